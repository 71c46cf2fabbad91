"""Figures 2 (bottom), 3c, 4 and 7b: a network that classifies images whose labels are more and more corrupted.

Dogs against planes; a fraction of the training labels is drawn again at random, so that what is to be learned becomes more
complex. SGD image by image: a million steps per network at scale "paper".
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from excite.data import load
from excite.data.dataset import corrupted
from excite.studies.computed import Computed, OnProgress, Outcome, Resumable
from excite.studies.figures import plain_ticks
from excite.studies.study import Claim, Ladder, Scale, Study, Variant, VariantResult
from excite.studies.trajectory.image_trajectory import TrainingLength, network, train, variance
from excite.studies.trajectory.trajectory_figures import bands, curves, dots
from excite.train.from_config import find_device

if TYPE_CHECKING:
    from matplotlib.figure import Figure


FRACTIONS = (0.0, 0.2, 0.4, 0.6)
VARIANTS = tuple(f"{fraction:.0%} corrupted" for fraction in FRACTIONS)
_LADDER = Ladder(VARIANTS, "fraction")
LAST = 10  # epochs at the end
_PAPER = "What training reveals"


@dataclass(frozen=True, kw_only=True)
class ImagesScale(Scale):
    """Numbers of images and epochs, and the network."""

    images: int | None  # None: all 10,000
    test: int | None
    epochs: int
    lr: float = 2.5e-3
    widths: tuple[int, int, int] = (96, 384, 384)


SCALES = {
    "quick": ImagesScale(
        name="quick", seeds=3, images=400, test=400, epochs=40, lr=0.02, widths=(16, 32, 32),
        words="400 training and 400 test images instead of 10,000 and 2,000, 40 epochs instead of 100, learning rate 0.02 instead of 0.0025, 16, 32 and 32 channels and units "
        "instead of 96, 384 and 384, 3 repeats instead of 8",
    ),
    "short": ImagesScale(
        name="short", seeds=3, images=None, test=None, epochs=30,
        words="the authors' network and all 10,000 training images, 30 epochs instead of 100, 3 repeats instead of 8",
    ),
    "paper": ImagesScale(
        name="paper", seeds=8, images=None, test=None, epochs=100, words="the authors' settings: 10,000 images, 100 epochs, 8 repeats"
    ),
}  # fmt: skip


def variants(scale: ImagesScale) -> list[Variant]:
    """Variants that are trained at a scale."""
    base = {
        "images": scale.images, "test": scale.test, "epochs": scale.epochs, "widths": list(scale.widths), "lr": scale.lr,
        "decay": 10 ** (-1 / 50),
    }  # fmt: skip
    return [Variant(name, {**base, "share": fraction}) for name, fraction in zip(VARIANTS, FRACTIONS)]


def compute(settings: Mapping[str, Any], seed: int, device: str, folder: Path, on_progress: OnProgress) -> Outcome:
    """Computes the numbers of one variant and seed."""
    data = load("cifar10", classes=("airplane", "dog"), train=settings["images"], test=settings["test"])
    labels = corrupted(data.y_train.reshape(-1).float(), settings["share"], seed)
    fingerprint = hashlib.sha256(json.dumps(dict(settings), sort_keys=True).encode()).hexdigest()[:8]
    checkpoint = folder / f"progress-{fingerprint}.safetensors"
    result = train(
        network(seed, settings["widths"]),
        (data.x_train, labels, data.x_test, data.y_test.reshape(-1).float()),
        TrainingLength(settings["epochs"], settings["lr"], settings["decay"]),
        seed=seed, device=find_device(device), checkpoint=checkpoint, on_progress=on_progress,
    )  # fmt: skip
    checkpoint.unlink(missing_ok=True)
    return outcome(result)


def outcome(result: dict[str, Tensor]) -> Outcome:
    """Numbers of a finished training."""
    curve = {name: values.numpy() for name, values in result.items()}
    last = min(LAST, len(curve["loss"]))
    values = {
        "loss": float(curve["loss"][-last:].mean()),
        "trajectory": float(curve["length"][-last:].mean()),
        "theirs": float(curve["theirs"][-last:].mean()),
        "total": float(curve["length"].sum()),
        "test": float(curve["test"][-last:].mean()),
        "variance": variance(result, last),
        "distance": float(curve["distance"][-last:].mean()),
    }
    detail = {name: _short(curve[name]) for name in ("loss", "length", "theirs", "test", "distance")}
    detail["total"] = _short(np.cumsum(curve["length"]))
    detail["epochs"] = [float(epoch) for epoch in range(1, len(curve["loss"]) + 1)]
    wrong = [] if np.isfinite(curve["loss"]).all() else ["the training loss did not stay finite"]
    return Outcome(values, detail, tuple(wrong))


def _short(curve: np.ndarray[Any, np.dtype[np.float64]]) -> list[float]:
    return [float(f"{value:.5g}") for value in curve]


_SLOWS = "training slows down as the complexity of the fitted function increases"
_LONGER = "the bias trajectory is significantly longer when fitting higher complexity functions"
_TEST = "longer trajectories consistently corresponding to poorer test performance"
_SAME = "The same variance trend can be seen in Figure 3c for image classification."
_GROWS = "the trajectory length of NNs grows with the complexity of the function they are learning"


def claims(scale: ImagesScale) -> list[Claim]:
    """Claims of the paper, as numbers to check."""
    late = f"mean of the last {LAST} epochs"
    length, reciprocal = f"length per epoch, {late}", f"length per epoch with the reciprocal, {late}"
    return [
        _LADDER.each("training slows down with corruption", f"{_PAPER}, figure 2d", "loss", f"training loss, {late}").quoting(_SLOWS),
        _LADDER.each("the trajectory of an epoch is longer the more labels are corrupted", f"{_PAPER}, figure 2e", "trajectory", length).quoting(_LONGER),
        _LADDER.ends("the trajectory of an epoch is longer with 60 % corrupted than with none", f"{_PAPER}, figure 2e", "trajectory", length).quoting(_LONGER, "weaker"),
        _LADDER.each("normalized by the reciprocal, as the authors' program does, it is longer the more labels are corrupted",
                 f"not in the paper: the authors' program of {_PAPER}", "theirs", reciprocal),
        _LADDER.ends("normalized by the reciprocal it is longer with 60 % corrupted than with none", f"not in the paper: the authors' program of {_PAPER}", "theirs", reciprocal),
        _LADDER.each("the test loss grows with corruption", f"{_PAPER}, figure 2f", "test", f"test loss, {late}").quoting(_TEST),
        _LADDER.each("the variance of the bias near the end grows with corruption", f"{_PAPER}, figure 3c", "variance", "variance").quoting(_SAME),
        _LADDER.ends("the variance of the bias is larger with 60 % corrupted than with none", f"{_PAPER}, figure 3c", "variance", "variance").quoting(_SAME, "weaker"),
        _LADDER.each("the whole trajectory is longer the more labels are corrupted", f"{_PAPER}, figure 7b", "total", "whole length").quoting(_GROWS),
        _LADDER.ends("the whole trajectory is longer with 60 % corrupted than with none", f"{_PAPER}, figure 7b", "total", "whole length").quoting(_GROWS, "weaker"),
        Claim(
            "with cross-entropy the bias does not end further from its start the more labels are corrupted", f"{_PAPER}, figure 4",
            "distance, log10 of the smallest ratio of a fraction to the next lower one", VARIANTS,
            lambda n: float(np.diff(np.log10([n[variant].distance for variant in VARIANTS])).min()), below=0.0,
        ).quoting("the distance is not an increasing function of complexity"),
    ]  # fmt: skip


_CURVES = (
    ("loss", "training loss", "linear"),
    ("length", "normalized trajectory: length of each epoch", "log"),
    ("test", "test loss", "linear"),
    ("theirs", "divided by |1 − ŷ − y|, as the authors do", "log"),
    ("total", "normalized trajectory: length so far", "linear"),
    ("distance", "distance of the bias from its start", "linear"),
)
_DOTS = (("variance", "variance of the bias, last ten epochs"), ("test", "test loss, last ten epochs"))


def draw(
    study: Study, scale: Any, details: Mapping[str, list[Any]], numbers: Sequence[VariantResult]
) -> dict[str, tuple[str, Figure]]:
    """Draws the figures of the study."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 6.8), layout="constrained")
    axes = list(figure.subplots(2, 4).flat)
    order = [0, 1, 2, 4, 5, 6]
    for axis, (name, label, how) in zip([axes[i] for i in order], _CURVES):
        curves(axis, details, name)
        axis.set_title(label, fontsize=11)
        axis.set(xlabel="epoch", yscale=how)
        if how == "linear":
            axis.set_ylim(bottom=0)
    for axis, (name, label) in zip((axes[3], axes[7]), _DOTS):
        dots(axis, list(details), numbers, name)
        axis.set_xticks(range(len(details)), [variant.removesuffix(" corrupted") for variant in details])
        axis.set_title(label, fontsize=11)
        axis.set(xlabel="corrupted labels", yscale="log")
    for axis in axes:
        axis.grid(alpha=0.3)
        if axis.get_yscale() == "log":
            plain_ticks(axis.yaxis, *axis.get_ylim())
    axes[0].legend(fontsize=9, framealpha=0.9)
    figure.suptitle(f"{study.title}\n{bands(details)}, scale {scale.name}", fontsize=12)
    return {
        "figure": (
            f"{study.title}: loss, trajectory, test loss, variance and distance by fraction of corrupted labels",
            figure,
        )
    }


STUDY = Study(
    "corruption",
    "Corrupted labels and the trajectory of the first bias",
    "figures 2 (bottom), 3c, 4 and 7b of What Training Reveals about Neural Network Complexity",
    "CIFAR-10, dogs against planes; a fraction of the training labels replaced by random ones",
    Computed(
        Resumable(compute),
        {
            "loss": ("training loss", "{:.3f}"),
            "trajectory": ("length per epoch", "{:.3g}"),
            "theirs": ("with the reciprocal", "{:.3g}"),
            "total": ("whole length", "{:.3g}"),
            "test": ("test loss", "{:.3f}"),
            "variance": ("variance of bias", "{:.2g}"),
            "distance": ("distance of bias", "{:.3f}"),
        },
        draw,
        "One colour per fraction of corrupted labels; lines are means over repeats, bands show their range. The length of an\n"
        "epoch is the sum over its images of ‖b(t+1) − b(t)‖ / (lr · ε), where ε = 1/|1 − ŷ − y| is the size of the loss's derivative\n"
        "by the probability ŷ: it is the Lipschitz constant of the network at the image, summed. *With the reciprocal*: divided by\n"
        "|1 − ŷ − y| instead, as the authors' program does; an image that is classified wrongly with certainty then counts without bound.",
        f"Means over repeats, with the range; all but the whole length over the last {LAST} epochs. The training loss of an image is taken\n"
        "before its update, with its corrupted label; the test loss with true labels. *Variance*: of the bias over the steps of those epochs.",
        (
            "SGD, batch size 1, binary cross-entropy, a learning rate (0.0025, or that of the scale) that falls by 10^(−1/50) each epoch, float32. First layer: an identity with a "
            "trained bias for each pixel and colour, from 0; then convolutions and linear layers with PyTorch's default initialization.",
            "A seed determines labels, weights and order. The corrupted labels of a larger fraction include those of a smaller one.",
        ),
        ("cifar10",),
    ),
    SCALES,
    variants,
    claims,
    (
        "The paper gives a learning rate of 0.0025; that it decays is in the authors' program alone, and followed here. That program "
        "halves the loss; here it is not halved.",
        "It draws the corrupted labels from one fixed seed; here every repeat draws its own.",
        "It divides update t by the ε of step t − 1, takes the reciprocal of ε, and averages bias vectors over repeats before it takes "
        "differences (figure 7b); here both normalizations are of the same step, and lengths of single networks are averaged.",
        "It divides the variance by the squared learning rate; here it is the variance of Corollary 2.",
    ),
    asks="trajectory with wrong labels",
    seconds={"quick": 285, "short": 19_500, "paper": 173_000},
    sources=(
        "reveals:figure 2",
        "reveals:figure 3c",
        "reveals:figure 4",
        "reveals:figure 7b",
    ),
)
