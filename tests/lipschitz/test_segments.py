"""Linear pieces along segments against a walk from kink to kink."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from excite.errors import InputError, ModelError
from excite.lipschitz import along, bound, local
from lipschitz.helpers import SMALL, SMOOTH, Odd, mlp
from models import CASES, build, same_state, state_of


def walk(model: nn.Sequential, start: Tensor, end: Tensor) -> list[float]:
    """Kinks of t ↦ f(start + t (end − start)) in (0, 1), one after the other: in each piece all layers are linear in t."""
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    t, kinks = 0.0, []
    while True:
        probe = t + 1e-10
        value, speed = (start + probe * (end - start)).numpy(), (end - start).numpy()
        nearest = np.inf
        for layer in layers[:-1]:
            weight = layer.weight.detach().numpy()
            value, speed = weight @ value + layer.bias.detach().numpy(), weight @ speed
            with np.errstate(divide="ignore"):
                times = probe - value / speed
            nearest = min([nearest, *times[times > probe]])
            value, speed = np.where(value > 0, value, 0), np.where(value > 0, speed, 0)
        if nearest >= 1:
            return kinks
        kinks.append(float(nearest))
        t = float(nearest)


@pytest.mark.parametrize("widths", [(2, 9, 1), (3, 8, 7, 1), (4, 6, 6, 6, 2)])
def test_segments_break_where_a_walk_from_kink_to_kink_says(widths: tuple[int, ...]) -> None:
    model = mlp(*widths)
    start, end = (3 * torch.randn(6, widths[0], generator=torch.Generator().manual_seed(s)).double() for s in (1, 2))
    before = state_of(model)
    found = along(model, start, end)
    assert same_state(before, state_of(model))
    assert int(found.pieces.max()) > 4
    for i in range(6):
        kinks = walk(model, start[i], end[i])
        np.testing.assert_allclose(found.breaks[i].numpy(), [0, *kinks, 1], rtol=0, atol=1e-12)
        middles = (found.breaks[i][1:] + found.breaks[i][:-1]) / 2
        slopes = local(model, start[i] + middles[:, None] * (end[i] - start[i]))
        torch.testing.assert_close(found.slopes[i], slopes)
        assert found.values[i] == found.slopes[i].max()


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_no_place_on_a_segment_is_steeper(name: str) -> None:
    model, x = build(name)
    end = -2 * x.flip(0)
    found = along(model, x, end, "inf", output=CASES[name].pick)
    places = torch.linspace(0, 1, 60, dtype=x.dtype).view(-1, 1, *[1] * (x.dim() - 1))
    points = x + places * (end - x)  # (60, B, ...)
    dense = local(model, points.flatten(0, 1), "inf", output=CASES[name].pick).view(60, -1).amax(0)
    assert (dense <= found.values * (1 + 1e-9)).all()
    assert found.values.max() <= float(bound(model, x, "inf", output=CASES[name].pick)) * (1 + 1e-9)


@pytest.mark.parametrize("name", sorted(SMOOTH))
def test_smooth_models_have_no_linear_regions(name: str) -> None:
    model, x = build(name)
    before = state_of(model)
    with pytest.raises(ModelError, match=SMOOTH[name]):
        along(model, x, -x, output=CASES[name].pick)
    assert same_state(before, state_of(model))


@pytest.mark.parametrize(
    ("what", "words"),
    [("product", "two signals"), ("quotient", "divides"), ("custom", "lgamma")],
)
def test_what_is_not_piecewise_linear_is_refused(what: str, words: str) -> None:
    x = torch.randn(4, 3, dtype=torch.float64)
    with pytest.raises(ModelError, match=words):
        along(Odd(what), x, -x)


def test_samples_on_another_axis_are_taken_one_at_a_time() -> None:
    x = torch.randn(4, 3, dtype=torch.float64)
    found = along(Odd("time first"), x, -x)
    for breaks in found.breaks:
        np.testing.assert_allclose(breaks.numpy(), [0, 0.5, 1], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("model", "kinks"),
    [
        (Odd("weights"), [1.0]),
        (Odd("extremes"), [0.0]),
        (nn.Hardtanh(), [-1.0, 1.0]),
        (nn.ReLU6(), [0.0, 6.0]),
        (nn.Hardsigmoid(), [-3.0, 3.0]),
        (nn.Softshrink(0.5), [-0.5, 0.5]),
        (nn.Threshold(0.25, 0.25), [0.25]),
        (nn.PReLU().double(), [0.0]),
    ],
)
def test_kinks_of_activations(model: nn.Module, kinks: list[float]) -> None:
    """From x = −8 to 8 in the first of three coordinates; the others stay where nothing happens."""
    start = torch.tensor([[-8.0, -0.125, -0.125]], dtype=torch.float64)
    if isinstance(model, Odd) and model.what == "extremes":
        start[:, 1:] = 0.0  # the largest of max(x, −2x) over coordinates is that of the first
    end = start.clone()
    end[:, 0] = 8.0
    found = along(model, start, end)
    np.testing.assert_allclose(16 * found.breaks[0][1:-1].numpy() - 8, kinks, rtol=0, atol=1e-10)


def test_segments_of_nothing_and_of_wrong_shapes() -> None:
    model = mlp(2, 5, 1)
    x = torch.randn(3, 2, dtype=torch.float64)
    still = along(model, x, x)
    assert still.pieces.tolist() == [1, 1, 1]
    torch.testing.assert_close(still.values, local(model, x))
    assert along(model, x[:0], x[:0]).values.shape == (0,)
    with pytest.raises(InputError, match="same shape"):
        along(model, x, x[:2])
    with pytest.raises(InputError, match="limit="):
        along(model, 9 * x, -9 * x, limit=2)
    single = along(model.float(), x.float(), -2 * x.float())
    assert single.values.dtype == torch.float32


@pytest.mark.parametrize("taken", [lambda h: h.median(1).values, lambda h: h.kthvalue(2, 1, keepdim=True).values[:, 0]])
def test_one_number_is_the_median_of_the_others_in_several_ways(taken: object) -> None:
    """At both ends the first of three numbers is in the middle, but between them another one is."""

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            t = x[:, 0]
            return taken(torch.stack([0 * t, t - 0.25, 0.75 - t], 1))[:, None]  # type: ignore[operator, no-any-return]

    found = along(Model(), torch.zeros(1, 1).double(), torch.ones(1, 1).double())
    assert torch.allclose(found.breaks[0], torch.tensor([0, 0.25, 0.5, 0.75, 1]).double())
    assert found.slopes[0].tolist() == [0.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("function", "jumps"),
    [
        (torch.sign, [2.0]),
        (torch.floor, [1.0] * 3),
        (torch.round, [1.0] * 4),
        (lambda h: h * (h > 0), [0.0]),
        (lambda h: h + 3 * (h > 0), [3.0]),
        (lambda h: torch.where(h > 1, 2 * h, h + 1), [0.0]),
        (nn.Threshold(0.25, 0.0), [0.25]),
        (nn.Hardshrink(0.5), [0.5, 0.5]),
    ],
)
def test_a_jump_makes_the_constant_infinite(function: Callable[[Tensor], Tensor], jumps: list[float]) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)[:, None]

    found = along(Model(), torch.tensor([-1.9], dtype=torch.float64), torch.tensor([1.8], dtype=torch.float64))
    np.testing.assert_allclose(found.jumps[0].numpy(), jumps, rtol=0, atol=1e-9)
    assert bool(found.values.isinf()) == any(jumps)
    assert torch.isfinite(found.slopes[0]).all()


def test_a_network_of_relus_has_no_jumps() -> None:
    model, x = mlp(2, 20, 20, 1), torch.randn(5, 2, dtype=torch.float64)
    for scale in (1.0, 1e3):
        found = along(model, scale * x, -scale * x)
        assert int(found.pieces.min()) > 3
        assert not any(bool(jump.any()) for jump in found.jumps)
    single = along(model.float(), x.float(), -x.float())
    assert not any(bool(jump.any()) for jump in single.jumps)
