"""Figure 1 of the richness paper: how many directions hidden signals use; and what raises their number.

The paper shows one network. What it says in words about dropout, augmented and larger data, and what it leaves open about
its own remedy, are the further variants: layer by layer, is the effective rank larger than after plain training?
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

from excite.studies.by_margins import TrainingScale
from excite.studies.excitation import planes_and_horses
from excite.studies.excitation.planes_and_horses import RADIUS, TASK, excited, settings
from excite.studies.richness.by_spectra import LAYERS, SEEN, BySpectra
from excite.studies.study import Claim, Strength, Study, Variant, VariantResult

PLAIN, ALL = "plain", "every layer excited"
NETWORK = {"widths": [6, 18, 120, 84], "activation": "relu"}
_FIGURE = "Richness of hidden activations, section 2, figure 1"
Effect = Callable[[Mapping[str, VariantResult]], float]

SCALES: dict[str, TrainingScale] = {
    "quick": replace(
        planes_and_horses.SCALES["quick"],
        seeds=5,
        points=1000,
        words=(
            "1,000 training and 1,000 test images instead of 10,000 and 2,000, 12 epochs instead of 40, learning rate 0.5 instead "
            "of 0.1, 5 seeds instead of 10"
        ),
    ),
    "paper": replace(
        planes_and_horses.SCALES["paper"],
        points=2000,
        words=(
            "all 10,000 training images, 40 epochs, 10 seeds, the optimizer of the authors' other experiments (the paper does not "
            "name this one's); spectra over 2,000 training images, evenly spaced, and all 2,000 test images"
        ),
    ),
}


def variants(scale: TrainingScale) -> list[Variant]:
    """Variants that are trained at a scale."""

    def variant(name: str, dropout: float = 0.0, images: int | None = None, **changes: Any) -> Variant:
        options = {**NETWORK, **({"dropout": dropout} if dropout else {})}
        config = settings(scale, model={"name": "papers-cnn", "options": options}, **changes)
        if images is not None:
            config["data"] = {**config["data"], "train": images}
        return Variant(name, config, extra=name != PLAIN)

    return [
        variant(PLAIN),
        variant("input excited", excitation=excited(RADIUS, "input")),
        variant(ALL, excitation=excited(RADIUS)),
        variant("dropout", dropout=0.5),
        variant("augmented data", augment={"flip": True, "shift": 4}),
        *(variant(name, images=count) for name, count in scale.sizes.items()),
        variant("adaptive optimizer", optimizer={"name": "adam", "lr": 1e-3}),
    ]


_FEW = "the signals in the upper layers of the network can be explained by the first few principal components"
_MUCH = (
    "The rank of the activation patterns in the upper layers are much lower than the number of nodes in those layers."
)
_IMPROVES = "a new training algorithm that improves the richness of the hidden-layer activations during training"
_VARIETY = "Randomly setting some of the neurons in the hidden layers during training increases the variety in the hidden-layer activations"
_DOUBT = "adding more training data will not necessarily be effective for attaining the required richness in the hidden layers"


def claims(scale: TrainingScale) -> list[Claim]:
    """Claims of the paper, as numbers to check."""
    return [*_of_the_figure(), *_training(), *_by_layer(scale)]


def _of_the_figure() -> list[Claim]:
    result = []
    for name in ("linear1", "linear2"):
        layer = LAYERS[name]
        for text, measure, effect, bounds, quote, strength in (
            ("the first five components explain nine tenths of the variance", "fraction of variance in five components",
             _ratio("five", None, name), {"above": 0.9}, _FEW, "threshold"),
            ("half as many components as units explain 99 % of it", "components for 99 % over units",
             _ratio("components99", "width", name), {"below": 0.5}, _MUCH, "threshold"),
            ("the rank is lower than the number of units", "numerical rank over units",
             _ratio("rank", "width", name), {"below": 1.0}, _MUCH, "weaker"),
        ):  # fmt: skip
            result.append(
                Claim(
                    f"{layer}: {text}",
                    _FIGURE,
                    f"{measure}, {layer}, plain",
                    (PLAIN,),
                    effect,
                    bounds.get("above"),
                    bounds.get("below"),
                ).quoting(quote, cast(Strength, strength))
            )
    return result


def _training() -> list[Claim]:
    return [
        Claim(
            f"{LAYERS[name]}: training lowers the effective rank",
            "Richness of hidden activations, section 5: signals become low-dimensional",
            "log2 of the effective rank, plain over untrained",
            (PLAIN,),
            _log2(_ratio("effective", "untrained", name)),
            below=0.0,
        ).quoting(
            "activations in the hidden layers of a naively-trained neural network will become low-dimensional", "weaker"
        )
        for name in SEEN
    ]


def _by_layer(scale: TrainingScale) -> list[Claim]:
    fewer, more = (PLAIN, "twice the data") if "twice the data" in scale.sizes else ("5,000 images", PLAIN)
    pairs: list[tuple[str, str, str, str, str, Strength]] = [
        (PLAIN, ALL, "perturbing every layer", "Richness of hidden activations, abstract", _IMPROVES, "as said"),
        (PLAIN, "input excited", "perturbing the input", "left open by the papers", "", "ours"),
        (PLAIN, "dropout", "dropout", "Richness of hidden activations, section 5", _VARIETY, "as said"),
        (
            PLAIN,
            "augmented data",
            "augmented data",
            "doubted in Richness of hidden activations, section 5",
            _DOUBT,
            "ours",
        ),
        (fewer, more, "doubling the data", "doubted in Richness of hidden activations, section 5", _DOUBT, "ours"),
        (PLAIN, "adaptive optimizer", "an adaptive optimizer", "left open by the papers", "", "ours"),
    ]
    return [
        Claim(
            f"{LAYERS[name]}: {what} raises the effective rank",
            source,
            f"log2 of the effective rank, {variant} over {than}",
            (than, variant),
            _gain(variant, than, name),
            above=0.0,
        ).quoting(quote, strength)
        for than, variant, what, source, quote, strength in pairs
        for name in SEEN
    ]


def _ratio(measure: str, over: str | None, layer: str) -> Effect:
    """A number of plain training over another one of the same layer, or by itself."""
    return lambda n: (
        float(getattr(n[PLAIN], f"{measure}_{layer}"))
        / (1.0 if over is None else float(getattr(n[PLAIN], f"{over}_{layer}")))
    )


def _log2(effect: Effect) -> Effect:
    """Not a number where signals do not vary at all: such a network settles nothing."""

    def log(n: Mapping[str, VariantResult]) -> float:
        try:
            return math.log2(effect(n))
        except (ValueError, ZeroDivisionError):
            return math.nan

    return log


def _gain(variant: str, than: str, layer: str) -> Effect:
    name = f"effective_{layer}"
    return _log2(lambda n: float(getattr(n[variant], name)) / float(getattr(n[than], name)))


STUDY = Study(
    "hidden-rank",
    "Hidden signals use few directions",
    "figure 1 of Richness of Training Data Does Not Suffice",
    TASK,
    BySpectra(),
    SCALES,
    variants,
    claims,
    (
        "Convolutions 3→6 and 6→18 of 5×5, each with max pooling, linear 450→120→84→1, ReLU, squared error. The paper counts "
        "4,704 and 1,800 units, which is before pooling; the inputs of the next layers have 1,176 and 450.",
        "Excitation with radius 0.02; dropout of ½ in the linear layers; flips and shifts of up to four pixels; Adam with rate 0.001.",
        "Signals of the trained network are measured as they are, without perturbations and without dropout. The paper says of both "
        "that they make signals richer during training, and of more data that they need not. Epochs stay the same, so twice the "
        "data are also twice the steps.",
    ),
    asks="how few directions are used?",
    seconds={"quick": 60, "paper": 17500},
    sources=("richness:figure 1",),
)
