"""Randomized smoothing against closed forms: a linear classifier smoothed is the same classifier, and its margin is known."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import norm
from torch import nn

from excite.errors import InputError
from excite.margin import smoothed_margins
from excite.margin.certificates.smoothing import SmoothedMargins


def linear(classes: int = 1) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(6, classes).double()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float64))
    return model, torch.randn(60, 6, generator=generator, dtype=torch.float64), torch.zeros(60, dtype=torch.long)


def test_radii_of_a_linear_model_never_exceed_its_margins():
    # P(right) = Φ(margin / σ) exactly, so that a right bound of P is a right bound of the margin
    model, x, _ = linear()
    f = model(x).detach()[:, 0]
    margin = (f - 0.5).abs() / model.weight.norm().detach()
    found = smoothed_margins(model, x, (f > 0.5).long(), sigma=1.0, samples=2000, level=0.9999)
    assert (found.radii <= margin).all()  # 60 points: wrong by chance in one run of 160, and the seed is fixed
    reach = float(norm.ppf((1 - 0.9999) ** (1 / 2000)))
    assert (found.radii <= reach + 1e-9).all()
    # Within 8 standard errors (3.7 of the bound, the others of the samples) of the margin; Φ⁻¹ is convex above 1/2.
    p, clear = norm.cdf(margin), (margin > 0.3) & (margin < 2)
    error = torch.from_numpy((p * (1 - p) / 2000) ** 0.5 / norm.pdf(margin))
    assert (found.radii >= margin - 8 * error)[clear].all()


def test_level_is_the_rate_of_right_radii():
    model, x, _ = linear()
    f = model(x).detach()[:, 0]
    margin = (f - 0.5).abs() / model.weight.norm().detach()
    wrong = sum(
        int(
            (
                smoothed_margins(model, x, (f > 0.5).long(), sigma=1.0, samples=100, level=0.9, seed=s).radii > margin
            ).sum()
        )
        for s in range(10)
    )
    assert wrong <= 600 * 0.1 + 4 * (600 * 0.1 * 0.9) ** 0.5  # at most a tenth, plus four standard deviations


def test_abstains_at_the_boundary_and_zero_where_wrong():
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 0.0]])), model.bias.fill_(0.5)
    x = torch.tensor([[0.0, 0.0], [3.0, 0.0], [3.0, 0.0]])
    found = smoothed_margins(model, x, torch.tensor([1, 1, 0]), sigma=0.5)
    assert found.abstained.tolist() == [True, False, False]
    assert found.predicted.tolist() == [-1, 1, 1]
    assert found.radii[0] == found.radii[2] == 0
    assert found.radii[1] > 1
    assert "2 wrong" not in str(found)
    assert "1 wrong, 1 abstained" in str(found)
    assert found.certified_accuracy(0.1) == pytest.approx(1 / 3)


def test_many_classes_and_batches_give_the_same():
    model, x, y = linear(4)
    y = model(x).argmax(1)
    found = smoothed_margins(model, x, y, sigma=0.2, samples=300, batch=7)
    assert isinstance(found, SmoothedMargins)
    assert found.radii.shape == (60,)
    again = smoothed_margins(model, x, y, sigma=0.2, samples=300, batch=7)
    assert torch.equal(found.radii, again.radii)


@pytest.mark.parametrize("settings", [{"sigma": 0}, {"level": 1}, {"samples": 0}, {"sigma": float("nan")}])
def test_bad_settings_are_refused(settings):
    model, x, y = linear()
    with pytest.raises(InputError):
        smoothed_margins(model, x, y, **settings)
