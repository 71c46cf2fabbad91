"""Theorem 1 and Corollary 1 of the persistency paper: formulas by hand, all regions of the plane, and no violation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from bounds.networks import evaluate, full_hessian, largest_step, random_network, random_points, regions
from excite.bounds import Descent, two_layer_lipschitz, two_layer_margin
from excite.errors import InputError, ModelError


def at_rest(seed, *, r=3, n=2, m=1, points=25, bias=True):
    pairs, x = random_network((n, r, m), bias, seed), random_points(points, n, seed)
    return pairs, x, evaluate(pairs, x)


def by_hand(pairs, x, q):
    """Per unit: number of points, μ, extreme eigenvalues, and both bounds, with plain loops."""
    V, b = pairs[0][0].numpy(), pairs[0][1].numpy() if pairs[0][1] is not None else np.zeros(len(pairs[0][0]))
    units = []
    for k in range(len(V)):
        on = [p for p in x.numpy() if V[k] @ p + b[k] > 0]
        S = sum(np.outer(p, p) for p in on)
        low, high = np.linalg.eigvalsh(S)[[0, -1]]
        mu = np.linalg.norm(sum(on))
        roots = np.roots([low, -2 * abs(b[k]) * mu, len(on) * b[k] ** 2 - q])
        units.append((len(on), mu, low, high, max(roots.real), math.sqrt(q / high)))
    return V, b, units


def slopes(pairs):
    """Norms of the slopes of all linear pieces in the plane."""
    V, b = pairs[0][0].numpy(), pairs[0][1].numpy() if pairs[0][1] is not None else np.zeros(len(pairs[0][0]))
    W = pairs[1][0].numpy()
    return {on: np.linalg.norm(W @ np.diag(on) @ V, 2) for on in regions(V, b)}


def spanned(pairs, x):
    """Whether each unit's points span the input."""
    active = x @ pairs[0][0].T + (0 if pairs[0][1] is None else pairs[0][1]) > 0
    return all(np.linalg.matrix_rank(x[on].numpy()) == x.shape[1] for on in active.T)


GOOD = [seed for seed in range(60) if spanned(*at_rest(seed)[:2])]


@pytest.mark.parametrize("seed", GOOD[:12])
def test_both_forms_are_their_formulas(seed):
    pairs, x, y = at_rest(seed)
    step = largest_step(pairs, x)
    q = 2 / step
    V, b, units = by_hand(pairs, x, q)
    patterns = regions(V, b)
    bound = two_layer_lipschitz(pairs, x, y, step)
    assert bound.holds
    assert bound.terms["exact"]
    expected = max(sum(u[4] * u[5] for u, on in zip(units, pattern) if on) for pattern in patterns)
    assert bound.value == pytest.approx(expected, rel=1e-9)

    bound = two_layer_lipschitz(pairs, x, y, step, form="stated")
    n = max(map(sum, patterns))
    mu, low, B = max(u[1] for u in units), min(u[2] for u in units), np.abs(b).max()
    assert bound.terms["n_active"] == n
    last = abs(q - B**2) if mu**2 >= low else q
    expected = n * math.sqrt(2 / (step * low)) * (2 * mu * B / low + math.sqrt(last / low))
    assert bound.value == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow
def test_no_violation_where_the_step_is_the_largest_possible():
    """Networks that fit their points, at the largest step at which gradient descent stays there: the tightest case."""
    given = 0
    for seed in range(60):
        pairs, x, y = at_rest(seed, r=2 + seed % 4, m=1 + seed % 2, points=20 + seed % 20, bias=seed % 5 > 0)
        if not spanned(pairs, x):
            continue
        given += 1
        step = largest_step(pairs, x)
        truth = max(slopes(pairs).values())
        unit, stated = (two_layer_lipschitz(pairs, x, y, step, form=form) for form in ("unit", "stated"))
        assert unit.holds
        assert truth <= unit.value <= stated.value
        V, W = pairs[0][0], pairs[1][0]
        for k, (row, column) in enumerate(zip(unit.terms["rows"], unit.terms["columns"])):
            assert float(V[k].norm()) <= row * (1 + 1e-9)
            assert float(W[:, k].norm()) <= column * (1 + 1e-9)
    assert given >= 30


def test_the_unit_form_is_sharp_for_one_unit_and_one_point():
    """f = w(vx)_+ with w → 0: the Hessian is (vx)² and |v| is all that q allows."""
    x = torch.tensor([[2.0]], dtype=torch.float64)
    pairs = [(torch.tensor([[3.0]], dtype=torch.float64), None), (torch.tensor([[1e-6]], dtype=torch.float64), None)]
    bound = two_layer_lipschitz(pairs, x, evaluate(pairs, x), 2 / (36 * (1 + 1e-9)))
    assert bound.terms["rows"][0] == pytest.approx(3, rel=1e-6)


def test_theorem_1_for_all_units_needs_mu_above_lambda():
    """The proof bounds every ‖V_k‖ by the root with B = max |b_k|, which is not monotone in the bias if μ² < λ.

    Inequality alone, with the numbers of two units: λ = 1, μ = 0, q = 4, biases 0.1 and √3.
    """
    q, low, mu, small, B = 4.0, 1.0, 0.0, 0.1, math.sqrt(3)
    allowed = (small * mu + math.sqrt((small * mu) ** 2 + low * (q - small**2))) / low
    printed = mu * B / low + math.sqrt((mu * B / low) ** 2 + (q - B * B) / low)
    assert allowed > printed
    assert allowed <= 2 * mu * B / low + math.sqrt(q / low)


def test_remarks_1_to_3_on_the_printed_bound():
    """Larger steps, points without bias and fewer units give smaller bounds; remark 1 only while 2/δ ≥ ‖b‖∞², or per unit."""

    def printed(q, low, mu, B):
        return math.sqrt(q / low) * (2 * mu * B / low + math.sqrt(abs(q - B * B) / low))

    assert (
        printed(2.0, 1.0, 0.0, 2.0) > printed(4.0, 1.0, 0.0, 2.0) == 0
    )  # 2/δ = 2 and 4, ‖b‖∞ = 2: a larger step, a larger bound
    pairs, x, y = at_rest(0)
    twice = [
        (torch.cat([pairs[0][0]] * 2), torch.cat([pairs[0][1]] * 2)),
        (torch.cat([pairs[1][0] / 2] * 2, 1), pairs[1][1]),
    ]
    assert torch.allclose(evaluate(twice, x), y)  # every unit twice, with half its weight: the same function
    step = 0.9 * min(largest_step(pairs, x), largest_step(twice, x))
    for form in ("unit", "stated"):
        values = [two_layer_lipschitz(pairs, x, y, share * step, form=form).value for share in (0.1, 0.3, 1.0)]
        assert values == sorted(values, reverse=True)
    found, doubled = (two_layer_lipschitz(net, x, y, step, form="stated") for net in (pairs, twice))
    assert doubled.terms["n_active"] == 2 * found.terms["n_active"]
    assert doubled.value == pytest.approx(2 * found.value)
    q, low, mu, B = 2 / step, found.terms["λ"], found.terms["μ"], found.terms["B"]
    assert found.value == pytest.approx(found.terms["n_active"] * printed(q, low, mu, B))
    assert printed(q, low, 2 * mu, B) > printed(q, low, mu, B)
    assert printed(q, low, 2 * mu, 0.0) == printed(q, low, mu, 0.0)


def test_theorem_1_as_printed_is_not_violated_at_random():
    """Two units with μ² < λ and output weights near zero, where the Hessian is Σ h h': no ‖V_k‖ is above the printed row."""
    rng = np.random.default_rng(0)
    tried, worst = 0, 0.0
    while tried < 500:
        n, count = int(rng.integers(1, 3)), int(rng.integers(4, 16))
        x, b = rng.standard_normal((count, n)), np.abs(rng.standard_normal(2)) * 3
        V = rng.standard_normal((2, n)) * 10 ** rng.uniform(-2, 1, (2, 1))
        h = np.maximum(x @ V.T + b, 0)
        on = [x[h[:, k] > 0] for k in range(2)]
        if min(map(len, on)) <= n:
            continue
        low, mu = min(np.linalg.eigvalsh(p.T @ p)[0] for p in on), max(np.linalg.norm(p.sum(0)) for p in on)
        if low < 1e-6 or mu**2 >= low:
            continue
        tried += 1
        q, B = np.linalg.norm(h, 2) ** 2, b.max()
        printed = 2 * mu * B / low + math.sqrt(abs(q - B * B) / low)
        worst = max(worst, np.linalg.norm(V, axis=1).max() / printed)
    assert worst < 1


def test_momentum_and_the_scale_of_the_loss_move_the_limit():
    pairs, x, y = at_rest(GOOD[0])
    step, count = largest_step(pairs, x), len(x)
    value = two_layer_lipschitz(pairs, x, y, step).value
    assert two_layer_lipschitz(pairs, x, y, step * count / 2, loss="mean").value == pytest.approx(value, rel=1e-9)
    assert two_layer_lipschitz(pairs, x, y, step * count, loss="half-mean").value == pytest.approx(value, rel=1e-9)
    assert two_layer_lipschitz(pairs, x, y, step / 2, loss="sum").value == pytest.approx(value, rel=1e-9)
    rule = Descent(step * 1.9, 0.9)
    assert two_layer_lipschitz(pairs, x, y, rule).value == pytest.approx(value, rel=1e-9)
    rule = Descent(step * 19, 0.9, 0.9)
    assert two_layer_lipschitz(pairs, x, y, rule).value == pytest.approx(value, rel=1e-9)
    with pytest.raises(InputError, match="loss"):
        two_layer_lipschitz(pairs, x, y, step, loss="max")


def test_the_hessian_is_the_full_one_with_residuals():
    pairs, x, y = at_rest(GOOD[0])
    y = y + random_points(*y.shape, 5)
    bound = two_layer_lipschitz(pairs, x, y, 1e-4)
    truth = torch.linalg.eigvalsh(full_hessian(pairs, x, y))[-1]
    assert bound.terms["sharpness"] == pytest.approx(float(truth), rel=1e-8)


def failed(bound):
    assert bound.value is None
    return " / ".join(a.text for a in bound.failed)


def test_assumptions_that_fail_leave_no_value():
    pairs, x, y = at_rest(GOOD[0])
    step = largest_step(pairs, x)
    assert "eigenvalue of the Hessian" in failed(two_layer_lipschitz(pairs, x, y, step * 1.01))
    assert "converged" in failed(two_layer_lipschitz(pairs, x, y + random_points(*y.shape, 1), step / 10))
    few = x[:1]
    assert "span" in failed(two_layer_lipschitz(pairs, few, evaluate(pairs, few), 1e-6))
    line = x[:, :1] * torch.tensor([[1.0, 2.0]])
    assert "span" in failed(two_layer_lipschitz(pairs, line, evaluate(pairs, line), 1e-6))
    dead = [(pairs[0][0], pairs[0][1] - torch.tensor([0.0, 100.0, 0.0])), pairs[1]]
    bound = two_layer_lipschitz(dead, x, evaluate(dead, x), 1e-6)
    assert "span" in failed(bound)
    assert bound.terms["deficient"] == (1,)
    assert "1 of 3 units deficient, 1 never active: 1" in str(bound)


def test_a_point_on_a_kink_fails():
    pairs, x, _ = at_rest(GOOD[0])
    V, b = pairs[0]
    on = -b[0] * V[0] / V[0].dot(V[0])
    x = torch.cat([x, on[None]])
    assert "kink" in failed(two_layer_lipschitz(pairs, x, evaluate(pairs, x), 1e-6))


def test_units_that_do_nothing_are_left_out():
    pairs, x, y = at_rest(GOOD[0])
    value = two_layer_lipschitz(pairs, x, y, 1e-3).value
    (V, b), (W, c) = pairs
    row = torch.tensor([[1.0, 1.0]], dtype=torch.float64)
    for more, bias, out in ((row, -100.0, 0.0), (0 * row, -3.0, 1.0)):
        wider = [
            (torch.cat([V, more]), torch.cat([b, torch.tensor([bias], dtype=torch.float64)])),
            (torch.cat([W, torch.tensor([[out]], dtype=torch.float64)], 1), c),
        ]
        for form in ("unit", "stated"):
            bound = two_layer_lipschitz(wider, x, y, 1e-3, form=form)
            assert bound.holds
        assert two_layer_lipschitz(wider, x, y, 1e-3).value == pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize("form", ["unit", "stated"])
def test_a_network_that_gives_nothing_is_flat(form):
    pairs, x, _ = at_rest(GOOD[0])
    flat = [pairs[0], (0 * pairs[1][0], None)]
    bound = two_layer_lipschitz(flat, x, evaluate(flat, x), 1e-3, form=form)
    assert bound.holds
    assert bound.value == 0


def test_a_module_gives_the_same_as_its_weights():
    pairs, x, y = at_rest(GOOD[0])
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)).double()
    with torch.no_grad():
        for layer, (weight, bias) in zip((model[0], model[2]), pairs):
            layer.weight.copy_(weight)
            layer.bias.copy_(bias)
    for function in (two_layer_lipschitz,):
        assert function(model, x, y.flatten(), 1e-3).value == function(pairs, x, y, 1e-3).value
    with pytest.raises(ModelError, match="deep_lipschitz"):
        two_layer_lipschitz([*pairs, (torch.ones(1, 1), None)], x, y, 1e-3)


def test_mismatched_targets_and_forms_are_refused():
    pairs, x, y = at_rest(GOOD[0])
    for wrong in (y[:-1], torch.cat([y, y], 1), y * torch.nan):
        with pytest.raises(InputError, match="targets"):
            two_layer_lipschitz(pairs, x, wrong, 1e-3)
    with pytest.raises(InputError, match="form"):
        two_layer_lipschitz(pairs, x, y, 1e-3, form="loose")
    with pytest.raises(InputError, match="at least one point"):
        two_layer_lipschitz(pairs, x[:0], y[:0], 1e-3)
    with pytest.raises(InputError, match="step size"):
        two_layer_lipschitz(pairs, x, y, "fast")


def classifier():
    """A network that gives 0 and 1 exactly: two ramps, (0, 1) above them and 0 below, in the plane."""
    V = torch.tensor([[1.0, 0.2], [0.3, 1.0]], dtype=torch.float64)
    b = torch.tensor([3.0, 3.0], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    t = torch.rand(20, generator=generator, dtype=torch.float64) * 2 - 1
    y = (torch.arange(20) % 2).double()
    # f = w'(Vx + b) = y with w = (½, ½): move each point along the slope onto the level of its label.
    W = torch.tensor([[0.5, 0.5]], dtype=torch.float64)
    c = torch.tensor([-2.5], dtype=torch.float64)
    slope = (W @ V)[0]
    side = torch.stack([-slope[1], slope[0]])
    level = y - (W @ b + c)
    x = level[:, None] * slope / slope.dot(slope) + t[:, None] * side
    return [(V, b), (W, c)], x, y, slope


@pytest.mark.parametrize("form", ["unit", "stated"])
def test_the_margin_is_below_the_true_one(form):
    pairs, x, y, slope = classifier()
    step = largest_step(pairs, x)
    bound = two_layer_margin(pairs, x, y, step, form=form)
    assert bound.holds
    assert bound.side == "lower"
    assert bound.terms["Δ"] == pytest.approx(1)
    assert bound.terms["threshold"] == pytest.approx(0.5)
    lipschitz = two_layer_lipschitz(pairs, x, y, step, form=form).value
    assert bound.value == pytest.approx(0.5 / lipschitz, rel=1e-9)
    # All points are on the piece with both units on, where the boundary is a line; it is the nearest piece of it.
    assert 0 < bound.value <= 0.5 / float(slope.norm())


def test_the_margin_needs_one_output_two_classes_and_a_gap():
    pairs, x, y, _ = classifier()
    with pytest.raises(InputError, match="two targets"):
        two_layer_margin(pairs, x, torch.arange(20), 1e-3)
    assert "overlap" in failed(two_layer_margin(pairs, x, y.flip(0), 1e-3))
    wide = [pairs[0], (torch.ones(2, 2, dtype=torch.float64), None)]
    assert "one output" in failed(two_layer_margin(wide, x, y, 1e-3))
