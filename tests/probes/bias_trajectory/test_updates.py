"""The hook ratio on data: against actual SGD updates, Jacobians, exact local constants; operator norms against matrices."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from excite.errors import InputError, ModelError
from excite.lipschitz import local
from excite.probes import trajectory
from excite.probes.bias_trajectory.layer_operators import LayerOperator
from excite.probes.bias_trajectory.sites import find
from models import CASES, build, same_state, state_of

# The folded ones are refused: samples have no axis of their own.
SCALAR = [name for name, case in CASES.items() if case.outputs == 1 and not case.tokens and "folded" not in name]
THROUGH = [
    name for name in SCALAR if "transformer" not in name and name not in ("heads", "gated", "recurrent")
]  # every path passes the first layer


class Unshared(nn.Module):
    """A convolution whose bias is not shared between positions, then the rest of a network."""

    def __init__(self, conv: nn.Conv2d, rest: nn.Module, shape: torch.Size):
        super().__init__()
        self.conv, self.rest = conv, rest
        self.bias = nn.Parameter(conv.bias.detach()[:, None, None].expand(shape).clone())

    def forward(self, x):
        return self.rest(F.conv2d(x, self.conv.weight, None, self.conv.stride, self.conv.padding) + self.bias)


def matrix_of(layer, shape):
    """A written out, column by column, by the module itself."""
    zero = torch.zeros(1, *shape, dtype=torch.float64)
    columns = []
    for i in range(zero.numel()):
        unit = zero.clone()
        unit.view(-1)[i] = 1
        columns.append((layer(unit) - layer(zero)).detach().reshape(-1))
    return torch.stack(columns, 1)


@pytest.mark.parametrize("rate", [0.01, 0.3])
@pytest.mark.parametrize(
    "loss", [lambda f, y: (f - y).square() / 2, lambda f, y: F.binary_cross_entropy(f.sigmoid(), y)]
)
def test_it_is_the_scaled_sgd_update_at_batch_size_one(loss, rate):
    for i in range(3):
        model, x = build("mlp", seed=i)
        x, y = x[:1], torch.ones(1, 1, dtype=torch.float64)
        before = model[0].bias.detach().clone()
        f = model(x)
        (derivative,) = torch.autograd.grad(loss(f, y).sum(), f)
        expected = trajectory(model, x, y, loss)["0"].values
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        loss(model(x), y).sum().backward()
        optimizer.step()
        moved = (model[0].bias.detach() - before).norm()
        assert float(expected) == pytest.approx(float(moved / rate / derivative.abs().squeeze()), rel=1e-12)


def test_of_a_convolution_it_is_the_update_of_the_unshared_bias():
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 3, 3, stride=2, padding=1).double()
    rest = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 1)).double()
    x = torch.randn(1, 2, 8, 8, dtype=torch.float64)
    free = Unshared(conv, rest, conv(x).shape[1:])
    before = free.bias.detach().clone()
    expected = trajectory(nn.Sequential(conv, rest), x)["0"].values
    optimizer = torch.optim.SGD([free.bias], lr=0.5)
    free(x).sum().backward()
    optimizer.step()
    assert float(expected) == pytest.approx(float((free.bias.detach() - before).norm()) / 0.5, rel=1e-12)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("batch", [1, 3, 7])
def test_against_jacobians_at_any_batch_size(batch, reduction):
    """By torch.func: the Jacobian of the rest of the network at z, applied to the unit gradient of the loss."""
    model, x = build("convolutional-classes", batch=7)
    y = torch.arange(7) % 4
    found = trajectory(model, x, y, lambda f, y: F.cross_entropy(f, y, reduction=reduction), batch=batch)["0"]
    for i in range(7):
        z = model[0](x[i : i + 1]).detach()
        jacobian = torch.func.jacrev(model[1:])(z).detach().reshape(4, -1)
        p = model(x[i : i + 1]).detach().softmax(1).reshape(-1)
        u = p - F.one_hot(y[i], 4)
        expected = (jacobian.T @ (u / u.norm())).norm()
        assert float(found.values[i]) == pytest.approx(float(expected), rel=1e-12)
        assert float(found.values[i]) <= float(torch.linalg.matrix_norm(jacobian, 2)) * (1 + 1e-12)
    assert {"vector", "logits"} <= set(found.labels)
    assert bool((found.lower <= local(model, x) * (1 + 1e-12)).all())  # the lower bound is left


@pytest.mark.parametrize("name", SCALAR)
def test_the_model_is_unchanged_and_the_bounds_hold(name):
    model, x = build(name)
    before = state_of(model)
    (found,) = trajectory(model, x, output=CASES[name].pick).values()
    assert same_state(before, state_of(model))
    assert bool((found.lipschitz <= found.upper * (1 + 2e-6)).all())
    assert found.lower is None or bool((found.lower <= found.lipschitz * (1 + 1e-9) + 1e-15).all())
    if name in THROUGH:
        assert torch.allclose(found.lipschitz, local(model, x, output=CASES[name].pick), rtol=1e-10)
        assert "bypass" not in found.labels
    else:
        assert "bypass" in found.labels


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(2, 3, 3), (2, 6, 5)),
        (nn.Conv2d(2, 3, 3, stride=2, padding=1, bias=False), (2, 6, 7)),
        (nn.Conv2d(4, 4, 3, padding=2, dilation=2, groups=2), (4, 6, 6)),
        (nn.Conv1d(2, 4, 3, stride=2), (2, 9)),
        (nn.ConvTranspose2d(2, 3, 3, stride=2), (2, 4, 4)),
        (nn.Linear(6, 9), (6,)),
    ],
)
def test_largest_singular_values_against_the_written_out_matrix(layer, shape):
    layer = layer.double()
    model = nn.Sequential(layer, nn.Flatten(), nn.LazyLinear(1).double())
    x = torch.randn(4, *shape, dtype=torch.float64)
    model(x)
    site = find(model, x).first
    operator, matrix = LayerOperator(site), matrix_of(layer, shape)
    sigma, error = operator.largest(1e-9, max_products=2000)
    truth = float(torch.linalg.matrix_norm(matrix, 2))
    assert sigma == pytest.approx(truth, rel=1e-9)
    assert error <= 1e-9
    active = torch.rand(5, len(matrix)) < 0.3
    shaped = active.reshape(5, *layer(x).shape[1:])
    expected = [
        0.0 if not a.any() or int(a.sum()) > matrix.shape[1] else float(torch.linalg.svdvals(matrix[a])[-1])
        for a in active
    ]
    assert operator.smallest_active(shaped)().tolist() == pytest.approx(expected, abs=1e-12)


def test_search_for_largest_singular_value_is_warm_started():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 12, 5), nn.ReLU(), nn.Flatten(), nn.Linear(12 * 144, 1))
    operator = LayerOperator(find(model, torch.randn(2, 3, 16, 16)).first)
    calls = []
    gram = operator.gram

    def counted():
        product, zeros = gram()
        return lambda x: (calls.append(1), product(x))[1], zeros

    operator.gram = counted
    operator.largest(1e-4)
    cold = len(calls)
    with torch.no_grad():
        model[0].weight += 1e-4 * torch.randn_like(model[0].weight)
    calls.clear()
    again, error = operator.largest(1e-4)
    assert len(calls) <= max(3, cold // 4)
    fresh, _ = LayerOperator(find(model, torch.randn(2, 3, 16, 16)).first).largest(1e-6, max_products=2000)
    assert again == pytest.approx(fresh, rel=3e-4)
    assert error <= 1e-4
    with torch.no_grad():
        model[0].weight += 1e-4 * torch.randn_like(model[0].weight)
    calls.clear()
    estimate = operator.follow()
    assert len(calls) == 8
    with torch.no_grad():
        model[0].weight.zero_()  # it was read already
    followed, error = estimate.result()
    assert followed == pytest.approx(fresh, rel=1e-3)
    assert error <= 3e-3


def test_a_direction_that_comes_to_lead_is_found():
    """Each input channel has its own filters, so what leads in the one is orthogonal to all that can come of the other."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 100, 1)).double()
    operator = LayerOperator(find(model, torch.randn(2, 2, 12, 12, dtype=torch.float64)).first)
    weight = model[0].weight
    with torch.no_grad():
        weight[:2, 1] = 0
        weight[2:, 0] = 0
        weight[2:] *= 0.5
    operator.largest(1e-9, max_products=4000)
    assert float(operator.last.vector().reshape(2, -1)[1].norm()) < 1e-6
    with torch.no_grad():
        weight[2:] *= 5
    truth = float(torch.linalg.matrix_norm(matrix_of(model[0], (2, 12, 12)), 2))
    for _ in range(3):
        sigma, error = operator.follow().result()
        assert sigma <= truth * (1 + 1e-12)
        assert truth - sigma <= 2 * error * truth
    assert sigma == pytest.approx(truth, rel=1e-3)


@pytest.mark.parametrize("layer", [nn.Conv2d(2, 3, 3), nn.Linear(6, 9), nn.Linear(9, 6)])
def test_the_largest_singular_value_is_nan_for_infinite_weights(layer):
    layer = layer.double()
    shape = (2, 6, 5) if isinstance(layer, nn.Conv2d) else (layer.in_features,)
    model = nn.Sequential(layer, nn.Flatten(), nn.LazyLinear(1).double())
    model(torch.randn(4, *shape, dtype=torch.float64))
    operator = LayerOperator(find(model, torch.randn(4, *shape, dtype=torch.float64)).first)
    sigma, error = operator.follow().result()
    assert sigma == pytest.approx(float(torch.linalg.matrix_norm(matrix_of(layer, shape), 2)), rel=max(1e-12, error))
    with torch.no_grad():
        layer.weight.view(-1)[3] = torch.inf
    assert math.isnan(operator.follow().result()[0])
    assert math.isnan(LayerOperator(operator.site).follow().result()[0])


def test_a_layer_on_many_positions_is_as_its_worst_position():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(15, 1)).double()
    x = torch.randn(6, 5, 4, dtype=torch.float64)
    (found,) = trajectory(model, x).values()
    weight = model[0].weight.detach()
    block = torch.block_diag(*[weight] * 5)
    assert found.sigma == pytest.approx(float(torch.linalg.matrix_norm(block, 2)), rel=1e-12)
    for i in range(6):
        z = model[0](x[i]).detach().reshape(-1) > 0
        assert float(found.active[i]) == pytest.approx(float(torch.linalg.svdvals(block[z])[-1]), rel=1e-9)


def test_all_layers_say_how_steep_the_rest_is():
    model, x = build("mlp")
    found = trajectory(model, x, layers="all")
    assert list(found) == ["0", "2", "4"]
    after = model[2:]
    for i in range(len(x)):
        h = model[:2](x[i : i + 1]).detach()
        assert float(found["2"].lipschitz[i]) == pytest.approx(float(local(after, h)), rel=1e-12)
    assert torch.allclose(found["4"].values, torch.ones(4, dtype=torch.float64))
    assert list(trajectory(model, x, layers=["2"])) == ["2"]


def test_samples_without_a_loss_gradient_are_left_out():
    model, x = build("mlp")
    y = model(x).detach()
    y[1:] += 1
    (found,) = trajectory(model, x, y, lambda f, y: (f - y).square()).values()
    assert found.zero == 1
    assert bool(found.values[0].isnan())
    assert not bool(found.values[1:].isnan().any())
    assert found.max == float(found.values[1:].max())
    assert "1 without" in str(found)


def test_labels():
    def of(name, **more):
        model, x = build(name)
        return set(next(iter(trajectory(model, x, output=CASES[name].pick, **more).values())).labels)

    assert of("mlp") == set()
    assert of("tanh") == {"pointwise"}
    assert of("convolutional") == {"estimated"}
    assert of("tokens") == {"preprocessed"}
    assert of("batchnorm") == set()  # evaluation mode
    assert of("mlp", loss=lambda f: F.softplus(f).mean()) == {"logits"}
    scaled = nn.Sequential(nn.Linear(5, 1)).double()
    scaled.register_forward_pre_hook(lambda m, a: (2 * a[0],))
    assert set(trajectory(scaled, build("mlp")[1])["0"].labels) == {"preprocessed"}


def test_bad_input():
    model, x = build("mlp")
    classes, images = build("convolutional-classes")
    with pytest.raises(InputError, match="give loss="):
        trajectory(classes, images)
    with pytest.raises(InputError, match="not connected"):
        trajectory(model, x, loss=lambda f: f.detach().sum())
    with pytest.raises(InputError, match="no layer"):
        trajectory(model, x, layers=["nine"])
    with pytest.raises(InputError, match="label per sample"):
        trajectory(model, x, torch.zeros(3), lambda f, y: f.sum())
    with pytest.raises(InputError, match="finite"):
        trajectory(model, x * torch.nan)
    with pytest.raises(InputError, match="Module"):
        trajectory(lambda x: x, x)
    with pytest.raises(ModelError, match="output="):
        trajectory(*build("dict"))

    class Detached(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(5, 4), nn.Linear(4, 1)

        def forward(self, x):
            return self.two(self.one(x).detach())

    with pytest.raises(ModelError, match="cannot be reached"):
        trajectory(Detached().double(), x)
    with pytest.raises(ModelError, match="no affine layer"):
        trajectory(nn.Sequential(nn.ReLU()), x)
