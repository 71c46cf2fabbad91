"""Bounds on trainings with cross-entropy against the truth: violations, and how tight they are. A table in Markdown.

    python -m benchmarks.truth_cross_entropy [--trainings 220] [--seed 0]

That many random linear classifiers and problems of Theorem 6, and twice as many networks, since not all of these converge:
dimensions, points, labels, step sizes, depth and the size of the initial weights all vary. The ratio is bound over truth,
at least one unless violated; it is infinite where the bound is, and where the true margin is not positive (or the rank 0).
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass, field

import numpy as np
import torch
from tests.bounds.references import lipschitz_by_enumeration
from tests.bounds.trainings import separable_points, train_deep_linear, train_linear, train_two_layer

from excite.bounds import (
    Bound,
    cross_entropy_rank,
    decay_rank,
    directional_lipschitz,
    linear_margin,
    linear_margin_any_time,
    penalty_of_radius,
    radius_of_penalty,
    relaxed_linear_margin,
)

SLACK, ROUNDING = 1e-9, 1e-12


@dataclass
class Row:
    statement: str
    trainings: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    violations: int = 0
    ratios: list[float] = field(default_factory=list)

    def add(self, bound: float | None, truth: float) -> None:
        """One training, with a bound (None: an assumption failed) and the truth; truths that are rounding count as 0."""
        self.trainings += 1
        if bound is None:
            return
        self.violations += truth > bound * (1 + SLACK) + ROUNDING
        if truth > ROUNDING:
            self.ratios.append(bound / truth)
        elif truth <= 0:
            self.ratios.append(math.inf)

    def why(self, bound: Bound) -> Bound:
        for a in bound.failed[:1]:
            self.failed[a.text] = self.failed.get(a.text, 0) + 1
        return bound

    def __str__(self) -> str:
        ratios = np.sort(self.ratios)
        finite = ratios[np.isfinite(ratios)]
        void = len(ratios) - len(finite)
        spread = f"{np.median(finite):.3g} ({finite[0]:.3g} to {finite[-1]:.3g})" if len(finite) else "—"
        said = "; ".join(f"{n} × {text}" for text, n in sorted(self.failed.items(), key=lambda item: -item[1])) or "—"
        counts = f"{self.trainings} | {self.trainings - sum(self.failed.values())} | {self.violations}"
        return f"| {self.statement} | {counts} | {spread} | {void} | {said} |"


def linear(count: int, rng: np.random.Generator) -> list[Row]:
    limit, trained = Row("Theorem 2, limit"), Row("Theorem 2, trained classifier")
    printed, any_time = (
        Row("Theorem 2 as printed (γ of all points)"),
        Row("Theorem 2 at any time, 20 steps and trained"),
    )
    relaxed = Row("Corollary 2, best direction")
    problems = [separable_points(rng) for _ in range(count)]
    rates = torch.from_numpy(10 ** rng.uniform(-1, 0.3, count))
    late, early = train_linear(problems, 20_000, rates), train_linear(problems, 20, rates)
    for (x, y), (w, b), (w0, b0) in zip(problems, late, early):
        bound = limit.why(linear_margin(x, y))
        limit.add(bound.value, bound.terms["limit margin"])
        printed.add(bound.terms["printed"], bound.terms["limit margin"])
        soft = relaxed.why(relaxed_linear_margin(x, y))
        relaxed.add(soft.value, soft.terms["limit margin"])
        after = trained.why(linear_margin(x, y, w, b))
        trained.add(after.value, after.terms["margin"])
        for weight, bias in ((w0, b0), (w, b)):
            now = any_time.why(linear_margin_any_time(x, y, weight, bias))
            any_time.add(now.value, now.terms["margin"])
    return [limit, trained, printed, any_time, relaxed]


def two_layer(count: int, rng: np.random.Generator) -> list[Row]:
    exact, product = Row("Theorem 3, Lipschitz constant"), Row("Theorem 3, Σ ‖w‖ ‖V‖")
    any_time = Row("Theorem 3 at any time, Σ ‖w‖ ‖V‖")
    stated = Row("Theorem 3 as printed, Lipschitz constant")
    shapes = [(n, points) for n in (1, 2, 3, 5) for points in (3, 4, 6)]
    for k, (n, points) in enumerate(shapes):
        share = count // len(shapes) + (k < count % len(shapes))
        if not share:
            continue
        x = torch.from_numpy(rng.normal(size=(share, points, n)))
        along = (x @ torch.from_numpy(rng.normal(size=(n, 1))))[..., 0]
        middle = along.median(1, keepdim=True).values
        y = (along > middle).long() if k % 2 else torch.from_numpy(rng.integers(0, 2, (share, points)))
        units = int(rng.integers(6, 13))
        v, b, w = train_two_layer(x, y, units, 8000, 10 ** float(rng.uniform(-0.3, 0.3)), k)
        for one in zip(x, y, v, b, w):
            points_, labels, *network = (t.numpy() for t in one)
            bound = exact.why(directional_lipschitz(*network, points_, labels))
            product.why(bound)
            if "at any time" not in bound.terms:
                for row in (exact, product, any_time, stated):
                    row.trainings += 1
                any_time.why(bound)
                stated.why(bound)
                continue
            margins = (2 * labels - 1) * (np.maximum(points_ @ network[0].T + network[1], 0) @ network[2])
            truth = lipschitz_by_enumeration(*network) / margins.min()
            sum_of_products = bound.terms["sum of |w| ‖V‖"]
            exact.add(bound.value, truth)
            product.add(bound.value, sum_of_products)
            any_time.add(bound.terms["at any time"], sum_of_products)
            stated.why(bound)
            stated.add(bound.terms["stated"] if bound.value is not None else None, truth)
    return [exact, product, any_time, stated]


def deep_linear(count: int, rng: np.random.Generator) -> list[Row]:
    five, any_five = Row("Theorem 5, σ₂/σ₁"), Row("Theorem 5 at any time, σ₂/σ₁")
    promised, ranks = Row("Theorem 5, promised by the initial weights and drift"), Row("Theorem 5, rank above 0.1 σ₁")
    four, any_four = Row("Theorem 4, σ₂"), Row("Theorem 4 at any time, σ₂")
    rank_four = Row("Theorem 4, rank above 0.001")
    shapes = [[4], [6], [5, 4], [6, 6], [5, 5, 5], [4, 4, 4, 4]]
    for k, widths in enumerate(shapes):
        share = count // len(shapes) + (k < count % len(shapes))
        if not share:
            continue
        n, points = int(rng.integers(2, 6)), int(rng.integers(3, 10))
        x = torch.from_numpy(rng.normal(size=(share, points, n)))
        y = (x @ torch.from_numpy(rng.normal(size=(n, 1))))[..., 0] > 0
        y[:, 0], x[:, 0] = True, torch.where(y[:, :1], x[:, 0], -x[:, 0])  # at least one point with label 1
        scale = float(rng.uniform(0.1, 0.3))
        first, weights = train_deep_linear(
            x, y.double(), widths, 6000, 10 ** float(rng.uniform(-0.5, 0)), k, scale=scale
        )
        for t in range(share):
            mine, start = [w[t] for w in weights], [w[t] for w in first]
            bound = five.why(cross_entropy_rank(mine, x[t], y[t], start))
            measured = max(b / a for a, b in zip(bound.terms["first"], bound.terms["second"]))
            five.add(bound.value, measured)
            any_five.add(float(bound.terms["value by layer"].max()), measured)
            promised.why(bound)
            promised.add(bound.terms["promised, with drift"] if bound.value is not None else None, measured)
            ranks.why(bound)
            ranks.add(1.0 if bound.value is not None else None, max(bound.terms["rank"]))
        mu = 10 ** float(rng.uniform(-1, 0.7))
        for steps in (10, 4000):
            _, weights = train_deep_linear(x, y.double(), widths, steps, 0.01, k, decay=mu)
            for t in range(share):
                bound = decay_rank([w[t] for w in weights], mu, x[t], y[t])
                any_four.add(float(bound.terms["value by layer"].max()), max(bound.terms["second"]))
                if steps > 10:
                    four.why(bound)
                    rank_four.why(bound)
                    four.add(bound.value, max(bound.terms["second"]))
                    rank_four.add(1.0 if bound.value is not None else None, max(bound.terms["rank"]))
    return [five, any_five, promised, ranks, four, any_four, rank_four]


def regularization(count: int, rng: np.random.Generator) -> str:
    worst = back = 0.0
    none = held = 0
    for k in range(count):
        n, points = int(rng.integers(1, 12)), int(rng.integers(1, 20))
        x = rng.normal(size=(points, n))
        x = x if k % 4 else np.column_stack([x, x[:, 0]])
        y = rng.normal(size=points) * 10 ** rng.uniform(-1, 1)
        norm, power = ("1", "2", "inf")[k % 3], float(rng.choice([1.0, 1.2, 1.5, 2.0, 3.0, 5.0]))
        penalty = 10 ** rng.uniform(-3, 2)
        there = radius_of_penalty(x, y, penalty, norm, power)
        if there.radius is None:
            none += 1
            continue
        again = penalty_of_radius(x, y, there.radius, norm, power)
        held += there.holds and again.holds
        worst, back = max(worst, there.difference), max(back, abs(again.penalty / penalty - 1))
    return (
        f"Theorem 6: {count} problems, p in 1, 2, ∞, m from 1 to 5. {none} have m = 1 and λ ≥ 2‖X'y‖_q: no ε. Of the others "
        f"{held} hold and {count - none - held} do not; largest relative difference of Xw or ‖w‖ {worst:.1e}, of λ after "
        f"λ → ε → λ {back:.1e}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainings", type=int, default=220, help="random trainings per statement")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rng, start = np.random.default_rng(options.seed), time.perf_counter()
    print(
        "| statement | trainings | with a value | violated | bound/truth: median (range) | infinite | without a value |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for part, times in ((linear, 1), (two_layer, 2), (deep_linear, 2)):
        for row in part(times * options.trainings, rng):
            print(row, flush=True)
    print(f"\n{regularization(options.trainings, rng)}\n\nTook {time.perf_counter() - start:.0f} s.")


if __name__ == "__main__":
    main()
