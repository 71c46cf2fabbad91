"""Figure 1: decision boundaries in the plane after training by cross-entropy and by squared error.

f(x) = (w · (Vx + b)₊ + c) / 5 with 20 hidden units, in float64, full batches. Labels are 1 for the two outer clusters and
0 for the one between; the cross-entropy of the logit f, and the squared error of f to ±½, are means over the points. Data
and first weights are drawn as the authors' program draws those of its network with cross-entropy: seed k here is their
seed 1 + 20k.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from excite.studies.computed import Computed, OnProgress, Outcome, StepsScale
from excite.studies.excitation.planar import Array, TwoLayer, around, margins, zero_set
from excite.studies.figures import COLOURS
from excite.studies.study import Claim, Study, Variant, VariantResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure


ENTROPY, SQUARED = "cross-entropy", "squared error"
OWN = "squared error, other first weights"
ENTROPY_CENTRED, SQUARED_CENTRED = "cross-entropy, centred data", "squared error, centred data"
CLUSTERS = ((8, (7.0, 19.0)), (4, (0.0, 5.0)), (4, (11.0, 27.0)))  # points, centre; the first is label 0
SPREAD = 0.5
_POORER = "The networks trained with the cross-entropy loss consistently have a substantially poorer margin."
_FIGURE = "Persistency of excitation, section 1, figure 1"


SCALES = {
    "quick": StepsScale(
        name="quick", seeds=6, steps=15_000, every_variant=True, words="15,000 steps instead of 60,000, the authors' six seeds"
    ),
    "paper": StepsScale(
        name="paper", seeds=6, steps=60_000, every_variant=True, words="the authors' settings: 60,000 steps, six seeds"
    ),
}  # fmt: skip


def variants(scale: StepsScale) -> list[Variant]:
    """Variants that are trained at a scale."""
    base = {"steps": scale.steps, "lr": 1e-2, "momentum": 0.9, "hidden": 20, "bias": 10.0, "divide": 5.0}
    return [
        Variant(ENTROPY, {**base, "loss": ENTROPY}),
        Variant(SQUARED, {**base, "loss": SQUARED}),
        Variant(OWN, {**base, "loss": SQUARED, "other": True}, extra=True),
        Variant(ENTROPY_CENTRED, {**base, "loss": ENTROPY, "centred": True}, extra=True),
        Variant(SQUARED_CENTRED, {**base, "loss": SQUARED, "centred": True}, extra=True),
    ]


def points_and_weights(seed: int, settings: Mapping[str, Any]) -> tuple[Array, Array, TwoLayer]:
    """Points (16, 2), labels (16,) and the first network of a seed; the hidden biases are `bias` times PyTorch's."""
    generator = torch.Generator().manual_seed(seed)
    clusters = [SPREAD * torch.randn(n, 2, generator=generator) + torch.tensor(at) for n, at in CLUSTERS]
    y = np.concatenate([np.full(n, float(k > 0)) for k, (n, _) in enumerate(CLUSTERS)])
    if settings.get("other"):
        generator = torch.Generator().manual_seed(seed + 1000)

    def uniform(inputs: int, *shape: int) -> Array:  # what torch.nn.Linear starts from
        drawn = torch.empty(shape).uniform_(-(inputs**-0.5), inputs**-0.5, generator=generator)
        return np.asarray(drawn.double().numpy())

    r = settings["hidden"]
    hidden, bias = uniform(2, r, 2), uniform(2, r) * settings["bias"]
    x = torch.cat(clusters).double().numpy()
    if settings.get("centred"):
        x = x - x.mean(0)
    return x, y, TwoLayer(hidden, bias, uniform(r, r), uniform(r, 1)[0])


def slope(loss: str, f: Array, y: Array) -> Array:
    """The derivative of the mean loss with respect to each output f (N,)."""
    if loss == ENTROPY:
        return np.asarray((1 / (1 + np.exp(-f)) - y) / len(y))
    return np.asarray(2 * (f - (y - 0.5)) / len(y))


def train(network: TwoLayer, x: Array, y: Array, settings: Mapping[str, Any], on_progress: OnProgress) -> TwoLayer:
    """Gradient descent with momentum on f = network / `divide`."""
    weights = list(network)
    velocity = [np.zeros_like(weight) for weight in weights]
    for step in range(settings["steps"]):
        hidden, hidden_bias, output, output_bias = weights
        inner = x @ hidden.T + hidden_bias  # (N, r)
        active = inner > 0
        inner = inner * active
        d = slope(settings["loss"], (inner @ output + output_bias) / settings["divide"], y) / settings["divide"]
        back = d[:, None] * output * active
        for k, gradient in enumerate((back.T @ x, back.sum(0), d @ inner, d.sum())):
            velocity[k] = settings["momentum"] * velocity[k] + gradient
            weights[k] = weights[k] - settings["lr"] * velocity[k]
        if step % 1000 == 0:
            on_progress(step / settings["steps"])
    return TwoLayer(*(np.asarray(weight) for weight in weights))


def compute(settings: Mapping[str, Any], seed: int, on_progress: OnProgress) -> Outcome:
    """Computes the numbers of one variant and seed."""
    x, y, first = points_and_weights(1 + 20 * seed, settings)
    network = train(first, x, y, settings, on_progress)
    distance = margins(network, x, y)
    pairs = np.linalg.norm(x[y == 0][:, None] - x[y == 1], axis=2)
    best = float(pairs.min()) / 2  # no classifier has more
    right = float((distance > 0).mean())
    values = {
        "margin": float(distance.min()),
        "best": best,
        "share": float(distance.min()) / best,
        "right": right,
        "output": float(np.abs(network(x)).min()) / settings["divide"],
    }
    detail = {
        "seed": 1 + 20 * seed,
        "points": x.round(4).tolist(),
        "labels": y.tolist(),
        "boundary": zero_set(network, around(x)).round(4).tolist(),
        "nearest": int(distance.argmin()),
        "margin": values["margin"],
    }
    flags = () if right == 1 else (f"seed {1 + 20 * seed} decides {right:.0%} of its training points right",)
    return Outcome(values, detail, flags)


def _ratio(text: str, source: str, entropy: str, squared: str, below: float) -> Claim:
    return Claim(
        text,
        source,
        f"margin by {entropy} over margin by {squared}",
        (entropy, squared),
        lambda n: n[entropy].margin / n[squared].margin if n[squared].margin else float("nan"),
        below=below,
    )


def claims(scale: StepsScale) -> list[Claim]:
    """Claims of the paper, as numbers to check."""
    return [
        _ratio(
            "with cross-entropy the margin is smaller than with squared error", _FIGURE, ENTROPY, SQUARED, 1.0
        ).quoting(_POORER, "weaker"),
        _ratio("and substantially so: it is less than half", _FIGURE, ENTROPY, SQUARED, 0.5).quoting(
            _POORER, "threshold"
        ),
        _ratio(
            "it is less than half also where the two losses start from different weights, as in the authors' program",
            _FIGURE,
            ENTROPY,
            OWN,
            0.5,
        ).quoting(_POORER, "threshold"),
        _ratio(
            "removing the mean of the data does not repair it: the margin stays less than half",
            "after section 3.1, which says it of linear classifiers and concludes that a poor margin is unavoidable",
            ENTROPY_CENTRED,
            SQUARED_CENTRED,
            0.5,
        ).quoting(
            "the term B can not be made zero simply by preprocessing the data and removing its mean. This is the primary reason why "
            "having a poor margin is unavoidable",
            "ours",
        ),
    ]


Details = Mapping[str, list[Any]]
_CLASSES = (COLOURS[2], COLOURS[1])  # blue between, orange outside: the paper's
_LINES: dict[str, tuple[str, Any]] = {"cross-entropy": ("#000000", "-"), "squared error": ("#009E73", (0, (4, 1.5)))}


def draw(study: Study, scale: Any, details: Details, numbers: Sequence[VariantResult]) -> dict[str, tuple[str, Figure]]:
    """Draws the figures of the study."""
    centred = {loss: details[f"{loss}, centred data"] for loss in _LINES if f"{loss}, centred data" in details}
    result = {
        "figure": (f"{study.title}: one panel per seed", panels({loss: details[loss] for loss in _LINES}, study.title))
    }
    if len(centred) == len(_LINES):
        result["centred"] = ("The same with the mean of the data removed", panels(centred, "Centred data"))
    return result


def panels(details: Details, title: str) -> Figure:
    """One panel per seed; the boundary of each loss, its nearest training point and the circle of radius margin around it."""
    from matplotlib.collections import LineCollection
    from matplotlib.figure import Figure
    from matplotlib.patches import Circle

    count = len(next(iter(details.values())))
    columns = min(3, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(1 + 3.1 * columns, 1.3 + 3.2 * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis in axes[count:]:
        axis.axis("off")
    for k, axis in enumerate(axes[:count]):
        any_loss = next(iter(details.values()))[k]
        points, labels = np.array(any_loss["points"]), np.array(any_loss["labels"])
        for loss, (colour, dashes) in _LINES.items():
            result = details[loss][k]
            axis.add_collection(LineCollection(result["boundary"], colors=colour, linestyles=[dashes], linewidths=1.8))
            centre = points[result["nearest"]]
            axis.add_patch(Circle(centre, result["margin"], fill=False, color=colour, linestyle=dashes, linewidth=0.8))
        for label, colour in enumerate(_CLASSES):
            axis.scatter(*points[labels == label].T, s=14, color=colour, zorder=3)
        middle, half = (points.min(0) + points.max(0)) / 2, 0.75 * float(np.ptp(points, axis=0).max())
        axis.set(xlim=(middle[0] - half, middle[0] + half), ylim=(middle[1] - half, middle[1] + half), aspect="equal")
        axis.tick_params(labelsize=8)
        solid, dashed = (details[loss][k]["margin"] for loss in _LINES)
        axis.set_title(f"seed {any_loss['seed']}: margin {solid:.2f} solid, {dashed:.2f} dashed", fontsize=9)
    figure.suptitle(title, fontsize=13)
    figure.legend(handles=_handles(), loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    return figure


def _handles() -> list[Any]:
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], color=c, linestyle=d, linewidth=1.8, label=loss) for loss, (c, d) in _LINES.items()]
    names = ("one class", "the other")
    dots = [Line2D([], [], color=c, marker="o", linestyle="", label=n) for c, n in zip(_CLASSES, names)]
    return [*lines, *dots]


STUDY = Study(
    "boundaries",
    "Decision boundaries of two losses",
    "figure 1 of Persistency of Excitation for Robustness of Neural Networks",
    "Three clusters in the plane, one hidden layer of 20 ReLUs",
    Computed(
        compute,
        {
            "margin": ("margin", "{:.2f}"),
            "best": ("largest possible", "{:.2f}"),
            "share": ("fraction of that", "{:.2f}"),
            "right": ("classified correctly", "{:.0%}"),
            "output": ("smallest output", "{:.2f}"),
        },
        draw,
        "One line per loss: where the prediction of the trained network changes. The circle around a point is the largest one that\n"
        "does not cross the line of its network; its radius is the margin: the smallest distance of a training point from the line.",
        "Means over seeds, with the range. The margin is exact, in the 2-norm: the network is linear on the cells its units cut out,\n"
        "and its boundary a list of segments. *Largest possible* is half the distance of the nearest points of different classes.\n"
        "*Trusted*: networks that classify all training points correctly.",
        (
            "Both losses are means over the 16 points; learning rate 0.01, momentum 0.9, full batches, float64.",
            "The seed determines data and initial weights, the same for both losses but where a variant says otherwise; seeds 0 to 5 are "
            "the authors' 1, 21, 41, 61, 81, 101.",
        ),
    ),
    SCALES,
    variants,
    claims,
    ("Hidden biases start ten times as large as PyTorch's, outputs are divided by 5: the authors' choices.",),
    asks="boundaries of two losses",
    seconds={"quick": 17, "paper": 280},
    sources=("persistency:figure 1",),
)
