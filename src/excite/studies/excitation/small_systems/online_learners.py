"""Small online learners whose excitation fades or persists: section 1.1 of *Persistency of Excitation*.

Each takes the settings of a variant and a seed. `wrong` is how far the parameters end from the truth, relative to where they
began or to their size; `error` is the last error that the algorithm itself sees.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from excite.studies.computed import Outcome

Array = NDArray[np.float64]
CURVE = 120  # points of a curve in the figure
PULLS = 0.35, 0.65  # how often the arms of a bandit pay


def regression(settings: Mapping[str, Any], seed: int) -> Outcome:
    """θ ← θ − δ Σ x(x'θ − y), then (x, y) ← α(x, y): the step size is a fifth of 1 / λ_max of the first measurements."""
    rng = np.random.default_rng([seed, 1])
    x, truth = rng.normal(size=(30, 3)), rng.normal(size=3)
    y, theta, curve = x @ truth, np.zeros(3), Curve(settings["steps"])
    step = 0.2 / np.linalg.eigvalsh(x.T @ x)[-1]
    for t in range(settings["steps"]):
        curve.add(t, np.linalg.norm(theta - truth) / np.linalg.norm(truth))
        theta = theta - step * x.T @ (x @ theta - y)
        x, y = settings["alpha"] * x, settings["alpha"] * y
    wrong = float(np.linalg.norm(theta - truth) / np.linalg.norm(truth))
    return Outcome({"wrong": wrong, "error": _size(x @ theta - y)}, curve.plain(wrong))


def scalar_system(settings: Mapping[str, Any], seed: int) -> Outcome:
    """x ← θx + u and x̂ ← θ̂x̂ + u; θ̂ goes down the gradient of ½(x̂ − x)² (equation 2). `input`: none or signs."""
    rng = np.random.default_rng([seed, 2])
    truth, x, guess = rng.uniform(0.5, 0.9), 1.0, 0.5
    theta, error, step, curve = 0.1, 0.0, 0.02, Curve(settings["steps"])
    inputs = {"none": np.zeros(settings["steps"]), "signs": rng.choice([-1.0, 1.0], settings["steps"])}
    for t, u in enumerate(inputs[settings["input"]]):
        curve.add(t, abs(theta - truth) / truth)
        x, following = truth * x + u, theta * guess + u
        error = following - x
        theta, guess = theta - step * error * guess, following
    wrong = float(abs(theta - truth) / truth)
    return Outcome({"wrong": wrong, "error": _size(error)}, curve.plain(wrong))


def linear_system(settings: Mapping[str, Any], seed: int) -> Outcome:
    """h ← Ah + Bx, y = Ch of order two (equation 1 of the richness paper), at rest until the input starts.

    The output identifies of A, B and C the four numbers of y ← a₁y + a₂y' + b₁x + b₂x' (a dash: one step before),
        learnt by gradient steps of half the size that would annul the error of the moment. `least_squares` is the distance
        to the truth of the least squares solution over all steps, `noisy` the same with noise of 0.01 in every output.
    """
    rng = np.random.default_rng([seed, 3])
    p, q, b = rng.uniform(0.4, 0.8), rng.uniform(-0.3, 0.1), rng.uniform(0.5, 1.5)
    truth = np.array([p + q, -p * q, b, b / 2])
    x = _input(settings["input"], settings["steps"])
    rows, targets = respond(truth, x, np.zeros(len(x)))
    theta, error, curve, size = np.zeros(4), 0.0, Curve(len(x)), float(np.linalg.norm(truth))
    for t, (row, target) in enumerate(zip(rows, targets)):
        curve.add(t, np.linalg.norm(theta - truth) / size)
        error = float(row @ theta - target)
        theta = theta - 0.5 * error * row / (row @ row) if row.any() else theta
    wrong = float(np.linalg.norm(theta - truth) / size)
    values = {"wrong": wrong, "error": _size(error)}
    for name, noise in (("least_squares", np.zeros(len(x))), ("noisy", 0.01 * rng.normal(size=len(x)))):
        result = np.linalg.lstsq(*respond(truth, x, noise), rcond=None)[0]
        values[name] = float(np.linalg.norm(result - truth) / size)
    return Outcome(values, curve.plain(wrong))


def respond(truth: Array, x: Array, noise: Array) -> tuple[Array, Array]:
    """Rows (y, y', x, x') and the outputs that follow them, of a system at rest."""
    rows, following, y, before = np.zeros((len(x), 4)), np.zeros(len(x)), 0.0, 0.0
    for t in range(len(x)):
        rows[t] = y, before, x[t], x[t - 1] if t else 0.0
        following[t] = rows[t] @ truth + noise[t]
        before, y = y, following[t]
    return rows, following


def _input(signal: str, steps: int) -> Array:
    t = np.arange(steps)
    waves = {"constant": (0.0,), "one frequency": (0.8,), "two frequencies": (0.8, 2.2)}[signal]
    return np.asarray(sum(np.cos(w * t) for w in waves))


def stochastic_gradient(settings: Mapping[str, Any], seed: int) -> Outcome:
    """θ ← θ − δ∇f_i(θ), then f ← α_t f, for least squares that no θ fits.

    `scaling` is "fast" (α_t = 0.98), "slow" (f is divided by 1 + t/50 after t steps) or "none".
    """
    rng = np.random.default_rng([seed, 4])
    x, truth = rng.normal(size=(40, 3)), rng.normal(size=3)
    y = x @ truth + 0.5 * rng.normal(size=40)
    best = np.linalg.lstsq(x, y, rcond=None)[0]
    t = np.arange(settings["steps"])
    scale = {"fast": 0.98**t, "slow": 1 / (1 + t / 50), "none": np.ones(len(t))}[settings["scaling"]]
    theta, curve, moved = best + rng.normal(size=3), Curve(len(t)), 0.0
    start = float(np.linalg.norm(theta - best))
    for k, i in enumerate(rng.integers(40, size=len(t))):
        curve.add(k, np.linalg.norm(theta - best) / start)
        gradient = scale[k] * x[i] * (x[i] @ theta - y[i])
        theta, moved = theta - 0.02 * gradient, float(np.linalg.norm(gradient))
    wrong = float(np.linalg.norm(theta - best) / start)
    return Outcome({"wrong": wrong, "error": _size(moved)}, curve.plain(wrong))


def bandit(settings: Mapping[str, Any], seed: int) -> Outcome:
    """`bandits` pairs of coins: after one pull of each, the coin with the larger average, at some times the other one.

    By time t the other one has its turn ⌊10 (1 − 1/t)⌋ times if `exploring` "stops" (the frequency falls like 1/t²) and
    ⌊10 log t⌋ times if it "goes on" (like 1/t). `wrong` is the fraction of bandits whose worse coin ends with the larger
    average, `error` the mean loss per pull against the better coin.
    """
    rng = np.random.default_rng([seed, 5])
    count, steps = settings["bandits"], settings["steps"]
    t = np.arange(2.0, steps + 3)  # two pulls are done
    explored = np.floor({"stops": 10 * (1 - 1 / t), "goes on": 10 * np.log(t)}[settings["exploring"]])
    chance, each = np.array(PULLS), np.arange(count)
    paid, pulls, curve = (rng.random((count, 2)) < chance).astype(float), np.ones((count, 2)), Curve(steps)
    for step in range(steps):
        average = paid / pulls
        tie = average[:, 0] == average[:, 1]
        choice = np.where(tie, rng.integers(2, size=count), average.argmax(1))
        curve.add(step, float(np.mean(average[:, 0] > average[:, 1]) + tie.mean() / 2))
        if explored[step + 1] > explored[step]:
            choice = 1 - choice
        pulls[each, choice] += 1
        paid[each, choice] += rng.random(count) < chance[choice]
    average = paid / pulls
    wrong = float(np.mean(average[:, 0] > average[:, 1]) + np.mean(average[:, 0] == average[:, 1]) / 2)
    regret = float((PULLS[1] - PULLS[0]) * (pulls[:, 0].sum() - count) / (count * steps))
    return Outcome({"wrong": wrong, "error": regret}, curve.plain(wrong))


class Curve:
    """Some values of a long sequence: at steps 0, and then evenly on a logarithmic axis."""

    def __init__(self, steps: int):
        self._at = set(np.unique(np.geomspace(1, max(steps, 1), CURVE).astype(int)).tolist()) | {0}
        self._steps, self._results = steps, dict[int, float]()

    def add(self, step: int, value: Any) -> None:
        """Stores the value if the step is one that is drawn."""
        if step in self._at:
            self._results[step] = float(value)

    def plain(self, last: float) -> dict[str, list[float]]:
        """Returns the curve as JSON values, with its last value."""
        result = {**self._results, self._steps: last}
        return {"at": [float(t) for t in result], "curve": list(result.values())}


def _size(errors: Array | float) -> float:
    """The root mean square; 0 where it is less than rounding."""
    size = float(np.sqrt(np.mean(np.square(errors))))
    return size if size > 1e-15 else 0.0
