"""The off-diagonal entries of a law."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from probes.conserved.two_layers import rates, tensor


@pytest.mark.parametrize("kind", ["linear", "same side", "opposite sides", "different"])
def test_when_the_off_diagonal_law_holds(kind: str) -> None:
    """Let p_i(x) be the slope of unit i at a point (z p = σ(z) for leaky ReLUs), z its pre-activation, v_i the gradient that
    reaches its output. Then d/dt of entry (i, j) of W₁W₁' − W₂'W₂ is

        −Σ_x (p_i − p_j)(z_j v_i − z_i v_j).

    It is zero if two units have the same slope at every point of the batch (linear units; units active on the same
    points) and in general not otherwise, not even if one of them is dead."""
    x = torch.tensor([[1.0, 2.0, 0.5], [0.3, -1.0, 1.0]], dtype=torch.float64)
    second = {"linear": [0.2, -1.0], "same side": [0.9, 0.6], "opposite sides": [-1.0, -0.5], "different": [0.2, -1.0]}
    w1, w2 = tensor([1.0, 0.5], second[kind]), tensor([0.7, -0.4])
    z = w1 @ x
    hidden = z if kind == "linear" else F.relu(z)
    slopes = torch.ones_like(z) if kind == "linear" else (z > 0).double()
    (w2 @ hidden - 1).square().sum().backward()
    off = rates(w1, w2)[0, 1]
    reached = (2 * (w2 @ hidden - 1) * w2.T).detach()
    p, zs = slopes.detach(), z.detach()
    formula = ((p[0] - p[1]) * (zs[1] * reached[0] - zs[0] * reached[1])).sum()
    torch.testing.assert_close(off, -formula)
    same = bool((slopes[0] == slopes[1]).all())
    assert same == (kind in ("linear", "same side"))
    assert (abs(float(off)) < 1e-15) == same
