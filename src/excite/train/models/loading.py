"""Saved models: of a run, of a checkpoint in one, or of a file of weights; with the data to measure them on.

There is one way to load them all. Weights come from the newest checkpoint or from `artifacts/model.safetensors`; the model is built
as the caller says, as the file says, or as the run's config says; the data are the caller's, the config's, or the points that
`excite.watch` stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from excite._core.calls import pick_output
from excite._core.checks import check_number, check_pair, check_path, shown
from excite._core.compatibility import renamed_keywords
from excite.data import NAMES, Dataset, load
from excite.data.files import SUFFIXES, DataFile, load_file
from excite.errors import InputError, RunError
from excite.runs import Run, load_run
from excite.runs import weights as stored_weights
from excite.runs.import_paths import ModelSource, model_source
from excite.runs.store import is_url
from excite.runs.weights import StoredWeights
from excite.train.config import TrainConfig
from excite.train.from_config import build_model, load_data, stored_config
from excite.train.models.architectures import ARCHITECTURES, options_for
from excite.train.models.factories import make_model
from excite.train.models.weights import load_weights, read_weights

POINTS = "artifacts/points.safetensors"  # in a run folder: the points that excite.watch measured on
Model = str | nn.Module | Callable[..., nn.Module]


@dataclass(frozen=True)
class SavedModel:
    """A model with the data and the decision rule it was trained for.

    Attributes:
        model: The model, in evaluation mode.
        data: Its data.
        threshold: Of a model with one output: class 1 where f > threshold.
        run: The run folder it comes from; None for a file of weights.
        step: Number of optimizer steps done; -1 if it is not known.
        trusted: Loaded with trust=True: its model may be a "module:factory".
        normalize: (mean, std) by which the data were normalized outside of the model; margins are then in pixels.
        config: The config of a run that `excite train` made.
        name: What the model is called in reports.
        data_from: "run"; "caller" if the run has no data; "other" if the caller replaced the run's data.
    """

    model: nn.Module
    data: Dataset
    threshold: float
    run: Path | None
    step: int
    trusted: bool = False
    normalize: Any = None
    config: TrainConfig | None = None
    name: str = ""
    data_from: Literal["run", "caller", "other"] = "run"

    @property
    def folder(self) -> Path:
        """The run folder; a file of weights has none."""
        if self.run is None:
            raise InputError(f"{self.name} is a file of weights, not a run: there is nothing to store results in")
        return self.run

    @renamed_keywords(part="split", most="max_points")
    def points(self, split: str, max_points: int | None = None) -> tuple[Tensor, Tensor]:
        """Training or test points, at most `max_points` of them, evenly spaced."""
        x, y = (getattr(self.data, f"{axis}_{split}") for axis in "xy")
        if max_points is not None and max_points < len(x):
            chosen = torch.linspace(0, len(x) - 1, max_points).round().long()
            x, y = x[chosen], y[chosen]
        return x, y

    def to(self, device: torch.device | str) -> SavedModel:
        """Model and data on `device`; margins come back on the CPU from anywhere."""
        return replace(self, model=self.model.to(device), data=self.data.to(device))


class TensorModel(nn.Module):
    """A model as a function from one tensor to one tensor: its input under a keyword, one part of what it returns."""

    def __init__(self, model: nn.Module, key: str | None, output: Any):
        super().__init__()
        self.model, self.key, self.output = model, key, output

    def forward(self, x: Tensor) -> Tensor:
        """The output at x."""
        return pick_output(self.model(x) if self.key is None else self.model(**{self.key: x}), self.output)


def load_model(
    path: str | Path,
    *,
    model: Model | None = None,
    options: Mapping[str, Any] | None = None,
    data: str | Path | Dataset | None = None,
    normalize: Any = None,
    bounds: tuple[float, float] | None = None,
    trust: bool = False,
) -> SavedModel:
    """Loads the newest model of a run folder, the one in a checkpoint file of a run, or a file of weights.

    Args:
        path: Run folder; a checkpoint, `artifacts/model.safetensors` or `artifacts/best.safetensors` in one; or a file of weights, safetensors or of
            `torch.save`, of which only tensors are read.
        model: How to build the model, instead of what the run says: "module:factory", which is imported and called; the name of
            a built-in model; a function; or a module that the weights are loaded into.
        options: Keyword arguments of `model`. Default: those that the run stores.
        data: Name of a dataset, a .safetensors or .npz file with x_train, y_train, x_test and y_test, or a `Dataset`. Default:
            the run's own.
        normalize: (mean, std) by which the data were normalized. Default: what the run stores with its points.
        bounds: Smallest and largest value of an element of the input. Default: those of the data.
        trust: Whether to build a model "module:factory" that the run names itself, whose code is then imported and called.

    Returns:
        The model, in evaluation mode on the CPU, with its data.

    Raises:
        InputError: If the run's model is a "module:factory" and neither `model` nor `trust` is given, or an argument is invalid.
        ModelError: If the weights do not fit the model: which names and shapes differ.
        RunError: If there is no run or file, it is damaged, or it does not say how to build the model or which data to use.
    """
    file, folder = _locate(path)
    with ExitStack() as stack:
        run = None if folder is None else stack.enter_context(load_run(folder))
        config = _train_config(run)
        weights = _read(run, file)
        result, about = _data(run, config, data)
        source = _source(run, weights, config, model, options, trust)
    made = _build(source, model, config if weights.source.factory is None else None, result)
    built = load_weights(made, weights.state, file or folder)
    key, output = about.get("key"), about.get("output")
    if key is not None or output is not None:
        built = TensorModel(built, key, output).eval()
    if bounds is not None:
        result = replace(result, bounds=check_pair(bounds, "bounds"))
    return SavedModel(
        built,
        result,
        _threshold(config, about),
        folder,
        weights.step,
        trust,
        about.get("normalize") if normalize is None else normalize,
        config,
        folder.resolve().name if folder is not None else Path(path).name,
        "run" if data is None else "other" if _has_data(folder, config) else "caller",
    )


def made_by_train(path: str | Path) -> bool:
    """Whether a path belongs to a run that `excite train` made, with a config that says everything."""
    folder = _locate(path)[1]
    if folder is None:
        return False
    with load_run(folder) as run:
        return _train_config(run) is not None


def _has_data(folder: Path | None, config: TrainConfig | None) -> bool:
    return config is not None or (folder is not None and (folder / POINTS).is_file())


def _locate(path: str | Path) -> tuple[Path | None, Path | None]:
    """(the file, the run folder), either of them None."""
    if is_url(path):
        return None, load_run(str(path)).path
    checked = check_path(path)
    if checked.is_dir():
        return None, checked
    if not checked.is_file():
        raise RunError(f"there is no run folder at {checked}, and no file of weights")
    folder = checked.resolve().parent.parent
    return checked, folder if (folder / "run.json").is_file() else None


class NoWeights(RunError):
    """Raised if a run has no weights."""


def _train_config(run: Run | None) -> TrainConfig | None:
    """The config of a run that `excite train` made; None of any other. Nothing of it is built here."""
    named = [] if run is None else [run.config.get(key) for key in ("model", "data")]
    if run is None or not all(isinstance(section, dict) and "name" in section for section in named):
        return None
    return stored_config(run, trust=True)


def _read(run: Run | None, file: Path | None) -> StoredWeights:
    """The weights in a file, or the newest of a run."""
    if file is not None and run is not None:
        known = [c.path for c in run.checkpoints()] + [run.path / stored_weights.NAME, run.path / stored_weights.BEST]
        if file.resolve() not in [path.resolve() for path in known]:
            present = ", ".join(path.name for path in known if path.exists()) or "none"
            raise RunError(f"{file.name} is not a checkpoint in {run.path}: there are {present}")
    if file is not None:
        return read_weights(file)
    assert run is not None
    own = run.path / stored_weights.NAME
    weights = stored_weights.read(own) if own.is_file() else None
    newest = run.checkpoints()[-1:]
    if newest and (weights is None or newest[0].step > weights.step):
        return read_weights(newest[0].path)
    if weights is None:
        raise NoWeights(
            f"there is no checkpoint in {run.path}, and no weights: store them with excite.watch(checkpoint=True) or run.save(model)"
        )
    return weights


def _source(
    run: Run | None,
    weights: StoredWeights,
    config: TrainConfig | None,
    model: Model | None,
    options: Mapping[str, Any] | None,
    trust: bool,
) -> ModelSource:
    """How the model is built: as the caller says, as the weights say, as the config says."""
    if model is not None:
        if isinstance(model, nn.Module):
            return ModelSource(None, {})
        chosen = weights.source.options if options is None else options
        return model_source(nn.Identity(), model, chosen) if isinstance(model, str) else ModelSource(None, dict(chosen))
    if options is not None:
        raise InputError("options: expected a model that takes them: pass --model MODULE:FACTORY (model= in Python)")
    if config is not None and weights.source.factory is None:
        assert run is not None
        stored_config(run, trust=trust)  # refuses a "module:factory" that is not trusted
        return ModelSource(config.model.name, dict(config.model.options))
    name, location = weights.source.factory, "the file" if run is None else str(run.path)
    if name is None:
        why = f" ({weights.source.missing})" if weights.source.missing else ""
        raise InputError(
            f"{location} does not say how to build its model{why}: pass --model MODULE:FACTORY (model= in Python)"
        )
    if ":" in name and not trust:
        raise InputError(
            f"{location}: its model is built by calling {name!r}, which may run any code: pass --trust (trust=True in Python) if "
            "you trust it, or --model MODULE:FACTORY"
        )
    return weights.source


def _build(source: ModelSource, model: Model | None, config: TrainConfig | None, data: Dataset) -> nn.Module:
    if isinstance(model, nn.Module):
        return model
    if model is not None and not isinstance(model, str):
        made = model(**source.options)
        if not isinstance(made, nn.Module):
            raise InputError(f"model: expected a function that returns a torch.nn.Module; it returned {shown(made)}")
        return made
    if model is None and config is not None:
        return build_model(config, data)
    assert source.factory is not None
    options = dict(source.options)
    if source.factory in ARCHITECTURES:
        outputs = len(data.classes) if len(data.classes) > 2 else 1
        options = {**options_for(source.factory, data.shape, outputs), **options}
    return make_model(source.factory, **options)


def _data(run: Run | None, config: TrainConfig | None, data: Any) -> tuple[Dataset, Mapping[str, Any]]:
    """The data, and what is known of how they were measured."""
    if isinstance(data, Dataset):
        return data, {}
    if data is not None:
        name = str(data)
        if name not in NAMES and Path(name).suffix not in SUFFIXES:
            raise InputError(
                f"data: expected a dataset ({', '.join(NAMES)}), or a {' or '.join(SUFFIXES)} file with x_train, y_train, x_test, "
                f"y_test; got {name!r}"
            )
        result = DataFile(load(name)) if name in NAMES else load_file(name)
        return result.data, result.about
    if config is not None:
        return load_data(config.data), {}
    if run is not None and (run.path / POINTS).is_file():
        result = load_file(run.path / POINTS, run.path.resolve().name)
        return result.data, result.about
    location = (
        "a file of weights has no data"
        if run is None
        else f"{run.path} has no data: excite.watch(train=, test=) stores them"
    )
    raise RunError(f"{location}: pass --data NAME, or a .safetensors or .npz file (data= in Python)")


def _threshold(config: TrainConfig | None, about: Mapping[str, Any]) -> float:
    if config is not None:
        return config.excitation.threshold if config.excitation is not None else 0.5
    return 0.5 if about.get("threshold") is None else check_number(about["threshold"], "threshold")
