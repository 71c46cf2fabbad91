"""Studies that train networks and compare margin curves of training and test images, as the papers' figures do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from excite.errors import RunError
from excite.jobs.job import Job
from excite.jobs.training_job import MarginMeasurement, TrainingJob
from excite.margin import Margins
from excite.margin.gap import ks_of_samples
from excite.runs import Run, load_run
from excite.studies.figures import gap_figure, margin_figure, radius_figure
from excite.studies.judging.intervals import resample
from excite.studies.study import Scale, Study, Variant, VariantResult
from excite.train.config import parse_config
from excite.train.evaluate import PARTS, artifact_name
from excite.train.from_config import load_data

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESAMPLES = 100  # of the images: the standard error they add is known to 7 %
CHANCE = 0.6  # below this test accuracy, of two classes, a network decides hardly better than by chance


@dataclass(frozen=True, kw_only=True)
class TrainingScale(Scale):
    """Sizes are training and test images; `points` of each have their margins measured."""

    train: int | None  # None: all there are
    test: int | None
    epochs: int
    batch: int
    lr: float
    points: int
    sizes: Mapping[str, int]  # variants with other numbers of training images


@dataclass(frozen=True)
class ByMargins:
    """With `splits`, every seed has its own split of the data into training and test points."""

    data: tuple[str, ...] = ("cifar10",)
    splits: bool = False

    columns: ClassVar[Mapping[str, tuple[str, str]]] = {
        "accuracy_train": ("accuracy, training", "{:.1%}"),
        "accuracy_test": ("test", "{:.1%}"),
        "margin_train": ("median margin, training", "{:.4f}"),
        "margin_test": ("test", "{:.4f}"),
        "gap": ("gap", "{:.3f}"),
        "reached": ("relative radius reached", "{:.2%}"),
        "censored_test": ("no adversarial example, test", "{:.1%}"),
        "suspect_test": ("suspect, test", "{:.1%}"),
    }
    below_figure: ClassVar[str] = (
        "Each curve is the fraction of images that some perturbation of size at most ε misclassifies. It starts at the\n"
        "classification error and rises with ε; lower curves are more robust. Lines are means over seeds, bands show the range over\n"
        "seeds. Where the left and the right curve of a colour agree, margins of training images predict those of test images."
    )

    @property
    def settings(self) -> tuple[str, ...]:
        """Settings of the study, as the page lists them."""
        drawn = (
            "the initial weights, the order of the images and their split into training and test"
            if self.splits
            else ("the initial weights and the order of the images; the images are the same")
        )
        return (
            f"Seeds determine {drawn}.",
            "Margins are found by a minimum-norm search in the infinity norm within [−1, 1]; see [Margins](../margins.md).",
        )

    def job(
        self, study: str, variant: Variant, scale: TrainingScale, seed: int, folder: Path, device: str
    ) -> TrainingJob:
        """Makes the job of one variant and seed."""
        settings = {**variant.config, "seed": seed, "device": device}
        if self.splits:
            settings["data"] = {**settings["data"], "seed": seed}
        config = parse_config(settings, f"{study}, {variant.name}")
        # Not certified: the figures show what was found, and bounds would cost as much again.
        return TrainingJob(variant.name, seed, folder, config, MarginMeasurement(scale.points, certify=False))

    def check(self, jobs: Sequence[Job]) -> None:
        """Checks that the data are available, before anything is trained."""
        assert isinstance(jobs[0], TrainingJob)
        load_data(jobs[0].config.data)  # describes how to fetch them

    def read(self, job: Job) -> tuple[VariantResult, dict[str, Margins]]:
        """The numbers, and the margins by part. Accuracies are of all images, the rest of those that were measured."""
        with load_run(job.folder) as run:
            try:
                accuracy = run.read_json("summary")["accuracy"]
                margins = {split: Margins.from_dict(run.read_json(artifact_name("inf", split))) for split in PARTS}
                right = {split: float(accuracy[split]) for split in PARTS}
                trace = radius_trace(run)
            except (KeyError, TypeError, ValueError) as error:
                raise RunError(
                    f"the artifacts of {job.folder} are damaged ({error!r}): delete them and start again"
                ) from error
        train, test = margins["train"], margins["test"]
        values = {
            **({"reached": trace["factor"][-1]} if trace else {}),
            "accuracy_train": right["train"],
            "accuracy_test": right["test"],
            "margin_train": train.median,  # infinite where more than half of the points have no adversarial example
            "margin_test": test.median,
            "gap": train.gap(test, resamples=1).value,  # largest vertical distance between the two curves
            "censored_train": _fraction(train.censored),  # points without an adversarial example
            "censored_test": _fraction(test.censored),
            "suspect_train": _fraction(train.suspect),  # points at which the search shows signs of failure
            "suspect_test": _fraction(test.suspect),
        }
        flags = tuple(f"{split}: {flag}" for split in PARTS for flag in margins[split].flags)
        resamples = {} if self.splits else _resamples(train, test)
        by_chance = right["test"] < CHANCE
        return VariantResult(job.variant, job.seed, values, flags, by_chance, resamples, trace), margins

    def figures(
        self, study: Study, scale: TrainingScale, details: Mapping[str, list[Any]], numbers: Sequence[VariantResult]
    ) -> dict[str, tuple[str, Figure]]:
        """Draws the figures of the study."""
        extra = {variant.name for variant in study.variants(scale) if variant.extra}
        shown = {variant: seeds for variant, seeds in details.items() if variant not in extra}
        curves = margin_figure(shown, study.title, f"{study.task}, scale {scale.name}")
        result = {"figure": (f"Margin curves: {study.title}", curves)}
        if len(shown) < len(details):
            result["variants"] = ("Gap and test margin of all variants", gap_figure(numbers, study.title))
        if any("factor" in number.curves for number in numbers):
            result["radius"] = (
                'The radius "auto" while training, and what it costs',
                radius_figure(numbers, study.title),
            )
        return result

    def below_table(self, scale: TrainingScale) -> str:
        """Text below the table of results."""
        from excite.report.curves import expected_gap

        return (
            "Means over seeds, with the range. Accuracies are over all training and test images, other columns over those measured. The gap\n"
            f"is the largest vertical distance between the two curves; two sets of {scale.points} images from one distribution would show\n"
            f"about {expected_gap(scale.points, scale.points):.3f}. *No adversarial example*: none was found within the pixel range. *Suspect*: the search for the\n"
            "margin shows signs of failure at these images. *Trusted*: networks without evidence against their margins."
        )


def radius_trace(run: Run) -> dict[str, list[float]]:
    """Radius "auto" by epoch, as a fraction of each layer's signal, with its cost and what it may cost; nothing for other radii."""
    names = set(run.names())
    series = {name: f"excitation/{name}" for name in ("factor", "cost", "allowed")}
    if series["factor"] not in names:
        return {}
    return {name: list(map(float, run.series(key)[1])) for name, key in series.items() if key in names}


def _resamples(train: Margins, test: Margins) -> dict[str, list[float]]:
    """Medians and gap of images drawn with replacement; the draws depend on nothing but the numbers of images."""
    a, b = (margins.values.numpy() for margins in (train, test))
    drawn = list(zip(a[resample(len(a), RESAMPLES, 0)], b[resample(len(b), RESAMPLES, 1)]))
    return {
        "margin_train": [_median(train) for train, _ in drawn],
        "margin_test": [_median(other) for _, other in drawn],
        "gap": [ks_of_samples(train, other) for train, other in drawn],
    }


def _median(values: npt.NDArray[np.float64]) -> float:
    return float(np.quantile(values, 0.5, method="inverted_cdf"))  # as Margins.median


def _fraction(of: Tensor | None) -> float:
    return math.nan if of is None else float(of.double().mean())
