"""Figure 8: a fully connected and a convolutional network tell threes from sixes; which learns the function with the larger gradients?

Both begin with an identity of 784 units that is not trained, with a bias that is, so that a normalized update of that bias is
the Lipschitz constant at the image that is seen (Lemma 1). Probabilities, binary cross-entropy, one image per step.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from excite._core.randomness import seeded_weights
from excite.data import Dataset, load
from excite.monitor.watch import watch
from excite.probes import Every, Trajectory
from excite.runs import load_run
from excite.studies.computed import Computed, OnProgress, Outcome, StepsScale
from excite.studies.figures import COLOURS
from excite.studies.study import Claim, Study, Variant, VariantResult
from excite.studies.trajectory.trajectory_figures import bands, curves
from excite.train import ensemble
from excite.train.batches import Shuffle

if TYPE_CHECKING:
    from matplotlib.figure import Figure


IMAGES = (100, 1000)  # of each class
NETWORKS = {"mlp": "fully connected", "cnn": "convolutional"}
WINDOW = 100  # steps
FIT = 0.1  # training loss at which networks count as having fitted equally well
_SIDE = 28
_PAPER = "What training reveals, appendix A.5, figure 8"
Curves = dict[str, Tensor]  # loss, length, test: one number per window

SCALES = {
    "quick": StepsScale(name="quick", seeds=3, steps=4000, words="4,000 steps, 3 repeats, 200 test images"),
    "paper": StepsScale(
        name="paper", seeds=8, steps=20_000,
        words="20,000 steps, after which the paper sees both networks fit; 8 repeats, 500 test images",
    ),
}  # fmt: skip


def name_of(network: str, images: int) -> str:
    """Name of the variant."""
    return f"{NETWORKS[network]}, {images} a class"


def variants(scale: StepsScale) -> list[Variant]:
    """Variants that are trained at a scale."""
    base = {"steps": scale.steps, "lr": 2e-3, "test": 200 if scale.name == "quick" else 500}
    return [
        Variant(name_of(network, images), {**base, "network": network, "images": images})
        for images in IMAGES
        for network in NETWORKS
    ]


def network(architecture: str, seed: int) -> nn.Sequential:
    """Weights are PyTorch's, but for the first."""
    size = _SIDE * _SIDE
    with seeded_weights(seed):
        first = nn.Linear(size, size)
        if architecture == "mlp":
            rest: list[nn.Module] = [nn.Linear(size, 512), nn.ReLU(), nn.Linear(512, 1), nn.Sigmoid()]
        else:
            rest = [
                nn.Unflatten(1, (1, _SIDE, _SIDE)),
                nn.Conv2d(1, 96, 5), nn.ReLU(), nn.MaxPool2d(3), nn.Conv2d(96, 384, 5), nn.ReLU(), nn.MaxPool2d(3),
                nn.Flatten(), nn.Linear(384, 384), nn.ReLU(), nn.Linear(384, 1), nn.Sigmoid(),
            ]  # fmt: skip
    first.weight.requires_grad_(False).copy_(torch.eye(size))
    return nn.Sequential(first, nn.ReLU(), *rest)


def in_an_ensemble(
    model: nn.Sequential, data: Dataset, settings: Mapping[str, Any], seed: int, on_progress: OnProgress
) -> Curves:
    """Trains a perceptron as an ensemble of one, and returns its curves."""
    result = ensemble(
        [model],
        data.x_train.flatten(1),
        data.y_train,
        epochs=settings["steps"] // len(data.x_train),
        lr=settings["lr"],
        loss="bce",
        seeds=[seed],
        test=(data.x_test.flatten(1), data.y_test),
        window=WINDOW,
        progress=lambda phase, done, total: on_progress(done / total),
    )
    assert result.test_loss is not None
    return {"loss": result.loss[0], "length": result.trajectory.length[0], "test": result.test_loss[0]}


def with_a_probe(
    model: nn.Sequential, data: Dataset, settings: Mapping[str, Any], seed: int, on_progress: OnProgress
) -> Curves:
    """The same for any module: the trajectory by the probe, in a run of its own."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=settings["lr"])
    shuffle = Shuffle(len(data.x_train), 1, seed)
    x, y = data.x_train.flatten(1), data.y_train.to(data.x_train)
    losses: list[float] = []
    tests: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        probe = Trajectory(Every(WINDOW), bounds_every=None)
        with watch(model, example=x[:2], run=f"{folder}/run", probes=[probe]) as watching:
            for _ in range(settings["steps"] // len(x)):
                for at in shuffle.order():
                    optimizer.zero_grad()
                    loss = functional.binary_cross_entropy(model(x[at : at + 1])[:, 0], y[at : at + 1])
                    loss.backward()
                    optimizer.step()
                    watching.step(loss)
                    losses.append(float(loss.detach()))
                    if len(losses) % WINDOW == 0:
                        tests.append(test_loss(model, data))
                        on_progress(len(losses) / settings["steps"])
        with load_run(f"{folder}/run") as run:
            length = torch.tensor(run.series("trajectory/length/0")[1], dtype=torch.float64)
    return {
        "loss": torch.tensor(losses, dtype=torch.float64).reshape(-1, WINDOW).mean(1),
        "length": length,
        "test": torch.tensor(tests, dtype=torch.float64),
    }


@torch.no_grad()
def test_loss(model: nn.Module, data: Dataset) -> float:
    """Mean binary cross-entropy on the test images."""
    losses = [
        functional.binary_cross_entropy(model(x.flatten(1))[:, 0], y.to(x), reduction="sum")
        for x, y in zip(data.x_test.split(200), data.y_test.split(200))
    ]
    return float(sum(losses)) / len(data.x_test)


def compute(settings: Mapping[str, Any], seed: int, on_progress: OnProgress) -> Outcome:
    """Computes the numbers of one variant and seed."""
    data = load("mnist", classes=(3, 6), train=2 * settings["images"], test=settings["test"], seed=seed)
    train = in_an_ensemble if settings["network"] == "mlp" else with_a_probe
    model = network(settings["network"], seed)
    curves = train(model, data, settings, seed, on_progress)
    late = max(1, len(curves["loss"]) // 10)
    with torch.no_grad():
        right = float(((model(data.x_test.flatten(1))[:, 0] > 0.5) == (data.y_test == 1)).double().mean())
    values = {name: float(curve[-late:].mean()) for name, curve in curves.items()}
    fitted = torch.nonzero(curves["loss"] < FIT).flatten()
    values |= {
        "total": float(curves["length"].sum()),
        "length_fit": float(curves["length"][fitted[0]]) if len(fitted) else math.nan,
        "accuracy": right,
    }
    detail: dict[str, list[float]] = {"steps": [WINDOW * (k + 1.0) for k in range(len(curves["loss"]))]}
    detail |= {name: [float(f"{value:.5g}") for value in curve] for name, curve in curves.items()}
    return Outcome(values, detail)


def _compare(text: str, name: str, description: str, images: int, **limit: Any) -> Claim:
    """The convolutional network's number over the fully connected one's."""
    plain, conv = (name_of(architecture, images) for architecture in NETWORKS)

    def effect(n: Mapping[str, VariantResult]) -> float:
        return math.log10(getattr(n[conv], name) / getattr(n[plain], name))

    return Claim(
        text, _PAPER, f"{description}, log10 of convolutional over fully connected", (plain, conv), effect, **limit
    )


_COMPLEX = "the MLP is learning a more complex function than the CNN"
_SLIGHTLY = (
    "learns a slightly lower complexity function than the MLP while fitting the training data equally well or better"
)
_HUNDRED = "in the MNIST100 case, there is a correlation between trajectory length and generalization"


def claims(scale: StepsScale) -> list[Claim]:
    """Claims of the paper, as numbers to check."""
    few, many = IMAGES
    length, test, loss = f"length of {WINDOW} steps at the end", "test loss at the end", "training loss at the end"
    at = f"with {few} images per class the convolutional network"
    return [
        _compare(f"{at} learns a less complex function: its trajectory is shorter", "length", length, few, below=0.0).quoting(_COMPLEX),
        _compare(f"{at} overfits less: its test loss is lower", "test", test, few, below=0.0).quoting("the CNN overfits less"),
        _compare(f"{at} fits its images equally well or better", "loss", loss, few, below=0.0).quoting(_SLIGHTLY, "stronger"),
        _compare(f"{at} has the shorter trajectory as a whole", "total", "whole length", few, below=0.0).quoting("the NN architecture that is more appropriate for the task exhibiting a shorter trajectory"),
        _compare(f"{at} has the shorter trajectory when both have the same training loss", "length_fit",
                 f"length of the {WINDOW} steps in which the training loss first is below {FIT}", few, below=0.0).quoting(_SLIGHTLY, "stronger"),
        _compare(f"with {many} images per class, too, its trajectory is shorter", "length", length, many, below=0.0).quoting(_HUNDRED, "ours"),
        _compare(f"with {many} images per class, too, its test loss is lower", "test", test, many, below=0.0).quoting(_HUNDRED, "ours"),
    ]  # fmt: skip


_PANELS = (("loss", "training loss"), ("length", "trajectory: length of 100 steps"), ("test", "test loss"))


def draw(
    study: Study, scale: Any, details: Mapping[str, list[Any]], numbers: Sequence[VariantResult]
) -> dict[str, tuple[str, Figure]]:
    """Draws the figures of the study."""
    from matplotlib.figure import Figure

    sizes = list(dict.fromkeys(variant.split(", ")[1] for variant in details))
    figure = Figure(figsize=(12, 1 + 3 * len(sizes)), layout="constrained")
    axes = figure.subplots(len(sizes), len(_PANELS), squeeze=False)
    for row, size in zip(axes, sizes):
        own = {variant.split(", ")[0]: detail for variant, detail in details.items() if variant.endswith(size)}
        for axis, (name, label) in zip(row, _PANELS):
            curves(axis, own, name, "steps", (COLOURS[2], COLOURS[1]))
            axis.set(title=f"{label}, {size}", xlabel="step")
            axis.locator_params(axis="x", nbins=4)
            axis.grid(alpha=0.3)
            if name == "length":
                axis.set_ylim(bottom=0)
            else:
                axis.set_yscale("log")
    axes[0][0].legend(fontsize=9, framealpha=0.9)
    figure.suptitle(f"{study.title}\n{study.task}; {bands(details)}", fontsize=12)
    return {"figure": (f"{study.title}: training loss, trajectory and test loss", figure)}


STUDY = Study(
    "architecture",
    "A fully connected and a convolutional network, and the trajectory of the first bias",
    "figure 8 of What Training Reveals about Neural Network Complexity",
    "MNIST, threes against sixes, 100 and 1,000 images per class",
    Computed(
        compute,
        {
            "loss": ("training loss", "{:.4f}"),
            "length": (f"length of {WINDOW} steps", "{:.2f}"),
            "length_fit": (f"at loss {FIT}", "{:.2f}"),
            "total": ("whole length", "{:.0f}"),
            "test": ("test loss", "{:.4f}"),
            "accuracy": ("test accuracy", "{:.1%}"),
        },
        draw,
        f"Above {IMAGES[0]} training images per class, below {IMAGES[1]:,}. Lines are means over repeats, bands show\n"
        f"their range; every {WINDOW} steps. The length is the sum of {WINDOW} normalized updates of the first bias,\n"
        "‖b(t+1) − b(t)‖ / (lr · ε) with ε = |dL/df| and f the probability: each is the Lipschitz constant of f at its image.",
        "Means over repeats, with the range. *Training loss*, *length* and *test loss* are means of the last tenth of training; the\n"
        f"training loss of an image is taken before its update. *At loss {FIT}*: the length of the {WINDOW} steps in which the training\n"
        "loss first is below that.",
        (
            "SGD, learning rate 0.002, batch size 1, binary cross-entropy, pixels in [−1, 1], float32.",
            "A seed determines images, initial weights and the order of images.",
            "Fully connected: 784-784-512-1. Convolutional: 784, convolution to 96 (5×5), max pool 3, convolution to 384 (5×5), max "
            "pool 3, linear 384-384-1. ReLUs between, a sigmoid at the end; the first 784 are the identity with a trained bias.",
        ),
        ("mnist",),
    ),
    SCALES,
    variants,
    claims,
    (
        "f is the probability, as in the paper: it is flat where a network is confident, so the trajectory also shortens as training "
        "proceeds, for any network.",
        "The paper does not say how long it trained; it sees both networks fit after about 20,000 steps.",
        "The authors' program halves the loss and divides update t by the reciprocal error of step t − 1; here it is as printed.",
    ),
    asks="trajectory by architecture",
    seconds={"quick": 220, "paper": 3400},
    sources=("reveals:figure 8",),
)
