"""Random perturbations against the worst ones, the rank of hidden signals at every tenth of training, and the rank of raw data.

Section 5 of *Richness of hidden activations* says in words why noise does not replace excitation. Here networks learn to tell eights from
nines with every layer perturbed by the search of Algorithm 1, by random signs of the same size, or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from excite._core.randomness import seeded_weights
from excite.data import load
from excite.excitation import PersistentExcitation
from excite.margin import SearchOptions, margins
from excite.probes import Moments
from excite.studies.by_margins import CHANCE
from excite.studies.computed import Computed, OnProgress, Outcome
from excite.studies.figures import COLOURS
from excite.studies.study import Claim, Scale, Study, Variant, VariantResult
from excite.train.batches import Shuffle

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLAIN, RANDOM, WORST = "plain", "random signs in every layer", "every layer excited"
FULL = "plain, random inputs of full rank"
RADIUS, BATCH, TENTHS, POINTS = 0.1, 20, 10, 60
WIDTHS = (64, 48, 48, 48, 1)
_RICHNESS = "Richness of hidden activations, section 5"
_RANDOM = "it is difficult to fill up the neighborhood of the training data in this space with random perturbations"
_LOW = "the signals in the upper layers of the network can be explained by the first few principal components"
_INDUCED = (
    "the iterative training algorithms induce low-dimensional signals in the intermediate layers of neural networks independently of the "
    "training data"
)
_RAW = "The raw image, audio, and video data are low-dimensional by nature"


SCALES = {
    "quick": Scale(name="quick", seeds=4, words=f"100 epochs, 4 seeds, margins of {POINTS} training and {POINTS} test images"),
    "paper": Scale(name="paper", seeds=10, words=f"100 epochs, 10 seeds, margins of {POINTS} training and {POINTS} test images; the paper has no experiment"),
}  # fmt: skip


def variants(scale: Scale) -> list[Variant]:
    """Ways of perturbing, and plain training on inputs of full rank."""
    base = {"epochs": 100, "radius": RADIUS, "how": "plain", "data": "digits"}
    return [
        Variant(PLAIN, base),
        Variant(RANDOM, {**base, "how": "random"}),
        Variant(WORST, {**base, "how": "worst"}),
        Variant(FULL, {**base, "data": "random"}),
    ]


def network(seed: int) -> nn.Sequential:
    """A ReLU network with three hidden layers of 48 units."""
    with seeded_weights(seed):
        layers = [layer for n, m in pairwise(WIDTHS) for layer in (nn.Linear(n, m), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def points(dataset: str, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Eights and nines, or as many random points of full rank with the labels of a random half-space."""
    data = load("digits", classes=(8, 9), seed=seed)
    tensors = (data.x_train.flatten(1), data.y_train, data.x_test.flatten(1), data.y_test)
    if dataset == "digits":
        return tensors
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(WIDTHS[0], generator=generator)
    x, new = (torch.rand(len(tensor), WIDTHS[0], generator=generator) * 2 - 1 for tensor in (tensors[0], tensors[2]))
    return x, (x @ normal > 0).long(), new, (new @ normal > 0).long()


def random_loss(model: nn.Sequential, x: Tensor, y: Tensor, radius: float, generator: torch.Generator) -> Tensor:
    """½(f(x; d) − y)² + ½(f(x; −d) − y)² with d of random signs, `radius` in size, at the input of every linear layer."""
    total = x.new_zeros(())
    shapes = [(len(x), layer.in_features) for layer in model if isinstance(layer, nn.Linear)]
    signs = [(torch.randint(2, shape, generator=generator) * 2 - 1).to(x) for shape in shapes]
    for side in (1, -1):
        signal, drawn = x, iter(signs)
        for layer in model:
            signal = layer(signal + side * radius * next(drawn)) if isinstance(layer, nn.Linear) else layer(signal)
        total = total + (signal[:, 0] - y).square().mean() / 2
    return total


def effective_rank(model: nn.Sequential, x: Tensor) -> float:
    """Effective rank of the last hidden layer's signals over x: e to the entropy of the normalized eigenvalues of their covariance."""
    with torch.no_grad():
        signal = model[:-1](x)
    moments = Moments(signal.shape[1], signal.shape[1])
    moments.add(signal)
    return float(moments.covariance().effective_rank)


def train(
    model: nn.Sequential, x: Tensor, y: Tensor, settings: Mapping[str, Any], seed: int, on_progress: OnProgress
) -> list[float]:
    """SGD with momentum on squared error; the effective rank at the start and after every tenth of training."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, dampening=0.9)
    excited = PersistentExcitation(model, settings["radius"], bounds=None)
    generator, shuffle = torch.Generator().manual_seed(seed), Shuffle(len(x), BATCH, seed)
    epochs, ranks = settings["epochs"], [effective_rank(model, x)]
    for epoch in range(epochs):
        order = torch.as_tensor(shuffle.order())
        for chosen in order.split(BATCH):
            optimizer.zero_grad()
            if settings["how"] == "worst":
                loss = excited.loss(x[chosen], y[chosen])
            elif settings["how"] == "random":
                loss = random_loss(model, x[chosen], y[chosen].to(x), settings["radius"], generator)
            else:
                loss = (model(x[chosen])[:, 0] - y[chosen].to(x)).square().mean()
            loss.backward()
            optimizer.step()
        if (epoch + 1) * TENTHS % epochs == 0:
            ranks.append(effective_rank(model, x))
            on_progress((epoch + 1) / epochs)
    return ranks


Splits = Sequence[tuple[Tensor, Tensor]]  # points and labels of training and test


def input_curves(model: nn.Module, splits: Splits, threshold: float = 0.5) -> tuple[dict[str, float], tuple[str, ...]]:
    """Accuracies, median test margin, and gap of the margin curves of training and test points; and what speaks against them."""
    options = SearchOptions(certify=False)
    train, test = (
        margins(model, x[:POINTS], y[:POINTS], bounds=(-1, 1), threshold=threshold, options=options) for x, y in splits
    )
    right = [float(((model(x)[:, 0] > threshold).long() == y).double().mean()) for x, y in splits]
    values = {
        "accuracy_train": right[0],
        "accuracy_test": right[1],
        "margin_test": test.median,
        "gap": train.gap(test, resamples=1).value,
    }
    return values, tuple(
        f"{split}: {flag}" for split, result in (("training", train), ("test", test)) for flag in result.flags
    )


def compute(settings: Mapping[str, Any], seed: int, on_progress: OnProgress) -> Outcome:
    """Trains a network and measures ranks and margins."""
    x, y, new, labels = points(settings["data"], seed)
    model = network(seed)
    ranks = train(model, x, y, settings, seed, on_progress)
    spectrum = np.linalg.svd(x.double().numpy() - x.double().numpy().mean(0), compute_uv=False) ** 2
    dimension = int((np.cumsum(spectrum) / spectrum.sum() < 0.95).sum()) + 1
    values, flags = input_curves(model, ((x, y), (new, labels)))
    values |= {
        "rank_start": ranks[0],
        "rank_end": ranks[-1],
        **{f"rank{tenth}": rank for tenth, rank in enumerate(ranks)},
        "raw": dimension / WIDTHS[0],
    }
    return Outcome(values, {"ranks": ranks}, flags)


def _tenths(n: Mapping[str, VariantResult], name: str) -> list[float]:
    ranks = [getattr(n[name], f"rank{tenth}") for tenth in range(TENTHS + 1)]
    return [after - before for before, after in pairwise(ranks)]


def claims(scale: Scale) -> list[Claim]:
    """Claims of the paper, as numbers to check."""
    return [
        Claim(
            "random perturbations of every layer give test images a smaller margin than the worst ones of the same size", _RICHNESS,
            "median test margin, random signs minus every layer excited", (RANDOM, WORST), lambda n: n[RANDOM].margin_test - n[WORST].margin_test, below=0.0,
        ).quoting(_RANDOM, "stronger"),
        Claim(
            "and leave a wider gap", _RICHNESS, "gap of the curves, random signs minus every layer excited", (RANDOM, WORST),
            lambda n: n[RANDOM].gap - n[WORST].gap, above=0.0,
        ).quoting(_RANDOM, "stronger"),
        Claim(
            "they do give a larger margin than plain training", _RICHNESS, "median test margin, random signs minus plain", (PLAIN, RANDOM),
            lambda n: n[RANDOM].margin_test - n[PLAIN].margin_test, above=0.0,
        ).quoting(_RANDOM, "ours"),
        Claim(
            "plain training lowers the effective rank of the last hidden layer", "Richness of hidden activations, section 2 and figure 1",
            "effective rank, end minus start", (PLAIN,), lambda n: n[PLAIN].rank_end - n[PLAIN].rank_start, below=0.0,
        ).quoting(_LOW, "stronger"),
        Claim(
            "excitation is lost all through training: the rank falls in every tenth of it", "Richness of hidden activations, section 2",
            "change of the effective rank in a tenth of training", (PLAIN,), lambda n: _tenths(n, PLAIN), below=0.0,
        ).quoting(_LOW, "ours"),
        Claim(
            "it falls on inputs of full rank too", "Persistency of excitation, section 7.3", "effective rank, end minus start, random inputs", (FULL,),
            lambda n: n[FULL].rank_end - n[FULL].rank_start, below=0.0,
        ).quoting(_INDUCED),
        Claim(
            "every layer excited ends with a higher effective rank than plain training", "Richness of hidden activations, section 4",
            "effective rank at the end, every layer excited minus plain", (PLAIN, WORST), lambda n: n[WORST].rank_end - n[PLAIN].rank_end, above=0.0,
        ).quoting("we will develop an alternative training method to produce richer sets of activations in the hidden-layers of the network", "stronger"),
        Claim(
            "the raw images are low-dimensional: a third of the dimensions hold 95 % of the variance", "Persistency of excitation, section 4",
            "components for 95 % of the variance of training images, over pixels", (PLAIN,), lambda n: n[PLAIN].raw, below=1 / 3,
        ).quoting(_RAW, "threshold"),
    ]  # fmt: skip


def draw(
    study: Study, scale: Any, details: Mapping[str, list[Any]], numbers: Sequence[VariantResult]
) -> dict[str, tuple[str, Figure]]:
    """Effective rank over training by variant; gap against test margin."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for number, (variant, seeds) in enumerate(details.items()):
        ranks = np.array([seed["ranks"] for seed in seeds])
        at = np.arange(ranks.shape[1]) / TENTHS * 100
        left.plot(at, ranks.mean(0), color=COLOURS[number], linewidth=1.8, label=variant)
        left.fill_between(at, ranks.min(0), ranks.max(0), color=COLOURS[number], alpha=0.15, linewidth=0)
        if variant != FULL:
            own = [result for result in numbers if result.variant == variant]
            right.plot(
                [n.margin_test for n in own],
                [n.gap for n in own],
                "o",
                color=COLOURS[number],
                alpha=0.7,
                label=variant,
            )
    left.set(xlabel="% of training", ylabel="effective rank of the last hidden layer")
    right.set(xlabel="median test margin", ylabel="gap of training and test curves")
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    figure.suptitle(study.title, fontsize=12)
    return {"figure": (f"{study.title}: effective rank over training, and gap against margin", figure)}


STUDY = Study(
    "random-perturbations",
    "Random perturbations beside the worst ones",
    "section 5 of Richness of Training Data Does Not Suffice and section 4 of Persistency of Excitation for Robustness of Neural Networks (no figure of the papers)",
    "scikit-learn's digits, eights against nines; a ReLU network with three hidden layers of 48 units",
    Computed(
        compute,
        {
            "accuracy_train": ("accuracy, training", "{:.1%}"),
            "accuracy_test": ("test", "{:.1%}"),
            "margin_test": ("median margin, test", "{:.3f}"),
            "gap": ("gap", "{:.3f}"),
            "rank_start": ("effective rank, start", "{:.1f}"),
            "rank_end": ("end", "{:.1f}"),
            "raw": ("95 % of the variance, inputs", "{:.0%}"),
        },
        draw,
        "Left: the effective rank of the last hidden layer's signals over training images, at every tenth of training; bands show the range over\n"
        "seeds. Right: a dot per network; margins in the infinity norm, pixels in [−1, 1].",
        "Means over seeds, with the range. *95 % of the variance*: principal components that hold it, as a fraction of the 64 pixels.",
        (f"Squared error, SGD, learning rate 0.05, momentum 0.9 damped by 0.9, batches of {BATCH}; radius {RADIUS} at the input of every linear layer, infinity norm.",
         "Random signs: ½(f(x; d) − y)² + ½(f(x; −d) − y)², d drawn again at every step. Seeds determine weights, order and split."),
        chance=CHANCE,
    ),
    SCALES,
    variants,
    claims,
    ("Digits and a fully connected network instead of CIFAR-10 and a convolutional one.",),
    asks="noise instead of excitation?",
    seconds={"quick": 45, "paper": 1240},
    sources=("richness:section 5", "persistency:section 4"),
)  # fmt: skip
