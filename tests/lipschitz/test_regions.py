"""Linear pieces along segments and on slices against a walk from kink to kink; search against what it searches."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from excite.errors import InputError, ModelError
from excite.lipschitz import along, bound, largest, local, region_map
from excite.lipschitz.signatures import signatures
from models import CASES, build, same_state, state_of

SMOOTH = {"tanh": "tanh", "layernorm": "layer_norm", "groupnorm": "group_norm", "transformer": "transformer",
          "transformer-dropout": "transformer", "transformer-time-first": "attention", "heads": "attention", "gated": "mul",
          "recurrent": "tanh", "in-place": "tanh"}  # fmt: skip
LINEAR = [n for n, case in CASES.items() if not case.tokens and n not in {*SMOOTH, "papers"}]
# Of these no bound is known: see test_lipschitz.
SMALL = [n for n in LINEAR if not n.startswith(("resnet", "instancenorm", "written", "patches"))]


def mlp(*widths: int, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [layer for n, m in pairwise(widths) for layer in (nn.Linear(n, m), nn.ReLU())]
    return nn.Sequential(*layers[:-1]).double()


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


@pytest.mark.parametrize("name", ["folded", "folded-time-first"])
def test_a_point_has_the_same_piece_alone_as_among_others(name: str) -> None:
    model, x = build(name, batch=6)
    alone = torch.cat([signatures(model, point[None])[0] for point in x])
    assert torch.equal(signatures(model, x)[0], alone)
    assert len(alone.unique()) > 1


@pytest.mark.parametrize("name", sorted(SMOOTH))
def test_smooth_models_have_no_linear_regions(name: str) -> None:
    model, x = build(name)
    before = state_of(model)
    with pytest.raises(ModelError, match=SMOOTH[name]):
        along(model, x, -x, output=CASES[name].pick)
    assert same_state(before, state_of(model))


class Odd(nn.Module):
    def __init__(self, what: str):
        super().__init__()
        self.what = what
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.what == "product":
            return x * x.relu()
        if self.what == "quotient":
            return x.relu() / (2 + x.abs())
        if self.what == "time first":
            return x.T.relu().T[:, :1]
        if self.what == "custom":
            return torch.lgamma(x.abs() + 1)
        if self.what == "weights":  # smooth in its weights alone
            return torch.where(x > 1, 2 * x, x + 1) * self.scale.exp() / self.scale.sigmoid()
        return torch.maximum(x, -2 * x).max(1).values


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


def test_a_slice_numbers_regions_as_patterns_do() -> None:
    model = mlp(5, 8, 7, 1)
    origin, right, up = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    found = region_map(model, origin, right, up, across=(-3, 3), upward=(-2, 2), size=(30, 40))
    assert found.ids.shape == found.slopes.shape == (30, 40)
    flat = found.points.reshape(-1, 5)
    torch.testing.assert_close(flat[45], origin + found.across[5] * right + found.up[1] * up)
    first = model[1](model[0](flat))
    bits = torch.cat([first > 0, model[3](model[2](first)) > 0], 1)
    _, ids = bits.unique(dim=0, return_inverse=True)
    same = ids[:, None] == ids[None]
    assert torch.equal(same, found.ids.view(-1, 1) == found.ids.view(1, -1))
    assert found.count == len(ids.unique()) > 10
    assert found.ids[0, 0] == 0
    torch.testing.assert_close(found.slopes.view(-1), local(model, flat))
    torch.testing.assert_close(found.outputs.view(-1, 1), model(flat).detach())
    border = found.borders()
    assert bool(border[3, 7]) == bool(found.ids[3, 7] != found.ids[3, 8] or found.ids[3, 7] != found.ids[4, 7])
    with pytest.raises(ModelError, match="tanh"):
        region_map(nn.Sequential(model, nn.Tanh()), origin, right, up)
    with pytest.raises(InputError, match="same shape"):
        region_map(model, origin, right, up[:4])
    with pytest.raises(InputError, match="low < high"):
        region_map(model, origin, right, up, across=(1, 1))


def test_points_of_one_signature_are_on_one_linear_piece() -> None:
    model, x = build("convolutional")
    near = x + 1e-9 * torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(1))
    assert torch.equal(signatures(model, x)[0], signatures(model, near)[0])
    assert not torch.equal(signatures(model, x)[0], signatures(model, -x)[0])
    torch.testing.assert_close(signatures(model, x)[1], model.eval()(x).detach())


@pytest.mark.parametrize("ball", ["inf", "2"])
def test_search_finds_more_than_the_points_and_stays_inside(ball: str) -> None:
    model = mlp(3, 12, 10, 1, seed=4)
    x = torch.randn(20, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    state = torch.get_rng_state()
    found = largest(model, x, 2.0, ball=ball, bounds=(-3, 3))
    assert torch.equal(state, torch.get_rng_state())
    assert found.value == pytest.approx(float(local(model, found.point[None])), rel=1e-12)
    assert float(local(model, x).max()) < found.value <= float(bound(model, x, "2"))
    order = float("inf") if ball == "inf" else 2.0
    assert float(torch.linalg.vector_norm(found.point - x, ord=order, dim=1).min()) <= 2 + 1e-9
    assert found.point.abs().max() <= 3
    many = 6 * torch.rand(200_000, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(9)) - 3
    near = torch.cdist(many, x, p=order).amin(1) <= 2
    assert found.value >= 0.98 * float(local(model, many[near]).max())
    assert largest(model, x, 0.0).value == float(local(model, x).max())
    assert str(found).startswith("Lipschitz constant at least")


def test_what_search_refuses() -> None:
    model, x = mlp(3, 5, 1), torch.randn(4, 3, dtype=torch.float64)
    with pytest.raises(InputError, match="radius"):
        largest(model, x, -1.0)
    with pytest.raises(InputError, match="at least one"):
        largest(model, x[:0], 1.0)
    with pytest.raises(InputError, match="round"):
        largest(model, x, 1.0, rounds=0)


class Layout(nn.Module):
    """(B, T, D) to (B, 1): ReLU layers on every time step, with the batch elsewhere than in front."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.second, self.head = nn.Linear(3, 5), nn.Linear(5, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        times, batch = x.shape[1], x.shape[0]
        h = {"time first": x.transpose(0, 1), "merged": x.transpose(0, 1).reshape(times * batch, -1), "batch first": x}[
            self.how
        ]
        h = torch.relu(self.second(torch.relu(self.first(h))))
        if self.how == "merged":
            h = h.reshape(times, batch, -1)
        return self.head(h.mean(1 if self.how == "batch first" else 0))


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


class Rounding(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.enter, self.function, self.head = nn.Linear(3, 4), function, nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.function(torch.relu(self.enter(x))))


FLOOR = {
    "//": lambda h: h + h // 0.5,
    "floor_divide": lambda h: h + torch.floor_divide(h, 0.5),
    "by a tensor": lambda h: h + h.floor_divide(torch.full((), 0.5, dtype=h.dtype)),
}


@pytest.mark.parametrize("name", FLOOR)
def test_floor_division_is_the_division_that_rounds_down(name: str) -> None:
    torch.manual_seed(0)
    model = Rounding(FLOOR[name]).double()
    same = Rounding(lambda h: h + torch.div(h, 0.5, rounding_mode="floor")).double()
    same.load_state_dict(model.state_dict())
    start, end = torch.randn(2, 3, 3, dtype=torch.float64)
    found, expected = along(model, start, end), along(same, start, end)
    assert torch.equal(found.values, expected.values)
    assert all(torch.equal(a, b) for a, b in zip(found.breaks, expected.breaks))
    assert torch.equal(local(model, start), local(same, start))


def test_functions_without_a_derivative_are_refused_in_one_line() -> None:
    model = Rounding(lambda h: torch.add(h, 1.0, out=torch.empty_like(h))).requires_grad_(False)
    for measure in (lambda x: along(model, x, -x), lambda x: local(model, x)):
        with pytest.raises(ModelError, match=r"that PyTorch can differentiate.*out=") as raised:
            measure(torch.ones(2, 3))
        assert "\n" not in str(raised.value)
