"""Padding and unfolding belong to the affine call behind them: perturbations enter in front, so that copies move together."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from excitation.literal import extreme
from excite import AdversarialTraining, PersistentExcitation, margins, trace
from excite.margin import SearchOptions
from excite.probes.base import StepContext
from excite.probes.bias_trajectory.layer_operators import LayerOperator
from excite.probes.bias_trajectory.sites import find
from excite.probes.layer_inputs import layer_inputs
from models import build, padded_network

MODES = ["zeros", "circular", "replicate", "reflect"]
PADS = {
    "zeros": (nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d),
    "circular": (nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d),
    "replicate": (nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d),
    "reflect": (nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d),
}
EXACT = {"rtol": 1e-10, "atol": 1e-12}


def network(mode: str, axes: int) -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    model = padded_network(mode, axes).double()
    return model, torch.rand(3, 2, *[4] * axes, dtype=torch.float64)


def apart(model: nn.Sequential, mode: str, axes: int) -> nn.Sequential:
    """The same network with a module that pads in front of each convolution."""
    layers: list[nn.Module] = []
    for module in model:
        if isinstance(module, nn.modules.conv._ConvNd):
            valid = type(module)(module.in_channels, module.out_channels, 3, stride=module.stride).double()
            valid.load_state_dict(module.state_dict())
            layers += [PADS[mode][axes - 1](1), valid]
        else:
            layers.append(module)
    return nn.Sequential(*layers)


def dense(model: nn.Sequential, shape: tuple[int, ...]) -> nn.Sequential:
    """The same network with every convolution, padding and all, as a linear layer on flat signals."""
    layers: list[nn.Module] = [nn.Flatten()]
    for module in model:
        if isinstance(module, nn.modules.conv._ConvNd):
            zero = torch.zeros(1, *shape, dtype=torch.float64)
            jacobian = torch.autograd.functional.jacobian(lambda x, m=module: m(x).flatten(), zero)
            linear = nn.Linear(zero.numel(), jacobian.shape[0]).double()
            with torch.no_grad():
                linear.weight.copy_(jacobian.reshape(jacobian.shape[0], -1))
                linear.bias.copy_(module(zero).flatten())
            shape = tuple(module(zero).shape[1:])
            layers.append(linear)
        else:
            layers.append(module)
    return nn.Sequential(*layers)


def extremes(model: nn.Module, x: Tensor, norm: str = "inf", **settings: object) -> Tensor:
    return torch.stack(PersistentExcitation(model, 0.1, norm=norm, steps=3, **settings).extremes(x))


@pytest.mark.parametrize("norm", ["inf", "2", "1"])
@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_extremes_are_those_of_the_unpadded_signal(mode: str, axes: int, norm: str) -> None:
    model, x = network(mode, axes)
    found = extremes(model, x, norm)
    literal = [torch.stack([extreme(model, point[None], 0.1, norm, 3, sign)[0] for point in x]) for sign in (-1, 1)]
    assert torch.allclose(found, torch.stack(literal), **EXACT)
    assert torch.allclose(found, extremes(dense(model, tuple(x.shape[1:])), x, norm), **EXACT)
    assert torch.allclose(found, extremes(apart(model, mode, axes), x, norm), **EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_shapes_and_perturbations_are_those_of_the_signal(mode: str, axes: int) -> None:
    model, x = network(mode, axes)
    for one in (model, apart(model, mode, axes)):
        layers = [layer for layer in trace(one, x).layers if layer.kind == "conv"]
        assert [layer.in_shape for layer in layers] == [(2, *[4] * axes), (3, *[4] * axes)]
        found = PersistentExcitation(one, 0.1).perturbations(x)
        assert found[layers[0].name][0].shape == x.shape


@pytest.mark.parametrize("mode", MODES)
def test_bounds_are_kept(mode: str) -> None:
    model, x = network(mode, 2)
    for one in (model, apart(model, mode, 2)):
        name = trace(one, x).layers[0].name
        low, high = PersistentExcitation(one, 0.4, steps=2, bounds=(0, 1)).perturbations(x)[name]
        for d in (low, high):
            assert float((x + d).min()) >= 0
            assert float((x + d).max()) <= 1
        assert bool(((x + high) == 1).any())


def test_a_constant_that_is_not_zero_is_not_perturbed() -> None:
    torch.manual_seed(0)
    padded = nn.Sequential(nn.ConstantPad1d((0, 1), 1.0), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    plain = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), padded[3]).double()
    with torch.no_grad():  # the weight of the appended one is a bias
        plain[0].weight.copy_(padded[1].weight[:, :4])
        plain[0].bias.copy_(padded[1].bias + padded[1].weight[:, 4])
    x = torch.randn(3, 4, dtype=torch.float64)
    assert torch.allclose(extremes(padded, x), extremes(plain, x), **EXACT)


class Windows(nn.Module):
    """The same convolution, written in several ways."""

    def __init__(self, written: str) -> None:
        super().__init__()
        self.written = written
        self.weight = nn.Parameter(torch.randn(3, 2, 3, 3))
        self.head = nn.Linear(48, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (1, 1, 1, 1), mode="replicate")
        flat = self.weight.flatten(1)
        if self.written == "conv2d":
            z = F.conv2d(x, self.weight).flatten(2)
        elif self.written == "unfold":
            z = flat @ F.unfold(x, 3)
        elif self.written == "patches first":
            z = (F.unfold(x, 3).transpose(1, 2) @ flat.T).transpose(1, 2)
        elif self.written == "views":
            windows = x.unfold(2, 3, 1).unfold(3, 3, 1).permute(0, 2, 3, 1, 4, 5).reshape(len(x), 16, 18)
            z = torch.einsum("bpk,ok->bop", windows, flat)
        elif self.written == "tensordot":
            z = torch.tensordot(x.unfold(2, 3, 1).unfold(3, 3, 1), self.weight, ([1, 4, 5], [1, 2, 3]))
            z = z.movedim(-1, 1).flatten(2)
        return self.head(torch.tanh(z).flatten(1))


@pytest.mark.parametrize("written", ["unfold", "patches first", "views", "tensordot"])
def test_patches_times_a_matrix_are_a_convolution(written: str) -> None:
    torch.manual_seed(0)
    models = [Windows(one).double() for one in ("conv2d", written)]
    models[1].load_state_dict(models[0].state_dict())
    x = torch.rand(3, 2, 4, 4, dtype=torch.float64)
    assert torch.allclose(models[0](x), models[1](x))
    layers = [trace(model, x).layers[0] for model in models]
    assert [layer.in_shape for layer in layers] == [(2, 4, 4)] * 2
    assert [layer.name for layer in layers] == ["weight"] * 2
    found = [extremes(model, x, bounds=(0, 1)) for model in models]
    assert torch.allclose(*found, **EXACT)
    # What the weight multiplies is the patches, in the order in which the way at hand has them.
    rows = [
        layer_inputs(signal.call, signal.input).rows for signal in signals(models[0], x)[:1] + signals(models[1], x)[:1]
    ]
    assert torch.allclose(*(torch.linalg.svdvals(one) for one in rows), **EXACT)


class Changed(nn.Module):
    """A signal that is changed after it was padded is not what enters the convolution."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.conv, self.head = nn.Conv1d(2, 3, 3), nn.Linear(12, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = x * 1.0
        padded = F.pad(h, (1, 1), mode="circular")
        (h if self.what == "signal" else padded).mul_(2)
        return self.head(torch.tanh(self.conv(padded)).flatten(1) + h.flatten(1).sum(1, keepdim=True))


@pytest.mark.parametrize("what", ["signal", "padded"])
def test_a_signal_that_is_written_to_between_is_left_as_it_is(what: str) -> None:
    model, x = Changed(what).double(), torch.rand(3, 2, 4, dtype=torch.float64)
    assert trace(model, x).layers[0].in_shape == (2, 6)
    found = PersistentExcitation(model, 1e-12).extremes(x[:1])
    assert torch.allclose(torch.stack(found), model(x[:1]).flatten().expand(2, 1), rtol=1e-9)


def signals(model: nn.Module, x: Tensor):
    return StepContext(model, 0, example=x).signals


@pytest.mark.parametrize("mode", MODES)
def test_patches_are_those_of_the_padded_signal(mode: str) -> None:
    model, x = network(mode, 2)
    for one in (model, apart(model, mode, 2)):
        first = signals(one, x)[0]
        assert first.input.shape == x.shape
        rows = layer_inputs(first.call, first.input, first.call.run(first.input)).rows
        conv = model[0]
        assert torch.allclose(
            rows @ conv.weight.flatten(1).T + conv.bias, conv(x).movedim(1, -1).reshape(-1, 3), **EXACT
        )
        assert torch.equal(layer_inputs(first.call, first.input, patches="whole").rows, x.flatten(1))


@pytest.mark.parametrize("mode", MODES)
def test_the_operator_of_a_site_includes_the_padding(mode: str) -> None:
    model, x = network(mode, 2)
    matrix = dense(model, tuple(x.shape[1:]))[1].weight.detach()
    expected = float(torch.linalg.matrix_norm(matrix, ord=2))
    for one in (model, apart(model, mode, 2)):
        operator = LayerOperator(find(one, x).first)
        assert operator.largest(1e-10, max_products=400)[0] == pytest.approx(expected, rel=1e-9)
        assert torch.allclose(operator.apply(x).flatten(1), x.flatten(1) @ matrix.T, **EXACT)


def test_the_operator_of_patches_takes_any_number_of_samples() -> None:
    model, x = build("patches")
    operator = LayerOperator(find(model, x).first)
    assert operator.apply(x).shape[0] == 4
    assert torch.allclose(operator.apply(x)[:1], operator.apply(x[:1]), **EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES[1:])
def test_margins_of_all_layers_perturb_the_signal(mode: str) -> None:
    model, x = network(mode, 1)
    y = (model(x) > 0.5).long().flatten()
    found = margins(model, x, y, layers="all", bounds=(0, 1), options=SearchOptions(steps=20))
    other = margins(dense(model, (2, 4)), x, y, layers="all", bounds=(0, 1), options=SearchOptions(steps=20))
    assert torch.allclose(found.values, other.values, rtol=1e-6)


def test_adversarial_training_meets_the_same_network() -> None:
    model, x = network("circular", 1)
    y = torch.tensor([0, 1, 0])
    losses = [
        AdversarialTraining(one, 0.1, steps=2, random_start=False).loss(x, y)
        for one in (model, apart(model, "circular", 1))
    ]
    assert torch.allclose(*losses, **EXACT)


class Aligned(nn.Module):
    """Pads, and asks for memory that is in order already: `contiguous` then returns the same tensor."""

    def __init__(self, same: bool):
        super().__init__()
        self.same = same
        self.hidden, self.out = nn.Linear(5, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, 2))
        x = x.contiguous().float().to(torch.float32) if self.same else x
        return self.out(torch.relu(self.hidden(x)))


def test_a_function_that_returns_its_own_argument_is_no_step() -> None:
    torch.manual_seed(0)
    model, x = Aligned(same=True), torch.randn(3, 3)
    plain = Aligned(same=False)
    plain.load_state_dict(model.state_dict())
    assert trace(model, x)["hidden"].in_shape == (3,)
    for found, expected in zip(*(PersistentExcitation(m, radius=0.1).extremes(x) for m in (model, plain))):
        assert torch.equal(found, expected)
