"""Values that are computed together when one of them is asked for."""

import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from excite.probes import Alignment, Conservation, Distance, Every, Probe, Rank, Signs, Trajectory, batched
from excite.probes.batched import Batched
from excite.probes.later import once
from excite.probes.protocol import Moment, Values


def test_what_waits_is_computed_at_once_and_each_gets_its_own() -> None:
    sizes = []

    def work(stack: Tensor) -> list[Values]:
        sizes.append(len(stack))
        return [{"sum": float(one.sum())} for one in stack]

    promises = Batched(work)
    made = [promises.promise(torch.full((3,), float(k))) for k in range(5)]
    assert not sizes
    assert all(one.here for one in made)
    assert made[3].result() == {"sum": 9.0}
    assert [one.result()["sum"] for one in made] == [0.0, 3.0, 6.0, 9.0, 12.0]
    assert promises.promise(torch.ones(3)).result() == {"sum": 3.0}  # after the others were kept
    assert sizes == [5, 1]


def test_as_many_wait_as_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def work(stack: Tensor) -> list[Values]:
        sizes.append(len(stack))
        return [{"first": float(one[0])} for one in stack]

    for limit, value, expected in (("_MOST", 4, [4, 4, 2]), ("_BYTES", 3 * 80, [3, 3, 3, 1])):
        with monkeypatch.context() as patch:
            patch.setattr(batched, limit, value)
            promises = Batched(work)
            made = [promises.promise(torch.full((10,), float(k), dtype=torch.float64)) for k in range(10)]
            with ThreadPoolExecutor(4) as pool:
                found = list(pool.map(lambda one: one.result()["first"], made))
            assert found == list(range(10))
            assert sorted(sizes, reverse=True) == expected
            sizes.clear()


def test_what_fails_fails_for_all_that_waited() -> None:
    def work(stack: Tensor) -> list[Values]:
        raise KeyError("gone")

    promises = Batched(work)
    made = [promises.promise(torch.ones(2)) for _ in range(2)]
    for one in made:
        with pytest.raises(KeyError, match="gone"):
            one.result()


def test_work_is_done_once_and_let_go() -> None:
    class Big:
        pass

    big = Big()
    held, calls = weakref.ref(big), []

    def work(what: Big = big) -> int:
        calls.append(what.__class__)
        return 3

    get = once(work)
    del big, work
    assert held() is not None
    assert [get(), get()] == [3, 3]
    assert len(calls) == 1
    assert held() is None


@pytest.mark.parametrize("probe", [Signs, Distance, Rank, Conservation, Alignment, Trajectory])
def test_what_waits_to_be_written_does_not_hold_the_moment(probe: type[Probe], monkeypatch: pytest.MonkeyPatch) -> None:
    """A moment holds the inputs of all layers on the example, and the graph of the loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monkeypatch.setattr("excite.probes.rank.Covariances.travelling", True)  # as on a GPU: promised, not computed
    one, x = probe(Every(1)), torch.randn(6, 4)
    one.attach(Moment(model, 0, None, x, optimizer))
    model(x).sum().backward()
    optimizer.step()
    now = Moment(model, 1, torch.ones(()), x, optimizer)
    waiting = one.measure(now)
    assert waiting is not None
    held = weakref.ref(now)
    del now
    assert held() is None
    one.detach()
