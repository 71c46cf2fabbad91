"""All-layer margins of training against test images: does exciting every layer close the gap there too?

Section 5 of *Richness of hidden activations* names the all-layer margin of Wei and Ma (2020) as closely aligned with its results, and
measures none. The task and the network of `random-perturbations`; margins at the input and with every layer perturbed, in units of the
input and relative to each layer's own signal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from excite.excitation import PersistentExcitation
from excite.margin import Margins, SearchOptions, margins
from excite.studies.by_margins import CHANCE
from excite.studies.computed import Computed, OnProgress, Outcome
from excite.studies.figures import COLOURS
from excite.studies.richness.random_perturbations import BATCH, POINTS, RADIUS, network, points
from excite.studies.study import Claim, Scale, Study, Variant, VariantResult
from excite.train.batches import Shuffle

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLAIN, INPUT, EVERY = "plain", "input excited", "every layer excited"
SETS = {"input": "input", "all": "every layer", "relative": "every layer, relative"}  # what may be perturbed
QUANTILES = 40
_SECTION = "Richness of hidden activations, section 5"
_ALIGNED = (
    "This is closely aligned with our results involving the richness requirements on the hidden-layer activations of multi-layer models and the "
    "effect of boosting this richness by injecting perturbations into the hidden layers during training."
)
_INDICATOR = (
    "when all layers are perturbed to improve the richness of the hidden-layer activations, the margin of the training data becomes a good "
    "indicator of the margin of the test data"
)

SCALES = {
    "quick": Scale(name="quick", seeds=5, words=f"100 epochs, 5 seeds, margins of {POINTS} training and {POINTS} test images"),
    "paper": Scale(name="paper", seeds=24, words=f"100 epochs, 24 seeds, margins of {POINTS} training and {POINTS} test images; the paper has no experiment"),
}  # fmt: skip


def variants(scale: Scale) -> list[Variant]:
    """Nothing, the input, or every layer excited."""
    return [
        Variant(PLAIN, {"epochs": 100, "radius": 0.0, "layers": "all"}),
        Variant(INPUT, {"epochs": 100, "radius": RADIUS, "layers": "input"}),
        Variant(EVERY, {"epochs": 100, "radius": RADIUS, "layers": "all"}),
    ]


def train(
    model: nn.Module, x: Tensor, y: Tensor, settings: Mapping[str, Any], seed: int, on_progress: OnProgress
) -> None:
    """SGD with momentum on the loss of Algorithm 1."""
    excited = PersistentExcitation(model, settings["radius"], layers=settings["layers"], bounds=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, dampening=0.9)
    shuffle, epochs = Shuffle(len(x), BATCH, seed), settings["epochs"]
    for epoch in range(epochs):
        for chosen in torch.as_tensor(shuffle.order()).split(BATCH):
            optimizer.zero_grad()
            excited.loss(x[chosen], y[chosen]).backward()
            optimizer.step()
        on_progress((epoch + 1) / (epochs + 50))


def measure(model: nn.Module, x: Tensor, y: Tensor, perturbed: str) -> Margins:
    """Margins of the first points at the input, with every layer perturbed, or with every layer relative to its signal."""
    options = SearchOptions(certify=False)
    layers = "input" if perturbed == "input" else "all"
    return margins(
        model, x[:POINTS], y[:POINTS], bounds=(-1, 1), layers=layers, relative=perturbed == "relative", options=options
    )


def compute(settings: Mapping[str, Any], seed: int, on_progress: OnProgress) -> Outcome:
    """Trains a network; medians and gap of its margins, at the input and with every layer perturbed."""
    x, y, new, labels = points("digits", seed)
    model = network(seed)
    train(model, x, y, settings, seed, on_progress)
    parts = {"training": (x, y), "test": (new, labels)}
    with torch.no_grad():
        right = [float(((model(x)[:, 0] > 0.5).long() == y).double().mean()) for x, y in parts.values()]
    values, detail, flags = {"accuracy_train": right[0], "accuracy_test": right[1]}, {}, []
    for perturbed, description in SETS.items():
        on_train, on_test = (measure(model, x, y, perturbed) for x, y in parts.values())
        values |= {
            f"{perturbed}_train": on_train.median,
            f"{perturbed}_test": on_test.median,
            f"{perturbed}_gap": on_train.gap(on_test, resamples=1).value,
        }
        at = np.linspace(0, 1, QUANTILES + 1)
        detail[perturbed] = [[measured.quantile(float(q)) for q in at] for measured in (on_train, on_test)]
        flags += [
            f"{description}, {split}: {flag}"
            for split, measured in zip(parts, (on_train, on_test))
            for flag in measured.flags
        ]
    return Outcome(values, detail, tuple(flags))


def claims(scale: Scale) -> list[Claim]:
    """Claims about the gap, as numbers to check."""

    def narrower(text: str, perturbed: str, than: str) -> Claim:
        name = f"{perturbed}_gap"
        measure = f"gap of the margins, {SETS[perturbed]}: {EVERY} minus {than}"
        return Claim(
            text,
            _SECTION,
            measure,
            (than, EVERY),
            lambda n: getattr(n[EVERY], name) - getattr(n[than], name),
            below=0.0,
        )

    def larger(text: str, perturbed: str, variant: str, than: str) -> Claim:
        name = f"{perturbed}_test"
        measure = f"log2 of the median test margin, {SETS[perturbed]}: {variant} over {than}"
        return Claim(
            text,
            _SECTION,
            measure,
            (than, variant),
            lambda n: _log2(getattr(n[variant], name), getattr(n[than], name)),
            above=0.0,
        )

    return [
        narrower("with every layer excited the all-layer gap is smaller than after plain training", "all", PLAIN).quoting(_INDICATOR, "ours"),
        narrower("also relative to each layer's signal the gap is smaller than after plain training", "relative", PLAIN).quoting(_INDICATOR, "ours"),
        narrower("it is smaller than with the input excited alone", "all", INPUT).quoting(_INDICATOR, "ours"),
        narrower("also relative to each layer's signal it is smaller than with the input excited alone", "relative", INPUT).quoting(_INDICATOR, "ours"),
        narrower("the gap of the input margin, too, is smaller than after plain training", "input", PLAIN).quoting(_INDICATOR, "stronger"),
        larger("every layer excited gives test images a larger all-layer margin than plain training", "all", EVERY, PLAIN).quoting(_ALIGNED, "ours"),
        larger("also a larger one relative to each layer's signal than plain training", "relative", EVERY, PLAIN).quoting(_ALIGNED, "ours"),
        larger("and a larger one than with the input excited alone", "all", EVERY, INPUT).quoting(_ALIGNED, "ours"),
        larger("also relative to each layer's signal than with the input excited alone", "relative", EVERY, INPUT).quoting(_ALIGNED, "ours"),
        Claim("after plain training the all-layer gap is larger than the gap at the input: hidden layers are what does not generalize", _SECTION,
              f"gap of the margins, plain: {SETS['all']} minus input", (PLAIN,), lambda n: n[PLAIN].all_gap - n[PLAIN].input_gap, above=0.0).quoting(_ALIGNED, "ours"),
    ]  # fmt: skip


def _log2(value: float, over: float) -> float:
    return math.log2(value / over) if value > 0 and over > 0 else math.nan


def draw(
    study: Study, scale: Any, details: Mapping[str, list[Any]], numbers: Sequence[VariantResult]
) -> dict[str, tuple[str, Figure]]:
    """Margin curves of training (solid) and test images (dashed), by what is perturbed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.3), layout="constrained")
    at = np.linspace(0, 1, QUANTILES + 1)
    for axis, (perturbed, description) in zip(figure.subplots(1, 3, sharey=True), SETS.items()):
        for number, (variant, seeds) in enumerate(details.items()):
            curves = np.array([seed[perturbed] for seed in seeds], dtype=float)  # (seeds, split, quantiles)
            for split, dashes in enumerate(("-", "--")):
                label = variant if split == 0 else None
                axis.plot(curves[:, split].mean(0), 100 * at, dashes, color=COLOURS[number], label=label)
        axis.set(xlabel="margin", title=f"perturbed: {description}", xlim=(0, None))
        axis.grid(alpha=0.3)
    figure.axes[0].set_ylabel("images with at most this margin, %")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    figure.suptitle(study.title, fontsize=12)
    return {"figure": (f"{study.title}: margin curves at the input and in every layer", figure)}


STUDY = Study(
    "all-layer-gap",
    "The gap of all-layer margins",
    "section 5 of Richness of Training Data Does Not Suffice (no figure of the paper)",
    "scikit-learn's digits, eights against nines; a ReLU network with three hidden layers of 48 units",
    Computed(
        compute,
        {
            "accuracy_train": ("accuracy, training", "{:.1%}"),
            "accuracy_test": ("test", "{:.1%}"),
            "input_train": ("margin at the input, training", "{:.3f}"),
            "input_test": ("test", "{:.3f}"),
            "input_gap": ("gap", "{:.3f}"),
            "all_train": ("every layer, training", "{:.3f}"),
            "all_test": ("test", "{:.3f}"),
            "all_gap": ("gap", "{:.3f}"),
            "relative_train": ("relative, training", "{:.3f}"),
            "relative_test": ("test", "{:.3f}"),
            "relative_gap": ("gap", "{:.3f}"),
        },
        draw,
        "Margins of training images (solid) and test images (dashed), sorted; means over seeds. Where the two curves of a colour agree, the margins\n"
        "of training images predict those of test images.",
        "Means over seeds, with the range; margins are medians. *Relative*: perturbations over the root mean square of each layer's input at that image.",
        (f"Squared error, SGD, learning rate 0.05, momentum 0.9 damped by 0.9, batches of {BATCH}; radius {RADIUS}, infinity norm, four search steps. "
         "Seeds determine weights, order and split.",
         "All-layer margins are the least ε for which perturbations of at most ε at the input of every linear layer change the decision."),
        chance=CHANCE,
    ),
    SCALES,
    variants,
    claims,
    ("The paper claims that margins of training images indicate those of test images where every layer is excited; that this holds for all-layer "
     "margins is our reading of its section 5.",
     "Wei and Ma perturb the outputs of layers and use the 2-norm: see [margins](../margins.md#all-layers).",
     "After six seeds all claims were undecided. `excite study plan` gave at most 51 seeds for nine of ten; that number was fixed before the run, "
     "which includes the first six."),
    asks="is the all-layer gap closed?",
    seconds={"quick": 226},
    sources=("richness:section 5",),
)  # fmt: skip
