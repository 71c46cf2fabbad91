"""The batched search against Algorithm 1 taken literally, point by point, in float64."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from excitation.literal import extreme, fixed, forward, layers_of, steepest
from excite import PersistentExcitation, Relative
from models import CASES, build, papers_network

NORMS = ["inf", "2", "1"]
DUAL = {"inf": 1, "2": 2, "1": torch.inf}
# Literal hooks reach layers that are modules called once; the others are compared batch against single points below.
HOOKABLE = [
    name
    for name, case in CASES.items()
    if case.outputs == 1
    and name not in ("functional", "products", "written", "recurrent", "in-place", "patches", "shared", "dict", "tuple")
    and "transformer" not in name
]
SCALAR = [name for name, case in CASES.items() if case.outputs == 1]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", HOOKABLE)
def test_extremes_equal_the_literal_algorithm(name, norm):
    model, x = build(name)
    model.eval()
    low, high = PersistentExcitation(model, 0.1, norm=norm, steps=4).extremes(x)
    for i in range(len(x)):
        assert torch.allclose(high[i], extreme(model, x[i : i + 1], 0.1, norm, 4, 1)[0], rtol=1e-10, atol=1e-12)
        assert torch.allclose(low[i], extreme(model, x[i : i + 1], 0.1, norm, 4, -1)[0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", ["dropout", "batchnorm", "resnet-norm", "resnet-identity"])
def test_in_training_mode_the_clean_pass_fixes_all_randomness(name, norm):
    model, x = build(name, batch=5)
    torch.manual_seed(7)
    twins = fixed(copy.deepcopy(model), x)
    torch.manual_seed(7)
    found = PersistentExcitation(model, 0.1, norm=norm).perturbations(x)
    for i, twin in enumerate(twins):
        for half, sign in enumerate((-1, 1)):
            _, expected = extreme(twin, x[i : i + 1], 0.1, norm, 4, sign)
            for layer, d in zip(layer_names(model), expected):
                assert torch.allclose(found[layer][half][i], d[0], rtol=1e-9, atol=1e-12), (layer, i, sign)


def layer_names(model):
    wanted = {id(m) for m in layers_of(model)}
    return [name for name, m in model.named_modules() if id(m) in wanted]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", SCALAR)
def test_a_batch_equals_its_points_one_by_one(name, norm):
    model, x = build(name, batch=3)
    model.eval()
    pe = PersistentExcitation(model, 0.1, norm=norm, output=CASES[name].pick)
    low, high = pe.extremes(x)
    single = [pe.extremes(x[i : i + 1]) for i in range(3)]
    assert torch.allclose(low, torch.cat([s[0] for s in single]), rtol=1e-9, atol=1e-12)
    assert torch.allclose(high, torch.cat([s[1] for s in single]), rtol=1e-9, atol=1e-12)


@given(norm=st.sampled_from(NORMS), steps=st.integers(1, 6), radius=st.floats(1e-3, 10), seed=st.integers(0, 99))
@settings(max_examples=40)
def test_linear_model_reaches_the_dual_norm_exactly(norm, steps, radius, seed):
    model, x = build("linear", seed=seed)
    low, high = PersistentExcitation(model, radius, norm=norm, steps=steps, layers="input").extremes(x)
    reach = radius * model.weight.flatten().norm(p=DUAL[norm])
    clean = model(x).flatten()
    assert torch.allclose(high, clean + reach)
    assert torch.allclose(low, clean - reach)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", ["mlp", "papers", "transformer", "transformer-time-first", "dense"])
def test_perturbations_stay_in_the_ball_per_layer_and_sample(name, norm):
    model, x = build(name)
    found = PersistentExcitation(model, 0.3, norm=norm).perturbations(x)
    assert len(found) == CASES[name].layers
    for halves in found.values():
        for d in halves:
            if d.shape[0] == len(x):
                assert (d.flatten(1).norm(p=float(norm), dim=1) <= 0.3 * (1 + 1e-12)).all()


def test_time_first_and_batch_first_transformers_agree():
    results = []
    for name in ("transformer", "transformer-time-first"):
        model, x = build(name, batch=3)  # a batch as large as the sequence: the axes cannot be told by their size
        results.append(torch.stack(PersistentExcitation(model.eval(), 0.1, norm="2").extremes(x)))
    assert torch.allclose(*results, rtol=1e-9, atol=1e-12)


def test_a_skip_connection_is_not_perturbed_with_its_layer():
    class Skip(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3, bias=False)

        def forward(self, x):
            return (x + self.layer(x)).sum(1)

    model, x = Skip().double(), torch.randn(2, 3, dtype=torch.float64)
    low, high = PersistentExcitation(model, 0.1).extremes(x)
    reach = 0.1 * model.layer.weight.sum(0).abs().sum()
    assert torch.allclose(high, model(x) + reach)
    assert torch.allclose(low, model(x) - reach)


def test_bounds_are_kept_and_used():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 1)).double()
    x = torch.rand(6, 3, 2, 2, dtype=torch.float64) * 2 - 1
    x[0] = 1
    weight = model[1].weight.reshape(3, 2, 2)
    for layers in ("input", "all"):
        pe = PersistentExcitation(model, 0.4, layers=layers, bounds=(-1, 1), steps=5)
        _, high = pe.extremes(x)
        best = ((x + 0.4).clamp(-1, 1) * weight.clamp(min=0) + (x - 0.4).clamp(-1, 1) * weight.clamp(max=0)).sum(
            (1, 2, 3)
        )
        assert torch.allclose(high, best + model[1].bias)
        for d in next(iter(pe.perturbations(x).values())):
            moved = x + d.reshape(x.shape)
            assert moved.min() >= -1 - 1e-15
            assert moved.max() <= 1 + 1e-15
    # One norm at the edge: the step goes to the best coordinate that can still move.
    edge = torch.ones(1, 3, 2, 2, dtype=torch.float64)
    _low, high = PersistentExcitation(model, 0.4, norm="1", layers="input", bounds=(-1, 1), steps=1).extremes(edge)
    down = (-weight.clamp(max=0)).max()
    assert torch.allclose(high, model(edge).flatten() + 0.4 * down)


def test_bounds_may_differ_by_channel():
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(12, 1)).double()
    high = torch.tensor([1.0, 2.0], dtype=torch.float64)[:, None, None]
    x = high * (torch.rand(3, 2, 3, 3, dtype=torch.float64) * 2 - 1)
    d_low, d_high = PersistentExcitation(model, 0.5, bounds=(-high, high)).perturbations(x)["0"]
    for d in (d_low, d_high):
        assert (x + d <= high + 1e-12).all()
        assert (x + d >= -high - 1e-12).all()
        assert (d.abs() > 0.4).any()


def test_relative_radius_is_the_root_mean_square_of_each_input():
    model, x = build("mlp")
    found = PersistentExcitation(model, Relative(0.1), steps=1).perturbations(x)
    assert torch.allclose(found["0"][1].abs().max(), 0.1 * x.square().mean().sqrt())
    hidden = torch.relu(model[0](x))
    assert torch.allclose(found["2"][1].abs().max(), 0.1 * hidden.square().mean().sqrt())


def test_radii_by_name_and_chosen_layers():
    model, x = build("shared")
    found = PersistentExcitation(model, {"enter": 0.1, "again": 0.2}, steps=1).perturbations(x)
    assert set(found) == {"enter", "again", "again#2"}
    assert torch.allclose(found["again#2"][1].abs().max(), torch.tensor(0.2, dtype=torch.float64))
    assert set(PersistentExcitation(model, 0.1, layers=["leave", "again#2"]).perturbations(x)) == {"leave", "again#2"}


def test_memory_does_not_grow_with_steps(monkeypatch):
    # Peak number of bytes that autograd keeps for the backward passes, seen through saved-tensor hooks.
    model, x = papers_network(), torch.rand(4, 3, 32, 32)
    peaks = []
    for steps in (2, 8):
        alive: dict[int, int] = {}
        peak = 0

        class Kept:
            def __init__(self, tensor, alive=alive):
                self.tensor, self.alive = tensor, alive
                alive[id(self)] = tensor.numel()

            def __del__(self):
                self.alive.pop(id(self), None)

        def pack(tensor, alive=alive):
            nonlocal peak
            kept = Kept(tensor)
            peak = max(peak, sum(alive.values()))
            return kept

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
            PersistentExcitation(model, 0.02, steps=steps).extremes(x)
        peaks.append(peak)
    assert peaks[1] == peaks[0]


# Random starts, and the best iterate


class Cosine(nn.Module):
    def forward(self, x):
        return x.cos()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("steps", [1, 4])
def test_best_iterate_is_the_best_of_the_literal_ones(norm, steps):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), Cosine(), nn.Linear(6, 1)).double()
    x, radius = torch.randn(4, 5, dtype=torch.float64), 20.0  # so large that steps overshoot
    low, high = PersistentExcitation(model, radius, norm=norm, steps=steps, layers=["0"], keep_best=True).extremes(x)
    last_low, last_high = PersistentExcitation(model, radius, norm=norm, steps=steps, layers=["0"]).extremes(x)
    for i in range(len(x)):
        up, down = ([model(x[i : i + 1]).squeeze()] for _ in range(2))
        for sign, found in ((1, up), (-1, down)):
            d = [None] * len([model[0]])
            for _ in range(steps):
                output = forward(model, [model[0]], x[i : i + 1], d)
                gradients = torch.autograd.grad(output, d)
                d = [
                    (p + sign * radius / steps * steepest(g, norm)).detach().requires_grad_()
                    for p, g in zip(d, gradients)
                ]
                found.append(forward(model, [model[0]], x[i : i + 1], d))
        assert torch.allclose(high[i], torch.stack(up).max(), rtol=1e-10)
        assert torch.allclose(low[i], torch.stack(down).min(), rtol=1e-10)
    assert (high >= last_high - 1e-12).all()
    assert (low <= last_low + 1e-12).all()
    if steps > 1:
        assert (high > last_high + 1e-6).any() or (low < last_low - 1e-6).any()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", ["mlp", "papers", "transformer-time-first", "dropout", "batchnorm"])
def test_random_starts_stay_in_the_balls(name, norm):
    model, x = build(name)
    found = PersistentExcitation(model, 0.3, norm=norm, random_start=True, keep_best=True).perturbations(x)
    for halves in found.values():
        for d in halves:
            if d.shape[0] == len(x):
                assert (d.flatten(1).norm(p=float(norm), dim=1) <= 0.3 * (1 + 1e-12)).all()
                assert (d != 0).any()


@pytest.mark.parametrize("norm", NORMS)
def test_a_linear_model_is_solved_from_a_random_start_too(norm):
    model, x = build("linear")
    pe = PersistentExcitation(model, 0.1, norm=norm, steps=20, layers="input", random_start=True, keep_best=True)
    low, high = pe.extremes(x)
    clean, reach = model(x).flatten(), 0.1 * model.weight.flatten().norm(p=DUAL[norm])
    for move in (high - clean, clean - low):
        assert (move <= reach * (1 + 1e-12)).all()
        assert (move >= 0.95 * reach).all()


def test_random_starts_come_from_the_global_random_state():
    model, x = build("dropout")
    pe = PersistentExcitation(model, 0.3, steps=1, random_start=True)
    starts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        starts.append(pe.loss(x, torch.tensor([0, 1, 1, 0])))
        starts.append(pe.loss(x, torch.tensor([0, 1, 1, 0])))
    assert torch.equal(starts[0], starts[2])
    assert torch.equal(starts[1], starts[3])
    assert len({float(s.detach()) for s in starts}) == 4


def test_best_iterate_and_random_start_keep_bounds():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    x = torch.rand(5, 6, dtype=torch.float64)
    pe = PersistentExcitation(model, 0.4, bounds=(0, 1), random_start=True, keep_best=True)
    for d in pe.perturbations(x)["0"]:
        assert (x + d).min() >= -1e-15
        assert (x + d).max() <= 1 + 1e-15


def test_a_hierarchy_and_codes_take_the_best_iterate():
    for options, outputs in (({"classes": 3}, 3), ({"classes": 3, "hierarchy": "balanced"}, 2)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs)).double()
        x, y = torch.randn(5, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1])
        pe = PersistentExcitation(model, 0.2, keep_best=True, random_start=True, **options)
        pe.loss(x, y).backward()
        low, high = pe.extremes(x)
        assert low.shape == high.shape == (5, outputs)
