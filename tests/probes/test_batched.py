"""Values that are computed together when one of them is asked for."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from excite.probes import batched
from excite.probes.batched import Batched
from excite.probes.protocol import Values


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
