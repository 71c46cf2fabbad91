"""Hidden layers perturbed without any attack: does clean accuracy gain from it where data are few or labels wrong?

Not an experiment of the papers, whose thesis it tests on what most people want of a classifier: accuracy on new images. Nothing
perturbs the input. Each task has plain training, every layer perturbed, and adversarial weight perturbation, which without an
attack is close to sharpness-aware minimization.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from excite.errors import RunError
from excite.jobs.job import Job
from excite.jobs.training_job import NoMeasurement, TrainingJob
from excite.runs import load_run
from excite.studies.study import Claim, Scale, Study, Variant, VariantResult, from_seed
from excite.train.config import parse_config
from excite.train.from_config import load_data

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_OWN = "not in the papers"
FIRST_NEW_SEED = 5  # of the digits at scale full; seeds before it suggested the claims
_SETS = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}
_COLOURS = {"plain": "black", "every": "#3182bd", "AWP": "#e6550d"}
_LOWEST = -12.0  # points, at the lower end of the figure
_SGD = {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4}
_ADAM = {"name": "adamw", "lr": 1e-3, "weight_decay": 0.05}


@dataclass(frozen=True)
class Task:
    """Data and network.

    Args:
        images: Number of training images.
        noise: Fraction of their labels that is drawn again at random.
        transformer: Whether the network is a vision transformer instead of a residual one.
        epochs: Passes over the images.
        other: Name of another data set than the scale's, whose images and network are larger.
    """

    images: int
    noise: float = 0.0
    transformer: bool = False
    epochs: int = 60
    other: str = ""

    @property
    def name(self) -> str:
        """As it stands in tables."""
        noise = f", {self.noise:.0%} random labels" if self.noise else ""
        of = f" of {_SETS[self.other]}" if self.other else ""
        return f"{self.images:,} images{of}{noise}{', ViT' if self.transformer else ''}"


@dataclass(frozen=True, kw_only=True)
class FewImagesScale(Scale):
    """Sizes of the study. `rho`, `gamma`: the hidden radii and the sizes of AWP, in ascending order."""

    data: Mapping[str, Any]
    splits: bool  # every seed has its own split of the data into training and test points
    residual: Mapping[str, Any]
    transformer: Mapping[str, Any]
    tasks: tuple[Task, ...]
    batch: int
    rho: tuple[float, ...]
    gamma: tuple[float, ...]
    precision: str = "float32"
    augment: bool = False


_TASKS = (Task(50, epochs=120), Task(100, epochs=80), Task(200), Task(400), Task(400, noise=0.2), Task(400, noise=0.4), Task(400, transformer=True))  # fmt: skip
_OTHER = tuple(Task(500, epochs=30, other=name) for name in _SETS)
_OTHER += tuple(Task(500, noise=0.4, epochs=30, other=name) for name in ("mnist", "fashion-mnist"))
_FULL = FewImagesScale(
    name="full", seeds=5, data={"name": "digits", "test": 800}, splits=True,
    residual={"name": "preact-resnet", "options": {"width": 16, "stages": 2, "blocks": 1}},
    transformer={"name": "vit", "options": {"patch": 2, "width": 32, "depth": 2, "heads": 2}},
    tasks=_TASKS + _OTHER, batch=25, rho=(0.01, 0.05), gamma=(0.01, 0.05),
    words="50 to 400 digits of 8×8 pixels, 800 test images, 60 to 120 epochs, a residual network of 20,000 weights and a transformer of 26,000; "
    "500 images of MNIST, Fashion-MNIST and CIFAR-10, 2,000 test images, 30 epochs, batches of 50, a residual network of 20,000 weights with three stages",
)  # fmt: skip

SCALES: dict[str, FewImagesScale] = {
    "quick": replace(
        _FULL, name="quick", tasks=(_TASKS[1], _TASKS[4]),
        words="100 digits of 8×8 pixels, and 400 with 20 % random labels, 800 test images, 80 and 60 epochs, a residual network of 20,000 weights, five seeds",
    ),
    "full": _FULL,
    "short": FewImagesScale(
        name="short", seeds=3, data={"name": "cifar10", "test": 2_000}, splits=False,
        residual={"name": "preact-resnet"}, transformer={"name": "vit"},
        tasks=(Task(4_000, epochs=40), Task(4_000, noise=0.2, epochs=40)), batch=128, rho=(0.003, 0.01), gamma=(0.005,),
        precision="bfloat16", augment=True,
        words="4,000 training images of CIFAR-10 with flips and shifts, 2,000 test images, 40 epochs, PreActResNet-18, three seeds, passes in bfloat16",
    ),
}  # fmt: skip


def methods(scale: FewImagesScale, task: Task | None = None) -> dict[str, dict[str, float]]:
    """Ways of training by name, as keys of the config's `adversarial`; none for plain training.

    On another data set than the scale's only the largest γ.
    """
    largest = -1 if task is not None and task.other else 0
    every = {f"every layer, ρ {rho:g}": {"hidden_radius": rho} for rho in scale.rho}
    return {"plain": {}, **every, **{f"AWP, γ {gamma:g}": {"awp": gamma} for gamma in scale.gamma[largest:]}}


def name_of(task: Task, method: str) -> str:
    """Name of a variant."""
    return f"{task.name}: {method}"


def variants(scale: FewImagesScale) -> list[Variant]:
    """Variants that are trained at a scale."""

    def train(task: Task, method: Mapping[str, float]) -> dict[str, Any]:
        noise = {"label_noise": task.noise} if task.noise else {}
        data = {"name": task.other, "test": 2_000} if task.other else scale.data
        residual = (
            {**scale.residual, "options": {"width": 8, "stages": 3, "blocks": 1}} if task.other else scale.residual
        )
        return {
            "data": {**data, "train": task.images, **noise},
            "model": dict(scale.transformer if task.transformer else residual),
            "loss": "cross-entropy",
            "adversarial": {"radius": 0.0, "steps": 2, **method},
            "augment": {"flip": True, "shift": 4} if scale.augment else None,
            "optimizer": _ADAM if task.transformer else _SGD,
            "schedule": "one-cycle",
            "precision": scale.precision,
            "epochs": task.epochs,
            "batch": 50 if task.other else scale.batch,
            "checkpoint_every": f"{task.epochs} epochs",
            "watch": False,
        }

    return [
        Variant(name_of(task, name), train(task, method))
        for task in scale.tasks
        for name, method in methods(scale, task).items()
    ]


def claims(scale: FewImagesScale) -> list[Claim]:
    """Sentences and the numbers that decide them: means over tasks of one kind."""
    few, noisy, transformer, other, other_noisy = (
        [t for t in scale.tasks if (bool(t.other), t.noise > 0, t.transformer) == kind]
        for kind in ((False, False, False), (False, True, False), (False, False, True), (True, False, False), (True, True, False))
    )  # fmt: skip
    names = list(methods(scale))
    small, large, weights = names[1], f"every layer, ρ {scale.rho[-1]:g}", names[-1]

    def mean(text: str, tasks: Sequence[Task], method: str, than: str = "plain", **limit: Any) -> list[Claim]:
        pairs = [(name_of(task, method), name_of(task, than)) for task in tasks]
        over = f", mean over {len(pairs)} tasks" if len(pairs) > 1 else ""
        premise = from_seed(FIRST_NEW_SEED) if scale.name == "full" and not any(task.other for task in tasks) else None
        return [
            Claim(
                text, _OWN, f"test accuracy, {method} minus {than}{over}", tuple(name for pair in pairs for name in pair),
                lambda n: float(np.mean([n[a].accuracy_test - n[b].accuracy_test for a, b in pairs])), premise=premise, **limit,
            )
        ] if tasks else []  # fmt: skip

    raises = "raises clean accuracy"
    return [
        *mean(f"few images: {small}, {raises}", few, small, above=0.0),
        *mean(f"few images: {large}, {raises}", few, large, above=0.0),
        *mean(f"few images: {weights}, does as well as {large}", few, weights, large, within=0.01),
        *mean(f"random labels: {large}, {raises}", noisy, large, above=0.0),
        *mean(f"transformer: {small}, gains less than one point", transformer, small, below=0.01),
        *(
            claim
            for rho in (small, large)
            for claim in (
                *mean(f"500 images of MNIST, Fashion-MNIST and CIFAR-10: {rho}, {raises}", other, rho, above=0.0),
                *mean(f"500 images of MNIST and Fashion-MNIST with 40% random labels: {rho}, {raises}", other_noisy, rho, above=0.0),
            )
        ),
    ]  # fmt: skip


def by_seed(numbers: Sequence[VariantResult], variant: str) -> dict[int, float]:
    """Test accuracy of a variant by seed."""
    return {result.seed: result.accuracy_test for result in numbers if result.variant == variant}


class ByAccuracy:
    """Trains each variant and reads its accuracy on training and test data."""

    data = ()  # scales of digits need none; `check` says how to fetch those of scale short
    draws_from_numbers = True
    columns: Mapping[str, tuple[str, str]] = {
        "accuracy_test": ("accuracy, test", "{:.1%}"),
        "accuracy_train": ("training", "{:.1%}"),
        "minutes": ("minutes", "{:.1f}"),
    }
    below_figure = (
        "Test accuracy minus that of plain training with the same seed, in points; small markers are seeds, large ones their means.\n"
        "Above zero a method improves clean accuracy. Means below −12 are written at the arrows."
    )
    settings = (
        "Hidden layers: two steps of the sup norm from zero up the cross-entropy, relative to the root mean square of each layer's input; the input itself is "
        "not perturbed. Residual networks by SGD with momentum, transformers by AdamW; the learning rate rises and falls in one cycle. The smaller hidden "
        "radius is that of `robust-overfitting`; both were set before anything was trained here.",
    )

    def job(
        self, study: str, variant: Variant, scale: FewImagesScale, seed: int, folder: Path, device: str
    ) -> TrainingJob:
        """Makes the job of one variant and seed."""
        settings = {**variant.config, "seed": seed, "device": device}
        settings["data"] = {**settings["data"], "seed": seed if scale.splits else 0}
        config = parse_config(settings, f"{study}, {variant.name}")
        return TrainingJob(variant.name, seed, folder, config, NoMeasurement())

    def check(self, jobs: Sequence[Job]) -> None:
        """Checks that the data are available, before anything is trained."""
        first = {job.config.data.name: job.config.data for job in reversed(jobs) if isinstance(job, TrainingJob)}
        for data in first.values():
            load_data(data)  # describes how to fetch them

    def read(self, job: Job) -> tuple[VariantResult, dict[str, Any]]:
        """Reads the result of a finished job."""
        with load_run(job.folder) as run:
            try:
                values = {
                    f"accuracy_{split}": float(run.series(f"accuracy/{split}")[1][-1]) for split in ("train", "test")
                }
                values["minutes"] = float(run.read_json("time")["seconds"]) / 60
            except (KeyError, TypeError, ValueError, IndexError) as error:
                raise RunError(
                    f"the artifacts of {job.folder} are damaged ({error!r}): delete them and start again"
                ) from error
        return VariantResult(job.variant, job.seed, values, (), values["accuracy_test"] < 0.15), {}

    def figures(
        self, study: Study, scale: FewImagesScale, details: Mapping[str, list[Any]], numbers: Sequence[VariantResult]
    ) -> dict[str, tuple[str, Figure]]:
        """Draws by how much each method changes the accuracy of plain training, by task."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(14, 5), layout="constrained")
        axis = figure.subplots()
        compared = [name for name in methods(scale) if name != "plain"]
        for number, method in enumerate(compared):
            colour = _COLOURS["AWP" if method.startswith("AWP") else "every"]
            style: dict[str, Any] = {"color": colour, "linestyle": "", "marker": "osv^D"[number]}
            axis.plot([], [], markersize=8, label=method, **style)
            for at, task in enumerate(scale.tasks):
                plain, own = (by_seed(numbers, name_of(task, name)) for name in ("plain", method))
                gains = [100 * (own[seed] - plain[seed]) for seed in own if seed in plain]
                x = at + 0.18 * (number - (len(compared) - 1) / 2)
                if gains and np.mean(gains) < _LOWEST:
                    text = f"{np.mean(gains):.0f}".replace("-", "−")
                    axis.annotate(
                        text, (x, _LOWEST + 1.2), (x, _LOWEST + 3), arrowprops={"arrowstyle": "->"}, ha="center"
                    )
                elif gains:
                    axis.plot([x] * len(gains), gains, markersize=3, alpha=0.7, **style)
                    axis.plot([x], [np.mean(gains)], markersize=8, **style)
        axis.set_ylim(_LOWEST, None)
        axis.axhline(0, color="black", linewidth=0.8)
        axis.set_xticks(
            range(len(scale.tasks)),
            [
                task.name.replace(" of ", " of\n").replace(", ", ",\n").replace("random ", "random\n")
                for task in scale.tasks
            ],
            fontsize=8,
        )
        axis.set_ylabel("test accuracy minus plain, points\n(higher is better)")
        axis.grid(axis="y", alpha=0.3)
        figure.legend(loc="outside right center", fontsize=9)
        figure.suptitle(f"{study.title} ({study.task}, scale {scale.name})", fontsize=12)
        return {"figure": (f"Test accuracy minus that of plain training: {study.title}", figure)}

    def below_table(self, scale: FewImagesScale) -> str:
        """Text below the table of results."""
        return (
            "Means over seeds, with the range. Training accuracy is on the labels that were trained on, random ones included; all test labels are correct. Minutes are those of\n"
            "training, on the machine named below, while other training runs used it too."
        )


STUDY = Study(
    "few-images",
    "Every layer perturbed, without any attack",
    "no figure of the papers",
    "ten classes",
    ByAccuracy(),
    SCALES,
    variants,
    claims,
    (
        "Claims at scale full are about means over tasks of one kind, and on digits were chosen after seeds 0 to 4 had been seen (14 claims about single tasks before, one "
        "decided). Those seeds are left out of the verdicts on digits; `excite study plan` named 5 to 18 further ones. The tasks on MNIST, Fashion-MNIST and CIFAR-10 and the "
        "claims about ρ 0.05 were set before anything was trained on these data; those about ρ 0.01 after two seeds of ρ 0.05, before any of ρ 0.01.",
        "Variants without a claim (γ 0.01, and transformers with the larger sizes, most of which collapse) keep the earlier seeds.",
        "Random labels: this fraction of the training labels is redrawn from all ten classes, so a tenth of them stay correct.",
        "Adversarial weight perturbation without an attack on the input moves the weights up the loss of the batch before each gradient: "
        "sharpness-aware minimization with a radius relative to each weight's norm.",
    ),
    asks="accuracy from few images",
    seconds={"quick": 720, "full": 4800},
)
