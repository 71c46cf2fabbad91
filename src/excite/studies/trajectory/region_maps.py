"""Maps of linear regions: where regions are dense, whether constants are clustered, a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from excite.lipschitz import RegionMap

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def density(result: RegionMap) -> float:
    """Regions met an area, within half of the square against the rest of it."""
    inner = (result.up.abs()[:, None] < 0.5) & (result.across.abs()[None] < 0.5)
    many, few = (len(result.ids[mask].unique()) for mask in (inner, ~inner))
    return (many / 0.25) / (few / 0.75)


def clustering(result: RegionMap) -> float:
    """Mean difference of the constants of two regions that touch, over that of any two regions."""
    slopes = torch.zeros(result.count, dtype=torch.float64)
    slopes[result.ids.reshape(-1)] = result.slopes.reshape(-1)
    pairs = torch.cat(
        [
            torch.stack([result.ids[:, :-1].reshape(-1), result.ids[:, 1:].reshape(-1)], 1),
            torch.stack([result.ids[:-1].reshape(-1), result.ids[1:].reshape(-1)], 1),
        ]
    )
    pairs = pairs[pairs[:, 0] != pairs[:, 1]].sort(1).values.unique(dim=0)
    near = (slopes[pairs[:, 0]] - slopes[pairs[:, 1]]).abs().mean()
    anywhere = (slopes[:, None] - slopes[None]).abs().sum() / (result.count * (result.count - 1))
    return float(near / anywhere)


EDGES = (-1, 1, -1, 1)


def draw_borders(axis: Axes, ids: np.ndarray, edges: Sequence[float] = EDGES) -> None:
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


def region_picture(region_map: RegionMap) -> Figure:
    """Any map of `excite.lipschitz.region_map`: colours are local Lipschitz constants, lines the borders of regions."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 5.4), layout="constrained")
    axis = figure.subplots()
    sides = [
        (places[0], places[-1], (places[-1] - places[0]) / max(len(places) - 1, 1))
        for places in (region_map.across.tolist(), region_map.up.tolist())
    ]
    edges = [edge for low, high, step in sides for edge in (low - step / 2, high + step / 2)]
    slopes = region_map.slopes.detach().cpu().numpy()
    image = axis.imshow(
        slopes, origin="lower", extent=tuple(edges), cmap="viridis", interpolation="nearest", aspect="auto"
    )
    draw_borders(axis, region_map.ids.cpu().numpy(), tuple(edges))
    figure.colorbar(image, label="local Lipschitz constant")
    axis.set(xlabel="along right", ylabel="along up", title=f"{region_map.count} linear regions found")
    return figure
