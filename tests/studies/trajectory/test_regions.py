"""Data, training, measures and the whole path of `regions`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from excite.bounds.relu_network import as_module
from excite.lipschitz import local
from excite.studies.trajectory.regions import (
    SCALES,
    RegionsScale,
    compute,
    data,
    first_weights,
    train,
    variants,
)
from studies.small import run_tiny

SETTINGS = {**variants(SCALES["quick"])[0].config, "points": 20, "epochs": 3, "cells": 40, "shown": 10}


def nothing(share: float) -> None:
    pass


def test_points_lie_on_the_plane() -> None:
    x, y, z, plane = data(SETTINGS, 3)
    np.testing.assert_allclose(plane.T @ plane, np.eye(2), atol=1e-12)
    np.testing.assert_allclose(10 * z @ plane.T, x, atol=1e-12)
    np.testing.assert_allclose(y, np.cos(np.pi * z[:, 0]) * np.cos(np.pi * z[:, 1]))
    assert np.abs(z).max() <= 1


@pytest.mark.parametrize("widths", [[10, 10, 8, 1], [10, 10, 6, 5, 4, 1]])
def test_training_is_sgd_with_an_identity_in_front(widths: list[int]) -> None:
    settings = {**SETTINGS, "widths": widths}
    x, y, _, _ = data(settings, 0)
    weights, biases, phi = train(x, y, settings, 0, nothing)
    first = first_weights(widths, 0)
    slow = [[torch.tensor(p, requires_grad=True) for p in group] for group in first]
    draws = np.random.default_rng([0, 4])
    moved = torch.zeros(20, dtype=torch.float64)
    for _ in range(3):
        for i in draws.permutation(20):
            h = torch.tensor(x[i])
            for weight, bias in zip(slow[0][:-1], slow[1][:-1]):
                h = F.relu(weight @ h + bias)
            f = (slow[0][-1] @ h + slow[1][-1])[0]
            trained = [*slow[0][1:], *slow[1]]
            gradients = torch.autograd.grad((f - y[i]) ** 2 / 2, trained)
            before = slow[1][0].detach().clone()
            with torch.no_grad():
                for p, g in zip(trained, gradients):
                    p -= 1e-3 * g
            moved[i] = (slow[1][0].detach() - before).norm() / (1e-3 * abs(float(f.detach()) - y[i]))
    for found, expected in zip([*weights, *biases], [*slow[0], *slow[1]]):
        np.testing.assert_allclose(found, expected.detach().numpy(), rtol=0, atol=1e-12)
    np.testing.assert_allclose(phi, moved.numpy(), rtol=1e-9)
    np.testing.assert_array_equal(weights[0], np.eye(10))


def test_with_an_identity_in_front_phi_is_the_local_constant() -> None:
    settings = {**SETTINGS, "lr": 1e-12}  # nothing moves between the step of a point and the end
    x, y, _, _ = data(settings, 0)
    weights, biases, phi = train(x, y, settings, 0, nothing)
    model = as_module([(torch.tensor(w), torch.tensor(b)) for w, b in zip(weights, biases)])
    np.testing.assert_allclose(phi, local(model, torch.tensor(x)).numpy(), rtol=1e-6)


def test_numbers_of_a_variant() -> None:
    found = compute({**SETTINGS, "points": 100}, 0, nothing)
    values = found.values
    assert values["least"] >= 1 - 1e-9
    assert 0 < values["filled"] < 1
    assert values["ratio_exact"] <= values["ratio"] * (1 + values["gamma"]) + 1e-9
    assert values["constant"] <= values["constant_most"]
    assert np.array(found.detail["bound"]).shape == (10, 10)
    assert compute(SETTINGS, 1, nothing).detail is None  # pictures are of the first seed


@pytest.mark.slow
def test_the_whole_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = RegionsScale(name="quick", seeds=2, epochs=2, cells=24, shown=16, every_variant=True, words="tiny")
    result = run_tiny("regions", tiny, tmp_path, monkeypatch)
    holds = [v.word for v in result.verdicts if v.claim.text.startswith("Theorem 2 holds")]
    assert set(holds) == {"holds"}
