"""Tensors of several layers in one computation, against one computation each."""

import pytest
import torch

from excite._core.intercept.together import Together


@pytest.mark.parametrize("entries", [1, 60, 1000])
def test_results_are_those_one_by_one(entries):
    torch.manual_seed(0)
    given = {(i, shape): torch.randn(shape).double() for i in range(3) for shape in ((2, 3), (4, 3), (2, 3, 1))}
    sizes = []

    def function(key, x):
        sizes.append(len(x))
        return x.flatten(1).sum(1) * key, x.flatten(1).amax(1)

    together = Together(function, entries)
    for name, x in given.items():
        together.add(name, x, key=1 + name[0] % 2)
    found = together.finish()
    assert list(found) == list(given)
    for (i, shape), x in given.items():
        total, largest = found[i, shape]
        assert float(total) == pytest.approx(float(x.sum()) * (1 + i % 2), rel=1e-14)
        assert float(largest) == float(x.max())
    assert sizes == [1] * 9 if entries == 1 else len(sizes) < 9
    assert entries < 1000 or sorted(sizes) == [1, 1, 1, 2, 2, 2]  # three shapes, two keys


def test_nothing_added_gives_nothing():
    assert Together(lambda key, x: (x,)).finish() == {}
