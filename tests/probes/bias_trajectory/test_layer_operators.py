import copy
import math

import pytest
import torch
from torch import nn

from excite.probes.bias_trajectory.layer_operators import LayerOperator
from excite.probes.bias_trajectory.sites import find

LAYERS = {
    "1x1": (lambda: nn.Conv2d(1, 1, 1), (1, 1, 1)),
    "one number": (lambda: nn.Conv1d(1, 2, 3, padding=1), (1, 1)),
    "pointwise": (lambda: nn.Conv2d(3, 3, 1, bias=False), (3, 4, 4)),
    "1d strided": (lambda: nn.Conv1d(1, 2, 3, stride=3), (1, 8)),
    "1d dilated": (lambda: nn.Conv1d(2, 2, 2, dilation=3), (2, 9)),
    "1d transposed": (lambda: nn.ConvTranspose1d(2, 2, 3, stride=2), (2, 4)),
    "2d": (lambda: nn.Conv2d(2, 3, 3, padding=1), (2, 4, 4)),
    "2d strided": (lambda: nn.Conv2d(2, 2, 2, stride=2), (2, 4, 4)),
    "2d grouped": (lambda: nn.Conv2d(4, 4, 3, groups=2), (4, 4, 3)),
    "depthwise": (lambda: nn.Conv2d(3, 3, 3, groups=3, padding=1), (3, 4, 3)),
    "2d transposed": (lambda: nn.ConvTranspose2d(2, 3, 2, stride=2), (2, 3, 3)),
    "3d strided": (lambda: nn.Conv3d(1, 2, 2, stride=2), (1, 4, 2, 2)),
    "3d transposed": (lambda: nn.ConvTranspose3d(2, 1, 2), (2, 2, 2, 2)),
}


def _identity(weight):
    nn.init.dirac_(weight)


def _rank_one(weight):
    outer = torch.outer(torch.linspace(1, 2, weight.shape[0]), torch.linspace(-1, 1, weight[0].numel()) + 0.1)
    weight.copy_(outer.view_as(weight))


WEIGHTS = {
    "identity": _identity,
    "zero": lambda weight: weight.zero_(),
    "rank one": _rank_one,
    "equal": lambda weight: weight.fill_(0.3),
    "drawn": lambda weight: None,
}


def operator_of(layer, shape):
    """The layer as the first of a model."""
    dtype = next(layer.parameters()).dtype
    outputs = layer(torch.zeros(1, *shape, dtype=dtype)).numel()
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(outputs, 1, dtype=dtype))
    return LayerOperator(find(model, torch.randn(4, *shape, dtype=dtype)).first)


def truth_of(layer, shape):
    """σ₁ of the matrix written out, in float64, and how many rows and columns that has."""
    layer, basis = copy.deepcopy(layer).double(), torch.eye(math.prod(shape), dtype=torch.float64)
    with torch.no_grad():
        matrix = (layer(basis.view(-1, *shape)) - layer(torch.zeros(1, *shape, dtype=torch.float64))).flatten(1)
    return float(torch.linalg.matrix_norm(matrix, 2)), sum(matrix.shape)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("name", LAYERS)
def test_the_largest_singular_value_is_never_above_the_true_one(name, weight, dtype):
    """Over many measurements, each from where the last one ended, of weights that stay and of weights that move."""
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    layer = make().to(dtype)
    with torch.no_grad():
        WEIGHTS[weight](layer.weight)
    operator = operator_of(layer, shape)
    for step in range(12):
        truth, size = truth_of(layer, shape)
        rounding = 8 * size * torch.finfo(dtype).eps
        sigma, _ = operator.largest(1e-3) if step % 4 == 3 else operator.follow().result()
        assert sigma <= truth * (1 + rounding)
        if step % 4 == 3:
            # Lanczos from a random start errs in the mean by at most .103 (ln(n (k − 1)²)/(k − 1))² of λ (Kuczyński and
            # Woźniakowski, 1992): after k = 20 products in n ≤ 64 dimensions 3 %, of σ half of that.
            assert sigma >= 0.97 * truth
        if step == 7:
            with torch.no_grad():
                layer.weight += 0.5 * torch.randn_like(layer.weight)


def test_an_identity_has_the_singular_value_one():
    layer = nn.Conv2d(3, 3, 1, bias=False, dtype=torch.float64)
    nn.init.dirac_(layer.weight)
    operator = operator_of(layer, (3, 4, 4))
    assert [operator.follow().result()[0] for _ in range(6)] == pytest.approx([1.0] * 6, abs=1e-13)


def test_another_eigenvector_than_the_leading_one_is_left():
    """The last vector still is an eigenvector, so its Krylov space has one dimension and an error of 0."""
    layer = nn.Conv2d(2, 2, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.diag(torch.tensor([2.0, 1.0])).view(2, 2, 1, 1))
    operator = operator_of(layer, (2, 1, 1))
    assert operator.largest()[0] == pytest.approx(2)
    with torch.no_grad():
        layer.weight[1, 1] = 3
    assert operator.largest()[0] == pytest.approx(3)


@pytest.mark.parametrize("bias", [1.0, 1e4])
def test_a_bias_that_is_large_beside_the_weight_does_not_count(bias: float) -> None:
    """The largest singular value does not depend on it, also in the rounding of float32."""
    found = []
    for one in (0.0, bias):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Flatten(), nn.Linear(50, 1))
        with torch.no_grad():
            model[0].weight.mul_(0.05)
            model[0].bias.fill_(one)
        site = next(iter(find(model, torch.randn(2, 1, 5, 5), "first").chosen))
        found.append(LayerOperator(site).largest())
    assert found[0] == found[1]
