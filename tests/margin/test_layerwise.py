"""Margins with perturbations in every layer: closed forms, Algorithm 1's set, literal searches, the table of models."""

from __future__ import annotations

import json
import math
from copy import deepcopy
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from excite import ExciteError, PersistentExcitation, margins
from excite.margin import Margins, SearchOptions
from excite.margin.sites import find_sites
from margin.networks import trained
from models import CASES, build, same_state, state_of

NORMS = ["inf", "2"]
ORDER = {"inf": math.inf, "2": 2.0}
DUAL = {"inf": 1.0, "2": 2.0}


def dual(w: Tensor, norm: str) -> Tensor:
    return torch.linalg.vector_norm(w.flatten(), DUAL[norm])


def deep_linear(*sizes: int, seed: int = 0, points: int = 20) -> tuple[nn.Sequential, Tensor, Tensor, Tensor]:
    """A network without nonlinearities, points, labels and the slack of each."""
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes))).double()
    x = torch.randn(points, sizes[0], dtype=torch.float64)
    f = model(x).detach()[:, 0]
    return model, x, (f > 0.5).long(), (f - 0.5).abs()


def tails(model: nn.Sequential) -> list[Tensor]:
    """∂f/∂(input of layer k) for each k: the products W_L ⋯ W_k."""
    rows = [model[-1].weight.detach()]
    for layer in reversed(model[:-1]):
        rows.insert(0, rows[0] @ layer.weight.detach())
    return rows


def applied(model: nn.Module, x: Tensor, d: dict[str, Tensor]) -> Tensor:
    """The output of a sequential model with d["i"] added to the input of module i, written out."""
    for name, module in model.named_children():
        x = module(x + d[name] if name in d else x)
    return x


@pytest.mark.parametrize("norm", NORMS)
def test_one_layer_is_the_distance_to_the_hyperplane(norm: str) -> None:
    model, x, y, slack = deep_linear(7, 1)
    found = margins(model, x, y, norm=norm, layers="all", options=SearchOptions(restarts=2))
    torch.testing.assert_close(found.values, slack / dual(model[0].weight.detach(), norm), rtol=1e-3, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("sizes", [(7, 6, 1), (5, 4, 6, 1)])
def test_linear_networks_have_a_closed_form(norm: str, sizes: tuple[int, ...]) -> None:
    # "inf": each layer adds ε‖W_L⋯W_k‖₁; "2": the rows ∂f/∂d_k side by side are one row
    model, x, y, slack = deep_linear(*sizes)
    found = margins(model, x, y, norm=norm, layers="all", options=SearchOptions(restarts=3))
    steep = dual(torch.stack([dual(w, norm) for w in tails(model)]), norm)
    torch.testing.assert_close(found.values, slack / steep, rtol=1e-3, atol=0)
    assert found.trusted
    assert found.layers == tuple(str(k) for k in range(len(model)))


@pytest.mark.parametrize("norm", NORMS)
def test_chosen_layers_count_alone(norm: str) -> None:
    model, x, y, slack = deep_linear(5, 4, 6, 1)
    found = margins(model, x, y, norm=norm, layers=["1"], options=SearchOptions(restarts=2), perturbations=True)
    torch.testing.assert_close(found.values, slack / dual(tails(model)[1], norm), rtol=1e-3, atol=0)
    assert isinstance(found.perturbations, dict)
    assert list(found.perturbations) == ["1"]


@pytest.mark.slow
@pytest.mark.parametrize("norm", NORMS)
def test_relative_perturbations_are_measured_by_each_signal(norm: str) -> None:
    model, x, y, slack = deep_linear(7, 6, 1)
    found = margins(model, x, y, norm=norm, layers="all", relative=True, options=SearchOptions(restarts=3))
    signals = [x, model[0](x).detach()]
    for i in range(len(x)):
        units = [s[i].norm() / (len(s[i]) ** 0.5 if norm == "inf" else 1.0) for s in signals]
        steep = dual(torch.stack([u * dual(w, norm) for u, w in zip(units, tails(model))]), norm)
        assert float(found.values[i]) == pytest.approx(float(slack[i] / steep), rel=1e-3)


@pytest.mark.slow
def test_bounds_hold_x_back_and_nothing_else() -> None:
    # the best ε: every hidden coordinate at ±ε, every coordinate of x at ±ε or at its bound
    model, x, y, slack = deep_linear(7, 6, 1)
    x = x.clamp(-1, 1)
    f = model(x).detach()[:, 0]
    y, slack = (f > 0.5).long(), (f - 0.5).abs()
    found = margins(model, x, y, bounds=(-1, 1), layers="all", options=SearchOptions(restarts=4), perturbations=True)
    first, second = tails(model)
    for i in range(len(x)):
        down = -first[0].sign() if y[i] == 1 else first[0].sign()
        room = 1 - down * x[i]
        low, high = 0.0, 100.0
        for _ in range(100):
            middle = (low + high) / 2
            gained = (first[0].abs() * room.clamp(max=middle)).sum() + middle * second.abs().sum()
            low, high = (low, middle) if gained >= slack[i] else (middle, high)
        assert float(found.values[i]) == pytest.approx(high, rel=1e-3)
    assert isinstance(found.perturbations, dict)
    assert (x + found.perturbations["0"]).abs().max() <= 1


@pytest.mark.slow
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("kind", ["mlp", "classes"])
def test_at_most_the_input_margin_and_adversarial_when_applied(norm: str, kind: str) -> None:
    model, x, y = trained(kind)
    x, y = x[:24], y[:24]
    options = SearchOptions(steps=20, restarts=2, evidence=False)
    settings = {"norm": norm, "bounds": (-1, 1), "options": options}
    at_input = margins(model, x, y, **settings)
    found = margins(model, x, y, layers="all", perturbations=True, **settings)
    assert (found.values <= at_input.values * (1 + 1e-5)).all()
    right = (found.values > 0) & ~found.censored
    assert (found.values < 0.98 * at_input.values)[right].float().mean() > 0.9
    d = found.perturbations
    assert isinstance(d, dict)
    sizes = torch.stack([torch.linalg.vector_norm(v.flatten(1), ORDER[norm], dim=1) for v in d.values()])
    sizes = torch.linalg.vector_norm(sizes, ORDER[norm], dim=0).double()
    torch.testing.assert_close(sizes[right], found.values[right], rtol=1e-5, atol=0)
    f = applied(model, x, d).detach()
    chosen = f.argmax(1) if kind == "classes" else (f[:, 0] > 0.5).long()
    assert (chosen != y)[right].all()


@pytest.mark.slow
def test_it_is_the_radius_where_excitation_changes_the_decision() -> None:
    model, x, y = trained("mlp")
    right = (model(x)[:, 0] > 0.5).long() == y
    x, y = x[right][:16], y[right][:16]
    found = margins(model, x, y, layers="all", options=SearchOptions(restarts=4, evidence=False))
    for i in range(len(x)):
        flips = []
        for times in (0.98, 1.1):
            excitation = PersistentExcitation(model, radius=times * float(found.values[i]), steps=40)
            low, high = excitation.extremes(x[i : i + 1])
            flips.append(bool(low <= 0.5) if y[i] == 1 else bool(high > 0.5))
        assert flips == [False, True]


@pytest.mark.slow
def test_a_literal_search_does_not_find_anything_smaller() -> None:
    model, x, y = trained("mlp")
    right = (model(x)[:, 0] > 0.5).long() == y
    x, y = x[right][:8].double(), y[right][:8]
    model = deepcopy(model).double()
    found = margins(model, x, y, layers="all", options=SearchOptions(restarts=4, evidence=False))
    shapes = {"1": (64,), "3": (48,), "5": (48,)}
    generator = torch.Generator().manual_seed(0)
    for i in range(len(x)):
        radius = 0.97 * float(found.values[i])
        for _ in range(3):  # projected signed steps on the slack within the ball, from random corners
            d = {k: radius * torch.randn(1, *s, generator=generator).double().sign() for k, s in shapes.items()}
            for step in range(60):
                leaves = [v.requires_grad_() for v in d.values()]
                slack = (applied(model, x[i : i + 1], d) - 0.5).sum() * (1 if y[i] == 1 else -1)
                assert slack > 0
                gradients = torch.autograd.grad(slack, leaves)
                d = {
                    k: (v.detach() - 0.3 * radius * 0.95**step * g.sign()).clamp(-radius, radius)
                    for (k, v), g in zip(d.items(), gradients)
                }


TABLE = [
    "convolutional-classes", "resnet-norm", "resnet-free", "dense", "shared", "transformer", "transformer-time-first",
    "products", "weight-norm", "dict",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLE)
def test_the_table_of_models(name: str) -> None:
    case = CASES[name]
    model, x = build(name, batch=5)
    model.eval()
    f = model(x)
    f = f if case.pick is None else f[case.pick]
    y = f.argmax(1) if case.outputs > 1 else (f.reshape(len(x)) > 0).long()
    before = state_of(model)
    options = SearchOptions(steps=12, restarts=1, evidence=False)
    settings = {"threshold": 0.0, "output": case.pick, "options": options}
    found = margins(model, x, y, layers="all", perturbations=True, **settings)
    assert same_state(before, state_of(model))
    assert (found.values <= margins(model, x, y, **settings).values * (1 + 1e-9)).all()
    assert (found.values > 0).all()
    assert len([name for name in found.layers if name]) == case.layers - (name == "dict")  # its side output has no say
    assert isinstance(found.perturbations, dict)
    # each point by itself: the same perturbations break it, wherever the batch lies inside the model
    sites = find_sites(model, x, "all", case.pick)
    rows = [s.layout.by_sample(found.perturbations[s.name], len(x)) for s in sites.places]
    for i in range(len(x)):
        with torch.no_grad():
            f = sites.run(x[i : i + 1], [r[i : i + 1] for r in rows])
        f = f if case.pick is None else f[case.pick]
        assert int(f.argmax(1) if case.outputs > 1 else f.reshape(1) > 0) != int(y[i])


def test_x_has_its_own_perturbation_where_several_calls_read_it() -> None:
    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.head = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x + self.inner(x))

    torch.manual_seed(0)
    model, x = Skip().double(), torch.randn(10, 4, dtype=torch.float64)
    f = model(x).detach()[:, 0]
    found = margins(model, x, (f > 0.5).long(), layers="all", options=SearchOptions(restarts=2, evidence=False))
    assert found.layers == ("", "inner", "head")
    head, inner = model.head.weight.detach(), model.inner.weight.detach()
    steep = (head + head @ inner).abs().sum() + (head @ inner).abs().sum() + head.abs().sum()
    torch.testing.assert_close(found.values, (f - 0.5).abs() / steep, rtol=1e-3, atol=0)


def test_integer_inputs_have_margins_in_later_layers() -> None:
    model, x = build("tokens", batch=6)
    y = (model(x)[:, 0] > 0).long()
    found = margins(model, x, y, threshold=0.0, layers="all", options=SearchOptions(restarts=2))
    assert found.layers == ("hidden", "head")
    assert (found.values > 0).all()
    assert not found.censored.any()
    assert found.trusted


@pytest.mark.slow
def test_vanishing_gradients_are_met_by_gradient_free_search() -> None:
    class Steps(nn.Module):
        """Flat but for a thin strip along the boundary."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 1)

        def forward(self, x: Tensor) -> Tensor:
            return (self.last(torch.tanh(self.first(x))) * 500).sigmoid().clamp(0.01, 0.99)

    torch.manual_seed(0)
    model, x = Steps().double(), torch.randn(16, 3, dtype=torch.float64)
    y = (model(x)[:, 0] > 0.5).long()
    found = margins(model, x, y, layers="all", options=SearchOptions(restarts=2))
    assert found.evidence is not None
    assert found.evidence.flat > 8
    assert not found.censored.any()
    # the same boundary without the plateau: what is found may not be far from it
    inner = margins(
        nn.Sequential(model.first, nn.Tanh(), model.last),
        x,
        y,
        threshold=0.0,
        layers="all",
        options=SearchOptions(restarts=4, evidence=False),
    )
    assert float((found.values / inner.values).median()) < 1.5


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(2 * x)


@pytest.mark.slow
@pytest.mark.parametrize("layers", ["all", ["layer"]])
def test_small_batches_progress_and_a_layer_that_reads_x_changed(layers: str | list[str]) -> None:
    torch.manual_seed(0)
    model, x = Doubled().double(), torch.randn(10, 4, dtype=torch.float64)
    f = model(x).detach()[:, 0]
    seen: list[float] = []
    found = margins(
        model,
        x,
        (f > 0.5).long(),
        layers=layers,
        options=SearchOptions(restarts=2),
        batch=3,
        progress=lambda done, all: seen.append(done / all),
    )
    # "all": x is doubled before the layer reads it, so that both may be perturbed
    steep = model.layer.weight.detach().abs().sum() * (3 if layers == "all" else 1)
    torch.testing.assert_close(found.values, (f - 0.5).abs() / steep, rtol=1e-3, atol=0)
    assert seen == sorted(seen)
    assert seen[-1] == 1


def test_the_result_says_what_it_is_about_and_survives_a_file() -> None:
    model, x, y, _ = deep_linear(4, 3, 1)
    found = margins(model, x, y, layers="all", relative=True, options=SearchOptions(restarts=1))
    assert "2 layers" in str(found)
    assert "relative" in str(found)
    assert found.certified is None
    again = Margins.from_dict(json.loads(json.dumps(found.to_dict())))
    assert (again.layers, again.relative) == (("0", "1"), True)
    at_input = margins(model, x, y, options=SearchOptions(restarts=1))
    old = {k: v for k, v in at_input.to_dict().items() if k not in ("layers", "relative")}
    assert Margins.from_dict(old).layers == "input"
    with pytest.raises(ExciteError, match="same kind"):
        found.gap(at_input)


BAD = {
    "unknown name": ({"layers": ["nought"]}, "unknown layer 'nought'"),
    "close name": ({"layers": ["00"]}, "did you mean '0'"),
    "one name": ({"layers": "0"}, r"give \['0'\]"),
    "none": ({"layers": []}, "at least one layer name"),
    "numbers": ({"layers": [0]}, "at least one layer name"),
    "relative input": ({"relative": True}, "layers='all'"),
    "relative number": ({"layers": "all", "relative": 0.1}, "True or False"),
    "lipschitz": ({"layers": "all", "options": SearchOptions(lipschitz=3.0)}, "input only"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_settings_are_refused_with_the_reason(case: str) -> None:
    settings, message = BAD[case]
    model, x, y, _ = deep_linear(4, 3, 1)
    with pytest.raises(ExciteError, match=message) as caught:
        margins(model, x, y, **settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["folded", "folded-time-first", "transformer-time-first"])
def test_points_that_are_all_equal_do_not_hide_where_samples_lie(name: str) -> None:
    """The places are found with the first points; with equal ones time and batch cannot be told apart by values."""
    model, x = build(name, batch=8)
    places = find_sites(model, x, "all", None).places
    for equal in (torch.zeros_like(x), torch.ones_like(x), x[:1].expand_as(x)):
        assert find_sites(model, equal, "all", None).places == places
