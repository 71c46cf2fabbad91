"""Figures 5 and 6: the linear regions of a small network on the plane of its data, and what Theorem 2 says of empty ones.

SGD with one point per step, a new order each epoch, half squared error, float64. The first layer is the identity and stays so;
its bias is trained, and β = 1. φ of each training point is measured at its last step: the distance that the first bias moved,
over the learning rate and the error. The plane is a grid of cells; every number is taken in the middle of a cell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from excite.bounds import EmptyRegions, empty_region
from excite.bounds.relu_network import as_module
from excite.data.synthetic import frequencies
from excite.lipschitz import RegionMap, local, region_map
from excite.studies.computed import Computed, OnProgress, Outcome
from excite.studies.figures import COLOURS, DASHES, plain_ticks
from excite.studies.study import Claim, Scale, Study, Variant, VariantResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure
from excite.studies.trajectory.region_maps import EDGES, clustering, density, draw_borders
from excite.studies.trajectory.region_maps import region_picture as region_picture

Array = npt.NDArray[Any]
MAIN, DEEP = "ω = 0.5", "ω = 0.5, four hidden layers"
OTHERS = {0.25: "ω = 0.25", 1.0: "ω = 1"}
ROUNDING = 1e-9
_PAPER = "What training reveals, appendix A.3"
_FOUR = "the bound overestimates the constants by roughly a factor of four"


@dataclass(frozen=True, kw_only=True)
class RegionsScale(Scale):
    """Epochs, and cells per side of the map of regions."""

    epochs: int
    cells: int  # a side
    shown: int = 150  # cells a side of the pictures


SCALES = {
    "quick": RegionsScale(
        name="quick", seeds=3, epochs=500, cells=150, words="500 epochs instead of 3000, 3 seeds; 150 × 150 cells"
    ),
    "paper": RegionsScale(
        name="paper", seeds=4, epochs=3000, cells=250, every_variant=True,
        words="the authors' settings for this task: 3000 epochs; 4 seeds; 250 × 250 cells",
    ),
}  # fmt: skip


def variants(scale: RegionsScale) -> list[Variant]:
    """Variants that are trained at a scale."""
    base = {"epochs": scale.epochs, "cells": scale.cells, "shown": scale.shown, "points": 200, "lr": 1e-3}
    small, deep = [10, 10, 32, 1], [10, 10, 32, 32, 32, 1]
    return [
        Variant(MAIN, {**base, "omega": 0.5, "widths": small}),
        *(Variant(name, {**base, "omega": omega, "widths": small}, extra=True) for omega, name in OTHERS.items()),
        Variant(DEEP, {**base, "omega": 0.5, "widths": deep}, extra=True),
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
    x: Array, y: Array, settings: Mapping[str, Any], seed: int, on_progress: OnProgress
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
        on_progress(0.9 * (epoch + 1) / settings["epochs"])
    return weights, biases, phi


def map_plane(model: nn.Sequential, plane: Array, cells: int) -> RegionMap:
    """Maps the linear regions on the plane."""
    right, up = torch.from_numpy(10 * plane.T.copy())
    return region_map(model, torch.zeros(10, dtype=torch.float64), right, up, size=cells)


def compute(settings: Mapping[str, Any], seed: int, on_progress: OnProgress) -> Outcome:
    """Computes the numbers of one variant and seed."""
    x_, y_, z, plane = data(settings, seed)
    weights, biases, phi = train(x_, y_, settings, seed, on_progress)
    model = as_module([(torch.from_numpy(weight), torch.from_numpy(bias)) for weight, bias in zip(weights, biases)])
    x, y = torch.from_numpy(x_), torch.from_numpy(y_)
    result = map_plane(model, plane, settings["cells"])
    new = result.points.reshape(-1, 10)
    measured = empty_region(model, x, torch.from_numpy(phi), new, beta=1.0)
    exact = empty_region(model, x, local(model, x), new, beta=1.0)
    truth = result.slopes.reshape(-1)
    ratios, tighter = _ratios(measured, truth), _ratios(exact, truth)
    has_slope = measured.reached & (truth > 1e-12)
    bounds, slopes = measured.values[has_slope], truth[has_slope]
    with torch.no_grad():
        loss = float((model(x)[:, 0] - y).square().mean())
    error = result.outputs[..., 0] - _wave(settings["omega"], result)
    values = {
        "loss": loss,
        "error": float(error.square().mean()),
        "regions": result.count,
        "filled": float((~measured.empty).double().mean()),
        "reached": measured.share_empty,
        "reached_regions": _share_of_regions(result, measured),
        "ratio": float(ratios.median()) if len(ratios) else np.nan,
        "ratio_exact": float(tighter.median()) if len(tighter) else np.nan,
        "ratio_most": float(ratios.max()) if len(ratios) else np.nan,
        "least": float((bounds / slopes).min()),
        "gamma": measured.terms["gamma"],
        "constant": float(truth.median()),
        "constant_most": float(truth.max()),
        "constant_training": float(local(model, x).max()),
        "density": density(result),
        "clustering": clustering(result),
        "rank": measured.terms["rank"],
        "patterns": measured.terms["patterns"],
    }
    detail = _pictures(model, plane, settings, z, y_, x, ratios, tighter) if seed == 0 else None
    return Outcome(values, detail)


def _wave(omega: float, result: RegionMap) -> Tensor:
    up, across = (torch.cos(2 * torch.pi * omega * places) for places in (result.up, result.across))
    return up[:, None] * across[None]


def _ratios(bound: EmptyRegions, truth: Tensor) -> Tensor:
    """Bound over truth in the empty regions that are reached, one value a cell."""
    some = bound.reached & bound.empty & (truth > 1e-12)
    return bound.values[some] / truth[some]


def _share_of_regions(result: RegionMap, bound: EmptyRegions) -> float:
    """The fraction of empty regions, each counted once, that are reached."""
    ids = result.ids.reshape(-1)
    empty = torch.zeros(result.count, dtype=torch.bool)
    reached = torch.zeros(result.count, dtype=torch.bool)
    empty[ids], reached[ids] = bound.empty, bound.reached
    return float(reached[empty].double().mean())


def _pictures(
    model: nn.Sequential, plane: Array, settings: Mapping[str, Any], z: Array, y: Array, x: Tensor, *ratios: Tensor
) -> dict[str, Any]:
    """Data of the figures, on a coarser grid."""
    small = map_plane(model, plane, settings["shown"])
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
        "ratios": [ratio.quantile(steps).tolist() if len(ratio) else [] for ratio in ratios],
    }


def _rounded(values: Tensor) -> list[list[float]]:
    return [[round(value, 4) for value in row] for row in values.tolist()]


def _claims_of(variant: str) -> list[Claim]:
    return [
        Claim(
            f"Theorem 2 holds in every cell it applies to, {variant}",
            "What training reveals, Theorem 2",
            f"{variant}: 1 if the constant of any cell is above its bound, else 0",
            (variant,),
            lambda n: float(n[variant].least < 1 - ROUNDING),
            below=0.5,
            kind="universal",
        ).quoting("the Lipschitz constant of f^(t) in R_x is bounded by the following Basis Pursuit problem"),
        Claim(
            f"the theorem does not explain the global behaviour: most of the empty plane is not covered by it, {variant}",
            _PAPER,
            f"{variant}: fraction of the empty plane that is reached",
            (variant,),
            lambda n: n[variant].reached,
            below=0.5,
        ).quoting("the theory does not explain the global behavior of the NN", "threshold"),
        Claim(
            f"where it applies the bound overestimates by roughly a factor of four (two to eight), {variant}",
            f"{_PAPER}, with exact constants at training points as in figure 6",
            f"{variant}: how far log₂ of the median of bound over constant is from 2",
            (variant,),
            lambda n: abs(np.log2(n[variant].ratio_exact / 4)),
            below=1.0,
        ).quoting(_FOUR, "threshold"),
        Claim(
            f"the same with φ measured in training, {variant}",
            "What training reveals, Theorem 2",
            f"{variant}: how far log₂ of the median of bound over constant is from 2",
            (variant,),
            lambda n: abs(np.log2(n[variant].ratio / 4)),
            below=1.0,
        ).quoting(_FOUR, "threshold"),
    ]


def claims(scale: RegionsScale) -> list[Claim]:
    """Claims of the paper, as numbers to check."""
    return [
        *_claims_of(MAIN),
        Claim(
            "regions are smaller and more densely packed close to (0, 0)",
            _PAPER,
            f"{MAIN}: regions per area within half of the square over those outside",
            (MAIN,),
            lambda n: n[MAIN].density,
            above=1.0,
        ).quoting("the smaller and more densely packed regions being found close to the (0,0)point"),
        Claim(
            "low and high constants are clustered",
            _PAPER,
            f"{MAIN}: difference of the constants of regions that touch over that of any two",
            (MAIN,),
            lambda n: n[MAIN].clustering,
            below=1.0,
        ).quoting("it appears that low- and high-Lipschitz constants are clustered", "threshold"),
        *(claim for variant in (*OTHERS.values(), DEEP) for claim in _claims_of(variant)[:2]),
        Claim(
            "a deeper network leaves less within reach",
            "excite: activations of more layers are combined less often",
            f"fraction of the empty plane that is reached, {DEEP} minus {MAIN}",
            (MAIN, DEEP),
            lambda n: n[DEEP].reached - n[MAIN].reached,
            below=0.0,
        ),
    ]


_CELLS: Any = {"origin": "lower", "extent": EDGES, "interpolation": "nearest"}


def draw(
    study: Study, scale: Any, details: Mapping[str, list[Any]], numbers: Sequence[VariantResult]
) -> dict[str, tuple[str, Figure]]:
    """Draws the figures of the study."""
    first = {variant: detail[0] for variant, detail in details.items()}
    main = next(iter(first.values()))
    return {
        "figure": (f"{study.title}: the learned function, its regions, constants and bounds", regions_figure(main)),
        "surfaces": ("The functions to be learned, and the points they are learned from (figure 5)", surfaces()),
        "overestimate": ("How much the bound overestimates, where it applies", overestimates(first)),
    }


def regions_figure(detail: Mapping[str, Any]) -> Figure:
    """Figure 6: two functions above, constants and bounds below."""
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.9, 7.1), layout="constrained")
    bands = colormaps["cividis"].resampled(22)  # flat colours keep the picture small
    axes = figure.subplots(2, 2)
    z, ids = np.array(detail["z"]), np.array(detail["ids"])
    for axis, name, title in (
        (axes[0, 0], "true", "(a) function to be learned"),
        (axes[0, 1], "learned", "(b) learned function, linear regions"),
    ):
        image = axis.imshow(np.array(detail[name]), cmap=bands, vmin=-1.1, vmax=1.1, **_CELLS)
        axis.plot(*z.T, "o", color=COLOURS[6], markersize=3, markeredgewidth=0.3, markeredgecolor="white")
        axis.set_title(title, fontsize=11)
    figure.colorbar(image, ax=axes[0], label="output", shrink=0.85)
    draw_borders(axes[0, 1], ids)
    slopes, bound = np.array(detail["slopes"]), np.array(detail["bound"])
    top = float(np.quantile(bound[bound > 0], 0.99)) if (bound > 0).any() else float(slopes.max())
    low = max(float(np.quantile(slopes[slopes > 0], 0.02)), 1e-3)
    norm = LogNorm(low, max(top, float(slopes.max())))
    image = axes[1, 0].imshow(np.maximum(slopes, low), cmap="viridis", norm=norm, **_CELLS)
    draw_borders(axes[1, 0], ids)
    axes[1, 0].set_title("(c) local Lipschitz constants", fontsize=11)
    axes[1, 1].set_facecolor("black")
    axes[1, 1].imshow(np.where(bound == -2, 1.0, np.nan), cmap="gray", vmin=0, vmax=1, **_CELLS)
    shown = np.where(bound >= 0, np.maximum(bound, low), np.nan)
    axes[1, 1].imshow(shown, cmap="viridis", norm=norm, **_CELLS)
    axes[1, 1].plot(*z.T, "o", color=COLOURS[1], markersize=2, markeredgewidth=0)
    axes[1, 1].set_title(
        "(d) bound of Theorem 2 in empty regions\nwhite: with a training point, black: out of reach", fontsize=9.5
    )
    bar = figure.colorbar(image, ax=axes[1], label="Lipschitz constant, and bounds on it", shrink=0.85)
    plain_ticks(bar.ax.yaxis, *image.get_clim())
    for axis in axes.flat:
        ticks = (-1, -0.5, 0, 0.5, 1)
        axis.set(xlabel="z₁", ylabel="z₂", xlim=(-1, 1), ylim=(-1, 1), xticks=ticks, yticks=ticks)
    return figure


def surfaces() -> Figure:
    """Figure 5: one surface a frequency, with points."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.1), layout="constrained")
    places = np.linspace(-1, 1, 31)
    z1, z2 = np.meshgrid(places, places)
    points = np.random.default_rng(0).uniform(-1, 1, (100, 2))
    for number, omega in enumerate((0.25, 0.5, 0.75, 1.0)):
        axis: Any = figure.add_subplot(1, 4, number + 1, projection="3d")
        axis.plot_surface(
            z1, z2, _draw_wave(omega, z1, z2), cmap="cividis", linewidth=0, alpha=0.75, rstride=1, cstride=1
        )
        axis.scatter(*points.T, _draw_wave(omega, *points.T), color=COLOURS[1], s=4, depthshade=False)
        axis.set(
            title=f"ω = {omega:g}", xlabel="z₁", ylabel="z₂", zlim=(-1.2, 1.2), xticks=(-1, 0, 1), yticks=(-1, 0, 1)
        )
        axis.tick_params(labelsize=7)
    return figure


def _draw_wave(omega: float, z1: np.ndarray, z2: np.ndarray) -> np.ndarray:
    return np.asarray(np.cos(2 * np.pi * omega * z1) * np.cos(2 * np.pi * omega * z2))


def overestimates(details: Mapping[str, Any]) -> Figure:
    """The fraction of the reached empty plane where bound over constant is below a value."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    fraction = np.linspace(0, 100, 201)
    titles = ("exact constants at training points (figure 6)", "φ measured in training")
    for axis, which, title in zip(axes, (1, 0), titles):
        for number, (variant, detail) in enumerate(details.items()):
            if detail["ratios"][which]:
                axis.plot(
                    detail["ratios"][which],
                    fraction,
                    color=COLOURS[number],
                    linestyle=DASHES[number],
                    linewidth=1.8,
                    label=variant,
                )
        axis.axvline(4, color="#888", linewidth=1)
        axis.annotate(
            "the paper: 4", (4, 0), xytext=(-4, 4), textcoords="offset points", fontsize=8, color="#555", ha="right"
        )  # fmt: skip
        axis.set(xscale="log", title=title, xlabel="bound of Theorem 2 over the exact constant", ylim=(0, 100))
        axis.set_xticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("% of the empty plane\nwithin the theorem's reach")
    axes[1].legend(loc="lower right")
    return figure


STUDY = Study(
    "regions",
    "Linear regions, their Lipschitz constants, and what Theorem 2 says about empty ones",
    "figures 5 and 6 and Theorem 2 of What training reveals about neural network complexity",
    "200 points of y = cos(2πω z₁) cos(2πω z₂), embedded in ten dimensions; networks 10-10-32-1",
    Computed(
        compute,
        {
            "loss": ("training loss", "{:.2g}"),
            "regions": ("linear regions found", "{:.0f}"),
            "filled": ("plane with a training point in the region", "{:.0%}"),
            "reached": ("empty plane reached", "{:.0%}"),
            "reached_regions": ("empty regions reached", "{:.0%}"),
            "ratio_exact": ("bound / constant, as in figure 6", "{:.2f}"),
            "ratio": ("with φ of training", "{:.2f}"),
            "ratio_most": ("largest", "{:.3g}"),
            "gamma": ("γ", "{:.2g}"),
            "constant_training": ("largest constant, training points", "{:.2f}"),
            "constant_most": ("largest constant, regions", "{:.2f}"),
        },
        draw,
        "The first seed, ω = 0.5, on the plane of the data. Above: the function to be learned and the one learned, with training\n"
        "points in blue; black lines are borders of linear regions. Below left: the local Lipschitz constant of each region. Below\n"
        "right: the bound of Theorem 2 in empty regions, on the same scale; white regions contain a training point;\n"
        "to black ones the theorem does not apply.",
        "Means over seeds, with the range. Areas are fractions of the square of the data. *Reached*: the activation of the region is a\n"
        "combination of those of training points, decided by integer arithmetic. *Bound / constant* is the median over the cells of empty\n"
        "regions that are reached, once with the exact constants at training points (what the authors' figure shows), once\n"
        "with φ as measured at the last step of each point, γ the factor by which slopes have changed since, minus 1.",
        settings=(
            "SGD, one point per step, a new order each epoch; learning rate 0.001, half squared error, float64.",
            "The first layer is the identity with a trained bias; other weights are initialized as in torch.nn.Linear.",
        ),
    ),
    SCALES,
    variants,
    claims,
    notes=(
        "The paper's formula repeats z₁; the authors' program uses both coordinates, as here.",
        "The paper does not say how long this network was trained; 3000 epochs are those of its first task.",
        "Regions are those that hold the middle of a cell: smaller ones are not found.",
    ),
    asks="slopes away from the data",
    seconds={"quick": 12},
    sources=(
        "reveals:figure 5",
        "reveals:figure 6",
        "reveals:Theorem 2",
    ),
)
