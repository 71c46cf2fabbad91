"""Other losses and other sets of perturbations: cross-entropy with additive and multiplicative ones, and radii that differ between layers.

Sections 7.2 and 7.3 of *Persistency of excitation* say in words that bounded additive perturbations of hidden layers have no effect under the
cross-entropy, whose signals grow without bound, and that other radii in other layers could help. The task and network of `random-perturbations`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from excite import Relative
from excite.excitation import PersistentExcitation
from excite.studies.by_margins import CHANCE
from excite.studies.computed import Computed, OnProgress, Outcome
from excite.studies.figures import COLOURS
from excite.studies.richness.random_perturbations import BATCH, POINTS, RADIUS, TENTHS, input_curves, network, points
from excite.studies.study import Claim, Scale, Study, Variant, VariantResult
from excite.train.batches import Shuffle

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SQUARED, PLAIN = "squared error", "cross-entropy"
ADDITIVE, MULTIPLICATIVE = "cross-entropy, additive", "cross-entropy, multiplicative"
EQUAL = {radius: f"squared error, radius {radius:g} in every layer" for radius in (0.025, 0.05, 0.1)}
OWN = {fraction: f"squared error, {fraction:.0%} of each layer's signal" for fraction in (0.05, 0.1, 0.2)}
COST = 0.02  # of test accuracy that a radius may cost against plain training
_SETS, _TRADE = "Persistency of excitation, section 7.2", "Persistency of excitation, section 7.3"
_GROWTH = "the cross-entropy loss yields unbounded growth of the parameters of the network, and consequently, the signals in the hidden layers will become unboundedly large"
_NO_EFFECT = "In this case, the addition of finite perturbations will have no effect on the output of the network."
_ALTERNATIVE = (
    "One potential alternative is introducing multiplicative perturbations to the signals in the hidden layers."
)
_MAGNITUDES = (
    "Applying perturbations with different magnitudes to different layers of the network could improve the robustness of the network, while "
    "preserving its overall accuracy."
)
_TOO_QUICKLY = (
    "if a loss function removes the effect of correctly classified points too quickly, then it could yield a worse generalization, as seen in the "
    "case of cross-entropy loss"
)

SCALES = {
    "quick": Scale(name="quick", seeds=3, words=f"100 epochs, 3 seeds, margins of {POINTS} training and {POINTS} test images"),
    "paper": Scale(name="paper", seeds=10, words=f"100 epochs, 10 seeds, margins of {POINTS} training and {POINTS} test images; the paper has no experiment"),
}  # fmt: skip


def variants(scale: Scale) -> list[Variant]:
    """Two losses without perturbations, two kinds under the cross-entropy, and two families of radii under the squared error."""
    squared = {"epochs": 100, "lr": 0.05, "loss": "squared"}
    entropy = {**squared, "lr": 0.2, "loss": "cross-entropy"}
    return [
        Variant(SQUARED, squared),
        Variant(PLAIN, entropy),
        Variant(ADDITIVE, {**entropy, "radius": RADIUS, "kind": "additive"}),
        Variant(MULTIPLICATIVE, {**entropy, "radius": RADIUS, "kind": "multiplicative"}),
        *(Variant(name, {**squared, "radius": radius}) for radius, name in EQUAL.items()),
        *(Variant(name, {**squared, "relative": fraction}) for fraction, name in OWN.items()),
    ]


def excited(model: nn.Sequential, settings: Mapping[str, Any]) -> PersistentExcitation:
    """The loss of Algorithm 1 with the settings of a variant; the plain loss without a radius."""
    relative = settings.get("relative")
    radius = settings.get("radius", 0.0) if relative is None else Relative(relative)
    return PersistentExcitation(model, radius, loss=settings["loss"], kind=settings.get("kind", "additive"))


def signal_size(model: nn.Sequential, x: Tensor) -> float:
    """Geometric mean over the hidden layers of the root mean square of what the next layer sees."""
    sizes, signal = [], x
    with torch.no_grad():
        for layer in list(model)[:-1]:
            signal = layer(signal)
            if isinstance(layer, nn.ReLU):
                sizes.append(float(signal.square().mean().sqrt()))
    return math.exp(float(np.mean(np.log(np.maximum(sizes, 1e-30)))))


def effect_of(model: nn.Sequential, x: Tensor, mode: str) -> float:
    """By how much perturbations of size RADIUS in every layer move the output, over the size of the output: means over x."""
    low, high = PersistentExcitation(model, RADIUS, loss="cross-entropy", kind=mode).extremes(x)
    with torch.no_grad():
        return float(((high - low) / 2).mean() / model(x).abs().mean())


def train(
    model: nn.Sequential, x: Tensor, y: Tensor, settings: Mapping[str, Any], seed: int, on_progress: OnProgress
) -> dict[str, list[float]]:
    """SGD with momentum; after every tenth of training the size of the signals and, of logits, the effect of both kinds of perturbations."""
    optimizer = torch.optim.SGD(model.parameters(), lr=settings["lr"], momentum=0.9, dampening=0.9)
    pe, shuffle, epochs = excited(model, settings), Shuffle(len(x), BATCH, seed), settings["epochs"]
    modes = ("additive", "multiplicative") if settings["loss"] == "cross-entropy" else ()
    curves: dict[str, list[float]] = {name: [] for name in ("size", *modes)}
    for epoch in range(epochs):
        for chosen in torch.as_tensor(shuffle.order()).split(BATCH):
            optimizer.zero_grad()
            pe.loss(x[chosen], y[chosen]).backward()
            optimizer.step()
        if (epoch + 1) * TENTHS % epochs == 0:
            curves["size"].append(signal_size(model, x))
            for mode in list(curves)[1:]:
                curves[mode].append(effect_of(model, x[:POINTS], mode))
            on_progress((epoch + 1) / epochs)
    return curves


def compute(settings: Mapping[str, Any], seed: int, on_progress: OnProgress) -> Outcome:
    """Trains a network; its margins, and how signals and effects changed from the first tenth of training to the end."""
    x, y, new, labels = points("digits", seed)
    model, threshold = network(seed), 0.0 if settings["loss"] == "cross-entropy" else 0.5
    curves = train(model, x, y, settings, seed, on_progress)
    values, flags = input_curves(model, ((x, y), (new, labels)), threshold)
    changes = {f"{name}_change": _log2(curve[-1], curve[0]) for name, curve in curves.items()}
    return Outcome({**values, "size": curves["size"][-1], **changes}, curves, flags)


def _log2(value: float, over: float) -> float:
    return math.log2(value / over) if value > 0 and over > 0 else math.nan


def best_margin(n: Mapping[str, VariantResult], names: Sequence[str]) -> float:
    """The largest median test margin among those that cost at most COST of the test accuracy of plain training; NaN if none does."""
    affordable = [n[name].margin_test for name in names if n[name].accuracy_test >= n[SQUARED].accuracy_test - COST]
    return max(affordable, default=math.nan)


def claims(scale: Scale) -> list[Claim]:
    """Claims of the paper, as numbers to check."""
    equal, own = tuple(EQUAL.values()), tuple(OWN.values())
    change = "log2 of the end of training over its first tenth"
    return [
        Claim("under the cross-entropy the signals in the hidden layers grow", _SETS, f"size of the signals, {change}", (PLAIN,),
              lambda n: n[PLAIN].size_change, above=0.0).quoting(_GROWTH, "weaker"),
        Claim("additive perturbations of one size lose their effect: it falls to less than half", _SETS,
              f"movement of the output over its size, {change}", (PLAIN,), lambda n: n[PLAIN].additive_change, below=-1.0).quoting(_NO_EFFECT, "threshold"),
        Claim("multiplicative ones keep theirs within a factor of two", _SETS,
              f"movement of the output over its size, {change}", (PLAIN,), lambda n: n[PLAIN].multiplicative_change, within=1.0).quoting(_ALTERNATIVE, "ours"),
        Claim("training with additive perturbations makes signals larger than with multiplicative ones", _SETS,
              "log2 of the size of the signals, additive over multiplicative", (ADDITIVE, MULTIPLICATIVE),
              lambda n: _log2(n[ADDITIVE].size, n[MULTIPLICATIVE].size), above=0.0).quoting(_GROWTH, "ours"),
        Claim("multiplicative perturbations give a larger test margin than additive ones", _SETS,
              "log2 of the median test margin, multiplicative over additive", (ADDITIVE, MULTIPLICATIVE),
              lambda n: _log2(n[MULTIPLICATIVE].margin_test, n[ADDITIVE].margin_test), above=0.0).quoting(_ALTERNATIVE, "ours"),
        Claim("additive perturbations still give a larger test margin than none", _SETS,
              "log2 of the median test margin, additive over plain cross-entropy", (PLAIN, ADDITIVE),
              lambda n: _log2(n[ADDITIVE].margin_test, n[PLAIN].margin_test), above=0.0).quoting(_NO_EFFECT, "ours"),
        Claim("radii relative to each layer's signal give a larger test margin than one radius for all layers, at matched accuracy", _SETS,
              f"log2 of the largest median test margin that costs at most {COST:.0%} of test accuracy, relative over equal radii",
              (SQUARED, *equal, *own), lambda n: _log2(best_margin(n, own), best_margin(n, equal)), above=0.0).quoting(_MAGNITUDES, "stronger"),
        Claim("the cross-entropy leaves test images a smaller margin than the squared error", _TRADE,
              "log2 of the median test margin, cross-entropy over squared error", (SQUARED, PLAIN),
              lambda n: _log2(n[PLAIN].margin_test, n[SQUARED].margin_test), below=0.0).quoting(_TOO_QUICKLY, "stronger"),
        Claim("and a wider gap between the margins of training and test images", _TRADE, "gap of the curves, cross-entropy minus squared error",
              (SQUARED, PLAIN), lambda n: n[PLAIN].gap - n[SQUARED].gap, above=0.0).quoting(_TOO_QUICKLY, "stronger"),
    ]  # fmt: skip


def draw(
    study: Study, scale: Any, details: Mapping[str, list[Any]], numbers: Sequence[VariantResult]
) -> dict[str, tuple[str, Figure]]:
    """Signals and effects over training under the cross-entropy; test accuracy against margin for the two families of radii."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.5, 4.4), layout="constrained")
    size, effect, right = figure.subplots(1, 3)
    at = np.arange(1, TENTHS + 1) * 100 / TENTHS
    for number, variant in enumerate((PLAIN, ADDITIVE, MULTIPLICATIVE)):
        curves = np.array([seed["size"] for seed in details[variant]])
        size.plot(at, curves.mean(0), color=COLOURS[number], label=variant)
        size.fill_between(at, curves.min(0), curves.max(0), color=COLOURS[number], alpha=0.15, linewidth=0)
    for number, mode in enumerate(("additive", "multiplicative"), 1):
        curves = np.array([seed[mode] for seed in details[PLAIN]])
        effect.plot(at, curves.mean(0), color=COLOURS[number], label=f"{mode}, size {RADIUS:g}")
        effect.fill_between(at, curves.min(0), curves.max(0), color=COLOURS[number], alpha=0.15, linewidth=0)
    families = (
        ("plain", (SQUARED,)),
        ("one radius", tuple(EQUAL.values())),
        ("share of the signal", tuple(OWN.values())),
    )
    for position, (label, names) in enumerate(families):
        own = [number for number in numbers if number.variant in names]
        colour = (COLOURS[0], COLOURS[1], COLOURS[3])[position]
        right.plot(
            [100 * n.accuracy_test for n in own],
            [n.margin_test for n in own],
            "o",
            color=colour,
            alpha=0.7,
            label=label,
        )
    size.set(xlabel="% of training", ylabel="size of hidden signals", title="cross-entropy")
    effect.set(xlabel="% of training", ylabel="movement of the output over its size", title="plain cross-entropy")
    right.set(xlabel="test accuracy, %", ylabel="median test margin", title="squared error")
    for axis in (size, effect, right):
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.suptitle(study.title, fontsize=12)
    return {"figure": (f"{study.title}: signals, effects and margins", figure)}


STUDY = Study(
    "perturbation-sets",
    "Other losses and other sets of perturbations",
    "sections 7.2 and 7.3 of Persistency of Excitation for Robustness of Neural Networks (no figure of the papers)",
    "scikit-learn's digits, eights against nines; a ReLU network with three hidden layers of 48 units",
    Computed(
        compute,
        {
            "accuracy_train": ("accuracy, training", "{:.1%}"),
            "accuracy_test": ("test", "{:.1%}"),
            "margin_test": ("median margin, test", "{:.3f}"),
            "gap": ("gap", "{:.3f}"),
            "size": ("size of hidden signals", "{:.2f}"),
            "additive_change": ("effect of additive ones, log2", "{:+.2f}"),
            "multiplicative_change": ("of multiplicative ones", "{:+.2f}"),
        },
        draw,
        "Left: root mean square of the hidden signals, geometric mean over layers. Middle: how far perturbations of one size in every layer move the\n"
        "logit of a plainly trained network, over the size of the logit. Bands show the range over seeds. Right: a dot per network.",
        "Means over seeds, with the range. *log2*: change of the effect from the first tenth of training to the end.",
        (f"SGD, momentum 0.9 damped by 0.9, batches of {BATCH}, learning rate 0.05 for the squared error and 0.2 for the cross-entropy; perturbations at the "
         "input of every linear layer, infinity norm, four steps. Seeds determine weights, order and split; learning rates and epochs were not tuned.",),
        chance=CHANCE,
    ),
    SCALES,
    variants,
    claims,
    ("Digits and a fully connected network; the paper has no experiment on this.",
     f"Matched accuracy: of each family of radii the network with the largest median test margin is taken whose test accuracy is at most {COST:.0%} below "
     "that of plain training with the same seed. Both families have three radii to choose from, and are chosen on test images in the same way. A first run of one seed had "
     "twice these radii, of which only the smallest were affordable."),
    asks="other losses and radii?",
    seconds={"quick": 150},
    sources=("persistency:section 7.2", "persistency:section 7.3"),
)  # fmt: skip
