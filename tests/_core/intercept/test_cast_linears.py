"""Linear layers whose weights are cast together, against autocast's own casts."""

import pytest
import torch
from torch import nn

from excite._core.intercept.cast_linears import _known, cast_linears


class Net(nn.Module):
    """Linear layers in several places: one without autocast, one with a bias, one whose weight is also an embedding."""

    def __init__(self):
        super().__init__()
        self.embed, self.up, self.exact, self.out = (
            nn.Embedding(7, 4),
            nn.Linear(4, 8),
            nn.Linear(8, 4, bias=False),
            nn.Linear(4, 7, bias=False),
        )
        self.out.weight = self.embed.weight

    def forward(self, ids):
        h = self.up(self.embed(ids)).relu()
        with torch.autocast("cpu", enabled=False):
            h = self.exact(h.float())
        return self.out(h), h + self.up.weight.abs().max()


@pytest.fixture
def case():
    torch.manual_seed(0)
    return Net(), torch.randint(7, (3, 5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, None])
def test_the_numbers_are_those_of_autocast(case, dtype):
    model, ids = case
    with torch.no_grad(), torch.autocast("cpu", dtype, enabled=dtype is not None):
        expected = model(ids)
        with cast_linears(model):
            found = model(ids)
            assert ("forward" in model.up.__dict__) == (dtype is not None)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, expected))
    assert not any("forward" in layer.__dict__ for layer in model.modules())


def test_passes_with_gradients_keep_the_weights(case):
    model, ids = case
    with torch.autocast("cpu", torch.bfloat16), cast_linears(model):
        model(ids)[0].float().sum().backward()
    assert model.up.weight.grad is not None


def test_layers_that_are_not_plain_are_left_alone():
    class Other(nn.Linear):
        pass

    hooked = nn.Linear(2, 2)
    hooked.register_forward_pre_hook(lambda module, args: None)
    old = torch.nn.utils.spectral_norm(nn.Linear(2, 2))
    new = torch.nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    low = nn.Linear(2, 2).bfloat16()
    model = nn.ModuleList([Other(2, 2), hooked, old, new, low])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), cast_linears(model):
        assert not any("forward" in layer.__dict__ for layer in model)


def test_after_an_error_layers_are_as_before(case):
    model, _ = case
    with pytest.raises(ZeroDivisionError), torch.no_grad(), torch.autocast("cpu", torch.bfloat16), cast_linears(model):
        1 / 0  # noqa: B018
    assert not any("forward" in layer.__dict__ for layer in model.modules())


def test_other_weights_are_cast_again(case):
    model, ids = case
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        with cast_linears(model) as cast:
            model(ids)
            for layer in (model.up, model.out):
                layer.weight.mul_(2)
            cast()
            found = model(ids)
        expected = model(ids)
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


def test_between_passes_no_memory_is_held(case):
    model, ids = case
    for _ in range(2):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            expected = model(ids)
            with cast_linears(model), cast_linears(model):  # the inner one finds nothing to do
                assert _known[model][1]._storage.nbytes() > 0
                assert torch.equal(model(ids)[0], expected[0])
        assert _known[model][1]._storage.nbytes() == 0
    model.up = nn.Linear(4, 16)
    model.exact = nn.Linear(16, 4, bias=False)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), cast_linears(model):
        assert torch.equal(model.up(torch.ones(4)), nn.functional.linear(torch.ones(4), model.up.weight, model.up.bias))
