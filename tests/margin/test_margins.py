"""Margins against closed forms, linear programs and the definition; results are real; bad input; masked gradients."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from torch import Tensor, nn

import excite
from excite import ExciteError, PersistentExcitation, margins
from excite.margin import Margins
from models import CASES, build, same_state, state_of

DUAL = {"inf": 1, "2": 2}
NORMS = ["inf", "2"]


def labels_of(model, x, pick=None, threshold=0.5):
    out = excite.wiring.calling.pick_output(model(x), pick).detach()
    return (out.reshape(len(x)) > threshold).long() if out.numel() == len(x) else out.argmax(1)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("seed", range(3))
def test_linear_models_have_the_closed_form(norm, seed):
    model, x = build("linear", batch=40, seed=seed)
    y = labels_of(model, x)
    y[:5] = 1 - y[:5]
    found = margins(model, x, y, norm=norm)
    w = model.weight.detach().flatten()
    expected = (model(x).detach().flatten() - 0.5).abs() / w.norm(p=DUAL[norm])
    expected[:5] = 0
    assert torch.allclose(found.values, expected, rtol=1e-3)
    assert (found.values >= expected * (1 - 1e-9)).all()
    assert found.trusted, found.flags


@pytest.mark.parametrize("norm", NORMS)
def test_linear_classifiers_have_the_closed_form(norm):
    model, x = build("linear-classes", batch=40)
    f, y = model(x).detach(), labels_of(model, x)
    w = model.weight.detach()
    expected = torch.full((40,), math.inf, dtype=torch.float64)
    for i in range(40):
        for j in range(3):
            if j != y[i]:
                distance = (f[i, y[i]] - f[i, j]) / (w[y[i]] - w[j]).norm(p=DUAL[norm])
                expected[i] = torch.minimum(expected[i], distance)
    assert torch.allclose(margins(model, x, y, norm=norm).values, expected, rtol=1e-3)


def test_bounds_are_used_as_a_linear_program_would():
    torch.manual_seed(0)
    model = nn.Linear(6, 1).double()
    x = torch.rand(30, 6, dtype=torch.float64) * 2 - 1
    y = labels_of(model, x)
    found = margins(model, x, y, bounds=(-1, 1), perturbations=True)
    w, b = model.weight.detach().numpy().ravel(), float(model.bias)
    for i in range(30):
        sign = 1 if y[i] == 1 else -1
        point = x[i].numpy()
        # variables: the new point and the radius; minimise the radius with the decision on the other side
        rows = np.block([[np.eye(6), -np.ones((6, 1))], [-np.eye(6), -np.ones((6, 1))], [sign * w, np.zeros(1)]])
        limits = np.concatenate([point, -point, [sign * (0.5 - b)]])
        best = linprog([0] * 6 + [1], rows, limits, bounds=[(-1, 1)] * 6 + [(0, None)])
        if best.success:
            assert float(found.values[i]) == pytest.approx(best.fun, rel=1e-3)
        else:
            assert found.censored[i]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", [n for n, case in CASES.items() if not case.tokens])
def test_every_margin_is_real_and_the_model_is_untouched(name, norm):
    model, x = build(name, batch=6)
    pick = CASES[name].pick
    y = labels_of(model.eval(), x, pick)
    model.train()
    before = state_of(model)
    found = margins(model, x, y, norm=norm, bounds=(-6, 6), output=pick, steps=30, perturbations=True)
    assert same_state(before, state_of(model))
    model.eval()
    broken = torch.isfinite(found.values) & (found.values > 0)
    moved = x + found.perturbations
    assert (labels_of(model, moved, pick)[broken] != y[broken]).all()
    assert torch.allclose(found.perturbations.flatten(1).norm(p=float(norm), dim=1)[broken], found.values[broken])
    assert moved.abs().max() <= 6
    if found.certified is not None:
        assert (found.certified <= found.values).all()


def test_misclassified_and_unreachable_points():
    model = nn.Sequential(nn.Linear(2, 1, bias=False)).double()
    model[0].weight.data[:] = torch.tensor([[1.0, 0.0]])
    x = torch.tensor([[0.4, 0.0], [0.9, 0.0], [0.45, 0.5]], dtype=torch.float64)
    found = margins(model, x, torch.tensor([0, 0, 0]), bounds=(0, 0.95))
    assert found.values[1] == 0
    assert torch.allclose(found.values[[0, 2]], torch.tensor([0.1, 0.05], dtype=torch.float64), rtol=1e-3)
    found = margins(model, x[[0, 2]], torch.tensor([0, 0]), bounds=(-0.5, 0.5))
    assert found.censored.all()
    assert found.median == math.inf
    assert found.within(1e9) == 0
    assert "never broken 2" in str(found)


def test_summaries():
    found = Margins(torch.tensor([0.0, 0.1, 0.2, math.inf], dtype=torch.float64), "inf")
    assert found.within(0.1) == 0.5
    assert found.within(0.0999) == 0.25
    assert list(found.within(np.array([0, 0.2, 5]))) == [0.25, 0.75, 0.75]
    assert found.median == pytest.approx(0.15)
    gap = found.gap(Margins(torch.tensor([1.0, 1.0, 1.0, math.inf], dtype=torch.float64), "inf"))
    assert float(gap) == 0.75
    assert gap.low <= 0.75 <= gap.high
    again = Margins.from_dict(found.to_dict())
    assert torch.equal(again.values, found.values)
    assert found.plot().get_xlabel().startswith("ε")
    with pytest.raises(ExciteError, match="same norm"):
        found.gap(Margins(torch.ones(2), "2"))


@pytest.fixture(scope="module")
def trained():
    """A small network that fits two moons, in float64."""
    from excite.data import load

    data = load("moons", train=200, test=60)
    x, y = data.x_train.double(), data.y_train
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 1)).double()
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    excitation = PersistentExcitation(model, 0)
    for _ in range(300):
        optimizer.zero_grad()
        excitation.loss(x, y).backward()
        optimizer.step()
    return model, data.x_test.double(), data.y_test


@pytest.mark.parametrize("norm", NORMS)
def test_margins_of_a_plane_model_agree_with_a_dense_grid(trained, norm):
    model, x, y = trained
    found = margins(model, x, y, norm=norm)
    assert found.trusted, found.flags
    angles = torch.linspace(0, 2 * math.pi, 721, dtype=torch.float64)
    rays = torch.stack([angles.cos(), angles.sin()], 1)
    rays = rays / rays.norm(p=float(norm), dim=1, keepdim=True)
    radii = torch.linspace(0, 2, 801, dtype=torch.float64)
    for i in range(0, len(x), 3):
        grid = x[i] + radii[:, None, None] * rays
        flipped = (model(grid.reshape(-1, 2)).reshape(801, 721) > 0.5).long() != y[i]
        hit = flipped.any(1)
        exact = radii[hit.long().argmax()] if hit.any() else math.inf
        assert found.values[i] <= exact * 1.01 + 1e-9
        assert found.values[i] >= exact - 0.003


class Staircase(nn.Module):
    """The same decisions as the model, but gradients that are zero nearly everywhere."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        f = self.model(x)
        return (torch.round(4 * f - 0.5 + 1e-9) + 0.5) / 4 + 0 * f


class Saturated(Staircase):
    """The same decisions, through a sigmoid so steep that its gradient vanishes in floating point."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(1e5 * (self.model(x) - 0.5))


@pytest.mark.parametrize("mask", [Staircase, Saturated])
def test_a_masked_gradient_is_told_from_robustness(trained, mask):
    model, x, y = trained
    honest, masked = margins(model, x, y), margins(mask(model), x, y)
    assert honest.trusted
    assert not masked.trusted
    assert masked.flags
    assert masked.suspect.double().mean() > 0.5
    assert "not to be trusted" in str(masked)


def test_certified_bounds_enclose_the_truth(trained):
    model, x, y = trained
    for norm in NORMS:
        found = margins(model, x, y, norm=norm)
        assert found.certified is not None
        assert (found.certified <= found.values).all()
        assert (found.certified[found.values > 0] > 0).all()
    linear, points = build("linear", batch=10)
    found = margins(linear, points, labels_of(linear, points), norm="2")
    assert torch.allclose(found.certified, found.values, rtol=1e-3)
    assert margins(model, x, y, lipschitz=1e6).certified.max() < 1e-5


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_works_where_gradients_are_off_and_repeats_itself(trained, guard):
    model, x, y = trained
    expected = margins(model, x, y).values
    state = torch.get_rng_state()
    with guard():
        found = margins(model, x.clone(), y).values
    assert torch.equal(found, expected)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.allclose(margins(model, x, y, batch=7).values, expected, rtol=0.05)


def call(x=None, y=None, model=None, **options):
    x = torch.zeros(4, 5) if x is None else x
    return margins(model or nn.Linear(5, 1), x, torch.zeros(4, dtype=torch.long) if y is None else y, **options)


class Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).detach()


BAD = {
    "norm": (lambda: call(norm="1"), "unknown norm '1'"),
    "labels out of range": (lambda: call(y=torch.tensor([0, 1, 2, 0])), "2"),
    "labels for classes": (lambda: call(model=nn.Linear(5, 3), y=torch.tensor([0, 1, 3, 0])), "3"),
    "label shape": (lambda: call(y=torch.zeros(3, dtype=torch.long)), "shape"),
    "fractional labels": (lambda: call(y=torch.full((4,), 0.5)), "0.5|integer|whole"),
    "outside bounds": (lambda: call(torch.full((4, 5), 2.0), bounds=(-1, 1)), "bounds"),
    "bounds upside down": (lambda: call(bounds=(1, -1)), "bounds"),
    "nan": (lambda: call(torch.full((4, 5), math.nan)), "finite|NaN"),
    "integers": (lambda: call(torch.zeros(4, 5, dtype=torch.long)), "int64"),
    "empty": (lambda: call(torch.zeros(0, 5), torch.zeros(0, dtype=torch.long)), "at least one input"),
    "no gradient path": (lambda: call(model=Detached()), "gradient"),
    "steps": (lambda: call(steps=0), "steps"),
    "threshold": (lambda: call(threshold=math.nan), "threshold"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_with_the_reason(case):
    action, message = BAD[case]
    with pytest.raises(ExciteError, match=message) as caught:
        action()
    assert "\n" not in str(caught.value)
