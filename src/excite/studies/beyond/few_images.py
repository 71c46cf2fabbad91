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
from excite.studies.study import Claim, Scale, Study, Variant, VariantResult
from excite.train.config import parse_config
from excite.train.from_config import load_data

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_OWN = "not in the papers"
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
    """

    images: int
    noise: float = 0.0
    transformer: bool = False
    epochs: int = 60

    @property
    def name(self) -> str:
        """As it stands in tables."""
        noise = f", {self.noise:.0%} random labels" if self.noise else ""
        return f"{self.images:,} images{noise}{', ViT' if self.transformer else ''}"


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
_FULL = FewImagesScale(
    name="full", seeds=5, data={"name": "digits", "test": 800}, splits=True,
    residual={"name": "preact-resnet", "options": {"width": 16, "stages": 2, "blocks": 1}},
    transformer={"name": "vit", "options": {"patch": 2, "width": 32, "depth": 2, "heads": 2}},
    tasks=_TASKS, batch=25, rho=(0.01, 0.05), gamma=(0.01, 0.05),
    words="50 to 400 digits of 8×8 pixels, 800 test images, 60 to 120 epochs, a residual network of 20,000 weights and a transformer of 26,000, five seeds",
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


def methods(scale: FewImagesScale) -> dict[str, dict[str, float]]:
    """Ways of training by name, as keys of the config's `adversarial`; none for plain training."""
    every = {f"every layer, ρ {rho:g}": {"hidden_radius": rho} for rho in scale.rho}
    return {"plain": {}, **every, **{f"AWP, γ {gamma:g}": {"awp": gamma} for gamma in scale.gamma}}


def name_of(task: Task, method: str) -> str:
    """Name of a variant."""
    return f"{task.name}: {method}"


def variants(scale: FewImagesScale) -> list[Variant]:
    """Variants that are trained at a scale."""

    def train(task: Task, method: Mapping[str, float]) -> dict[str, Any]:
        noise = {"label_noise": task.noise} if task.noise else {}
        return {
            "data": {**scale.data, "train": task.images, **noise},
            "model": dict(scale.transformer if task.transformer else scale.residual),
            "loss": "cross-entropy",
            "adversarial": {"radius": 0.0, "steps": 2, **method},
            "augment": {"flip": True, "shift": 4} if scale.augment else None,
            "optimizer": _ADAM if task.transformer else _SGD,
            "schedule": "one-cycle",
            "precision": scale.precision,
            "epochs": task.epochs,
            "batch": scale.batch,
            "checkpoint_every": f"{task.epochs} epochs",
            "watch": False,
        }

    return [
        Variant(name_of(task, name), train(task, method))
        for task in scale.tasks
        for name, method in methods(scale).items()
    ]


def claims(scale: FewImagesScale) -> list[Claim]:
    """Sentences and the numbers that decide them."""
    every = [name for name in methods(scale) if name.startswith("every")]

    def gain(task: Task, every: str) -> Claim:
        plain, perturbed = name_of(task, "plain"), name_of(task, every)
        return Claim(
            f"{task.name}: {every}, raises clean accuracy", _OWN, f"test accuracy, {every} minus plain", (plain, perturbed),
            lambda n: n[perturbed].accuracy_test - n[plain].accuracy_test, above=0.0,
        )  # fmt: skip

    return [gain(task, name) for name in every for task in scale.tasks]


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
        assert isinstance(jobs[0], TrainingJob)
        load_data(jobs[0].config.data)  # describes how to fetch them

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

        figure = Figure(figsize=(10, 4.6), layout="constrained")
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
            [task.name.replace(", ", ",\n").replace("random ", "random\n") for task in scale.tasks],
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
        "At scale full the claims about the larger hidden radius, the task with 40 % random labels and the larger γ were added after the other numbers had been seen. "
        "Claims about the larger radius, but that with 40 % random labels, are so judged by the numbers that suggested them.",
        "Random labels: this fraction of the training labels is redrawn from all ten classes, so a tenth of them stay correct.",
        "Adversarial weight perturbation without an attack on the input moves the weights up the loss of the batch before each gradient: "
        "sharpness-aware minimization with a radius relative to each weight's norm.",
    ),
    asks="accuracy from few images",
    seconds={"quick": 720, "full": 3000},
)
