"""Figures 2 (top), 3a, 3b and 7a: networks that learn functions of four frequencies, and what their first bias does.

y = cos(2πω z₁) cos(2πω z₂) for points z of a square, embedded in ten dimensions. Networks 10-10-32-32-32-1 whose first
weight is the identity and stays it, so that a normalized update of the first bias is the Lipschitz constant at the point
that is seen (Lemma 1). All networks of all frequencies are trained at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from excite.data import load
from excite.studies.computed import Computed, Jointly, OnProgress, Outcome, StepsScale
from excite.studies.study import Claim, Ladder, Study, Variant, VariantResult
from excite.studies.trajectory.trajectory_figures import bands, curves, dots
from excite.train import Ensemble, build, ensemble
from excite.train.from_config import find_device

if TYPE_CHECKING:
    from matplotlib.figure import Figure


FREQUENCIES = (0.25, 0.5, 0.75, 1.0)
VARIANTS = tuple(f"ω = {omega:g}" for omega in FREQUENCIES)
_LADDER = Ladder(VARIANTS, "frequency")
FIT = 0.02  # training loss at which networks count as having fitted equally well
LAST = 10  # epochs at the end
_PAPER = "What training reveals"
_POINTS = 100

SCALES = {
    "quick": StepsScale(name="quick", seeds=3, steps=300_000, words="the authors' settings, 3 repeats instead of 10"),
    "paper": StepsScale(
        name="paper", seeds=10, steps=300_000, words="the authors' settings: 3,000 epochs of 100 points, 10 repeats"
    ),
}


def variants(scale: StepsScale) -> list[Variant]:
    """Variants that are trained at a scale."""
    base = {"epochs": scale.steps // _POINTS, "points": _POINTS, "test": 30, "lr": 1e-3, "widths": [10, 32, 32, 32]}
    return [Variant(name, {**base, "omega": omega}) for name, omega in zip(VARIANTS, FREQUENCIES)]


def network(seed: int, widths: Sequence[int] = (10, 32, 32, 32)) -> nn.Sequential:
    """First layer: an identity that is not trained, with a bias that is. The other weights are PyTorch's."""
    model = build("mlp", seed=seed, inputs=widths[0], widths=list(widths))
    assert isinstance(model, nn.Sequential)
    first = model[1]
    assert isinstance(first, nn.Linear)
    first.weight.requires_grad_(False).copy_(torch.eye(widths[0]))
    return model


def points(omega: float, seed: int, train: int = 100, test: int = 30) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, y and test points; those of a seed are the same for every frequency."""
    data = load("frequencies", train=train, test=test, seed=seed, omega=omega)
    return data.x_train, data.y_train, data.x_test, data.y_test


def compute(
    settings_and_seeds: Sequence[tuple[Mapping[str, Any], int]], device: str, on_progress: OnProgress
) -> list[Outcome]:
    """All networks at once. Those of a seed share points, first weights and order; only targets differ."""
    settings = settings_and_seeds[0][0]
    place = find_device(device)
    drawn = [points(own["omega"], seed, own["points"], own["test"]) for own, seed in settings_and_seeds]
    x, y, x_test, y_test = (torch.stack(tensors).to(place) for tensors in zip(*drawn))
    result = ensemble(
        [network(seed, settings["widths"]).to(place) for _, seed in settings_and_seeds],
        x,
        y,
        epochs=settings["epochs"],
        lr=[own["lr"] for own, _ in settings_and_seeds],
        seeds=[seed for _, seed in settings_and_seeds],
        test=(x_test, y_test),
        progress=lambda phase, done, total: on_progress(done / total),
    )
    return [outcome(result, i) for i in range(len(settings_and_seeds))]


def outcome(ensemble_result: Ensemble, i: int) -> Outcome:
    """Numbers of network i of an ensemble that claims use, and its curves."""
    assert ensemble_result.test_loss is not None
    loss, test = ensemble_result.loss[i].numpy(), ensemble_result.test_loss[i].numpy()
    length, total = ensemble_result.trajectory.length[i].numpy(), ensemble_result.trajectory.total[i].numpy()
    last = min(LAST, len(loss))
    fitted = np.flatnonzero(loss < FIT)
    at = int(fitted[0]) if len(fitted) else None
    values = {
        "loss": float(loss[-last:].mean()),
        "epochs": at + 1.0 if at is not None else math.nan,
        "trajectory": float(length[-last:].mean()),
        "total": float(total[-1]),
        "total_third": float(total[len(total) // 3]),
        "total_fit": float(total[at]) if at is not None else math.nan,
        "test": float(test[-last:].mean()),
        "variance": float(ensemble_result.trajectory.variance(last)[i]),
        "distance": float(ensemble_result.trajectory.distance[i, -1]),
    }
    detail = {
        "epochs": thinned(np.arange(1.0, len(loss) + 1)),
        "loss": thinned(loss),
        "length": thinned(length),
        "test": thinned(test),
        "total": thinned(total),
    }
    flags = () if at is not None else (f"training loss {values['loss']:.2g} at the end, above {FIT}",)
    return Outcome(values, detail, flags)


def thinned(curve: np.ndarray[Any, np.dtype[np.float64]], max_points: int = 300) -> list[float]:
    """Means of so many neighbours that at most `max_points` numbers are left, with five digits."""
    chunks = np.array_split(curve, min(max_points, len(curve)))
    return [float(f"{chunk.mean():.5g}") for chunk in chunks]


def _together(n: Mapping[str, VariantResult]) -> float:
    return float(
        stats.spearmanr(
            [n[variant].trajectory for variant in VARIANTS], [n[variant].test for variant in VARIANTS]
        ).statistic
    )


def _of_fitted(claim: Claim) -> Claim:
    """The claim on the seeds on which all networks have fitted their points; one that never does has no number of epochs."""
    return replace(claim, premise=lambda n: all(math.isfinite(n[variant].epochs) for variant in VARIANTS))


_SLOWS = "training slows down as the complexity of the fitted function increases"
_LONGER = "the bias trajectory is significantly longer when fitting higher complexity functions"
_TEST = (
    "the trajectory length also correlates with the loss of the network on a held-out test set, with longer trajectories consistently "
    "corresponding to poorer test performance"
)
_STABLE = (
    "when fitting a lower complexity function and an MSE loss is utilized, the bias will remain more stable (here we show the variance "
    "in the last 10 epochs) and closer to initialization"
)
_GROWS = "the trajectory length of NNs grows with the complexity of the function they are learning"


def claims(scale: StepsScale) -> list[Claim]:
    """Claims of the paper, as numbers to check."""
    late = f"length per epoch, mean of the last {LAST}"
    return [
        _of_fitted(_LADDER.each("training slows down with the frequency", f"{_PAPER}, figure 2a", "epochs", f"epochs until the training loss is below {FIT}")).quoting(_SLOWS),
        _LADDER.each("near the end the trajectory of an epoch is longer the higher the frequency", f"{_PAPER}, figure 2b", "trajectory", late).quoting(_LONGER),
        _LADDER.ends("near the end the trajectory of an epoch is longer at the highest frequency than at the lowest", f"{_PAPER}, figure 2b", "trajectory", late).quoting(_LONGER, "weaker"),
        _LADDER.each("the test loss grows with the frequency", f"{_PAPER}, figure 2c", "test", "test loss at the end").quoting(_TEST),
        Claim(
            "longer trajectories go with poorer test loss", f"{_PAPER}, section 6", "rank correlation over frequencies",
            VARIANTS, _together, above=0.0,
        ).quoting(_TEST, "weaker"),
        _LADDER.each("the variance of the bias over the last ten epochs grows with the frequency", f"{_PAPER}, figure 3a", "variance", "variance").quoting(_STABLE),
        _LADDER.ends("the variance of the bias is larger at the highest frequency than at the lowest", f"{_PAPER}, figure 3a", "variance", "variance").quoting(_STABLE, "weaker"),
        _LADDER.each("the bias ends further from where it began the higher the frequency", f"{_PAPER}, figure 3b", "distance", "distance").quoting(_STABLE),
        _LADDER.ends("the bias ends further from where it began at the highest frequency than at the lowest", f"{_PAPER}, figure 3b", "distance", "distance").quoting(_STABLE, "weaker"),
        _LADDER.each("the whole trajectory is longer the higher the frequency", f"{_PAPER}, figure 7a", "total", "whole length at the end").quoting(_GROWS),
        _LADDER.ends("the whole trajectory is longer at the highest frequency than at the lowest", f"{_PAPER}, figure 7a", "total", "whole length at the end").quoting(_GROWS, "weaker"),
        _LADDER.ends("at every point of training, such as a third of the way, it is longer at the highest frequency than at the lowest", f"after the caption of figure 7 of {_PAPER}", "total_third", "whole length at a third of the epochs").quoting(
            "Length of the normalized trajectory at every pointing in the training starting from initialization.", "ours"
        ),
        _of_fitted(_LADDER.each(
            "among networks that have fitted their points equally well, the trajectory so far is longer the higher the frequency",
            f"{_PAPER}, appendix A.4", "total_fit", f"whole length until the training loss is below {FIT}",
        )).quoting(
            "between any two NNs that have fitted the training data equally well, the one that implements a higher complexity function "
            "has consistently a longer trajectory"
        ),
    ]  # fmt: skip


_CURVES = (
    ("loss", "training loss", "log"),
    ("length", "normalized trajectory: length of each epoch", "linear"),
    ("test", "test loss", "log"),
    ("total", "normalized trajectory: length so far", "linear"),
)
_DOTS = (("variance", "variance of the bias, last ten epochs"), ("distance", "distance of the bias from its start"))


def draw(
    study: Study, scale: Any, details: Mapping[str, list[Any]], numbers: Sequence[VariantResult]
) -> dict[str, tuple[str, Figure]]:
    """Draws the figures of the study."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7.2), layout="constrained")
    axes = list(figure.subplots(2, 3).flat)
    for axis, (name, label, how) in zip(axes, _CURVES):
        curves(axis, details, name)
        axis.set(title=label, xlabel="epoch", yscale=how)
        if how == "linear":
            axis.set_ylim(bottom=0)
    for axis, (name, label) in zip(axes[len(_CURVES) :], _DOTS):
        dots(axis, list(details), numbers, name)
        axis.set(title=label, xlabel="frequency ω", yscale="log")
    for axis in axes:
        axis.grid(alpha=0.3)
    axes[0].legend(loc="lower left", fontsize=9, framealpha=0.9)
    figure.suptitle(f"{study.title}\n{bands(details)}", fontsize=12)
    return {"figure": (f"{study.title}: loss, trajectory, test loss, variance and distance by frequency", figure)}


STUDY = Study(
    "frequency",
    "Functions of higher frequency and the trajectory of the first bias",
    "figures 2 (top), 3a, 3b and 7a of What Training Reveals about Neural Network Complexity",
    "100 points of y = cos(2πω z₁) cos(2πω z₂), embedded in ten dimensions; networks 10-10-32-32-32-1",
    Computed(
        Jointly(compute),
        {
            "loss": ("training loss", "{:.4f}"),
            "epochs": (f"epochs to {FIT}", "{:.0f}"),
            "trajectory": ("length per epoch", "{:.0f}"),
            "total": ("whole length", "{:.0f}"),
            "total_third": ("at a third", "{:.0f}"),
            "total_fit": (f"at loss {FIT}", "{:.0f}"),
            "test": ("test loss", "{:.4f}"),
            "variance": ("variance of bias", "{:.2g}"),
            "distance": ("distance of bias", "{:.2f}"),
        },
        draw,
        "One colour per frequency; lines are means over repeats, bands show their range. The length of an epoch is\n"
        "the sum of its 100 normalized updates ‖b(t+1) − b(t)‖ / (lr · |f − y|) of the first bias. As the first weight is the\n"
        "identity, each of them is the Lipschitz constant of the network at the training point of that step: the length over 100 is\n"
        "their mean. Dots are single networks, bars their geometric mean.",
        "Means over repeats, with the range. *Training loss*, *length per epoch* and *test loss* are means of the last ten epochs; the\n"
        f"training loss of a point is taken before its update. *At loss {FIT}*: the whole length when the training loss of an epoch\n"
        "first is below that. *Variance*: of the bias over the 1,000 steps of the last ten epochs. *Distance*: of the bias from its\n"
        f"initial value. *Trusted*: networks whose training loss went below {FIT}.",
        (
            "SGD, learning rate 0.001, batch size 1, half squared error, float32.",
            "A seed determines points, embedding, initial weights and the order of points; these are the same for its four frequencies.",
        ),
    ),
    SCALES,
    variants,
    claims,
    (
        "The paper prints cos(2πω z₁) cos(2πω z₁); as in the authors' program the second factor has z₂. Also as there, embedded "
        "points are multiplied by 10, where the paper says that the embedding is isometric.",
        "The paper samples points with replacement; here and in the authors' program an epoch sees each point once.",
        "The authors' program divides update t by the error of step t − 1; here it is divided by its own, as in the paper.",
        "It averages bias vectors over repeats before it takes differences (figures 2b, 7a); here lengths of single networks "
        "are averaged.",
        "It divides the variance of figure 3a by the squared learning rate; here it is the variance of Corollary 2.",
        "After the authors' ten repeats (on a GPU) three claims were undecided. `excite study plan` gave 285 repeats to decide all of "
        "them; that number was fixed before the run, which includes the seeds of the first ten.",
        f"Claims about the loss {FIT} leave out seeds on which a network does not reach it. With ten repeats all did; the rule was added when "
        "some of 285 did not. It leaves out the slowest networks, all of the highest frequency.",
    ),
    asks="trajectory against frequency",
    seconds={"quick": 40},
    sources=("reveals:figure 2", "reveals:figure 3a", "reveals:figure 3b", "reveals:figure 7a",),
)  # fmt: skip
