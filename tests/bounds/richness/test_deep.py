"""Theorem 1 of the richness paper: formulas by hand, the erratum, biases, and no violation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

from bounds.networks import evaluate, largest_step, random_network, random_points
from excite.bounds import deep_lipschitz, deep_norms, two_layer_lipschitz
from excite.errors import InputError


def layers_of(pairs, x):
    """h_0, …, h_L as numpy arrays."""
    h = [x.numpy()]
    for j, (weight, bias) in enumerate(pairs):
        z = h[-1] @ weight.numpy().T + (0 if bias is None else bias.numpy())
        h.append(z if j + 1 == len(pairs) else np.maximum(z, 0))
    return h


def with_one(h, bias):
    return h if bias is None else np.column_stack([h, np.ones(len(h))])


def contribution(pairs, h, j, i):
    """W_L G_{L−1} … W_{j+1} h_j for one point."""
    v = h[j][i]
    for layer in range(j, len(pairs)):
        v = pairs[layer][0].numpy() @ v
        if layer + 1 < len(pairs):
            v = v * (h[layer + 1][i] > 0)
    return v


def stated(pairs, x, q):
    """‖W_j‖² bounds as the appendix has them, with ‖h_{j+1}‖, point by point; infinite where a unit is deficient."""
    h, L = layers_of(pairs, x), len(pairs)
    bounds = []
    for j in range(1, L):
        total = 0.0
        before = with_one(h[j - 1], pairs[j - 1][1])
        for k in range(h[j].shape[1]):
            on = [i for i in range(len(x)) if h[j][i, k] > 0 and np.linalg.norm(contribution(pairs, h, j + 1, i)) > 0]
            S = sum((np.outer(before[i], before[i]) for i in on), np.zeros((before.shape[1],) * 2))
            room = [
                q * np.sum(h[j + 1][i] ** 2) / np.sum(contribution(pairs, h, j + 1, i) ** 2) - (pairs[j][1] is not None)
                for i in on
            ]
            deficient = np.linalg.matrix_rank(S) < len(S)
            total += math.inf if deficient else sum(room) / np.linalg.eigvalsh(S)[0]
        bounds.append(total)
    before = with_one(h[L - 2], pairs[L - 2][1])
    columns = 0.0
    for k in range(h[L - 1].shape[1]):
        on = [i for i in range(len(x)) if h[L - 1][i, k] > 0 and np.abs(h[L][i]).max() > 0]
        columns += q / max(np.sum(before[i] ** 2) for i in on) if on else math.inf
    return [*bounds, columns]


CASES = [((2, 3, 1), False), ((2, 3, 1), True), ((2, 3, 2, 1), False), ((2, 2, 2, 1), True), ((2, 2, 2, 2, 2), True)]


def at_rest(widths, bias, seed, points=60):
    """A network with all units excited by points, or None."""
    pairs, x = random_network(widths, bias, seed), random_points(points, widths[0], seed)
    return (pairs, x) if all(map(math.isfinite, stated(pairs, x, 1.0))) else None


def some(widths, bias, count):
    found = (at_rest(widths, bias, seed) for seed in range(400))
    return list(itertools.islice((case for case in found if case is not None), count))


@pytest.mark.slow
@pytest.mark.parametrize(("widths", "bias"), CASES)
def test_the_stated_form_is_its_formula_and_nothing_is_violated(widths, bias):
    cases = some(widths, bias, 6)
    assert len(cases) >= 3
    for pairs, x in cases:
        step = largest_step(pairs, x)
        expected = stated(pairs, x, 2 / step)
        y = evaluate(pairs, x)
        bounds = deep_norms(pairs, x, y, step, form="stated")
        tighter = deep_norms(pairs, x, y, step)
        assert [b.value**2 for b in bounds] == pytest.approx(expected, rel=1e-6)
        for (weight, _), bound, tight in zip(pairs, bounds, tighter):
            assert bound.holds
            truth = float(torch.linalg.matrix_norm(weight, 2))
            assert tight.terms["norm"] == pytest.approx(truth)
            assert truth <= tight.value * (1 + 1e-9)
            assert tight.value <= bound.value * (1 + 1e-9)
            rows = weight.norm(dim=1) if "rows" in tight.terms else weight.norm(dim=0)
            limits = tight.terms.get("rows") or tight.terms["columns"]
            assert all(float(r) <= limit * (1 + 1e-9) for r, limit in zip(rows, limits))
        whole = deep_lipschitz(pairs, x, y, step)
        assert whole.value == pytest.approx(math.prod(b.value for b in tighter))


def test_appendix_a_printed_with_h_j_fails():
    """f = w₂(w₁x)₊ at x = 1, y = 100, δ = 0.009: w₁² = 98, and the printed bound is 2.2."""
    w1 = math.sqrt(98)
    w2 = 100 / w1
    pairs = [(torch.tensor([[w]], dtype=torch.float64), None) for w in (w1, w2)]
    x, y = torch.ones(1, 1, dtype=torch.float64), torch.full((1, 1), 100.0, dtype=torch.float64)
    bound, _ = deep_norms(pairs, x, y, 0.009, form="stated")
    assert bound.holds  # gradient descent can rest here: w₁² + w₂² = 200 < 2/δ = 222
    printed = 2 / 0.009 * w1**2 / 100**2
    assert printed == pytest.approx(2.18, abs=0.01)
    assert w1**2 > printed
    assert w1**2 <= bound.value**2 == pytest.approx(2 / 0.009)
    # It is where gradient descent ends, from a start nearby.
    a, b = 9.5, 10.4
    for _ in range(5000):
        error = a * b - 100
        a, b = a - 0.009 * error * b, b - 0.009 * error * a
    assert abs(a * b - 100) < 1e-9
    assert a**2 > 2 / 0.009 * a**2 / 100**2


def test_with_biases_the_output_is_what_the_layer_contributes():
    """With ‖h_L‖ in place of ‖A h_{j+1}‖, as if there were no biases above, the bound fails: a large output bias."""
    one = torch.ones(1, 1, dtype=torch.float64)
    pairs = [(2 * one, None), (0.1 * one, 0 * one[0]), (0.1 * one, 100 * one[0])]
    x = torch.tensor([[1.0], [1.5]], dtype=torch.float64)
    step = largest_step(pairs, x)
    h = layers_of(pairs, x)
    naive = 2 / step * np.sum(h[2] ** 2 / h[3] ** 2) / np.sum(h[0] ** 2)
    assert naive < 2.0**2
    bounds = deep_norms(pairs, x, evaluate(pairs, x), step)
    assert all(b.holds for b in bounds)
    assert bounds[0].value >= 2


def test_two_layers_agree_in_part_with_the_other_theorem():
    """For two layers without biases both per-unit forms bound ‖V_k‖² by q/λ_min and ‖W_k‖² by q/λ_max."""
    pairs, x = some((2, 3, 1), False, 1)[0]
    y, step = evaluate(pairs, x), largest_step(pairs, x)
    rows, columns = deep_norms(pairs, x, y, step)
    other = two_layer_lipschitz(pairs, x, y, step)
    assert rows.terms["rows"] == pytest.approx(other.terms["rows"], rel=1e-9)
    assert columns.terms["columns"] == pytest.approx(other.terms["columns"], rel=1e-9)


def test_a_deficient_layer_alone_has_no_bound():
    pairs, x = some((2, 3, 2, 1), False, 1)[0]
    dead = [pairs[0], (-pairs[1][0].abs(), None), pairs[2]]
    bounds = deep_norms(dead, x, evaluate(dead, x), 1e-3)
    assert [b.value for b in bounds] == [None, None, None]  # nothing reaches the output
    narrow = [pairs[0], pairs[1], pairs[2]]
    line = x[:, :1] * torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    bounds = deep_norms(narrow, line, evaluate(narrow, line), 1e-4)
    assert bounds[0].value is None
    assert "span" in bounds[0].failed[0].text
    assert bounds[-1].value is not None
    assert deep_lipschitz(narrow, line, evaluate(narrow, line), 1e-4).value is None


def test_a_module_gives_the_same_as_its_weights():
    pairs, x = some((2, 2, 2, 1), True, 1)[0]
    parts = []
    for j, (weight, bias) in enumerate(pairs):
        layer = nn.Linear(weight.shape[1], weight.shape[0]).double()
        layer.load_state_dict({"weight": weight, "bias": bias})
        parts += [layer, nn.ReLU()] if j + 1 < len(pairs) else [layer]
    y = evaluate(pairs, x)
    assert deep_lipschitz(nn.Sequential(*parts), x, y, 1e-4).value == deep_lipschitz(pairs, x, y, 1e-4).value
    with pytest.raises(InputError, match="form"):
        deep_norms(pairs, x, y, 1e-4, form="other")
