"""Data, networks and steps of `low-rank`, in numpy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

Array = NDArray[np.float64]
Weights = list[Array]
STRIDE = 1e-3  # length of a growing step, relative to the norm of the weights


def data_and_weights(seed: int, settings: Mapping[str, Any]) -> tuple[Array, Array, Weights]:
    """Points (N, n); labels ±1, or classes 0 to 2; first weights with variance gain² / inputs.

    Two points: 100° apart, with the same label; unit i along point i, all within a tenth.
    """
    rng = np.random.default_rng(seed)
    widths = settings["widths"]
    if settings.get("two points"):
        turn = np.deg2rad(20 + np.array([0.0, 100.0]))
        x = np.stack([np.cos(turn), np.sin(turn)], 1)
        return x, np.ones(2), [x + rng.uniform(-0.1, 0.1, (2, 2)), np.ones((1, 2)) + rng.uniform(-0.1, 0.1, (1, 2))]
    x = rng.normal(size=(settings["points"], widths[0]))
    if settings["loss"] == "classes":
        normals = np.linalg.qr(rng.normal(size=(widths[0], widths[-1])))[0].T
        y = (x @ normals.T).argmax(1).astype(np.float64)
        x = x + 0.5 * normals[y.astype(int)]
    else:
        normal = rng.normal(size=widths[0])
        normal /= np.linalg.norm(normal)
        y = np.where(x @ normal > 0, 1.0, -1.0)
        x = x + 0.3 * y[:, None] * normal
    shapes = zip(widths[1:], widths)
    spread = 2.0 if settings["leak"] == 0 else 1.0  # He: half of the units are off
    return x, y, [settings["gain"] * rng.normal(size=(o, i)) * np.sqrt(spread / i) for o, i in shapes]


# Derivatives (N, outputs) by the outputs z, each up to a common factor that keeps the largest from vanishing.
def _logistic(z: Array, y: Array) -> Array:
    margins = y[:, None] * z
    return -y[:, None] * np.exp(max(0.0, float(margins.min())) - np.logaddexp(0, margins))


def _exponential(z: Array, y: Array) -> Array:
    margins = y[:, None] * z
    return np.asarray(-y[:, None] * np.exp(margins.min() - margins))


def _classes(z: Array, y: Array) -> Array:
    k, rows = y.astype(int), np.arange(len(z))
    logs = z - logsumexp(z, axis=1, keepdims=True)
    others = logs.copy()
    others[rows, k] = -np.inf
    logs[rows, k] = logsumexp(others, axis=1)  # log(1 − p) of the right class
    slopes = np.exp(logs - logs[rows, k].max())
    slopes[rows, k] *= -1
    return np.asarray(slopes)


SLOPES: dict[str, Callable[[Array, Array], Array]] = {
    "logistic": _logistic,
    "exponential": _exponential,
    "classes": _classes,
    "squared": lambda z, y: z - y[:, None],  # of ½ Σ (z − y)²
}


def forward(weights: Weights, x: Array, leak: float) -> tuple[list[Array], list[Array], Array]:
    """What each layer sees, the slopes of its units, and the outputs (N, outputs)."""
    inputs, slopes = [x], []
    for w in weights[:-1]:
        z = inputs[-1] @ w.T
        slopes.append(np.where(z > 0, 1.0, leak))
        inputs.append(z * slopes[-1])
    return inputs, slopes, inputs[-1] @ weights[-1].T


def step(weights: Weights, x: Array, y: Array, settings: Mapping[str, Any]) -> Weights:
    """One step of gradient descent: of fixed size for squared error, else of length STRIDE times the norm of the weights."""
    inputs, slopes, z = forward(weights, x, settings["leak"])
    back = SLOPES[settings["loss"]](z, y)
    gradients: Weights = []
    for k in reversed(range(len(weights))):
        gradients.insert(0, back.T @ inputs[k])
        if k:
            back = (back @ weights[k]) * slopes[k - 1]
    size = settings["lr"]
    if settings["loss"] != "squared":
        length = norm(gradients)
        size = STRIDE * norm(weights) / length if length > 0 else 0.0
    return [w - size * g for w, g in zip(weights, gradients)]


def norm(parts: Weights) -> float:
    return float(np.sqrt(sum(float((p**2).sum()) for p in parts)))


def ratios(weights: Weights) -> list[float]:
    """‖W‖₂²/‖W‖²_F by layer."""
    return [float(np.linalg.norm(w, 2) ** 2 / (w**2).sum()) if w.any() else 0.0 for w in weights]


def differences(weights: Weights) -> list[Array]:
    return [a @ a.T - b.T @ b for a, b in pairwise(weights)]


def moved(weights: Weights, start: list[Array]) -> tuple[float, float]:
    """How far the laws moved, over the squared norm of the layer: largest entry on the diagonal, and off it."""
    on, off = 0.0, 0.0
    for w, now, before in zip(weights, differences(weights), start):
        change = np.abs(now - before) / float((w**2).sum())
        on = max(on, float(np.diag(change).max()))
        off = max(off, float((change - np.diag(np.diag(change))).max()))
    return on, off


def right(weights: Weights, x: Array, y: Array, settings: Mapping[str, Any]) -> float:
    z = forward(weights, x, settings["leak"])[2]
    if settings["loss"] == "classes":
        return float((z.argmax(1) == y).mean())
    return float((z[:, 0] * y > 0).mean())
