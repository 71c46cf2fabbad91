"""Global bounds that no point and no pair of points may exceed."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from excite._core.calls import pick_output
from excite.errors import InputError, ModelError
from excite.lipschitz import bound, local
from models import CASES, build, same_state, state_of

FLOATS = [name for name, case in CASES.items() if not case.tokens]


REFUSED = {
    "layernorm": "layer_norm",
    "groupnorm": "group_norm",
    "instancenorm": "instance_norm",
    "transformer": "attention",
    "heads": "attention",
    "gated": "product of two activations",
    "written": "einsum",
    "patches": "im2col",
}


BOUNDED = [n for n in FLOATS if not n.startswith(tuple(REFUSED))]


@pytest.mark.slow
@pytest.mark.parametrize("name", BOUNDED)
@pytest.mark.parametrize("norm", ["inf", "2"])
def test_no_point_and_no_pair_of_points_exceeds_the_bound(name: str, norm: str) -> None:
    case = CASES[name]
    model, _ = build(name)
    before = state_of(model)
    example = torch.randn(2, *case.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    limit = bound(model, example, norm, output=case.pick)
    assert same_state(before, state_of(model))
    assert 0 < limit.value < math.inf
    generator = torch.Generator().manual_seed(1)
    x = 3 * torch.randn(32, *case.shape, dtype=torch.float64, generator=generator)
    y = x + torch.randn(x.shape, dtype=torch.float64, generator=generator) * 10 ** (
        2 * torch.rand(32, *[1] * len(case.shape), dtype=torch.float64, generator=generator) - 1.5
    )
    assert float(local(model, x[:8], norm, output=case.pick).max()) <= limit.value * (1 + 1e-9)
    model.eval()
    f = [pick_output(model(z), case.pick).reshape(len(z), -1).detach() for z in (x, y)]
    order = {"2": 2, "inf": math.inf}[norm]
    ratio = torch.linalg.vector_norm(f[0] - f[1], ord=order, dim=1) / torch.linalg.vector_norm(
        (x - y).flatten(1), ord=order, dim=1
    )
    assert float(ratio.max()) <= limit.value * (1 + 1e-9)


@pytest.mark.parametrize("name", ["linear", "linear-classes"])
@pytest.mark.parametrize("norm", ["inf", "2"])
def test_the_bound_of_a_linear_model_is_exact(name: str, norm: str) -> None:
    model, x = build(name)
    assert bound(model, x, norm).value == pytest.approx(float(local(model, x, norm)[0]), rel=1e-12)


def test_the_infinity_bound_follows_every_element() -> None:
    model, x = build("mlp")
    layers = [m.weight.detach().abs() for m in model if isinstance(m, nn.Linear)]  # type: ignore[union-attr]
    elementwise = float((layers[2] @ layers[1] @ layers[0]).sum(1).max())
    via_two = math.sqrt(5) * math.prod(
        float(torch.linalg.matrix_norm(w.detach(), 2)) for w in [m.weight for m in model if isinstance(m, nn.Linear)]
    )  # type: ignore[union-attr]
    found = bound(model, x, "inf")
    assert found.value == pytest.approx(min(elementwise, via_two), rel=1e-12)
    assert found.value == pytest.approx(math.prod(factor for _, factor in found.terms), rel=1e-9)


class Skip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = x + torch.sigmoid(self.a(x))
        return self.b(torch.cat([h, x], -1))


def test_branches_add_and_concatenation_is_pythagorean() -> None:
    torch.manual_seed(0)
    model = Skip().double()
    a, b = (float(torch.linalg.matrix_norm(m.weight.detach(), 2)) for m in (model.a, model.b))
    found = bound(model, torch.zeros(2, 4, dtype=torch.float64), "2")
    assert found.value == pytest.approx(b * math.hypot(1 + a / 4, 1), rel=1e-12)
    assert [what for what, _ in found.terms] == ["a", "sigmoid", "sum", "concatenation", "b"]
    assert "branches" in found.why
    assert "sigmoid" in str(found)


PARTS: dict[str, tuple[object, tuple[int, ...]]] = {
    "average overlapping": (nn.AvgPool2d(3, 1, 1), (2, 5, 5)),
    "adaptive average": (nn.AdaptiveAvgPool2d(3), (2, 5, 5)),
    "sum": (lambda x: x.sum(-1), (3, 4)),
    "upsample": (nn.Upsample(scale_factor=2, mode="bilinear"), (1, 3, 3)),
    "nearest": (nn.Upsample(scale_factor=2), (1, 3, 3)),
    "repeat": (lambda x: x.repeat(1, 3), (4,)),
    "expand": (lambda x: x[:, None].expand(-1, 3, -1), (4,)),
    "indexed": (lambda x: x[:, [0, 0, 1, 3]], (4,)),
    "reflect": (nn.ReflectionPad1d(2), (2, 5)),
    "zero pad": (nn.ZeroPad2d(1), (2, 3, 3)),
    "flipped": (lambda x: x.flip(-1).transpose(1, 2).reshape(len(x), -1), (2, 3)),
    "maximum": (lambda x: torch.maximum(x, -2 * x), (4,)),
    "amax": (lambda x: x.amax(-1), (3, 4)),
    "max": (lambda x: x.max(-1).values, (3, 4)),
    "scaled": (lambda x: -3 * x / torch.tensor([1.0, 2.0, 4.0, 0.5]), (4,)),
    "broadcast": (lambda x: x[:, :, None] * torch.ones(3), (4,)),
    "broadcast sum": (lambda x: x[:, :, None] + x[:, None, :], (4,)),
    "difference": (lambda x: x[:, 1:] - x[:, :-1], (4,)),
    "constant times": (lambda x: torch.arange(6.0, dtype=torch.float64).view(2, 3) @ x, (3, 2)),
    "times constant": (lambda x: x @ torch.arange(6.0, dtype=torch.float64).view(2, 3), (3, 2)),
    "chunks": (lambda x: torch.cat([x.chunk(2, -1)[1], x.chunk(2, -1)[0]], -1), (4,)),
    "strided": (nn.Conv2d(2, 3, 3, stride=2, padding=1), (2, 6, 6)),
    "dilated": (nn.Conv2d(2, 4, 3, dilation=2, groups=2, padding="same"), (2, 6, 6)),
    "transposed": (nn.ConvTranspose2d(4, 2, 3, stride=2, groups=2, output_padding=1), (4, 3, 3)),
    "gelu": (nn.GELU(), (4,)),
    "elu": (nn.ELU(2.0), (4,)),
    "prelu": (nn.PReLU(init=-1.5), (4,)),
    "clamp": (lambda x: x.clamp(-1, 1), (4,)),
}  # fmt: skip


class Wrapped(nn.Module):
    def __init__(self, function: object) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)  # type: ignore[operator, no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("norm", ["inf", "2"])
def test_each_part_is_bounded_from_above_and_not_absurdly(name: str, norm: str) -> None:
    torch.manual_seed(0)
    part, shape = PARTS[name]
    model = Wrapped(part).double()
    limit = bound(model, torch.zeros(2, *shape, dtype=torch.float64), norm).value
    steepest = float(local(model, torch.randn(64, *shape, dtype=torch.float64), norm).max())
    assert steepest <= limit * (1 + 1e-9)
    assert limit <= 3 * steepest


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_bound_is_named(name: str) -> None:
    model, x = build(name)
    with pytest.raises(ModelError, match=f"no Lipschitz bound known for .*{REFUSED[name]}"):
        bound(model, x)


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (lambda x: x * x, "product of two activations"),
        (lambda x: x.log_softmax(-1), "log_softmax"),
        (lambda x: 1 / x, "div|reciprocal"),
        (lambda x: x.exp(), "exp"),
        (lambda x: x.round(), "round"),
        (lambda x: F.dropout(x, 0.5, training=True), "dropout"),
    ],
)
def test_functions_without_a_bound_are_refused(function: object, named: str) -> None:
    with pytest.raises(ModelError, match=f"no Lipschitz bound known for .*({named})"):
        bound(Wrapped(function), torch.ones(2, 4))


def test_bad_input_is_refused() -> None:
    model, x = build("mlp")
    tokens, ids = build("tokens")
    for call in (lambda: local(tokens, ids), lambda: bound(tokens, ids), lambda: local(model, x, "3"),
                 lambda: bound(model, x, "1"), lambda: local(model, x * math.nan), lambda: local(model, x[0, 0])):  # fmt: skip
        with pytest.raises(InputError):
            call()
    with pytest.raises(ModelError, match="no gradient"):
        local(Wrapped(lambda x: x.detach()), x)
    with pytest.raises(ModelError, match="one row per sample"):
        local(Wrapped(lambda x: x.sum()), x)
    with pytest.raises(ModelError, match="one row per sample"):
        bound(Wrapped(lambda x: x.sum()), x)
    with pytest.raises(ModelError, match="does not run"):
        bound(model, torch.randn(2, 3, dtype=torch.float64))
    dictionary, x = build("dict")
    with pytest.raises(ModelError, match="output="):
        bound(dictionary, x)
    before = state_of(dictionary)
    with pytest.raises(ModelError, match="output="):
        local(dictionary, x)
    assert same_state(before, state_of(dictionary))
