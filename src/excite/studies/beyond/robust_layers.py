"""Which hidden layers adversarial training should perturb, with how many search steps and which radii, and why it helps.

Not an experiment of the papers. It takes the networks, data and schedule of `robust-overfitting` at scale quick and changes one
setting at a time. Beside robust accuracy it measures what the papers say persistent excitation does: how rich the signals
of the layers are, how aligned their weights, how large the margins at all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from excite.errors import RunError
from excite.jobs.job import Job
from excite.jobs.progress import ProgressCallback
from excite.jobs.training_job import TrainingJob
from excite.margin import SearchOptions, margins
from excite.probes import alignment, richness
from excite.runs import Run, load_run
from excite.studies.beyond.robust_overfitting import PGD, ByEpoch, LastEpochMeasurement, OverfittingScale, every
from excite.studies.beyond.robust_overfitting import SCALES as OVERFITTING
from excite.studies.beyond.robust_overfitting import variants as overfitting_variants
from excite.studies.study import Claim, Study, Variant, VariantResult, from_seed
from excite.train.config import TrainConfig, parse_config
from excite.train.evaluate import SavedModel, load_model
from excite.train.from_config import find_device, train
from excite.train.models.resnet import preact_resnet

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RHO = 0.01
ALL = every(RHO)
SHALLOW, DEEP = f"shallow third, ρ {RHO:g}", f"deep third, ρ {RHO:g}"
FOUR, TWO, ONE = "every layer, four search steps", "every layer, two search steps", "every layer, one search step"
PGD_TWO = "PGD training, two search steps"
SMALL = f"every layer, ρ {RHO:g}, the half of each batch with the smallest errors"
POOR = "every layer, ρ larger where richness is missing"
LATE, BEFORE = f"every layer, ρ {RHO:g} from half of training on", f"before each normalization, ρ {RHO:g}"
ONCE = f"every layer, ρ {RHO:g}, all in the last search step"
FREE = f"every layer, ρ {RHO:g}, the weights updated after each of four search steps, half the epochs"
_OWN = "not in the papers"
FIRST_NEW_SEED = 5  # at scale full; seeds before it suggested the claims
_HIDDEN = ("1.first", "1.second", "2.skip", "2.first", "2.second", "7")  # affine layers behind the input, in order
_NORMS = ("1.norm1", "1.norm2", "2.norm1", "2.norm2", "3")  # normalizations of the same network

_WORDS = OVERFITTING["quick"].words
_BASE = replace(OVERFITTING["quick"], rho=(RHO,), gamma=(), both=(RHO, 0.01))
SCALES: dict[str, OverfittingScale] = {
    "quick": replace(_BASE, words=f"{_WORDS}; every layer, a third of the layers, two search steps"),
    "full": replace(_BASE, name="full", seeds=5, every_variant=True, words=_WORDS.replace("three seeds", "five seeds")),
}


def radii_by_richness(ranks: Mapping[str, float], mean: float) -> dict[str, float]:
    """Radii inversely proportional to the richness of each layer, with the given mean.

    Args:
        ranks: Effective rank over width of the layers' inputs.
        mean: Mean of the radii.

    Returns:
        Radius of each layer.
    """
    inverse = {layer: 1 / value for layer, value in ranks.items()}
    total = sum(inverse.values())
    return {layer: round(mean * len(inverse) * value / total, 5) for layer, value in inverse.items()}


def hidden_richness(model: nn.Module, x: Tensor) -> dict[str, float]:
    """Effective rank over width of the inputs of the hidden layers."""
    return {
        layer.layer: float(layer.covariance.effective_rank) / layer.width
        for layer in richness(model, x)
        if layer.layer in _HIDDEN
    }


def with_gates(**options: Any) -> nn.Module:
    """The residual network with a fixed factor of one for each channel in front of every normalization.

    The factors change nothing; being affine layers, they are where perturbations enter before a normalization.
    """
    model = preact_resnet(**options)
    for name in _NORMS:
        norm = model.get_submodule(name)
        assert isinstance(norm, nn.BatchNorm2d)
        gate = nn.Conv2d(norm.num_features, norm.num_features, 1, groups=norm.num_features, bias=False)
        nn.init.ones_(gate.weight).requires_grad_(False)
        model.set_submodule(name, nn.Sequential(gate, norm))
    return model


def variants(scale: OverfittingScale) -> list[Variant]:
    """Variants that are trained: one setting of the variant with every layer is changed at a time."""
    base = {variant.name: variant for variant in overfitting_variants(scale)}
    gated = {**scale.model["options"], "channels": 1, "outputs": 10}

    def changed(name: str, of: str, model: Mapping[str, Any] | None = None, **changes: Any) -> Variant:
        config = {**base[of].config, "model": model or base[of].config["model"]}
        few = name in (SHALLOW, DEEP, TWO)  # also at scale quick
        return Variant(name, {**config, "adversarial": {**config["adversarial"], **changes}}, extra=not few)

    return [
        base[PGD],
        base[ALL],
        changed(SHALLOW, ALL, layers=list(_HIDDEN[:2])),
        changed(DEEP, ALL, layers=list(_HIDDEN[-2:])),
        changed(TWO, ALL, steps=2),
        changed(FOUR, ALL, steps=4),
        changed(ONE, ALL, steps=1),
        changed(PGD_TWO, PGD, steps=2),
        changed(POOR, ALL),  # its job finds the radii
        changed(LATE, ALL, hidden_stages=2),
        changed(SMALL, ALL, hidden_fraction=0.5),
        changed(ONCE, ALL, hidden_once=True),
        with_epochs(changed(FREE, ALL, steps=4, free=True), scale.epochs // 2),
        changed(
            BEFORE,
            ALL,
            {"name": f"{__name__}:{with_gates.__name__}", "options": gated},
            layers=[f"{norm}.0" for norm in _NORMS],
        ),
    ]


def with_epochs(variant: Variant, epochs: int) -> Variant:
    """The same variant, trained for another number of epochs."""
    return replace(variant, config={**variant.config, "epochs": epochs})


def claims(scale: OverfittingScale) -> list[Claim]:
    """Sentences and the numbers that decide them."""
    last = "robust test accuracy after the last epoch"
    premise = from_seed(FIRST_NEW_SEED) if scale.name == "full" else None

    def higher(
        text: str, better: str, than: str, key: str = "test_last", measure: str = last, above: float = 0.0
    ) -> Claim:
        return Claim(
            text, _OWN, f"{measure}, {better} minus {than}", (than, better),
            lambda n: getattr(n[better], key) - getattr(n[than], key), above=above, premise=premise,
        )  # fmt: skip

    return [
        Claim(
            "all layers are better than the better third of them", _OWN, f"{last}, {ALL} minus the larger of the two thirds",
            (ALL, SHALLOW, DEEP), lambda n: n[ALL].test_last - max(n[SHALLOW].test_last, n[DEEP].test_last), above=0.0,
            premise=premise,
        ),
        higher("every layer perturbed in two steps is more robust than PGD training with five, at about half the cost", TWO, PGD),
        higher(
            "weights updated after every search step (free adversarial training) lose at most two points, at about half the cost",
            FREE, ALL, above=-0.02,
        ),
        Claim(
            "hidden layers moved in the last search step alone do as well", _OWN, f"{last}, {ONCE} minus {ALL}", (ALL, ONCE),
            lambda n: n[ONCE].test_last - n[ALL].test_last, within=0.02, premise=premise,
        ),
        higher("perturbations from the start are better than from half of training on", ALL, LATE),
        higher("perturbations behind the normalizations are better than in front of them", ALL, BEFORE),
        higher(
            "perturbing every layer makes the signals of the layers richer", ALL, PGD, "rank",
            "effective rank over width of the hidden layers' inputs, mean over layers",
        ),
        higher("and the margin at all layers larger", ALL, PGD, "layer_margin", "median relative margin at all layers"),
    ]  # fmt: skip


@dataclass(frozen=True)
class LayersMeasurement:
    """The stronger attack, and effective rank, alignment and margins at all layers of the trained network on test images."""

    radius: float
    points: int
    margins: int = 20

    def is_measured(self, run: Run, config: TrainConfig) -> bool:
        """Whether the run holds this measurement, with these settings."""
        stored = (run.path / "artifacts/layers.json").exists() and run.read_json("layers").get("settings") == vars(self)
        return stored and self._attack().is_measured(run, config)

    def measure(self, saved: SavedModel, variant: str, progress: Callable[[float], None]) -> None:
        """Measures a trained model and stores the result in its run."""
        self._attack().measure(saved, variant, lambda fraction: progress(0.5 * fraction))
        x, y = saved.points("test", self.points)
        ranks = hidden_richness(saved.model, x)
        ratios = [layer.ratio for layer in alignment(saved.model, x[:4]).layers if layer.layer in _HIDDEN]
        options = SearchOptions(evidence=False, certify=False, restarts=1)
        few = slice(None, None, max(1, len(x) // self.margins))
        smallest = margins(saved.model, x[few], y[few], layers="all", relative=True, options=options)
        result = {
            "settings": vars(self),
            "rank": float(np.mean(list(ranks.values()))),
            "ranks": ranks,
            "alignment": float(np.mean(ratios)),
            "layer_margin": smallest.median,
        }
        progress(1.0)
        with closing(Run.open(saved.folder, "a")) as run:
            run.write_json("layers", result)

    def _attack(self) -> LastEpochMeasurement:
        return LastEpochMeasurement(self.radius, self.points)


@dataclass(frozen=True)
class RichnessJob(TrainingJob):
    """Trains with radii inversely proportional to the richness of the layers after PGD training with the same seed.

    That training is done first, in a folder beside the run's.
    """

    mean: float = RHO

    def run(self, on_progress: ProgressCallback) -> None:
        """Trains the network that decides the radii, then the one with these radii, and measures it."""
        first = self.folder.parent / f"{self.folder.name}.richness"
        before = {**self.config.model_dump(), "robust": None, "adversarial": {**self._attack(), "hidden_radius": 0.0}}
        train(parse_config(before), first).close()
        saved = load_model(first, trust=True).to(find_device(self.config.device))
        radii = radii_by_richness(hidden_richness(saved.model, saved.points("test", 500)[0]), self.mean)
        config = parse_config({**self.config.model_dump(), "adversarial": {**self._attack(), "hidden_radius": radii}})
        TrainingJob(self.variant, self.seed, self.folder, config, self.measurement).run(on_progress)

    def _attack(self) -> dict[str, Any]:
        return dict(self.config.model_dump()["adversarial"])

    def _is_same_config(self, run: Run) -> bool:
        """The radii are found while it runs: everything else has to be the same."""
        radii = (run.config.get("adversarial") or {}).get("hidden_radius")
        if not isinstance(radii, Mapping):
            return False
        own = {**self._attack(), "hidden_radius": dict(radii)}
        same = parse_config({**self.config.model_dump(), "adversarial": own})
        return TrainingJob(self.variant, self.seed, self.folder, same, self.measurement)._is_same_config(run)


class ByLayers(ByEpoch):
    """Trains each variant as `robust-overfitting` does and measures its layers."""

    columns: Mapping[str, tuple[str, str]] = {
        **ByEpoch.columns,
        "rank": ("effective rank over width", "{:.3f}"),
        "alignment": ("σ₁²/‖W‖²", "{:.3f}"),
        "layer_margin": ("margin at all layers", "{:.3%}"),
    }
    below_figure = (
        "Robust accuracy after the last epoch against the gap to training images, one small marker per seed; up and left is better.\n"
        "Right: the same accuracy against the richness of the hidden layers' inputs."
    )

    def job(
        self, study: str, variant: Variant, scale: OverfittingScale, seed: int, folder: Path, device: str
    ) -> TrainingJob:
        """Makes the job of one variant and seed."""
        job = super().job(study, variant, scale, seed, folder, device)
        measured = LayersMeasurement(scale.radius, scale.points)
        job_class = RichnessJob if variant.name == POOR else TrainingJob
        return job_class(job.variant, job.seed, job.folder, job.config, measured)

    def read(self, job: Job) -> tuple[VariantResult, dict[str, Any]]:
        """Reads the result of a finished job."""
        result, lines = super().read(job)
        with load_run(job.folder) as run:
            try:
                stored = run.read_json("layers")
                more = {name: float(stored[name]) for name in ("rank", "alignment", "layer_margin")}
            except (KeyError, TypeError, ValueError) as error:
                raise RunError(
                    f"the artifacts of {job.folder} are damaged ({error!r}): delete them and start again"
                ) from error
        return replace(result, values={**result.values, **more}), lines

    def figures(
        self, study: Study, scale: OverfittingScale, details: Mapping[str, list[Any]], numbers: Sequence[VariantResult]
    ) -> dict[str, tuple[str, Figure]]:
        """Draws robust accuracy against the gap and against the richness of the layers."""
        from matplotlib import colormaps
        from matplotlib.figure import Figure

        figure = Figure(figsize=(11, 7), layout="constrained")
        axes = figure.subplots(1, 2, sharey=True)
        for number, name in enumerate(details):
            own = [n for n in numbers if n.variant == name]
            colour, marker = colormaps["tab20"](number % 20), "osv^DPX*"[number % 8]
            for axis, key in zip(axes, ("gap_last", "rank")):
                at = np.array([[getattr(n, key), 100 * n.test_last] for n in own])
                axis.plot(*at.T, linestyle="", marker=marker, markersize=3, color=colour)
                axis.plot(*at.mean(0), linestyle="", marker=marker, markersize=9, color=colour, label=name)
        axes[0].set(xlabel="gap of robust accuracy, training minus test", ylabel="robust test accuracy, %, last epoch")
        axes[1].set(xlabel="effective rank over width, mean of hidden layers")
        for axis in axes:
            axis.grid(alpha=0.3)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=9)
        figure.suptitle(f"{study.title} (scale {scale.name})", fontsize=12)
        return {"figure": (f"Robust accuracy, gap and richness: {study.title}", figure)}


STUDY = Study(
    "robust-layers",
    "Which hidden layers to perturb, in how many steps, and why",
    "no figure of the papers",
    "ten classes",
    ByLayers(),
    SCALES,
    variants,
    claims,
    (
        "Eight claims at scale full, chosen and in part reworded after seeds 0 to 4 had been seen (11 claims before, none decided by them). Those seeds are left out of the "
        "verdicts; `excite study plan` named 8 to 21 further ones. The table shows the means over all seeds.",
        "Variants without a claim (one and four search steps, PGD training with two, radii by richness, small errors) keep five seeds.",
        "Hidden layers in order: the four convolutions of two residual blocks, the convolution of a skip, the linear layer. Shallow third: "
        "the first block; deep third: the last convolution and the linear layer.",
        "Radii by richness: inversely proportional to effective rank over width of each layer's input after PGD training with the same seed, with mean ρ.",
        "Before each normalization: a fixed factor of one in front of each, which is an affine layer and so a place for perturbations, relative to the root mean "
        "square of what is normalized. All other variants perturb the inputs of convolutions and of the linear layer, behind normalization and ReLU.",
        "Radii by conserved scale would be the equal ones: what gradient flow conserves of a layer in front of a normalization, the squared norm of its weights "
        "per output, is 1/3 for every layer under PyTorch's initialization.",
        "Half the cost: a forward pass counts 1, a backward pass for the perturbations 1 and one for the weights too 2. Five search steps and the "
        "update take 13 per batch, two search steps 7, four search steps with an update after each 14, in half of the epochs.",
        "Margins at all layers: the least ε such that perturbations of at most ε times the root mean square of each layer's input change the "
        "decision, of 20 test images, by attack.",
        "Accuracies are multiples of 0.002 (500 images; the standard error of one, from the choice of images, is about 0.02).",
    ),
    asks="which layers to perturb?",
    seconds={"quick": 600, "full": 2000},
)
