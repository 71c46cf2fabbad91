"""The cost model of `benchmarks.scaling`: fitted to measurements by least squares with bounds, and its predictions.

In units of one forward pass of the batch a plain step is 3 (forward, backward by inputs, backward by weights). Excitation with
k search steps and `turns` searches for the direction is, by the code of `excite.excitation.search`,

    2 + 2 turns        the clean pass and its gradient by inputs; each turn a forward and a gradient once more
    + 4 (k − 1)        later steps on the batch twice, gradients by inputs only
    + 6                the loss on the batch twice, gradients by weights as well

so work(k, turns) = (4k + 4 + 2 turns) / 3 plain steps, in k + 1 + turns forward passes over all n affine layers.

    excited      = a · work · plain + b · n · passes
    measurement  = a · plain · example/batch + b · P + c · n + d · G        one of all default probes
    ledger       = a · P' + b · n                                           added to every step

All coefficients are at least 0, except b of the excited step: below 0 it says that a part of the plain step of a small network
is calling kernels, which does not double with the batch. P: parameters; P': those under a conservation law; G = Σ min(m, n)² max(m, n) over the weight matrices, up to 4096: the matrices
of inner products that alignment forms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import lsq_linear

SEARCH = 4
EVERY = 50  # steps between two measurements of the default probes
FLOOR = 0.02  # of a plain step: errors of what costs less than this count as if it cost this
GRAM = 4096  # excite.probes.layer_alignment.leading forms the matrix of inner products up to this size


@dataclass(frozen=True)
class Measurement:
    """One network at one batch; times are seconds, memory bytes."""

    family: str
    name: str
    batch: int
    parameters: int
    layers: int  # affine
    turns: int  # of the search for the direction: 1 for several outputs, 0 for one
    flops: float  # of a plain step, forward and backward
    grams: float
    example: int  # samples on which watch looks
    under_law: int  # parameters under a conservation law
    plain: float
    excited: float
    ledger: float
    between: float  # a watched step at which nothing is due
    measurement: float  # what one measurement of all default probes adds
    peak_plain: float | None = None
    peak_excited: float | None = None
    watch_bytes: float | None = None


@dataclass(frozen=True)
class Target:
    """A training nobody ran here. `flops` of a plain step on one GPU; `shares`: GPUs among which the weights are cut."""

    name: str
    shapes: tuple[tuple[int, int], ...]  # of the affine layers, kernels flattened
    parameters: float
    flops: float
    batch: int
    turns: int
    family: str  # whose rate of arithmetic is taken
    rate: float | None = None  # operations per second, where one is assumed
    shares: int = 1
    example: int = 32


@dataclass(frozen=True)
class Fit:
    """The coefficients that minimise the sum of squared errors, relative to the time or to its floor."""

    terms: tuple[str, ...]
    coefficients: tuple[float, ...]
    r2: float  # of the times themselves
    worst: float  # largest relative error
    left_out: float  # largest relative error of a network that the fit has not seen


def grams(shapes: Sequence[tuple[int, ...]]) -> float:
    return float(sum(min(s) ** 2 * max(s) for s in shapes if min(s) <= GRAM))


def work(steps: int, turns: int) -> float:
    """An excited step in plain ones, arithmetic only."""
    return (4 * steps + 4 + 2 * turns) / 3


def fit(
    terms: Sequence[str],
    columns: Sequence[Sequence[float]],
    times: Sequence[float],
    floors: Sequence[float] | None = None,
    signed: Sequence[str] = (),
) -> Fit:
    """`columns`: one per measurement, an entry per term. Coefficients are ≥ 0 but those of the terms in `signed`."""
    table, target = np.asarray(columns, dtype=float), np.asarray(times, dtype=float)
    unit = np.maximum(target, 0.0 if floors is None else np.asarray(floors))
    low = np.array([-np.inf if term in signed else 0.0 for term in terms])
    solved = _solve(table, target, unit, low)
    errors = table @ solved - target
    left = []
    for i in range(len(target)):
        seen = np.arange(len(target)) != i
        left.append(abs(table[i] @ _solve(table[seen], target[seen], unit[seen], low) - target[i]) / unit[i])
    spread = float(((target - target.mean()) ** 2).sum())
    r2 = 1 - float((errors**2).sum()) / spread if spread else float("nan")
    return Fit(tuple(terms), tuple(map(float, solved)), r2, float(np.abs(errors / unit).max()), float(max(left)))


def _solve(table: np.ndarray, target: np.ndarray, unit: np.ndarray, low: np.ndarray) -> np.ndarray:
    relative = table / unit[:, None]
    scale = np.where(relative.max(0) > 0, relative.max(0), 1.0)  # columns of one size: seconds, parameters, layers
    found = lsq_linear(relative / scale, target / unit, (low, np.inf), method="bvls")
    return np.asarray(found.x) / scale


def excited_terms(plain: float, layers: int, turns: int, steps: int = SEARCH) -> list[float]:
    return [work(steps, turns) * plain, layers * (steps + 1 + turns)]


def measurement_terms(plain: float, share: float, parameters: float, layers: int, grams: float) -> list[float]:
    """`share`: samples of the example over those of a batch."""
    return [plain * share, parameters, layers, grams]


class Model:
    """The three fits, and the best rate of arithmetic that each family reached."""

    def __init__(self, found: Sequence[Measurement]):
        floors = [FLOOR * m.plain for m in found]
        self.networks = len(found)
        self.excited = fit(
            ("work · plain step", "layer and pass, s"),
            [excited_terms(m.plain, m.layers, m.turns) for m in found],
            [m.excited for m in found],
            signed=("layer and pass, s",),
        )
        self.measurement = fit(
            ("plain step · example/batch", "parameter, s", "layer, s", "operation of G, s"),
            [measurement_terms(m.plain, m.example / m.batch, m.parameters, m.layers, m.grams) for m in found],
            [m.measurement for m in found],
            floors,
        )
        self.ledger = fit(
            ("parameter, s", "layer, s"),
            [[m.under_law, m.layers] for m in found],
            [m.ledger - m.plain for m in found],
            floors,
        )
        self.rates = {f: max(m.flops / m.plain for m in found if m.family == f) for f in {m.family for m in found}}

    def predict(self, target: Target) -> dict[str, float]:
        """Seconds: plain, excited, what watch and what the ledger add to a step; bytes they keep on a GPU."""
        plain = target.flops / (target.rate or self.rates[target.family])
        n, own = len(target.shapes), target.parameters / target.shares
        one = measurement_terms(plain, target.example / target.batch, own, n, grams(target.shapes))
        return {
            "plain": plain,
            "excited": _dot(self.excited, excited_terms(plain, n, target.turns)),
            "measurement": _dot(self.measurement, one),
            "watch": _dot(self.measurement, one) / EVERY,
            "ledger": _dot(self.ledger, [own, n]),
            "watch_bytes": 9 * own,  # where training began (4), the sign (1) and the step of its last change (4)
            "ledger_bytes": 4 * own,  # weights before the step; as much again where decay acts through momentum
        }


def _dot(fit: Fit, terms: Sequence[float]) -> float:
    return float(np.dot(fit.coefficients, terms))


def resnet50_shapes() -> tuple[tuple[int, int], ...]:
    shapes, before = [(64, 3 * 49)], 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += [(width, before), (width, 9 * width), (4 * width, width)]
            shapes += [(4 * width, before)] if block == 0 else []
            before = 4 * width
    return (*shapes, (1000, 2048))


VIT = ((768, 768), *((2304, 768), (768, 768), (3072, 768), (768, 3072)) * 12, (1000, 768))
LANGUAGE = (*(((4096, 4096),) * 4 + ((11008, 4096),) * 3) * 32, (32000, 4096))
TOKENS = 4 * 2048  # of one GPU in a step
TARGETS = (
    Target("ResNet-50, ImageNet", resnet50_shapes(), 25.6e6, 3 * 2 * 4.1e9 * 256, 256, 1, "resnet"),
    Target("ViT-B/16, ImageNet", VIT, 86e6, 3 * 2 * 17.6e9 * 256, 256, 1, "transformer"),
    Target("7 B language model, 64 GPUs", LANGUAGE, 6.7e9, 6 * 6.7e9 * TOKENS, 4, 0, "transformer", None, 64, 1),
    Target("the same, 400 TFLOP/s in bfloat16", LANGUAGE, 6.7e9, 6 * 6.7e9 * TOKENS, 4, 0, "transformer", 4e14, 64, 1),
)


# -- tables ----------------------------------------------------------------------------------------------------------
def page(where: str, found: Sequence[Measurement]) -> str:
    model = Model(found)
    memory = _memory(found)
    # The rate that is assumed is one of a GPU: it says nothing beside the times of a CPU.
    targets = [target for target in TARGETS if target.rate is None or memory]
    return "\n\n".join([f"{where}, float32", _measured(found), *memory, _fits(model), _predicted(found, targets)])


def _measured(found: Sequence[Measurement]) -> str:
    lines = [
        "| network | batch | parameters | layers | plain, ms | TFLOP/s | excited / plain | work | measurement, ms "
        f"| watch adds, every {EVERY} | ledger adds |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for m in found:
        lines.append(
            f"| {m.name} | {m.batch} | {_count(m.parameters)} | {m.layers} | {1e3 * m.plain:.2f} "
            f"| {m.flops / m.plain / 1e12:.3g} | {m.excited / m.plain:.2f} | {work(SEARCH, m.turns):.2f} "
            f"| {1e3 * m.measurement:.2f} | {m.measurement / EVERY / m.plain:.2%} | {m.ledger / m.plain - 1:+.1%} |"
        )
    return "\n".join(lines)


def _memory(found: Sequence[Measurement]) -> list[str]:
    known = [m for m in found if m.peak_plain and m.peak_excited]
    if not known:
        return []
    kept = all(m.watch_bytes is not None for m in known)
    lines = ["| network | batch | peak plain, MiB | peak excited, MiB | ratio |", "|---|---|---|---|---|"]
    lines = [line + (" watch keeps, bytes per parameter |", "---|")[i] * kept for i, line in enumerate(lines)]
    for m in known:
        plain, excited = m.peak_plain or 0.0, m.peak_excited or 0.0
        line = f"| {m.name} | {m.batch} | {plain / 2**20:.0f} | {excited / 2**20:.0f} | {excited / plain:.2f} |"
        lines.append(line + (f" {m.watch_bytes / m.parameters:.1f} |" if kept and m.watch_bytes is not None else ""))
    return ["\n".join(lines)]


def _fits(model: Model) -> str:
    lines = ["| | coefficients | R² | largest error | largest error left out |", "|---|---|---|---|---|"]
    names = ("excited step", "measurement", "ledger, per step")
    for name, one in zip(names, (model.excited, model.measurement, model.ledger)):
        terms = ", ".join(f"{value:.3g} per {term}" for term, value in zip(one.terms, one.coefficients))
        lines.append(f"| {name} | {terms} | {one.r2:.3f} | {one.worst:.0%} | {one.left_out:.0%} |")
    return "\n".join(lines)


def _predicted(found: Sequence[Measurement], targets: Sequence[Target]) -> str:
    """With the range of the predictions of all fits that leave one network out."""
    model, others = Model(found), [Model([*found[:i], *found[i + 1 :]]) for i in range(len(found))]
    lines = [
        "| training | plain, ms | excited, ms | ratio | measurement, ms | watch adds | ledger adds | watch keeps, GiB "
        "| ledger keeps, GiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for target in targets:
        p, rest = model.predict(target), [other.predict(target) for other in others]
        ratio, watch, ledger = (
            _range(p[name] / p["plain"], [r[name] / r["plain"] for r in rest], form)
            for name, form in (("excited", ".1f"), ("watch", ".2%"), ("ledger", ".2%"))
        )
        lines.append(
            f"| {target.name} | {1e3 * p['plain']:.0f} | {1e3 * p['excited']:.0f} | {ratio} "
            f"| {1e3 * p['measurement']:.0f} | {watch} | {ledger} "
            f"| {p['watch_bytes'] / 2**30:.2f} | {p['ledger_bytes'] / 2**30:.2f} |"
        )
    return "\n".join(lines)


def _range(value: float, others: Sequence[float], form: str) -> str:
    return f"{value:{form}} ({min(others):{form}} to {max(others):{form}})"


def _count(number: int) -> str:
    return f"{number / 1e6:.3g} M"
