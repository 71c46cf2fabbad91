"""Other tensors in place of parameters, against `torch.func.functional_call`."""

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from excite._core.intercept.other_weights import OtherWeights


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.hidden, self.out = (
            nn.Embedding(7, 4),
            weight_norm(nn.Linear(4, 4)),
            nn.Linear(4, 7, bias=False),
        )
        self.out.weight = self.embed.weight
        self.scale = nn.ParameterList([nn.Parameter(torch.ones(4))])

    def forward(self, ids):
        return self.out(self.hidden(self.embed(ids)).relu() * self.scale[0])


def test_a_model_computes_with_other_weights_for_a_while():
    torch.manual_seed(0)
    model, ids = Tied().double(), torch.randint(7, (3, 5))
    own = dict(model.named_parameters())
    others = {path: torch.randn_like(p) for path, p in own.items()}
    expected = torch.func.functional_call(model, others, (ids,))
    weights = OtherWeights(model, own)
    with weights.swapped_in(others):
        assert torch.equal(model(ids), expected)
        assert model.out.weight is model.embed.weight is others["embed.weight"]
        weights.put({path: 2 * one for path, one in others.items()})
        twice = torch.func.functional_call(model, {path: 2 * one for path, one in others.items()}, (ids,))
        assert torch.equal(model(ids), twice)
    assert all(own[path] is p for path, p in model.named_parameters())


def test_after_an_error_the_model_has_its_own_weights():
    model = nn.Linear(2, 2)
    own = dict(model.named_parameters())
    with pytest.raises(RuntimeError), OtherWeights(model, own).swapped_in({path: torch.zeros(1) for path in own}):
        model(torch.randn(1, 2))
    with pytest.raises(KeyError), OtherWeights(model, own).swapped_in({"weight": torch.zeros(2, 2)}):
        pass
    assert all(own[path] is p for path, p in model.named_parameters())
