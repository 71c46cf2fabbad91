"""Figures 5 and 6: the linear regions of a small network on the plane of its data, and what Theorem 2 says of empty ones.

SGD with one point a step, a new order each epoch, half squared error, float64. The first layer is the identity and stays so;
its bias is trained, and β = 1. φ of each training point is measured at its last step: the distance that the first bias moved,
over the learning rate and the error. The plane is a grid of cells; every number is taken in the middle of a cell.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from excite.bounds import EmptyRegions, empty_region
from excite.bounds.relu_network import as_module
from excite.data.synthetic import frequencies
from excite.lipschitz import RegionMap, local, region_map
from excite.studies.computed import Computed, Outcome, Report
from excite.studies.study import Arm, Claim, Scale, Study
from excite.studies.trajectory.regions_figure import draw

Array = npt.NDArray[Any]
MAIN, DEEP = "ω = 0.5", "ω = 0.5, four hidden layers"
OTHERS = {0.25: "ω = 0.25", 1.0: "ω = 1"}
ROUNDING = 1e-9
_PAPER = "What training reveals, appendix A.3"


@dataclass(frozen=True, kw_only=True)
class RegionsScale(Scale):
    epochs: int
    cells: int  # a side
    shown: int = 150  # cells a side of the pictures


SCALES = {
    "quick": RegionsScale(
        name="quick", seeds=3, epochs=500, cells=150, words="500 epochs instead of 3000, 3 seeds; 150 × 150 cells"
    ),
    "paper": RegionsScale(
        name="paper", seeds=4, epochs=3000, cells=250, every_arm=True,
        words="the authors' settings for this task: 3000 epochs; 4 seeds; 250 × 250 cells",
    ),
}  # fmt: skip


def arms(scale: RegionsScale) -> list[Arm]:
    base = {"epochs": scale.epochs, "cells": scale.cells, "shown": scale.shown, "points": 200, "lr": 1e-3}
    small, deep = [10, 10, 32, 1], [10, 10, 32, 32, 32, 1]
    return [
        Arm(MAIN, {**base, "omega": 0.5, "widths": small}),
        *(Arm(name, {**base, "omega": omega, "widths": small}, extra=True) for omega, name in OTHERS.items()),
        Arm(DEEP, {**base, "omega": 0.5, "widths": deep}, extra=True),
    ]


def data(settings: Mapping[str, Any], seed: int) -> tuple[Array, Array, Array, Array]:
    """x (N, 10), y (N,), z (N, 2) and Q (10, 2) with x = 10 Q z."""
    count = settings["points"]
    x, y = frequencies(count, np.random.default_rng([seed, 1]), np.random.default_rng([seed, 2]), settings["omega"])
    z = np.random.default_rng([seed, 1]).uniform(-1, 1, (count, 2))
    plane = np.linalg.lstsq(z, x / 10, rcond=None)[0].T
    return x, y, z, plane


def first_weights(widths: list[int], seed: int) -> tuple[list[Array], list[Array]]:
    """As torch.nn.Linear starts; the first weight is the identity."""
    draws = np.random.default_rng([seed, 3])
    weights = [draws.uniform(-1, 1, (m, n)) / np.sqrt(n) for n, m in pairwise(widths)]
    biases = [draws.uniform(-1, 1, m) / np.sqrt(n) for n, m in pairwise(widths)]
    return [np.eye(widths[0]), *weights[1:]], biases


def train(
    x: Array, y: Array, settings: Mapping[str, Any], seed: int, report: Report
) -> tuple[list[Array], list[Array], Array]:
    """Weights, biases, and φ (N,): ‖b₁ after − b₁ before‖ / (α |f − y|) at the last step of each point."""
    weights, biases = first_weights(settings["widths"], seed)
    draws, rate, last = np.random.default_rng([seed, 4]), settings["lr"], len(weights) - 1
    phi = np.zeros(len(x))
    for epoch in range(settings["epochs"]):
        for i in draws.permutation(len(x)):
            inputs = [x[i]]
            signal = np.maximum(x[i] + biases[0], 0)
            for weight, bias in zip(weights[1:-1], biases[1:-1]):
                inputs.append(signal)
                signal = np.maximum(weight @ signal + bias, 0)
            inputs.append(signal)
            error = weights[last] @ signal + biases[last] - y[i]
            back = error
            for j in range(last, 0, -1):
                through = (back @ weights[j]) * (inputs[j] > 0)
                step = rate * back
                weights[j] -= step[:, None] * inputs[j]
                biases[j] -= step
                back = through
            biases[0] -= rate * back
            if epoch == settings["epochs"] - 1 and error[0]:
                phi[i] = np.linalg.norm(rate * back) / (rate * abs(error[0]))
        report(0.9 * (epoch + 1) / settings["epochs"])
    return weights, biases, phi


def look(model: nn.Sequential, plane: Array, cells: int) -> RegionMap:
    right, up = torch.from_numpy(10 * plane.T.copy())
    return region_map(model, torch.zeros(10, dtype=torch.float64), right, up, size=cells)


def compute(settings: Mapping[str, Any], seed: int, report: Report) -> Outcome:
    x_, y_, z, plane = data(settings, seed)
    weights, biases, phi = train(x_, y_, settings, seed, report)
    model = as_module([(torch.from_numpy(weight), torch.from_numpy(bias)) for weight, bias in zip(weights, biases)])
    x, y = torch.from_numpy(x_), torch.from_numpy(y_)
    found = look(model, plane, settings["cells"])
    new = found.points.reshape(-1, 10)
    measured = empty_region(model, x, torch.from_numpy(phi), new, beta=1.0)
    exact = empty_region(model, x, local(model, x), new, beta=1.0)
    truth = found.slopes.reshape(-1)
    ratios, tighter = _ratios(measured, truth), _ratios(exact, truth)
    steep = measured.reached & (truth > 1e-12)
    bounds, slopes = measured.values[steep], truth[steep]
    with torch.no_grad():
        loss = float((model(x)[:, 0] - y).square().mean())
    error = found.outputs[..., 0] - _wave(settings["omega"], found)
    values = {
        "loss": loss,
        "error": float(error.square().mean()),
        "regions": found.count,
        "filled": float((~measured.empty).double().mean()),
        "reached": measured.share_empty,
        "reached_regions": _share_of_regions(found, measured),
        "ratio": float(ratios.median()) if len(ratios) else np.nan,
        "ratio_exact": float(tighter.median()) if len(tighter) else np.nan,
        "ratio_most": float(ratios.max()) if len(ratios) else np.nan,
        "least": float((bounds / slopes).min()),
        "gamma": measured.terms["gamma"],
        "constant": float(truth.median()),
        "constant_most": float(truth.max()),
        "constant_training": float(local(model, x).max()),
        "density": _density(found),
        "clustering": _clustering(found),
        "rank": measured.terms["rank"],
        "patterns": measured.terms["patterns"],
    }
    detail = _pictures(model, plane, settings, z, y_, x, ratios, tighter) if seed == 0 else None
    return Outcome(values, detail)


def _wave(omega: float, found: RegionMap) -> Tensor:
    up, across = (torch.cos(2 * torch.pi * omega * places) for places in (found.up, found.across))
    return up[:, None] * across[None]


def _ratios(bound: EmptyRegions, truth: Tensor) -> Tensor:
    """Bound over truth in the empty regions that are reached, one value a cell."""
    some = bound.reached & bound.empty & (truth > 1e-12)
    return bound.values[some] / truth[some]


def _share_of_regions(found: RegionMap, bound: EmptyRegions) -> float:
    """The share of empty regions, each counted once, that are reached."""
    ids = found.ids.reshape(-1)
    empty = torch.zeros(found.count, dtype=torch.bool)
    reached = torch.zeros(found.count, dtype=torch.bool)
    empty[ids], reached[ids] = bound.empty, bound.reached
    return float(reached[empty].double().mean())


def _density(found: RegionMap) -> float:
    """Regions met an area, within half of the square against the rest of it."""
    inner = (found.up.abs()[:, None] < 0.5) & (found.across.abs()[None] < 0.5)
    many, few = (len(found.ids[part].unique()) for part in (inner, ~inner))
    return (many / 0.25) / (few / 0.75)


def _clustering(found: RegionMap) -> float:
    """Mean difference of the constants of two regions that touch, over that of any two regions."""
    slopes = torch.zeros(found.count, dtype=torch.float64)
    slopes[found.ids.reshape(-1)] = found.slopes.reshape(-1)
    pairs = torch.cat(
        [
            torch.stack([found.ids[:, :-1].reshape(-1), found.ids[:, 1:].reshape(-1)], 1),
            torch.stack([found.ids[:-1].reshape(-1), found.ids[1:].reshape(-1)], 1),
        ]
    )
    pairs = pairs[pairs[:, 0] != pairs[:, 1]].sort(1).values.unique(dim=0)
    near = (slopes[pairs[:, 0]] - slopes[pairs[:, 1]]).abs().mean()
    anywhere = (slopes[:, None] - slopes[None]).abs().sum() / (found.count * (found.count - 1))
    return float(near / anywhere)


def _pictures(
    model: nn.Sequential, plane: Array, settings: Mapping[str, Any], z: Array, y: Array, x: Tensor, *ratios: Tensor
) -> dict[str, Any]:
    """What the figures need, on a coarser grid."""
    small = look(model, plane, settings["shown"])
    bound = empty_region(model, x, local(model, x), small.points.reshape(-1, 10), beta=1.0)
    side = (settings["shown"], settings["shown"])
    values = torch.where(bound.reached, bound.values, -1.0)  # −1: out of reach
    values = torch.where(bound.empty, values, -2.0)  # −2: a training point is in the region
    steps = torch.linspace(0, 1, 201, dtype=torch.float64)
    return {
        "omega": settings["omega"],
        "z": z.round(4).tolist(),
        "y": y.round(4).tolist(),
        "true": _rounded(_wave(settings["omega"], small)),
        "learned": _rounded(small.outputs[..., 0]),
        "ids": small.ids.tolist(),
        "slopes": _rounded(small.slopes),
        "bound": _rounded(values.view(side)),
        "ratios": [part.quantile(steps).tolist() if len(part) else [] for part in ratios],
    }


def _rounded(values: Tensor) -> list[list[float]]:
    return [[round(value, 4) for value in row] for row in values.tolist()]


def _claims_of(arm: str) -> list[Claim]:
    return [
        Claim(
            f"Theorem 2 holds in every cell it speaks about, {arm}",
            "What training reveals, Theorem 2",
            f"{arm}: 1 if the constant of any cell is above its bound, else 0",
            (arm,),
            lambda n: float(n[arm].least < 1 - ROUNDING),
            below=0.5,
        ),
        Claim(
            f"the theorem does not explain the global behaviour: most of the empty plane is out of its reach, {arm}",
            _PAPER,
            f"{arm}: share of the empty plane that is reached",
            (arm,),
            lambda n: n[arm].reached,
            below=0.5,
        ),
        Claim(
            f"where it applies the bound overestimates by roughly a factor of four (two to eight), {arm}",
            f"{_PAPER}, with exact constants at training points as in figure 6",
            f"{arm}: how far log₂ of the median of bound over constant is from 2",
            (arm,),
            lambda n: abs(np.log2(n[arm].ratio_exact / 4)),
            below=1.0,
        ),
        Claim(
            f"the same with φ measured in training, {arm}",
            "What training reveals, Theorem 2",
            f"{arm}: how far log₂ of the median of bound over constant is from 2",
            (arm,),
            lambda n: abs(np.log2(n[arm].ratio / 4)),
            below=1.0,
        ),
    ]


def claims(scale: RegionsScale) -> list[Claim]:
    return [
        *_claims_of(MAIN),
        Claim(
            "regions are smaller and more densely packed close to (0, 0)",
            _PAPER,
            f"{MAIN}: regions an area within half of the square over those outside",
            (MAIN,),
            lambda n: n[MAIN].density,
            above=1.0,
        ),
        Claim(
            "low and high constants are clustered",
            _PAPER,
            f"{MAIN}: difference of the constants of regions that touch over that of any two",
            (MAIN,),
            lambda n: n[MAIN].clustering,
            below=1.0,
        ),
        *(claim for arm in (*OTHERS.values(), DEEP) for claim in _claims_of(arm)[:2]),
        Claim(
            "a deeper network leaves less within reach",
            "excite: activations of more layers are combined less often",
            f"share of the empty plane that is reached, {DEEP} minus {MAIN}",
            (MAIN, DEEP),
            lambda n: n[DEEP].reached - n[MAIN].reached,
            below=0.0,
        ),
    ]


STUDY = Study(
    "regions",
    "Linear regions, their Lipschitz constants, and what Theorem 2 says about empty ones",
    "figures 5 and 6 and Theorem 2 of What training reveals about neural network complexity",
    "200 points of y = cos(2πω z₁) cos(2πω z₂), embedded in ten dimensions; networks 10-10-32-1",
    Computed(
        compute,
        {
            "loss": ("training loss", "{:.2g}"),
            "regions": ("linear regions met", "{:.0f}"),
            "filled": ("plane with a training point in the region", "{:.0%}"),
            "reached": ("empty plane reached", "{:.0%}"),
            "reached_regions": ("empty regions reached", "{:.0%}"),
            "ratio_exact": ("bound / constant, as in figure 6", "{:.2f}"),
            "ratio": ("with φ of training", "{:.2f}"),
            "ratio_most": ("largest", "{:.3g}"),
            "gamma": ("γ", "{:.2g}"),
            "constant_training": ("steepest training point", "{:.2f}"),
            "constant_most": ("steepest region", "{:.2f}"),
        },
        draw,
        "The first seed, ω = 0.5, on the plane of the data. Above: the function to be learned and the one learned, with training\n"
        "points in blue; black lines are borders of linear regions. Below left: the local Lipschitz constant of each region. Below\n"
        "right: the bound of Theorem 2 in empty regions, on the same scale; white regions hold a training point, black ones\n"
        "are out of the theorem's reach.",
        "Means over seeds, and the range. Areas are shares of the square of the data. *Reached*: the activation of the region is a\n"
        "combination of those of training points, decided in integers. *Bound / constant* is the median over the cells of empty\n"
        "regions that are reached, once with the exact constants at training points (what the authors' figure shows), once\n"
        "with φ as measured at the last step of each point, γ the factor by which slopes have changed since, minus 1.",
        settings=(
            "SGD, one point a step, a new order each epoch; learning rate 0.001, half squared error, float64.",
            "The first layer is the identity with a trained bias; other weights start as torch.nn.Linear does.",
        ),
    ),
    SCALES,
    arms,
    claims,
    notes=(
        "The paper's formula repeats z₁; the authors' program uses both coordinates, as here.",
        "The paper does not say how long this network was trained; 3000 epochs are those of its first task.",
        "Regions are those that hold the middle of a cell: smaller ones are not met.",
    ),
)
