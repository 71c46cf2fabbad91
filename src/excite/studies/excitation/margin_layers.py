"""Figure 6 (and figure 2 of the richness paper): the input perturbed alone, or every layer; and what else might help.

The papers argue in words about dropout, augmented and larger data, adaptive optimizers and the hidden layers: those are
the extra variants. CIFAR-10 has 5,000 images per class and no more, so at scale "paper" the data are doubled from 2,500 to
5,000 to all 10,000 images, the plain variant; at scale "quick" from half to all to twice the plain variant's images. The number
of epochs stays the same.
"""

from __future__ import annotations

from excite.studies.by_margins import ByMargins, TrainingScale
from excite.studies.excitation.planes_and_horses import HIDDEN, RADIUS, SCALES, TASK, excited, settings, with_images
from excite.studies.study import Claim, Study, Variant, gap_claim

PLAIN, INPUT, ALL = "plain", "input excited", "every layer excited"
AUGMENTED, BOTH = "augmented data", "every layer excited, augmented data"
_FIGURE = "Persistency of excitation, section 6, figure 6; Richness of hidden activations, figure 2"
_INDICATOR = (
    "when all layers are perturbed for persistency of excitation as described in Algorithm 1, the margin of the training data "
    "becomes a good indicator of the margin of the test data"
)
_DROPOUT = "it is difficult to fill up the neighborhood of the training data in this space with random perturbations"
_AUGMENTING = "augmenting the training data set may not help achieving robustness in neural networks"


def variants(scale: TrainingScale) -> list[Variant]:
    """Variants that are trained at a scale."""
    dropout = {"name": "papers-cnn", "options": {"dropout": 0.5}}
    augment = {"flip": True, "shift": 4}
    return [
        Variant(PLAIN, settings(scale)),
        Variant(INPUT, settings(scale, excitation=excited(RADIUS, "input"))),
        Variant(ALL, settings(scale, excitation=excited(RADIUS))),
        Variant("hidden layers excited", settings(scale, excitation=excited(RADIUS, HIDDEN)), extra=True),
        Variant("dropout", settings(scale, model=dropout), extra=True),
        Variant(AUGMENTED, settings(scale, augment=augment), extra=True),
        Variant(BOTH, settings(scale, augment=augment, excitation=excited(RADIUS)), extra=True),
        *(Variant(name, with_images(scale, count), extra=True) for name, count in scale.sizes.items()),
        Variant("adaptive optimizer", settings(scale, optimizer={"name": "adam", "lr": 1e-3}), extra=True),
    ]


def claims(scale: TrainingScale) -> list[Claim]:
    """Claims of the paper, as numbers to check."""
    return [*_of_the_figure(), *_in_words(scale)]


def _of_the_figure() -> list[Claim]:
    return [
        Claim(
            "perturbing the input alone makes the margin of training images larger",
            _FIGURE,
            "median training margin, input excited minus plain",
            (PLAIN, INPUT),
            lambda n: n[INPUT].margin_train - n[PLAIN].margin_train,
            above=0.0,
        ).quoting(
            "perturbing only the first layer of the network during training substantially increases the margin of the training data",
            "weaker",
        ),
        Claim(
            "that is not an improvement for test images: their margin grows by less than a tenth",
            _FIGURE,
            "median test margin, input excited over plain, minus 1",
            (PLAIN, INPUT),
            lambda n: n[INPUT].margin_test / n[PLAIN].margin_test - 1 if n[PLAIN].margin_test else float("nan"),
            below=0.1,
        ).quoting("however, this does not correspond to an improvement for the margin of the test data", "threshold"),
        gap_claim(
            "with every layer perturbed training margins predict test margins better than with the input perturbed alone",
            _FIGURE,
            ALL,
            INPUT,
        ).quoting(_INDICATOR, "weaker"),
        gap_claim(
            "with every layer perturbed training margins predict test margins better than after plain training",
            _FIGURE,
            ALL,
            PLAIN,
        ).quoting(_INDICATOR, "weaker"),
    ]


def _in_words(scale: TrainingScale) -> list[Claim]:
    fewer, more = (PLAIN, "twice the data") if "twice the data" in scale.sizes else ("5,000 images", PLAIN)
    claims = [
        gap_claim(
            f"{what} does less for the gap than perturbing every layer",
            f"Richness of hidden activations, section 5, {where}",
            ALL,
            variant,
        ).quoting(quote, "stronger")
        for variant, what, where, quote in (
            ("dropout", "dropout", "Dropout", _DROPOUT),
            (AUGMENTED, "augmenting the data", "Importance of low-dimensional activations", _AUGMENTING),
        )
    ]
    return [
        *claims,
        Claim(
            "twice the training data do less for the gap than perturbing every layer",
            "Persistency of excitation, section 7.3; Richness of hidden activations, section 5",
            f"what doubling takes off the gap ({fewer} minus {more}), minus what every layer excited takes off plain",
            tuple(dict.fromkeys((fewer, more, PLAIN, ALL))),
            lambda n: (n[fewer].gap - n[more].gap) - (n[PLAIN].gap - n[ALL].gap),
            below=0.0,
        ).quoting(
            "it is not possible to achieve robustness in neural networks simply by retrieving more training data",
            "weaker",
        ),
        gap_claim(
            "an adaptive optimizer leaves a wider gap than gradient descent",
            "Persistency of excitation, section 7.3, trade-off between training speed and generalization",
            "adaptive optimizer",
            PLAIN,
            wider=True,
        ).quoting("adaptive gradient algorithms do not usually yield solutions which generalize well", "stronger"),
        gap_claim(
            "perturbing the hidden layers alone leaves a wider gap than perturbing the input too",
            "the papers do not say; Algorithm 1 perturbs both",
            "hidden layers excited",
            ALL,
            wider=True,
        ),
        gap_claim(
            "augmenting the data narrows the gap that perturbing every layer leaves", "the papers do not say", BOTH, ALL
        ),
        Claim(
            "and perturbing every layer widens the test margin that augmenting the data leaves, by half at least",
            "the papers do not say",
            "median test margin, every layer excited and augmented data over augmented data, minus 1",
            (AUGMENTED, BOTH),
            lambda n: n[BOTH].margin_test / n[AUGMENTED].margin_test - 1 if n[AUGMENTED].margin_test else float("nan"),
            above=0.5,
        ),
    ]


STUDY = Study(
    "margin-layers",
    "The input excited alone, or every layer",
    "figure 6 of Persistency of Excitation for Robustness of Neural Networks",
    TASK,
    ByMargins(),
    SCALES,
    variants,
    claims,
    (
        f"Radius {RADIUS} in the infinity norm, grown from zero in four stages.",
        "The authors' published commands for the two curves of this figure run the same experiment, the input excited alone "
        '(a flag that reads "False" as true); here the two differ as the text says.',
    ),
    asks="excite input or all layers?",
    seconds={"quick": 410, "paper": 59000},
    sources=(
        "persistency:figure 6",
        "richness:figure 2",
    ),
)
