"""Calling a model on a batch, and picking the output."""

import pytest
import torch
from torch import nn

from excite._core.calls import batch_size, call, check_finite, own_copy, pick_output, repeated, tensors
from excite.errors import InputError, ModelError


class Named(nn.Module):
    def forward(self, a, b):
        return {"sum": a + b, "both": (a, b)}


def test_tuples_are_positional_and_dicts_keyword_arguments():
    a, b = torch.ones(2), torch.ones(2)
    assert call(Named(), (a, b))["sum"].tolist() == [2, 2]
    assert call(Named(), {"b": b, "a": a})["sum"].tolist() == [2, 2]


def test_repeated_batches_leave_other_tensors_alone():
    batch = {"x": torch.arange(2), "table": torch.zeros(3)}
    twice = repeated(batch, 2)
    assert twice["x"].tolist() == [0, 1, 0, 1]
    assert len(twice["table"]) == 3
    assert batch_size(twice) == 4


def test_a_copy_has_memory_of_its_own():
    x = torch.zeros(2, requires_grad=True)
    copy = own_copy((x, "text"))
    assert copy[0].data_ptr() != x.data_ptr()
    assert not copy[0].requires_grad
    assert copy[1] == "text"


def test_outputs_are_picked_by_key_index_and_function():
    returned = Named()(torch.ones(2), torch.zeros(2))
    assert pick_output(returned, "sum").tolist() == [1, 1]
    assert pick_output(returned["both"], 1).tolist() == [0, 0]
    assert pick_output(returned, lambda r: r["both"][0]).tolist() == [1, 1]
    with pytest.raises(ModelError, match="say which part"):
        pick_output(returned)
    with pytest.raises(InputError, match="not in what the model returned"):
        pick_output(returned, "product")


@pytest.mark.parametrize("batch", [(), torch.tensor(1.0), torch.zeros(0, 2)], ids=["none", "scalar", "empty"])
def test_batches_without_samples_are_refused(batch):
    with pytest.raises(InputError):
        batch_size(batch)


def test_values_that_are_not_finite_are_counted():
    assert len(tensors((torch.zeros(1), {"a": torch.ones(1)}))) == 2
    with pytest.raises(InputError, match="1 of 2 values"):
        check_finite((torch.tensor([1.0, float("nan")]),))
