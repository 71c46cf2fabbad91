"""Points with the same signature are on the same linear piece."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from excite.errors import ModelError
from excite.lipschitz import along, region_map
from excite.lipschitz.signatures import signatures
from lipschitz.helpers import Layout
from models import build


@pytest.mark.parametrize("name", ["folded", "folded-time-first"])
def test_a_point_has_the_same_piece_alone_as_among_others(name: str) -> None:
    model, x = build(name, batch=6)
    alone = torch.cat([signatures(model, point[None])[0] for point in x])
    assert torch.equal(signatures(model, x)[0], alone)
    assert len(alone.unique()) > 1


def test_points_of_one_signature_are_on_one_linear_piece() -> None:
    model, x = build("convolutional")
    near = x + 1e-9 * torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(1))
    assert torch.equal(signatures(model, x)[0], signatures(model, near)[0])
    assert not torch.equal(signatures(model, x)[0], signatures(model, -x)[0])
    torch.testing.assert_close(signatures(model, x)[1], model.eval()(x).detach())


@pytest.mark.parametrize("how", ["time first", "merged", "batch first"])
@pytest.mark.parametrize("times", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_samples_are_told_apart_wherever_the_batch_axis_stands(how: str, times: int) -> None:
    """With as many time steps as samples (or twice as many), rows of the first axis look like samples and are none."""
    torch.manual_seed(0)
    model = Layout(how).double()
    plain = Layout("batch first").double()
    plain.load_state_dict(model.state_dict())
    start, end = torch.randn(2, 4, times, 3, dtype=torch.float64)
    end = start + (end - start) / 2  # few kinks, each found by dozens of passes
    found, expected = along(model, start, end), along(plain, start, end)
    assert found.pieces.tolist() == expected.pieces.tolist()
    assert max(found.pieces) > 3
    torch.testing.assert_close(found.values, expected.values)
    grid = region_map(model, start[0], end[0], end[1], size=4)
    assert torch.equal(grid.ids, region_map(plain, start[0], end[0], end[1], size=4).ids)
    assert len(grid.ids.unique()) > 3


class _Rounded(torch.autograd.Function):
    """Rounds in the forward pass, the identity in the backward pass."""

    @staticmethod
    def forward(ctx: object, h: Tensor) -> Tensor:
        return h.round()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient


OTHER_GRADIENTS = {
    "straight-through": lambda h: h + (h.round() - h).detach(),
    "a backward pass of its own": _Rounded.apply,
    "detached": lambda h: h + h.relu().detach(),
    "data": lambda h: h + 2 * h.data,
    "numpy": lambda h: h + torch.from_numpy(2 * h.detach().numpy()),
}


@pytest.mark.parametrize("name", OTHER_GRADIENTS)
def test_a_gradient_that_is_not_that_of_the_output_is_refused(name: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(3, 4).double(), nn.Linear(4, 2).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.last(OTHER_GRADIENTS[name](self.first(x)))

    start, end = (torch.randn(2, 3, generator=torch.Generator().manual_seed(s)).double() for s in (1, 2))
    with pytest.raises(ModelError, match="moves otherwise than its gradient says"):
        along(Model(), start, end)
    with pytest.raises(ModelError, match="moves otherwise than its gradient says"):
        region_map(Model(), start[0], start[1] - start[0], end[0] - start[0], size=12)
