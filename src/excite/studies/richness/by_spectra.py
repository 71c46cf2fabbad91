"""Studies that train networks and ask how many directions the signals of every hidden layer use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from excite._core.preserve import eval_mode
from excite.errors import RunError
from excite.jobs.job import Job
from excite.jobs.training_job import TrainingJob
from excite.probes import Moments
from excite.runs import Run, load_run
from excite.studies.by_margins import CHANCE, TrainingScale
from excite.studies.figures import COLOURS, DASHES
from excite.studies.study import Study, Variant, VariantResult
from excite.train.config import TrainConfig, parse_config
from excite.train.evaluate import PARTS, SavedModel
from excite.train.from_config import build_model, load_data, stored_config
from excite.train.predictions import accuracy, decisions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANELS = {
    "outputs, convolutions before pooling\n(as in the paper)": ("conv1", "conv2", "linear1", "linear2"),
    "inputs of the next layer,\nconvolutions after pooling": ("pooled1", "pooled2", "linear1", "linear2"),
}
TICKS = [mantissa * 10**power for power in range(4) for mantissa in (1, 2, 5)]
COMPONENTS = 80  # of the papers' figure
# Signals of a network with two convolutions: what the paper shows, and what the next affine layer sees.
LAYERS = {
    "conv1": "convolution 1",
    "conv2": "convolution 2",
    "pooled1": "convolution 1, pooled",
    "pooled2": "convolution 2, pooled",
    "linear1": "linear 1",
    "linear2": "linear 2",
}
SEEN = ("pooled1", "pooled2", "linear1", "linear2")  # inputs of an affine layer
STATES = (*PARTS, "untrained")


def signals(model: nn.Sequential, x: Tensor) -> dict[str, Tensor]:
    """The hidden signals of "papers-cnn", (B, width) each: behind the activation of every affine layer, and pooled."""
    result: dict[str, Tensor] = {}
    name_of_type, count = "", {"conv": 0, "linear": 0}
    for module in model:
        x = module(x)
        if isinstance(module, nn.Conv2d | nn.Linear):
            name_of_type = "conv" if isinstance(module, nn.Conv2d) else "linear"
            count[name_of_type] += 1
        elif isinstance(module, nn.MaxPool2d):
            result[f"pooled{count['conv']}"] = x.flatten(1)
        elif not isinstance(module, nn.Dropout | nn.Flatten):
            result[f"{name_of_type}{count[name_of_type]}"] = x.flatten(1)
    return result


def spectra(model: nn.Sequential, x: Tensor, batch: int = 250) -> dict[str, dict[str, Any]]:
    """Of every signal over the points x: width, fraction of the variance in the first components, effective rank, rank.

    All are of the covariance and exact: up to as many points as the signal is wide they are kept, and the eigenvalues
    are those of the matrix of their inner products; beyond, their covariance is summed.
    """
    moments: dict[str, Moments] = {}
    with eval_mode(model), torch.no_grad():
        for batch_of_x in x.split(batch):
            for name, signal in signals(model, batch_of_x).items():
                if name not in moments:
                    width = signal.shape[1]
                    moments[name] = Moments(width, width, device=signal.device, block=min(len(x) + 1, width))
                moments[name].add(signal)
    result = {}
    for name, summed in moments.items():
        spectrum = summed.covariance()
        explained = np.cumsum(spectrum.values) / max(spectrum.total, np.finfo(float).tiny)
        result[name] = {
            "width": spectrum.width,
            "points": len(x),
            "explained": explained[:COMPONENTS].tolist(),
            "components99": int((explained < 0.99).sum()) + 1,
            "effective": float(spectrum.effective_rank),
            "rank": float(spectrum.rank),
        }
    return result


@dataclass(frozen=True)
class SpectraMeasurement:
    """Spectra over at most `points` training images and test images, and over test images before training."""

    points: int

    def is_measured(self, run: Run, config: TrainConfig) -> bool:
        """Whether the run holds this measurement, with these settings."""
        exists = (run.path / "artifacts/spectra.json").exists()
        return exists and run.read_json("spectra").get("settings") == asdict(self)

    def measure(self, saved: SavedModel, variant: str, progress: Callable[[float], None]) -> None:
        """Measures a trained model and stores the result in its run."""
        with closing(Run.open(saved.folder, "a")) as run:  # its status stays
            config = stored_config(run, trust=saved.trusted)
        untrained = build_model(config, saved.data).to(saved.data.x_test.device)
        result: dict[str, Any] = {"settings": asdict(self), "arm": variant, "accuracy": {}}
        models = {"train": saved.model, "test": saved.model, "untrained": untrained}
        for number, (state, model) in enumerate(models.items()):
            x, y = saved.points("train" if state == "train" else "test", self.points)
            assert isinstance(model, nn.Sequential)
            result[state] = spectra(model, x)
            if state in PARTS:
                x, y = saved.points(state)
                result["accuracy"][state] = accuracy(model, decisions(model, saved.threshold), x, y)
            progress((number + 1) / len(models))
        with closing(Run.open(saved.folder, "a")) as run:  # its status stays
            run.write_json("spectra", result)


class BySpectra:
    """Trains each variant and measures the spectra of its hidden layers."""

    data = ("cifar10",)
    columns: Mapping[str, tuple[str, str]] = {
        "accuracy_train": ("accuracy, training", "{:.1%}"),
        "accuracy_test": ("test", "{:.1%}"),
        **{f"effective_{name}": (f"effective rank, {heading}", "{:.1f}") for name, heading in LAYERS.items()},
    }
    below_figure = (
        "The fraction of a layer's variance that its first principal components explain: a curve that reaches 100 % after a few of them belongs to a layer whose\n"
        "outputs span a few dimensions. Left: outputs of convolutions before pooling,\n"
        "as in the paper. Right: inputs of the next layers. Training images; lines are means over seeds of plain training, bands show the range over seeds."
    )
    settings = (
        "Signals behind the activation (ReLU), centred. Effective rank: exp of the entropy of the eigenvalues of the covariance.",
        "Seeds determine the initial weights and the order of the images. The images are the same.",
    )

    def job(
        self, study: str, variant: Variant, scale: TrainingScale, seed: int, folder: Path, device: str
    ) -> TrainingJob:
        """Makes the job of one variant and seed."""
        config = parse_config({**variant.config, "seed": seed, "device": device}, f"{study}, {variant.name}")
        return TrainingJob(variant.name, seed, folder, config, SpectraMeasurement(scale.points))

    def check(self, jobs: Sequence[Job]) -> None:
        """Checks that the data are available, before anything is trained."""
        assert isinstance(jobs[0], TrainingJob)
        load_data(jobs[0].config.data)  # describes how to fetch them

    def read(self, job: Job) -> tuple[VariantResult, dict[str, Any]]:
        """The numbers, of test images unless their name says otherwise, and the spectra by state and layer."""
        with load_run(job.folder) as run:
            try:
                spectra = run.read_json("spectra")
                values = {f"accuracy_{split}": float(spectra["accuracy"][split]) for split in PARTS}
                for name in LAYERS:
                    test, train, before = (spectra[state][name] for state in ("test", "train", "untrained"))
                    values[f"effective_{name}"] = float(test["effective"])
                    values[f"untrained_{name}"] = float(before["effective"])
                    values[f"five_{name}"] = float(train["explained"][4])
                    values[f"components99_{name}"] = float(train["components99"])
                    values[f"rank_{name}"], values[f"width_{name}"] = float(train["rank"]), float(train["width"])
            except (KeyError, TypeError, ValueError, IndexError) as error:
                raise RunError(
                    f"the artifacts of {job.folder} are damaged ({error!r}): delete them and start again"
                ) from error
        return VariantResult(job.variant, job.seed, values, (), values["accuracy_test"] < CHANCE), spectra

    def figures(
        self, study: Study, scale: TrainingScale, details: Mapping[str, list[Any]], numbers: Sequence[VariantResult]
    ) -> dict[str, tuple[str, Figure]]:
        """Draws the figures of the study."""
        first = study.variants(scale)[0].name
        title = f"{study.title} ({study.task}, scale {scale.name})"
        result = {
            "figure": ("Variance explained by the first components", variance_figure(details[first], LAYERS, title))
        }
        if len(details) > 1:
            labels = {name: f"{LAYERS[name]}" for name in SEEN}
            result["variants"] = (
                "Effective rank of every variant, layer by layer",
                variants_figure(numbers, labels, title),
            )
        return result

    def below_table(self, scale: TrainingScale) -> str:
        """Text below the table of results."""
        return (
            "Means over seeds, with the range. Accuracies are of all training and test images; effective ranks of the same\n"
            f"{scale.points:,} test images for every variant, or of all there are. {scale.points:,} images bound every rank by {scale.points - 1:,}."
        )


def variance_figure(seeds: Sequence[Mapping[str, Any]], layers: Mapping[str, str], title: str) -> Figure:
    """The fraction of the variance of training images in the first components, one line per layer."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.6), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, (heading, names) in zip(axes, PANELS.items()):
        for number, name in enumerate(names):
            explained = [100 * np.array(seed["train"][name]["explained"]) for seed in seeds]
            fraction = np.stack(explained)
            at = np.arange(1, fraction.shape[1] + 1)
            colour, dashes = COLOURS[number], DASHES[number]
            label = f"{layers[name]} ({seeds[0]['train'][name]['width']:,} units)"
            axis.plot(at, fraction.mean(0), color=colour, linestyle=dashes, linewidth=2, label=label)
            axis.fill_between(at, fraction.min(0), fraction.max(0), color=colour, alpha=0.15, linewidth=0)
        axis.set(title=heading, xlabel="principal components", xlim=(1, None), ylim=(0, 102))
        axis.grid(alpha=0.3)
        axis.legend(loc="lower right", fontsize=9)
    axes[0].set_ylabel("% of the variance explained")
    figure.suptitle(title, fontsize=12)
    return figure


def variants_figure(numbers: Sequence[VariantResult], layers: Mapping[str, str], title: str) -> Figure:
    """For every variant and layer the effective rank on test images: one dot per seed, a bar at the mean; a line at the first variant."""
    from matplotlib.figure import Figure

    variants = list(dict.fromkeys(number.variant for number in numbers))
    figure = Figure(figsize=(13, 1.6 + 0.4 * len(variants)), layout="constrained")
    axes = figure.subplots(1, len(layers), sharey=True)
    for axis, (name, label) in zip(axes, layers.items()):
        for row, variant in enumerate(["untrained", *variants]):
            source, quantity = (variants[0], "untrained") if variant == "untrained" else (variant, "effective")
            values = [float(getattr(number, f"{quantity}_{name}")) for number in numbers if number.variant == source]
            colour = COLOURS[3] if variant == "untrained" else COLOURS[2]
            axis.plot(values, [row] * len(values), "o", color=colour, alpha=0.5, markeredgewidth=0)
            axis.plot([float(np.mean(values))], [row], "|", color=COLOURS[0], markersize=16, markeredgewidth=2)
            if row == 1:
                axis.axvline(float(np.mean(values)), color=COLOURS[0], linewidth=0.8, linestyle=":")
        width = int(getattr(numbers[0], f"width_{name}"))
        axis.set(title=f"{label}\n({width:,} units)", xscale="log", xlabel="effective rank (logarithmic)")
        low, high = axis.get_xlim()
        ticks = [tick for tick in TICKS if low <= tick <= high]
        axis.set_xticks(ticks, [str(tick) for tick in ticks])
        axis.set_xticks([], minor=True)
        axis.grid(axis="x", alpha=0.3)
    axes[0].set_yticks(range(len(variants) + 1), ["untrained", *variants])
    axes[0].invert_yaxis()
    figure.suptitle(f"{title}: test images, one dot per seed, the bar is the mean, dotted: {variants[0]}", fontsize=11)
    return figure
