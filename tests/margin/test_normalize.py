"""Margins in the unit of the pixels, of data that are normalized outside of the model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import excite
from excite import InputError
from excite.margin import Margins, SearchOptions, Unit
from excite.margin.normalize import NormalizedInput, pixel_range, unit_of

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
QUICK = SearchOptions(steps=20, restarts=1, evidence=False, certify=False)


def of_pixels() -> tuple[nn.Module, nn.Module, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A model of normalized images, the same model of pixels, both inputs, and labels."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    pixels = torch.rand(12, 3, 4, 4)
    mean, std = (torch.tensor(value).reshape(1, 3, 1, 1) for value in (MEAN, STD))
    inside = NormalizedInput(model, mean, std)
    return model, inside, (pixels - mean) / std, pixels, inside(pixels).argmax(1)


def test_margins_of_normalized_data_are_those_of_the_pixels():
    model, inside, x, pixels, y = of_pixels()
    found = excite.margins(model, x, y, normalize=(MEAN, STD), perturbations=True, options=QUICK)
    expected = excite.margins(inside, pixels, y, bounds=(0, 1), options=QUICK)
    assert torch.allclose(found.values, expected.values, rtol=1e-2)
    assert found.unit == expected.unit == Unit(0.0, 1.0, True)
    changed = pixels + found.perturbations
    assert bool((inside(changed).argmax(1) != y).all())
    assert float(changed.min()) >= 0
    assert float(changed.max()) <= 1


@pytest.mark.slow
def test_a_linear_model_in_closed_form():
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    x = torch.randn(8, 3, dtype=torch.float64)
    y = (model(x)[:, 0] > 0.5).long()
    found = excite.margins(model, x, y, normalize=(0.0, 2.0), bounds=(-100, 100))
    plain = excite.margins(model, x, y)
    assert found.values.tolist() == pytest.approx((2 * plain.values).tolist(), rel=1e-3)  # a pixel is x·2


def test_the_unit_is_stored_and_earlier_files_have_none():
    found = Margins(torch.tensor([0.1]), "inf", unit=Unit(-1.0, 1.0, True))
    assert Margins.from_dict(found.to_dict()).unit == found.unit
    earlier = {key: value for key, value in found.to_dict().items() if key != "unit"}
    assert Margins.from_dict(earlier).unit is None


@pytest.mark.parametrize(
    ("bounds", "unit"),
    [
        (None, None),
        ((0, 1), Unit(0.0, 1.0, False)),
        ((torch.tensor(0.0), torch.tensor(2.0)), Unit(0.0, 2.0, False)),
        ((torch.zeros(3), torch.ones(3)), None),
        ((float("-inf"), 1), None),
    ],
)
def test_the_unit_is_the_range_of_scalar_bounds(bounds, unit):
    assert unit_of(torch.zeros(2, 3), bounds) == unit


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"normalize": 0.5}, "expected \\(mean, std\\)"),
        ({"normalize": ((0.1, 0.2), 1.0)}, "a mean of 1 or 3 numbers"),
        ({"normalize": (0.5, 0.0)}, "a std above 0"),
        ({"normalize": (float("nan"), 1.0)}, "finite"),
        ({"normalize": (0.0, 1.0)}, "lie outside"),
        ({"normalize": (MEAN, STD), "layers": "all"}, "leave it out"),
    ],
)
def test_what_does_not_fit_is_refused(options, match):
    model, _, x, _, y = of_pixels()
    with pytest.raises(InputError, match=match):
        excite.margins(model, x, y, **options)


def test_the_range_of_pixels() -> None:
    x = torch.rand(4, 3, 5, 5)
    assert pixel_range([x, x]) == (0.0, 1.0)
    assert pixel_range([x, 2 * x - 1]) == (-1.0, 1.0)
    for other in (3 * x, 0.1 * x, x.flatten(1), (255 * x).to(torch.uint8), x[:0]):
        assert pixel_range([other]) is None
    assert pixel_range([]) is None
