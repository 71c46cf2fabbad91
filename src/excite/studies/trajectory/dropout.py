"""Theorem 3 of What training reveals, with Lemmas 3 and 4: is λ_steady a bound, is it tight, and does the error bound say anything?

Small networks learn two clouds or random labels with ½-dropout at the end of the pass, as the paper defines it, one point per step. Beside
λ_steady stand the largest local constant that is found, which a bound has to exceed, the product of norms, which always is one, and the
program of Theorem 2 over the dropout patterns that were seen, which holds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from excite.bounds import dropout_generalization
from excite.bounds.relu_network import relu_network
from excite.bounds.trajectory.patterns import patterns, slopes
from excite.studies.computed import Computed, OnProgress, Outcome, StepsScale
from excite.studies.figures import COLOURS
from excite.studies.study import Claim, Study, Variant, VariantResult
from excite.train import train_with_dropout

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLOUDS = {widths: f"{'-'.join(map(str, widths))}, two clouds" for widths in ((2, 4, 1), (2, 16, 1), (2, 6, 6, 1))}
NOISE = {widths: f"{'-'.join(map(str, widths))}, random labels" for widths in ((2, 4, 1), (2, 6, 6, 1))}
TWO = "two units, always active"
LARGEST = 1e12  # larger constants, infinite ones too, count as this
_PAPER = "What training reveals"
_POINTS, _NEW = 40, 300

SCALES = {
    "quick": StepsScale(name="quick", seeds=3, steps=2_000, words="2,000 steps, 3 seeds"),
    "paper": StepsScale(name="paper", seeds=5, steps=5_000, words="5,000 steps, 5 seeds; the paper has no experiment"),
}


def variants(scale: StepsScale) -> list[Variant]:
    """Networks and tasks."""
    base = {"steps": scale.steps, "points": _POINTS, "lr": 0.02}
    return [
        *(Variant(name, {**base, "widths": list(w), "noise": False}) for w, name in CLOUDS.items()),
        *(Variant(name, {**base, "widths": list(w), "noise": True}) for w, name in NOISE.items()),
        Variant(TWO, {**base, "widths": [2, 2, 1], "noise": True, "lr": 1e-6, "active": True}),
    ]


def data(count: int, noise: bool, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Points of two clouds around (1, 1) and (−1, −1), with their labels or random ones."""
    y = torch.randint(0, 2, (count,), generator=generator)
    x = 0.5 * torch.randn(count, 2, generator=generator, dtype=torch.float64) + (2 * y[:, None] - 1)
    return x, torch.randint(0, 2, (count,), generator=generator) if noise else y


def network(widths: Sequence[int], seed: int, active: bool) -> nn.Sequential:
    """A ReLU network; `active`: all of its units are active everywhere, and its output stays near one half."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [layer for n, m in pairwise(widths) for layer in (nn.Linear(n, m), nn.ReLU())]
        model = nn.Sequential(*layers[:-1]).double()
    with torch.no_grad():
        for layer in [layer for layer in model if isinstance(layer, nn.Linear)][:-1]:
            layer.bias.fill_(0.5)  # so that most units are active at some point, as the theorem assumes
        if active:
            for parameter, value in zip(model.parameters(), (1.0, 20.0, 0.01, -0.2 * widths[1])):
                parameter.fill_(value)
    return model


def compute(settings: Mapping[str, Any], seed: int, on_progress: OnProgress) -> Outcome:
    """One training, and the constants of the network it ends at."""
    generator = torch.Generator().manual_seed(seed)
    x, y = data(settings["points"], settings["noise"], generator)
    fresh, labels = data(2_000, settings["noise"], generator)
    model = network(settings["widths"], seed, settings.get("active", False))
    tail = min(1_000, settings["steps"])
    run = train_with_dropout(
        model, x, y, settings["steps"], settings["lr"], tail=tail, decay=0.1, seed=seed, progress=on_progress
    )
    new = fresh[:_NEW]
    result = dropout_generalization(run, x, new)
    net = relu_network(list(run.pairs), new)
    truth = 0.25 * slopes(net, patterns(net, new))[1]  # the most that the slope can be in the region
    reached = result.program.reached
    over = (truth[reached] / result.program.values[reached]).nan_to_num(0.0)
    errors = [float(((run.module()(p)[:, 0] > 0.5).long() != t).double().mean()) for p, t in ((x, y), (fresh, labels))]
    values = {
        "steady": min(result.steady, LARGEST),
        "found": result.found,
        "product": result.product,
        "violation": float(over.max()) if len(over) else 0.0,
        "reached": result.program.share,
        "lemma4": float(next(iter(result.lemma4.values())).bounds[0]),
        "difference": abs(errors[0] - errors[1]),
    }
    return Outcome(values, {"constants": {name: values[name] for name in ("steady", "product", "found")}})


def claims(scale: StepsScale) -> list[Claim]:
    """Claims of the paper, as numbers to check."""
    every = (*CLOUDS.values(), *NOISE.values())
    return [
        *(_above(name) for name in (*every, TWO)),
        *(_tighter(name) for name in every),
        *(_says_something(name) for name in every),
        Claim(
            "errors on training points and on new ones differ by less than the bound of Lemma 4, where it is below 1",
            f"{_PAPER}, Lemma 4", "largest difference over bound, networks with a bound below 1", every,
            lambda n: max(n[name].difference / n[name].lemma4 for name in every if n[name].lemma4 < 1), below=1.0, kind="universal",
            premise=lambda n: any(n[name].lemma4 < 1 for name in every),
        ).quoting("with probability at least 1 − δ − o(1), we have |E[er(g(x), y)] − avg er(g(x_i), y_i)| ≤ …"),
        Claim(
            "the program of Theorem 2 over the dropout patterns seen holds", "excite.bounds.dropout_generalization",
            "largest local constant over its bound, all networks", every,
            lambda n: max(n[name].violation for name in every), below=1 + 1e-9, kind="universal",
        ),
    ]  # fmt: skip


def _above(name: str) -> Claim:
    return Claim(
        f"λ_steady is at least every local constant found, {name}", f"{_PAPER}, Lemma 3",
        f"{name}: largest constant found over λ_steady", (name,), lambda n: n[name].found / n[name].steady,
        below=1 + 1e-9, kind="universal", premise=lambda n: n[name].steady < LARGEST,
    ).quoting("The global Lipschitz constant of f^(t) is with high probability λ_f ≤ c log(Σ n_l) ‖φ_T‖_∞ := λ_f^steady", "weaker")  # fmt: skip


def _tighter(name: str) -> Claim:
    return Claim(
        f"λ_steady is below the product of norms, {name}", f"{_PAPER}, section 5.2",
        f"{name}: log10 of λ_steady over the product of norms", (name,),
        lambda n: math.log10(n[name].steady / n[name].product), below=0.0, premise=lambda n: n[name].steady < LARGEST,
    ).quoting("The bound above comes in sharp contrast with the product-of-norms bound", "stronger")  # fmt: skip


def _says_something(name: str) -> Claim:
    return Claim(
        f"the error bound with λ_steady says something: it is below 1, {name}", f"after {_PAPER}, Theorem 3",
        f"{name}: bound of Lemma 4, with the covering number from below", (name,), lambda n: n[name].lemma4, below=1.0, kind="universal",
    ).quoting("steady training with Dropout implies a training- and datadependent generalization bound", "ours")  # fmt: skip


def draw(
    study: Study, scale: Any, details: Mapping[str, list[Any]], numbers: Sequence[VariantResult]
) -> dict[str, tuple[str, Figure]]:
    """A row per network: the three constants of every seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 1.4 + 0.55 * len(details)), layout="constrained")
    axis = figure.subplots()
    styles = {"found": ("largest constant found", COLOURS[0], "o"), "product": ("product of norms (holds)", COLOURS[2], "s"),
              "steady": ("λ_steady", COLOURS[1], "D")}  # fmt: skip
    for row, seeds in enumerate(details.values()):
        for name, (label, colour, marker) in styles.items():
            values = [min(seed["constants"][name], LARGEST) for seed in seeds]
            spread = np.full(len(values), row) + {"found": -0.2, "product": 0.0, "steady": 0.2}[name]
            axis.plot(
                values,
                spread,
                marker,
                color=colour,
                linestyle="none",
                alpha=0.75,
                markersize=6,
                label=label if row == 0 else None,
            )
    axis.set_yticks(range(len(details)), list(details))
    axis.invert_yaxis()
    axis.set(xscale="log", xlabel=f"Lipschitz constant, and bounds on it (beyond {LARGEST:.0e}: drawn there)")
    axis.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    figure.suptitle(study.title, fontsize=12)
    return {"figure": (f"{study.title}: λ_steady, the product of norms and the largest constant found", figure)}


STUDY = Study(
    "dropout",
    "Steady training with dropout: what Theorem 3 says",
    "Theorem 3 with Lemmas 3 and 4 of What Training Reveals about Neural Network Complexity (the paper has no figure of it)",
    "Two clouds in the plane, or random labels; networks of one and two hidden layers with ½-dropout",
    Computed(
        compute,
        {
            "steady": ("λ_steady", "{:.3g}"),
            "product": ("product of norms", "{:.3g}"),
            "found": ("largest found", "{:.3g}"),
            "reached": ("program reaches", "{:.0%}"),
            "violation": ("truth over program", "{:.3f}"),
            "lemma4": ("Lemma 4", "{:.2f}"),
            "difference": ("errors differ by", "{:.3f}"),
        },
        draw,
        "A row per network, a mark per seed. λ_steady has to lie to the right of the largest constant found to be a bound, and to the left\n"
        "of the product of norms to be of use.",
        "Means over seeds, with the range. *Lemma 4* is its bound on the difference of errors with λ_steady and the covering number from below:\n"
        "above 1 it is vacuous. λ_steady is infinite (shown as 1e+12) where a unit is active at no training point, p_min = 0, which the\n"
        "theorem excludes: there the first two claims are not tested.",
        ("Units are dropped at the end of the pass with probability ½, as the paper defines it; SGD with one point per step, cross-entropy.",),
    ),
    SCALES,
    variants,
    claims,
    (
        "Theorem 3 is not proved: its Claim 1 is false for two hidden layers of width 3 (see [Theory](../theory/reveals.md)).",
        "Biases of hidden layers begin at 0.5, so that most units are active at some training point.",
        "The settings were not fixed in advance: with biases from 0 and learning rate 0.1 λ_steady was infinite in most runs, so that nothing could be judged; both, and the premises, were chosen after that.",
        "The two units that are always active are chosen to make λ_steady small: outputs near one half, log 2 below 1.",
    ),
    asks="does dropout generalize?",
    seconds={"quick": 10, "paper": 100},
    sources=("reveals:Theorem 3", "reveals:Lemma 3", "reveals:Lemma 4"),
)  # fmt: skip
