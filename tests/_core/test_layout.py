import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from excite import ModelError
from excite._core.layout import Layout, find_layout


@pytest.mark.slow
@given(
    before=st.lists(st.integers(1, 3), max_size=2),
    after=st.lists(st.integers(1, 3), max_size=2),
    outer=st.integers(1, 3),
    inner=st.integers(1, 3),
    batch=st.integers(1, 4),
)
def test_join_split_and_rows_fit_together(before, after, outer, inner, batch):
    layout = Layout(len(before), outer)
    shape = (*before, outer * batch * inner, *after)
    first, second = torch.randn(shape), torch.randn(shape)
    both = layout.join(first, second)
    assert torch.equal(layout.mirrored(first), layout.join(first, -first))
    assert torch.equal(layout.split(both)[0], first)
    assert torch.equal(layout.split(both)[1], second)
    rows = layout.by_sample(both, 2 * batch)
    assert torch.equal(rows[:batch], layout.by_sample(first, batch))
    assert torch.equal(rows[batch:], layout.by_sample(second, batch))
    assert torch.equal(layout.from_samples(rows, both), both)


def test_folded_axes_are_told_apart_by_their_values():
    x = torch.randn(4, 3, 2)  # (B, T, D)
    twice = torch.cat([x, x])
    assert find_layout(x.flatten(0, 1), twice.flatten(0, 1), 4, "fc") == Layout(0, 1)
    folded = [t.transpose(0, 1).flatten(0, 1) for t in (x, twice)]
    assert find_layout(*folded, 4, "fc") == Layout(0, 3)
    assert find_layout(x.transpose(0, 1), twice.transpose(0, 1), 4, "fc") == Layout(1, 1)
    assert find_layout(x, x, 4, "fc") is None


def test_what_cannot_be_told_is_refused():
    with pytest.raises(ModelError, match=r"input of fc: shape \(4, 2\).*became \(9, 2\)"):
        find_layout(torch.randn(4, 2), torch.randn(9, 2), 4, "fc")
    with pytest.raises(ModelError, match="leave that layer out"):
        find_layout(torch.randn(12, 2), torch.randn(24, 2), 4, "fc")


def test_no_samples_have_a_layout_too():
    like = torch.zeros(3, 0, 2)
    assert Layout(1).from_samples(torch.zeros(0, 6), like).shape == like.shape
