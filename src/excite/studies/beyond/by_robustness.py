"""Studies that train networks and compare the fraction of images that stay correctly classified under perturbations of given sizes, on training and test data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from excite.errors import RunError
from excite.jobs.job import Job
from excite.jobs.training_job import TrainingJob
from excite.margin import SearchOptions, margins
from excite.margin.fixed_radius import broken_at
from excite.runs import Run, load_run
from excite.studies.by_margins import radius_trace
from excite.studies.figures import COLOURS, DASHES
from excite.studies.figures import PARTS as WORDS
from excite.studies.study import Scale, Study, Variant, VariantResult
from excite.train.config import TrainConfig, parse_config
from excite.train.evaluate import PARTS, SavedModel
from excite.train.from_config import load_data

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZES = (2, 4, 8)  # of the perturbation, in 255ths of the pixel range
DOUBT = 0.05  # the second attack breaks this share of points more: the first is not to be trusted


def in_pixels(size: float) -> float:
    """The radius of size/255 of the pixel range where pixels lie in [−1, 1]."""
    return 2 * size / 255


@dataclass(frozen=True)
class RobustnessMeasurement:
    """Robust accuracy of `points` training and test images; the minimum-norm search of `check` test images beside it."""

    points: int
    check: int
    steps: int
    restarts: int

    def is_measured(self, run: Run, config: TrainConfig) -> bool:
        """Whether the run holds this measurement, with these settings."""
        return (run.path / "artifacts/robust.json").exists() and run.read_json("robust").get("settings") == vars(self)

    def measure(self, saved: SavedModel, variant: str, progress: Callable[[float], None]) -> None:
        """Measures a trained model and stores the result in its run."""
        radii = [0.0, *map(in_pixels, SIZES)]
        options: dict[str, Any] = {"bounds": saved.data.bounds, "classes": len(saved.data.classes)}
        result: dict[str, Any] = {"settings": vars(self), "sizes": [0, *SIZES], "arm": variant}
        for number, split in enumerate(PARTS):
            x, y = saved.points(split, self.points)
            report = lambda fraction, number=number: progress((number + fraction) / 2)  # noqa: E731
            broken = broken_at(
                saved.model, x, y, radii, steps=self.steps, restarts=self.restarts, progress=report, **options
            )
            result[split] = [float((broken > radius).double().mean()) for radius in radii]
        chosen = np.linspace(0, len(x) - 1, min(self.check, len(x))).round().astype(int)
        smallest = margins(
            saved.model,
            x[chosen],
            y[chosen],
            bounds=saved.data.bounds,
            options=SearchOptions(evidence=False, certify=False),
        ).values
        result["check"] = {
            "points": len(chosen),
            "attack": [float((broken[chosen] > r).double().mean()) for r in radii],
            "search": [float((smallest > r).double().mean()) for r in radii],
        }
        with closing(Run.open(saved.folder, "a")) as run:  # its status stays
            run.write_json("robust", result)


@dataclass(frozen=True, kw_only=True)
class RobustnessScale(Scale):
    """Sizes of a study of robust accuracy."""

    model: Mapping[str, Any]
    train: int | None
    test: int | None
    epochs: int
    batch: int
    points: int
    check: int
    steps: int
    restarts: int
    precision: str


class ByRobustness:
    """Trains each variant and measures its robust accuracy at several radii."""

    data = ("cifar10",)
    columns: Mapping[str, tuple[str, str]] = {
        **{
            f"{'clean' if not size else f'robust{size}'}_{split}": (
                f"{'clean' if not size else f'{size}/255'}, {'training' if split == 'train' else 'test'}",
                "{:.1%}",
            )
            for size in (0, *SIZES)
            for split in PARTS
        },
        "gap": ("gap", "{:.3f}"),
        "reached": ("relative radius reached", "{:.2%}"),
        "search8_test": ("8/255, test, second attack", "{:.1%}"),
        "minutes": ("minutes", "{:.1f}"),
    }
    below_figure = (
        "Each line is the fraction of images that are classified correctly under every perturbation of at most ε per pixel that was\n"
        "tried; higher lines are more robust. Where the left and the right line of a colour agree, training predicts test."
    )
    settings = (
        "Robust accuracy: projected gradient steps up the margin loss from several random starts; an image counts as misclassified as "
        "soon as one of them, at this or a smaller ε, finds an adversarial example. The second attack is the minimum-norm search of "
        "[Margins](../margins.md) on fewer test images; both give upper bounds.",
    )

    def job(
        self, study: str, variant: Variant, scale: RobustnessScale, seed: int, folder: Path, device: str
    ) -> TrainingJob:
        """Makes the job of one variant and seed."""
        config = parse_config({**variant.config, "seed": seed, "device": device}, f"{study}, {variant.name}")
        taken = RobustnessMeasurement(scale.points, scale.check, scale.steps, scale.restarts)
        return TrainingJob(variant.name, seed, folder, config, taken)

    def check(self, jobs: Sequence[Job]) -> None:
        """Checks that the data are available, before anything is trained."""
        assert isinstance(jobs[0], TrainingJob)
        load_data(jobs[0].config.data)  # describes how to fetch them

    def read(self, job: Job) -> tuple[VariantResult, dict[str, list[float]]]:
        """Reads the result of a finished job."""
        with load_run(job.folder) as run:
            try:
                result, minutes = run.read_json("robust"), float(run.read_json("time")["seconds"]) / 60
                trace = radius_trace(run)
                series: dict[str, list[float]] = {split: list(map(float, result[split])) for split in PARTS}
                attack, search = (list(map(float, result["check"][name])) for name in ("attack", "search"))
            except (KeyError, TypeError, ValueError) as error:
                raise RunError(
                    f"the artifacts of {job.folder} are damaged ({error!r}): delete them and start again"
                ) from error
        names = ["clean", *(f"robust{size}" for size in SIZES)]
        values = {f"{name}_{split}": series[split][i] for i, name in enumerate(names) for split in PARTS}
        values["gap"] = max(train - test for train, test in zip(series["train"], series["test"]))
        values |= {
            **({"reached": trace["factor"][-1]} if trace else {}),
            "minutes": minutes,
            "search8_test": search[-1],
            "attack8_test": attack[-1],
        }
        flags = tuple(
            f"at {size}/255 the second attack leaves {second:.1%} of {result['check']['points']} test images, the first {first:.1%}"
            for size, first, second in zip(SIZES, attack[1:], search[1:])
            if first - second > DOUBT
        )
        assert isinstance(job, TrainingJob)
        chance = 2 / (10 if job.config.data.classes is None else len(job.config.data.classes))
        return VariantResult(job.variant, job.seed, values, flags, series["test"][0] < chance), series

    def figures(
        self, study: Study, scale: RobustnessScale, details: Mapping[str, list[Any]], numbers: Sequence[VariantResult]
    ) -> dict[str, tuple[str, Figure]]:
        """Draws the figures of the study."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 4.8), layout="constrained")
        axes = figure.subplots(1, 2, sharey=True)
        at = [0, *SIZES]
        for axis, (split, label) in zip(axes, WORDS.items()):
            for number, (variant, seeds) in enumerate(details.items()):
                fraction = 100 * np.array([lines[split] for lines in seeds])
                colour, dashes = COLOURS[number % len(COLOURS)], DASHES[number % len(DASHES)]
                axis.plot(at, fraction.mean(0), color=colour, linestyle=dashes, marker="o", markersize=4, label=variant)
                axis.fill_between(at, fraction.min(0), fraction.max(0), color=colour, alpha=0.15, linewidth=0)
            axis.set(
                title=label,
                xlabel="ε, in 255ths of the pixel range",
                xlim=(0, at[-1]),
                ylim=(0, 100),
            )
            axis.set_xticks(at)
            axis.grid(alpha=0.3)
        axes[0].set_ylabel("% correct under attack\n(higher is more robust)")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", fontsize=9)
        figure.suptitle(f"{study.title} ({study.task}, scale {scale.name})", fontsize=12)
        return {"figure": (f"Robust accuracy: {study.title}", figure)}

    def below_table(self, scale: RobustnessScale) -> str:
        """Text below the table of results."""
        return (
            f"Of {scale.points:,} training and {scale.points:,} test images. The gap is the largest difference between training and test over these\n"
            "sizes. Minutes are those of training, on the machine named below. *Trusted*: networks for which the second attack\n"
            f"finds adversarial examples for at most {DOUBT:.0%} more of its images than the first."
        )
