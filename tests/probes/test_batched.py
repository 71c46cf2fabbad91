"""Values that are computed together when one of them is asked for."""

import queue
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Event, get_ident

import pytest
import torch
from torch import Tensor, nn

from excite._core.background import memoize, submit
from excite.probes import Alignment, Conservation, Every, Probe, Rank, Signs, Trajectory
from excite.probes.base import Moment, Values
from excite.probes.batched import Batched, Promise


def test_what_waits_is_computed_at_once_and_each_gets_its_own() -> None:
    sizes = []

    def work(stack: Tensor) -> list[Values]:
        sizes.append(len(stack))
        return [{"sum": float(one.sum())} for one in stack]

    promises = Batched(work)
    made = [promises.promise(partial(torch.full, (3,), float(k)), True) for k in range(5)]
    assert not sizes
    assert all(one.here for one in made)
    assert made[3].result() == {"sum": 9.0}
    assert [one.result()["sum"] for one in made] == [0.0, 3.0, 6.0, 9.0, 12.0]
    assert promises.promise(lambda: torch.ones(3), True).result() == {"sum": 3.0}  # after the others were kept
    assert sizes == [5, 1]


def test_as_many_wait_as_there_is_room_for() -> None:
    sizes = []

    def work(stack: Tensor) -> list[Values]:
        sizes.append(len(stack))
        return [{"first": float(one[0])} for one in stack]

    promises = Batched(work, most=4)
    made = [promises.promise(partial(torch.full, (10,), float(k)), True) for k in range(10)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda one: one.result()["first"], made))
    assert found == list(range(10))
    assert sorted(sizes, reverse=True) == [4, 4, 2]


def test_what_was_measured_is_collected_by_the_thread_that_begins() -> None:
    collected, worked = [], []

    def read() -> Tensor:
        collected.append(get_ident())
        return torch.ones(2)

    def work(stack: Tensor) -> list[Values]:
        worked.append(get_ident())
        return [{"sum": float(one.sum())} for one in stack]

    promises = Batched(work)
    made = [promises.promise(read, False) for _ in range(3)]
    made[0].begin()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(made[2].result).result() == {"sum": 2.0}
    assert collected == [get_ident()] * 3
    assert len(worked) == 1
    assert worked != collected[:1]


def test_a_promise_made_while_others_are_kept_is_kept_too() -> None:
    promises = Batched(lambda stack: [{"sum": float(one.sum())} for one in stack], most=8)
    made: queue.Queue[Promise] = queue.Queue()
    with ThreadPoolExecutor(1) as pool:
        kept = pool.submit(lambda: [made.get().result(timeout=240)["sum"] for _ in range(3000)])
        for _ in range(3000):
            made.put(promises.promise(lambda: torch.ones(1), True))
        assert kept.result(timeout=240) == [1.0] * 3000


def test_what_fails_fails_for_all_that_waited() -> None:
    def work(stack: Tensor) -> list[Values]:
        raise KeyError("gone")

    promises = Batched(work)
    made = [promises.promise(lambda: torch.ones(2), True) for _ in range(2)]
    for one in made:
        with pytest.raises(KeyError, match="gone"):
            one.result()

    def read() -> Tensor:
        raise RuntimeError("no memory")

    made = [promises.promise(one, True) for one in (lambda: torch.ones(2), read)]
    for one in made:
        one.begin()
        with pytest.raises(RuntimeError, match="no memory"):
            one.result()


def test_work_is_done_once_and_let_go() -> None:
    class Big:
        pass

    big = Big()
    held, calls = weakref.ref(big), []

    def work(what: Big = big) -> int:
        calls.append(what.__class__)
        return 3

    get = memoize(work)
    del big, work
    assert held() is not None
    assert [get(), get()] == [3, 3]
    assert len(calls) == 1
    assert held() is None


@pytest.mark.parametrize("probe", [Signs, Rank, Conservation, Alignment, Trajectory])
def test_what_waits_to_be_written_does_not_hold_the_moment(probe: type[Probe], monkeypatch: pytest.MonkeyPatch) -> None:
    """A moment holds the inputs of all layers on the example, and the graph of the loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    one, x, go = probe(Every(1)), torch.randn(6, 4), Event()
    one.attach(Moment(model, 0, None, x, optimizer))
    model(x).sum().backward()
    optimizer.step()
    now = Moment(model, 1, torch.ones(()), x, optimizer)
    before = submit(go.wait)  # nothing promised is computed yet
    try:
        with monkeypatch.context() as pretend:  # as on a GPU
            pretend.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
            pretend.setattr("excite.probes.activation_rank.rank.Covariances.apart", True)
            waiting = one.measure(now)
        assert isinstance(waiting, Future)
        assert not waiting.done()
        held = weakref.ref(now)
        del now
        assert held() is None
    finally:
        go.set()
    assert before.result()
    assert waiting.result()
    one.detach()
