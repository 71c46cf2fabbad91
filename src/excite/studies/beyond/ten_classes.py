"""Ten classes and a residual network: excitation beside adversarial training and plain training, in one loop.

Not an experiment of the papers, which have two classes and five layers: section 7.1 says how to continue, and not how far it
carries. All variants share data, augmentation, network, schedule, number of epochs and evaluation.
"""

from __future__ import annotations

from typing import Any

from excite.studies.beyond.by_robustness import ByRobustness, RobustnessScale, in_pixels
from excite.studies.study import Claim, Study, Variant, gap_claim

SQUARED, ENTROPY = "plain, squared error", "plain, cross-entropy"
ONE, SEVEN = "adversarial, one step", "adversarial, seven steps"
INPUT, EVERY, AUTO = "input excited", "every layer, 2 % of its signal", "radius auto"
SGD = {"name": "sgd", "lr": 0.2, "momentum": 0.9, "weight_decay": 5e-4, "nesterov": True}
ADAM = {"name": "adamw", "lr": 0.004, "weight_decay": 0.05}
SCALES: dict[str, RobustnessScale] = {
    "quick": RobustnessScale(
        name="quick",
        model={"name": "resnet", "options": {"width": 8, "stages": 2, "blocks": 1}},
        train=500,
        test=500,
        epochs=8,
        batch=50,
        points=100,
        check=20,
        steps=10,
        restarts=1,
        precision="float32",
        seeds=1,
        words=(
            "500 training images, 8 epochs, a residual network of 5,000 weights, 100 training and 100 test images attacked once with "
            "10 steps, one seed: it shows that everything runs, and decides nothing"
        ),
    ),
    "short": RobustnessScale(
        name="short",
        model={"name": "resnet"},
        train=10_000,
        test=2_000,
        epochs=10,
        batch=250,
        points=500,
        check=100,
        steps=20,
        restarts=1,
        precision="bfloat16",
        seeds=5,
        words=(
            "10,000 training images, 10 epochs, a residual network of 2.8 million weights, passes in bfloat16; 500 test and 500 training "
            "images attacked once with 20 steps, 5 seeds"
        ),
    ),
    "paper": RobustnessScale(
        name="paper",
        model={"name": "resnet"},
        train=None,
        test=None,
        epochs=15,
        batch=500,
        points=10000,
        check=500,
        steps=20,
        restarts=3,
        precision="bfloat16",
        seeds=1,
        words=(
            "all 50,000 training images, 15 epochs, a residual network of 2.8 million weights, passes in bfloat16; all 10,000 test "
            "and 10,000 training images attacked three times with 20 steps"
        ),
    ),
}
_OWN = "not in the papers"


def variants(scale: RobustnessScale) -> list[Variant]:
    """Variants that are trained at a scale."""
    eight, bounds = in_pixels(8), [-1.0, 1.0]
    return [
        Variant(SQUARED, squared(scale)),
        Variant(ENTROPY, entropy(scale)),
        Variant(ONE, entropy(scale, adversarial={"radius": eight, "steps": 1, "bounds": bounds})),
        Variant(SEVEN, entropy(scale, adversarial={"radius": eight, "steps": 7, "bounds": bounds})),
        Variant(INPUT, squared(scale, excitation={"radius": eight, "layers": "input", "bounds": bounds})),
        Variant(EVERY, squared(scale, excitation={"relative": 0.02, "bounds": bounds})),
        Variant(AUTO, squared(scale, excitation={"radius": "auto", "bounds": bounds})),
    ]


def squared(scale: RobustnessScale, **changes: Any) -> dict[str, Any]:
    """Config with the squared error and Adam."""
    return settings(scale, loss="squared", optimizer=ADAM, **changes)


def entropy(scale: RobustnessScale, **changes: Any) -> dict[str, Any]:
    """Config with cross-entropy and SGD."""
    return settings(scale, loss="cross-entropy", optimizer=SGD, **changes)


def settings(scale: RobustnessScale, **changes: Any) -> dict[str, Any]:
    """Settings of all variants, with `changes`."""
    return {
        "data": {"name": "cifar10", "train": scale.train, "test": scale.test},
        "model": dict(scale.model),
        "augment": {"flip": True, "shift": 4},
        "schedule": "one-cycle",
        "precision": scale.precision,
        "epochs": scale.epochs,
        "batch": scale.batch,
        "watch": False,
        **changes,
    }


def claims(scale: RobustnessScale) -> list[Claim]:
    """Claims of the paper, as numbers to check."""
    return [
        gap_claim(
            "without tuning, radius auto ends with a smaller gap than the input excited alone", _OWN, AUTO, INPUT
        ),
        Claim(
            "and cost less than two points of test accuracy",
            _OWN,
            "clean test accuracy, radius auto minus input excited",
            (INPUT, AUTO),
            lambda n: n[AUTO].clean_test - n[INPUT].clean_test,
            above=-0.02,
        ),
        gap_claim("every layer excited ends with a smaller gap than plain training", _OWN, EVERY, SQUARED),
        Claim(
            "seven steps of adversarial training give a higher robust test accuracy at 8/255 than excitation of every layer",
            _OWN,
            "robust test accuracy at 8/255, seven steps minus the best of the variants with every layer excited",
            (SEVEN, EVERY, AUTO),
            lambda n: n[SEVEN].robust8_test - max(n[variant].robust8_test for variant in (EVERY, AUTO)),
            above=0.0,
        ),
        Claim(
            "one step with a random start is within five points of seven steps",
            "Wong, Rice and Kolter, Fast is better than free (2020)",
            "robust test accuracy at 8/255, one step minus seven",
            (ONE, SEVEN),
            lambda n: n[ONE].robust8_test - n[SEVEN].robust8_test,
            above=-0.05,
        ),
    ]


STUDY = Study(
    "ten-classes",
    "Ten classes: excitation and adversarial training",
    "section 7.1 of Persistency of Excitation for Robustness of Neural Networks, extended",
    "CIFAR-10, all ten classes",
    ByRobustness(),
    SCALES,
    variants,
    claims,
    (
        "Adversarial training and the input excited: 8/255 of the pixel range. Every layer: relative to the root mean square of "
        "each layer's input. Radius auto: [the rule](../excitation.md), no other setting.",
        "Excitation by the squared error to equidistant codes, four search steps; adversarial training by cross-entropy.",
        "Images flipped and shifted by up to 4 pixels; one cycle of the learning rate. Cross-entropy: gradient descent, rate 0.2, "
        "momentum 0.9, weight decay 0.0005. Squared error: AdamW, rate 0.004, decay 0.05, because plain training by it learned much "
        "more slowly with gradient descent at the few rates that were tried; these were judged on test accuracy. The variants of the two "
        "losses therefore differ in more than the loss.",
        "Adversarial training that does not overfit, every layer perturbed on top of it: [train a robust classifier](../robust-training.md).",
    ),
    asks="all classes of CIFAR-10",
    seconds={"quick": 250},
    sources=("persistency:section 7.1",),
)
