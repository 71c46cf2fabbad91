"""The computations of `regularization`: settings and a seed in, numbers and curves out. Losses are sums over points."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from excite._core.checks import DUAL, parse_norm
from excite.bounds import radius_of_penalty
from excite.bounds.excitation.hard_margin import least_norm
from excite.studies.computed import OnProgress, Outcome

Array = NDArray[np.float64]


def regression(seed: int, settings: Mapping[str, Any]) -> tuple[Array, Array]:
    """Points (N, n) of uneven variances and targets (N,) from weights of which half are zero, with noise."""
    rng = np.random.default_rng(seed)
    n = settings["inputs"]
    x = rng.normal(size=(settings["points"], n)) * np.geomspace(1, 0.3, n)
    w = rng.normal(size=n) * (np.arange(n) % 2 == 0)
    return x, x @ w + 0.3 * rng.normal(size=len(x))


def equivalence(settings: Mapping[str, Any], seed: int, on_progress: OnProgress) -> Outcome:
    """Theorem 6: for λ on a grid both solutions, and the ε that makes them one, for several powers m."""
    x, y = regression(seed, settings)
    norm = settings["norm"]
    largest = 2 * float(np.linalg.norm(x.T @ y, float(DUAL[parse_norm(norm)])))  # m = 1 gives zero from here on
    grid = largest * np.geomspace(1e-3, 3, settings["grid"])
    curves: dict[str, list[Any]] = {}
    differences, alone = [0.0], 0
    for number, power in enumerate(settings["powers"]):
        for k, penalty in enumerate(grid):
            found = radius_of_penalty(x, y, float(penalty), norm, power)
            excited = None if found.excited is None else found.excited.round(6).tolist()
            curves.setdefault(str(power), []).append(
                (float(penalty / largest), found.radius, found.regularized.round(6).tolist(), excited)
            )
            alone += found.radius is None
            differences += [found.difference] if found.radius is not None else []
            on_progress((number + k / len(grid)) / len(settings["powers"]))
    values = {"difference": max(differences), "alone": float(alone), "solved": float(len(differences) - 1)}
    return Outcome(values, {"curves": curves})


def noise(settings: Mapping[str, Any], seed: int, on_progress: OnProgress) -> Outcome:
    """Equations 10 and 11: ridge, n ghost measurements, 2n directions of noise, and noise drawn at random."""
    x, y = regression(seed, settings)
    count, n = x.shape
    penalty = settings["penalty"] * count
    ridge = np.linalg.solve(x.T @ x + penalty * np.eye(n), x.T @ y)

    def off(rows: Array, targets: Array) -> float:
        found = np.linalg.lstsq(rows, targets, rcond=None)[0]
        return float(np.linalg.norm(found - ridge) / np.linalg.norm(ridge))

    ghosts = off(np.vstack([x, math.sqrt(penalty) * np.eye(n)]), np.r_[y, np.zeros(n)])
    moves = math.sqrt(n * penalty / count) * np.vstack([np.eye(n), -np.eye(n)])  # second moment penalty/count · I
    directions = off((x + moves[:, None]).reshape(-1, n), np.tile(y, len(moves)))
    rng = np.random.default_rng(seed + 1000)
    drawn = []
    for copies in settings["copies"]:
        xi = math.sqrt(penalty / count) * rng.normal(size=(copies, count, n))
        drawn.append((copies, off((x + xi).reshape(-1, n), np.tile(y, copies))))
    values = {"ghosts": ghosts, "directions": directions, "few": drawn[0][1], "many": drawn[-1][1]}
    return Outcome(values, {"drawn": drawn, "directions": (2 * n, directions)})


def two_classes(seed: int, settings: Mapping[str, Any]) -> tuple[Array, Array, float]:
    """Points (N, n), signs (N,) and the largest margin of a hyperplane through the origin, in the 2-norm."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(settings["points"], settings["inputs"]))
    normal = rng.normal(size=settings["inputs"])
    normal /= np.linalg.norm(normal)
    s = np.where(x @ normal > 0, 1.0, -1.0)
    x = x + 0.5 * s[:, None] * normal
    return x, s, 1 / float(np.linalg.norm(least_norm(s[:, None] * x)[0]))


def inflated_loss(w: Array, x: Array, s: Array, radius: float) -> float:
    """Equation 13 in the 2-norm: ½ Σ log(1 + exp(−s w·x − ε‖w‖)) + log(1 + exp(−s w·x + ε‖w‖))."""
    margins, reach = s * (x @ w), radius * float(np.linalg.norm(w))
    return float((np.logaddexp(0, -margins - reach) + np.logaddexp(0, -margins + reach)).sum()) / 2


def inflated_gradient(w: Array, x: Array, s: Array, radius: float) -> Array:
    size = float(np.linalg.norm(w))
    margins, reach = s * (x @ w), radius * size
    far, near = (np.exp(-np.logaddexp(0, margins + sign * reach)) for sign in (1, -1))  # σ(−margins ∓ reach)
    outward = radius * w / max(size, 1e-300) * float((near - far).sum())
    return np.asarray((-(s * (far + near)) @ x + outward) / 2)


def inflated(settings: Mapping[str, Any], seed: int, on_progress: OnProgress) -> Outcome:
    """Gradient descent on equation 13 (plus decay · ‖w‖²), the radius a multiple of the largest margin."""
    x, s, margin = two_classes(seed, settings)
    radius, steps = settings["radius"] * margin, settings["steps"]
    w = np.asarray(1e-3 * np.random.default_rng(seed + 1000).normal(size=x.shape[1]))
    looked_at = set(np.unique(np.geomspace(1, steps, 60).round()).astype(int).tolist())
    curve = []
    for step in range(1, steps + 1):
        w = w - settings["lr"] * (inflated_gradient(w, x, s, radius) + 2 * settings["decay"] * w)
        if step in looked_at:
            size = float(np.linalg.norm(w))
            curve.append((step, size, inflated_loss(w, x, s, radius), float((s * (x @ w)).min()) / size / radius))
            on_progress(step / steps)
    early = next(size for step, size, _, _ in curve if step >= steps / 10)
    values = {
        "norm": curve[-1][1],
        "growth": curve[-1][1] / early - 1,
        "loss": curve[-1][2],
        "reach": curve[-1][3],
        "above": float(above_chord(x, s, radius, seed)),
    }
    return Outcome(values, {"curve": curve})


def above_chord(x: Array, s: Array, radius: float, seed: int, pairs: int = 2000) -> int:
    """How often F((u + v)/2) > (F(u) + F(v))/2 for random pairs of weights: never, if F is convex."""
    rng = np.random.default_rng(seed + 2000)
    found = 0
    for _ in range(pairs):
        u, v = rng.normal(size=(2, x.shape[1])) * np.exp(rng.uniform(-3, 3, size=(2, 1)))
        chord = (inflated_loss(u, x, s, radius) + inflated_loss(v, x, s, radius)) / 2
        found += inflated_loss((u + v) / 2, x, s, radius) > chord * (1 + 1e-12)
    return found


def linear_estimator(settings: Mapping[str, Any], seed: int, on_progress: OnProgress) -> Outcome:
    """Section 2.1: gradient descent on ½Σ‖Wx − f(x)‖² with one step size, for targets of growing size."""
    x, y = regression(seed, settings)
    hessian = x.T @ x
    step = 1 / float(np.linalg.eigvalsh(hessian)[-1])
    curve = []
    for scale in settings["scales"]:
        w = np.zeros(x.shape[1])
        for _ in range(settings["steps"]):
            w = w - step * (hessian @ w - scale * (x.T @ y))
        left = float(np.linalg.norm(hessian @ w - scale * (x.T @ y)) / np.linalg.norm(scale * (x.T @ y)))
        curve.append((scale, float(np.linalg.norm(w)), left))
        on_progress(len(curve) / len(settings["scales"]))
    first, last = curve[0], curve[-1]
    values = {
        "lipschitz": last[1] / first[1],
        "unconverged": max(left for _, _, left in curve),
    }
    return Outcome(values, {"curve": curve})


PARTS = {"equivalence": equivalence, "noise": noise, "inflated": inflated, "linear": linear_estimator}


def compute(settings: Mapping[str, Any], seed: int, on_progress: OnProgress) -> Outcome:
    return PARTS[settings["part"]](settings, seed, on_progress)
