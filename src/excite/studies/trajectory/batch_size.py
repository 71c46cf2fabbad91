"""Figure 9: what the batch size does to the trajectory of the first bias, for two frequencies.

The task and networks of `frequency`, trained with batches of 1, 16 and 32 for the same number of steps. The normalized update
is that of every sample, whatever the batch (see `excite.probes.Trajectory`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy import stats

from excite.studies.computed import Computed, Jointly, OnProgress, Outcome, StepsScale
from excite.studies.figures import DASHES
from excite.studies.study import Claim, Study, Variant, VariantResult
from excite.studies.trajectory.frequency import network, points, thinned
from excite.studies.trajectory.trajectory_figures import COLOURS, bands, curve
from excite.train import ensemble
from excite.train.from_config import find_device

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZES = (1, 16, 32)
FREQUENCIES = (0.25, 0.75)
_FIGURE = "What training reveals, figure 9"
_POINTS, _WINDOWS = 100, 200

SCALES = {
    "quick": StepsScale(
        name="quick",
        seeds=3,
        steps=60_000,
        words="60,000 steps, 3 repeats; too few for the higher frequency to be fitted",
    ),
    "paper": StepsScale(
        name="paper", seeds=10, steps=300_000, words="300,000 steps, as many as `frequency`, 10 repeats"
    ),
}


def name(omega: float, size: int) -> str:
    """Name of the variant."""
    return f"ω = {omega:g}, batch {size}"


def variants(scale: StepsScale) -> list[Variant]:
    """Variants that are trained at a scale."""
    base = {"steps": scale.steps, "points": _POINTS, "test": 30, "lr": 1e-3, "widths": [10, 32, 32, 32]}
    return [Variant(name(w, size), {**base, "omega": w, "batch": size}) for w in FREQUENCIES for size in SIZES]


def compute(
    settings_and_seeds: Sequence[tuple[Mapping[str, Any], int]], device: str, on_progress: OnProgress
) -> list[Outcome]:
    """One ensemble for each batch size."""
    place = find_device(device)
    result: dict[int, Outcome] = {}
    sizes = sorted({settings["batch"] for settings, _ in settings_and_seeds})
    for turn, size in enumerate(sizes):
        chosen = [i for i, (settings, _) in enumerate(settings_and_seeds) if settings["batch"] == size]
        settings = settings_and_seeds[chosen[0]][0]
        drawn = [
            points(settings_and_seeds[i][0]["omega"], settings_and_seeds[i][1], settings["points"], settings["test"])
            for i in chosen
        ]
        x, y, x_test, y_test = (torch.stack(tensors).to(place) for tensors in zip(*drawn))
        epoch = math.ceil(settings["points"] / size)
        trained = ensemble(
            [network(settings_and_seeds[i][1], settings["widths"]).to(place) for i in chosen],
            x,
            y,
            epochs=max(1, settings["steps"] // epoch),
            batch=size,
            lr=settings["lr"],
            seeds=[settings_and_seeds[i][1] for i in chosen],
            test=(x_test, y_test),
            window=max(1, settings["steps"] // _WINDOWS),
            progress=lambda _, done, total, turn=turn: on_progress((turn + done / total) / len(sizes)),  # type: ignore[misc]
        )
        at = trained.window * np.arange(1.0, trained.loss.shape[1] + 1)
        for row, i in enumerate(chosen):
            loss, mean = trained.loss[row].numpy(), trained.trajectory.mean[row].numpy()
            test = trained.test_loss[row].numpy()  # type: ignore[index]
            last = max(1, len(loss) // 20)
            values = {
                "loss": float(loss[-last:].mean()),
                "trajectory": float(mean[-last:].mean()),
                "average": float(mean.mean()),
                "test": float(test[-last:].mean()),
            }
            curves = {"steps": at, "loss": loss, "mean": mean, "test": test}
            result[i] = Outcome(values, {key: thinned(curve) for key, curve in curves.items()})
    return [result[i] for i in range(len(settings_and_seeds))]


def _longer(size: int) -> Claim:
    low, high = (name(w, size) for w in FREQUENCIES)

    def effect(n: Mapping[str, VariantResult]) -> float:
        return math.log10(n[high].trajectory / n[low].trajectory)

    return Claim(
        f"with batches of {size} the trajectory is longer for the higher frequency",
        _FIGURE,
        "normalized update at the end, log10 of the ratio of ω = 0.75 to ω = 0.25",
        (low, high),
        effect,
        above=0.0,
    ).quoting("The trajectory length correlates with the NN's complexity for different batch sizes.")


def _larger(omega: float) -> Claim:
    single, many = name(omega, 1), name(omega, 32)

    def effect(n: Mapping[str, VariantResult]) -> float:
        return math.log10(n[many].trajectory / n[single].trajectory)

    return Claim(
        f"batches of 32 instead of 1 make the trajectory slightly longer, ω = {omega:g}",
        _FIGURE,
        "normalized update at the end, log10 of the ratio of batch 32 to batch 1",
        (single, many),
        effect,
        above=0.0,
    ).quoting("Increasing the batch size from 1 to 32 also leads to a slight increase in trajectory length")


def claims(scale: StepsScale) -> list[Claim]:
    """Claims of the paper, as numbers to check."""
    every = tuple(name(w, size) for w in FREQUENCIES for size in SIZES)

    def together(n: Mapping[str, VariantResult]) -> float:
        return float(stats.spearmanr([n[a].trajectory for a in every], [n[a].test for a in every]).statistic)

    return [
        *(_longer(size) for size in SIZES),
        Claim("longer trajectories go with higher test loss", _FIGURE, "rank correlation over the six ways", every, together, above=0.0).quoting(
            "a longer bias trajectory indicating that the NN is fitting a more complex hypothesis and correlating with higher test loss"),
        *(_larger(w) for w in FREQUENCIES),
    ]  # fmt: skip


def draw(
    study: Study, scale: Any, details: Mapping[str, list[Any]], numbers: Sequence[VariantResult]
) -> dict[str, tuple[str, Figure]]:
    """Figure 9: loss, normalized update and test loss; both frequencies in one panel, as columns would hide that scales differ."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.4), layout="constrained")
    axes = figure.subplots(1, 3)
    panels = (
        ("loss", "training loss", "log"),
        ("mean", "normalized update, mean over samples", "linear"),
        ("test", "test loss", "log"),
    )
    for axis, (name, label, how) in zip(axes, panels):
        for number, (variant, repeats) in enumerate(details.items()):
            half = max(1, len(details) // 2)
            colour = COLOURS[3 * (number // half)] if number // half < 2 else COLOURS[1]
            curve(axis, repeats, name, "steps", variant, colour, DASHES[(number % half) % len(DASHES)])
        axis.set(title=label, xlabel="step, thousands", yscale=how)
        axis.xaxis.set_major_formatter(lambda step, _: f"{step / 1000:g}")
        axis.grid(alpha=0.3)
    axes[1].set_ylim(bottom=0)
    axes[1].legend(fontsize=8, framealpha=0.9)
    figure.suptitle(f"{study.title}\n{bands(details)}", fontsize=12)
    return {"figure": (f"{study.title}: loss, normalized update and test loss by step", figure)}


STUDY = Study(
    "batch-size",
    "Batch size and the trajectory of the first bias",
    "figure 9 of What Training Reveals about Neural Network Complexity",
    "The task of `frequency` at ω = 0.25 and 0.75; networks 10-10-32-32-32-1",
    Computed(
        Jointly(compute),
        {
            "loss": ("training loss", "{:.4f}"),
            "trajectory": ("normalized update", "{:.3f}"),
            "average": ("over the whole run", "{:.3f}"),
            "test": ("test loss", "{:.4f}"),
        },
        draw,
        "One colour per frequency, one dash per batch size; lines are means over repeats, bands show their range. The\n"
        "normalized update is the mean over samples of ‖dL/dz‖ / |dL/df|, which with the identity as first weight is the Lipschitz\n"
        "constant of the network at the sample. Where no dashes are visible, the curves of the batch sizes coincide.",
        "Means over repeats, with the range. *Training loss*, *normalized update* and *test loss* are means over the last twentieth\n"
        "of the steps.",
        (
            "SGD, learning rate 0.001, mean of the half squared error over the batch, float32; the same number of steps for all.",
        ),
    ),
    SCALES,
    variants,
    claims,
    (
        "The paper does not say how its number of steps depends on the batch; here it is the same for all, as in its figure.",
        "The authors' program divides the update of a whole batch by the error of its first sample. Here every sample has its own "
        "update and error, so that batches do not average directions away.",
    ),
    asks="trajectory and batch size",
    seconds={"quick": 27},
    sources=("reveals:figure 9",),
)
