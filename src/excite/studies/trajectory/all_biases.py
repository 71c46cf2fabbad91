"""Figure 10: the trajectories of the biases of all layers, for four frequencies, with the first weight trained too.

The normalized update of the bias of layer l is the slope of the network as a function of what that layer's activation is
given: the slope of everything after the layer (appendix A.7).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy import stats

from excite.studies.computed import Computed, Jointly, OnProgress, Outcome, StepsScale
from excite.studies.study import Claim, Study, Variant, VariantResult
from excite.studies.trajectory.frequency import FIT, points, thinned
from excite.studies.trajectory.trajectory_figures import bands, curves
from excite.train import build, ensemble
from excite.train.from_config import find_device

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FREQUENCIES = (0.25, 0.5, 0.75, 1.0)
VARIANTS = tuple(f"ω = {omega:g}" for omega in FREQUENCIES)
LAYERS = 5
LAST = 10  # epochs at the end, and of every window
_FIGURE = "What training reveals, figure 10"
_THREE = "the bias dynamics correlate with task complexity for the first three layers, while being uncorrelated for the last two"
_POINTS = 100

SCALES = {
    "quick": StepsScale(
        name="quick", seeds=3, steps=100_000, words="1,000 epochs instead of 3,000, 3 repeats instead of 10"
    ),
    "paper": StepsScale(name="paper", seeds=10, steps=300_000, words="3,000 epochs of 100 points, 10 repeats"),
}


def variants(scale: StepsScale) -> list[Variant]:
    """Variants that are trained at a scale."""
    base = {"epochs": scale.steps // _POINTS, "points": _POINTS, "test": 30, "lr": 1e-3, "widths": [10, 32, 32, 32]}
    return [Variant(name, {**base, "omega": omega}) for name, omega in zip(VARIANTS, FREQUENCIES)]


def compute(
    settings_and_seeds: Sequence[tuple[Mapping[str, Any], int]], device: str, on_progress: OnProgress
) -> list[Outcome]:
    """All networks at once; those of a seed share points, first weights and order."""
    settings, place = settings_and_seeds[0][0], find_device(device)
    drawn = [points(own["omega"], seed, own["points"], own["test"]) for own, seed in settings_and_seeds]
    x, y, x_test, y_test = (torch.stack(tensors).to(place) for tensors in zip(*drawn))
    widths = settings["widths"]
    trained = ensemble(
        [build("mlp", seed=seed, inputs=10, widths=widths).to(place) for _, seed in settings_and_seeds],
        x,
        y,
        epochs=settings["epochs"],
        lr=settings["lr"],
        seeds=[seed for _, seed in settings_and_seeds],
        test=(x_test, y_test),
        window=min(LAST, settings["epochs"]) * settings["points"],
        layers="all",
        progress=lambda _, done, total: on_progress(done / total),
    )
    result = []
    for i in range(len(settings_and_seeds)):
        loss, test = trained.loss[i].numpy(), trained.test_loss[i].numpy()  # type: ignore[index]
        epochs = trained.trajectories[0].counts.numpy() / settings["points"]
        lengths = [trajectory.length[i].numpy() / epochs for trajectory in trained.trajectories]
        values = {"loss": float(loss[-1]), "test": float(test[-1])}
        values |= {f"length_{k}": float(length[-1]) for k, length in enumerate(lengths, 1)}
        curves = {"epochs": epochs.cumsum(), "loss": loss, "test": test}
        curves |= {f"length_{k}": length for k, length in enumerate(lengths, 1)}
        flags = () if loss[-1] < FIT else (f"training loss {loss[-1]:.2g} at the end, above {FIT}",)
        result.append(Outcome(values, {name: thinned(curve) for name, curve in curves.items()}, flags))
    return result


def order(n: Mapping[str, VariantResult], layer: int) -> float:
    """Rank correlation of frequency and length; 0 if the lengths are all the same."""
    lengths = [getattr(n[variant], f"length_{layer}") for variant in VARIANTS]
    if np.ptp(lengths) <= 1e-6 * max(lengths):
        return 0.0
    return float(stats.spearmanr(FREQUENCIES, lengths).statistic)


def _follows(layer: int) -> Claim:
    return Claim(
        f"the trajectory of bias {layer} follows the frequency", _FIGURE, "rank correlation of length and frequency", VARIANTS,
        lambda n: order(n, layer), above=0.5,
    ).quoting(_THREE, "threshold")  # fmt: skip


def _does_not(layer: int) -> Claim:
    return Claim(
        f"the trajectory of bias {layer} does not follow the frequency", _FIGURE, "rank correlation of length and frequency",
        VARIANTS, lambda n: order(n, layer), below=0.5,
    ).quoting(_THREE, "threshold")  # fmt: skip


def _decay(n: Mapping[str, VariantResult]) -> float:
    logs = [math.log10(n[a].length_1 / getattr(n[a], f"length_{LAYERS}")) for a in VARIANTS]
    return float(np.mean(logs)) / (LAYERS - 1)


def claims(scale: StepsScale) -> list[Claim]:
    """Claims of the paper, as numbers to check."""
    return [
        *(_follows(layer) for layer in (1, 2, 3)),
        _does_not(4),  # bias 5 cannot: its normalized update is 1 by definition
        Claim(
            "the length decays by almost an order of magnitude at each layer", _FIGURE,
            "log10 of the ratio of a layer's length to the next one's, mean over layers and frequencies", VARIANTS, _decay, above=0.7,
        ).quoting("the trajectory length decays by almost an order of magnitude at each layer", "threshold"),
    ]  # fmt: skip


def draw(
    study: Study, scale: Any, details: Mapping[str, list[Any]], numbers: Sequence[VariantResult]
) -> dict[str, tuple[str, Figure]]:
    """Figure 10: losses, and one panel for the bias of every layer."""
    from matplotlib.figure import Figure

    layers = sorted(name for name in next(iter(details.values()))[0] if name.startswith("length_"))
    panels = [("loss", "training loss"), ("test", "test loss")]
    panels += [(name, f"bias {name.removeprefix('length_')}: length of an epoch") for name in layers]
    figure = Figure(figsize=(13, 6.4), layout="constrained")
    axes = list(figure.subplots(2, (len(panels) + 1) // 2).flat)
    for axis, (name, label) in zip(axes, panels):
        curves(axis, details, name)
        axis.set(title=label, xlabel="epoch", yscale="log" if name in ("loss", "test") else "linear")
        if name not in ("loss", "test"):
            axis.set_ylim(0, 1.15 * axis.dataLim.ymax)
        axis.grid(alpha=0.3)
    last = axes[len(panels) - 1]
    last.text(
        0.5, 0.5, "one a step, by definition:\nz of the last layer is f itself", ha="center", transform=last.transAxes
    )
    for axis in axes[len(panels) :]:
        axis.axis("off")
    handles, label = axes[0].get_legend_handles_labels()
    axes[-1].legend(handles, label, loc="center", fontsize=11, frameon=False)
    figure.suptitle(f"{study.title}\n{bands(details)}", fontsize=12)
    return {"figure": (f"{study.title}: losses, and the length of an epoch for every bias, by frequency", figure)}


STUDY = Study(
    "all-biases",
    "The trajectories of the biases of all layers",
    "figure 10 of What Training Reveals about Neural Network Complexity",
    "The task of `frequency`; networks 10-10-32-32-32-1, all weights trained",
    Computed(
        Jointly(compute),
        {
            "loss": ("training loss", "{:.4f}"),
            "test": ("test loss", "{:.4f}"),
            **{f"length_{k}": (f"bias {k}", "{:.1f}") for k in range(1, LAYERS + 1)},
        },
        draw,
        "One colour per frequency; lines are means over repeats, bands show their range. The length of an epoch is\n"
        "the sum of its 100 normalized updates of that layer's bias.",
        "Means over repeats, with the range. Training loss and lengths are means of the last ten epochs. *Bias l*: normalized length of an\n"
        f"epoch. *Trusted*: networks whose training loss went below {FIT}.",
        ("SGD, learning rate 0.001, batch size 1, half squared error, float32; all weights and biases are trained.",),
    ),
    SCALES,
    variants,
    claims,
    (
        "The normalized update of the last bias is 1 for every sample and network, whatever was learned: df/db = 1. That its trajectory is the same for all "
        "frequencies is therefore not a finding.",
    ),
    asks="trajectories of all biases",
    seconds={"quick": 16},
    sources=("reveals:figure 10",),
)
