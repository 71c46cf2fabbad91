"""Pictures of `regions`: functions, linear regions, constants and bounds; the surfaces of figure 5; overestimates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from excite.lipschitz import RegionMap
from excite.studies.figures import COLOURS, DASHES, plain_ticks
from excite.studies.numbers import Numbers
from excite.studies.study import Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_EDGES = (-1, 1, -1, 1)


def draw(
    study: Study, scale: Any, details: Mapping[str, list[Any]], numbers: Sequence[Numbers]
) -> dict[str, tuple[str, Figure]]:
    first = {arm: found[0] for arm, found in details.items()}
    main = next(iter(first.values()))
    return {
        "figure": (f"{study.title}: the learned function, its regions, constants and bounds", regions_figure(main)),
        "surfaces": ("The functions to be learned, and the points they are learned from (figure 5)", surfaces()),
        "overestimate": ("How much the bound overestimates, where it speaks", overestimates(first)),
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
        image = axis.imshow(
            np.array(detail[name]),
            origin="lower",
            extent=_EDGES,
            interpolation="nearest",
            cmap=bands,
            vmin=-1.1,
            vmax=1.1,
        )
        axis.plot(*z.T, "o", color=COLOURS[6], markersize=3, markeredgewidth=0.3, markeredgecolor="white")
        axis.set_title(title, fontsize=11)
    figure.colorbar(image, ax=axes[0], label="output", shrink=0.85)
    _lines(axes[0, 1], ids)
    slopes, bound = np.array(detail["slopes"]), np.array(detail["bound"])
    top = float(np.quantile(bound[bound > 0], 0.99)) if (bound > 0).any() else float(slopes.max())
    low = max(float(np.quantile(slopes[slopes > 0], 0.02)), 1e-3)
    norm = LogNorm(low, max(top, float(slopes.max())))
    image = axes[1, 0].imshow(
        np.maximum(slopes, low), origin="lower", extent=_EDGES, interpolation="nearest", cmap="viridis", norm=norm
    )
    _lines(axes[1, 0], ids)
    axes[1, 0].set_title("(c) local Lipschitz constants", fontsize=11)
    axes[1, 1].set_facecolor("black")
    axes[1, 1].imshow(
        np.where(bound == -2, 1.0, np.nan),
        origin="lower",
        extent=_EDGES,
        interpolation="nearest",
        cmap="gray",
        vmin=0,
        vmax=1,
    )
    shown = np.where(bound >= 0, np.maximum(bound, low), np.nan)
    axes[1, 1].imshow(shown, origin="lower", extent=_EDGES, interpolation="nearest", cmap="viridis", norm=norm)
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


def _lines(axis: Axes, ids: np.ndarray, edges: Sequence[float] = _EDGES) -> None:
    """The sides of cells where two regions touch, as one line with gaps."""
    rows, columns = ids.shape
    left, right, low, high = edges
    x, y = np.linspace(left, right, columns + 1), np.linspace(low, high, rows + 1)
    i, j = np.nonzero(ids[:, :-1] != ids[:, 1:])
    gap = np.full(len(i), np.nan)
    upright = np.stack([x[j + 1], x[j + 1], gap], 1).ravel(), np.stack([y[i], y[i + 1], gap], 1).ravel()
    i, j = np.nonzero(ids[:-1] != ids[1:])
    gap = np.full(len(i), np.nan)
    flat = np.stack([x[j], x[j + 1], gap], 1).ravel(), np.stack([y[i + 1], y[i + 1], gap], 1).ravel()
    axis.plot(*np.concatenate([upright, flat], 1), color="black", linewidth=0.5, alpha=0.8)


def region_picture(found: RegionMap) -> Figure:
    """Any map of `excite.lipschitz.region_map`: colours are local Lipschitz constants, lines the borders of regions."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 5.4), layout="constrained")
    axis = figure.subplots()
    sides = [
        (places[0], places[-1], (places[-1] - places[0]) / max(len(places) - 1, 1))
        for places in (found.across.tolist(), found.up.tolist())
    ]
    edges = [edge for low, high, step in sides for edge in (low - step / 2, high + step / 2)]
    slopes = found.slopes.detach().cpu().numpy()
    image = axis.imshow(
        slopes, origin="lower", extent=tuple(edges), cmap="viridis", interpolation="nearest", aspect="auto"
    )
    _lines(axis, found.ids.cpu().numpy(), tuple(edges))
    figure.colorbar(image, label="local Lipschitz constant")
    axis.set(xlabel="along right", ylabel="along up", title=f"{found.count} linear regions met")
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
        axis.plot_surface(z1, z2, _wave(omega, z1, z2), cmap="cividis", linewidth=0, alpha=0.75, rstride=1, cstride=1)
        axis.scatter(*points.T, _wave(omega, *points.T), color=COLOURS[1], s=4, depthshade=False)
        axis.set(
            title=f"ω = {omega:g}", xlabel="z₁", ylabel="z₂", zlim=(-1.2, 1.2), xticks=(-1, 0, 1), yticks=(-1, 0, 1)
        )
        axis.tick_params(labelsize=7)
    return figure


def _wave(omega: float, z1: np.ndarray, z2: np.ndarray) -> np.ndarray:
    return np.asarray(np.cos(2 * np.pi * omega * z1) * np.cos(2 * np.pi * omega * z2))


def overestimates(details: Mapping[str, Any]) -> Figure:
    """The share of the reached empty plane where bound over constant is below a value."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    share = np.linspace(0, 100, 201)
    titles = ("exact constants at training points (figure 6)", "φ measured in training")
    for axis, which, title in zip(axes, (1, 0), titles):
        for number, (arm, detail) in enumerate(details.items()):
            if detail["ratios"][which]:
                axis.plot(
                    detail["ratios"][which],
                    share,
                    color=COLOURS[number],
                    linestyle=DASHES[number],
                    linewidth=1.8,
                    label=arm,
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
