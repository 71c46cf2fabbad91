"""Radii: numbers, by layer, relative to a layer's input, and in stages."""

import numpy as np
import pytest
import torch
from torch import nn

from excite import InputError, PersistentExcitation, Relative, Stages
from excite.excitation.radius import radius_of, root_mean_square
from models import CASES, build


def excited(name, **options):
    model, x = build(name)
    return PersistentExcitation(model, output=CASES[name].pick, **options), x


def test_stages_grow_from_zero_as_the_authors_have_it():
    pe, x = excited("linear", radius=Stages(0.3, 4), steps=1)
    largest = []
    for epoch in range(40):
        pe.advance(epoch / 40)
        found = pe.perturbations(x)
        largest.append(float(found["weight"][1].abs().max()) if found else 0.0)
    assert largest == pytest.approx([0.0] * 10 + [0.1] * 10 + [0.2] * 10 + [0.3] * 10)
    pe.advance(1)
    assert float(pe.perturbations(x)["weight"][1].abs().max()) == pytest.approx(0.3)
    twin, _ = excited("linear", radius=Stages(0.3, 4))
    twin.load_state_dict(pe.state_dict())
    assert twin.progress == 1


def test_stages_of_relative_and_named_radii():
    pe, x = excited("mlp", radius=Stages({"0": 0.2}, 2))
    assert pe.perturbations(x) == {}
    pe.advance(0.5)
    assert set(pe.perturbations(x)) == {"0"}
    pe, x = excited("mlp", radius=Stages(Relative(0.2), 3), steps=1)
    pe.advance(0.4)
    assert torch.allclose(pe.perturbations(x)["0"][1].abs().max(), 0.1 * x.square().mean().sqrt())


def test_a_second_call_has_the_radius_of_its_weight():
    radii = {"first": 0.1, "second#2": 0.3}
    assert radius_of(radii, "first#2", 1.0) == (0.1, False)
    assert radius_of(radii, "second#2", 1.0) == (0.3, False)
    assert radius_of(radii, "second", 1.0) == (0.0, False)
    assert radius_of(Relative(0.5), "any", 1.0) == (0.5, True)


def test_root_mean_square_is_in_single_precision_at_least():
    x = torch.full((4, 3), 3.0, dtype=torch.bfloat16)
    assert root_mean_square(x).dtype == torch.float32
    assert float(root_mean_square(x)) == 3


@pytest.mark.parametrize(
    "make", [lambda: Relative(0), lambda: Stages(0.0), lambda: Stages(0.1, 1), lambda: Stages(Stages(0.1))]
)
def test_radii_that_never_perturb_are_refused(make):
    with pytest.raises(InputError):
        make()


def test_numbers_of_numpy_are_radii():
    assert PersistentExcitation(nn.Linear(5, 1), np.float32(0.5)).radius == 0.5
