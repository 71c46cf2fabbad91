"""The term of a normalization's eps against autograd."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD

from excite.probes import conservation
from excite.probes.conserved.norm_terms import eps_term
from probes.conserved.normalized import NORMS, normed, simple

# -- the eps of normalizations -----------------------------------------------------------------------------------


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("eps", [1e-8, 1e-5, 0.3, 30.0])
@pytest.mark.parametrize("name", NORMS)
def test_the_eps_term_is_the_derivative_by_the_input_scale(name: str, eps: float, affine: bool) -> None:
    """dL/da of L(norm(a·x)) at a = 1, with an a of its own for every position, by autograd."""
    torch.manual_seed(0)
    make, shape = NORMS[name]
    norm, op = make(eps, affine).double(), name.split(",")[0]
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(shape, dtype=torch.float64) + 0.5
    positions = {"layer_norm": 1, "rms_norm": 1, "group_norm": 3}.get(op, 6)
    a = torch.ones(positions, dtype=torch.float64, requires_grad=True)
    factors = (
        a
        if positions == 1
        else a.repeat_interleave(6 // positions).view(6, *[1] * (len(shape) - 2 if len(shape) != 3 else 2))
    )
    out = norm(x * factors)
    gradient = torch.randn_like(out)
    (expected,) = torch.autograd.grad((out * gradient).sum(), a)
    found = eps_term(norm, op, x, gradient)
    # Autograd cancels numbers of the size of ⟨|x|, |dL/dx|⟩; the term is computed without.
    size = float((gradient.abs() * out.detach().abs()).sum())
    torch.testing.assert_close(found.detach(), expected, rtol=1e-12, atol=64 * torch.finfo(torch.float64).eps * size)
    assert expected.abs().max() > (1e-9 if eps < 1e-6 else 1e-6) * size / 1e3


def test_a_gradient_scaler_scales_the_eps_term_too() -> None:
    model, x = normed("layer_norm")
    optimizer = SGD(model.parameters(), 0.02)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with conservation(model, optimizer, x) as ledger:
        for step in range(5):
            optimizer.zero_grad()
            scaler.scale(simple(model, x) * (float("inf") if step == 2 else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
        assert ledger.read().holds


# -- normalizations that are written out ------------------------------------------------------------------------------
class Written(nn.Module):
    """weight · x / √(mean x² + ε) + bias, of x or of x − mean x."""

    def __init__(self, width: int, centred: bool, gain: float = 1.0) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(width)), nn.Parameter(torch.randn(width))
        self.centred, self.gain = centred, gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x - x.mean(-1, keepdim=True) if self.centred else x
        return self.gain * self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.01)) + self.bias


@pytest.mark.parametrize("centred", [False, True])
def test_written_norms_are_checked_with_their_eps(centred: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), Written(6, centred), nn.ReLU(), nn.Linear(6, 1)).double()
    x = torch.randn(8, 4, dtype=torch.float64) / 10  # so that the eps counts
    optimizer = SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-2)
    with conservation(model, optimizer, x) as ledger:
        for _ in range(100):
            optimizer.zero_grad()
            (model(x) - 1).square().mean().backward()
            optimizer.step()
        report = ledger.read()
    assert report.holds
    assert report["0"].group.law == "norm"
    assert max(entry.relative for entry in report.entries) < 1e-12
    assert report["0"].terms["eps"].abs().max() > 1e-6


def test_another_formula_behind_a_law_is_not_checked() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), Written(6, False, gain=2.0), nn.ReLU(), nn.Linear(6, 1)).double()
    optimizer, x = SGD(model.parameters(), 0.05), torch.randn(8, 4, dtype=torch.float64)
    with conservation(model, optimizer, x) as ledger:
        model(x).mean().backward()
        optimizer.step()
        entry = ledger.read()["0"]
    assert entry.state == "not checked"
    assert "1 normalizes in a Written, not by weight" in entry.why
