"""`audit`: everything that Excite can say about one trained model and its data."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from excite._core.calls import check_finite, pick_output
from excite._core.checks import (
    check_choice,
    check_count,
    check_dense,
    check_flag,
    check_number,
    check_output,
    check_real,
    check_weights,
    model_errors,
    shown,
)
from excite._core.preserve import eval_mode
from excite.bounds import Descent
from excite.bounds.stability import as_descent
from excite.data import Dataset
from excite.errors import ExciteError, InputError, ModelError
from excite.margin import Margins, margins
from excite.probes import richness
from excite.report.audit.lipschitz import steepness
from excite.report.audit.result import Audit
from excite.report.audit.target import Subject
from excite.report.audit.theorems import promises
from excite.report.audit.training_setup import AuditLoss, Setting, setting_of
from excite.runs import load_run
from excite.train.evaluate import PARTS, SavedModel, artifact_name, load_model
from excite.train.from_config import build_model, stored_config
from excite.train.predictions import accuracy, decisions

Progress = Callable[[str, int, int], None]
NORMS: tuple[Literal["2", "inf"], ...] = ("2", "inf")
_MOST_CLASSES = 10**6
STAGES = {"layers and units": 0, "theorems": 20, "steepness": 50, "margins": 60}  # in percent of the time


@model_errors
def audit(
    what: str | Path | SavedModel | nn.Module,
    data: Dataset | tuple[Tensor, Tensor] | None = None,
    *,
    descent: float | Descent | None = None,
    loss: AuditLoss | None = None,
    threshold: float = 0.5,
    points: int = 1000,
    margin_points: int = 200,
    units: bool = True,
    with_margins: bool = True,
    trust: bool = False,
    progress: Progress | None = None,
) -> Audit:
    """Richness of every layer, deficient units, the theorems that apply, Lipschitz constants and margins.

    `what` is a run folder, a checkpoint in one, or a loaded one: then data, loss, step size and threshold are the run's.
    Or it is a model, with its `data` (a `Dataset`, or training points x (N, ...) and labels or targets y), and as far as
    known the `loss` and the step size or `descent` that it was trained with on all points. Losses are means over points:
    "squared" of ‖f − y‖², a sum over outputs; "mse" of ‖f − y‖²/m, a mean over m outputs as `F.mse_loss` takes it;
    "cross-entropy". The step size is in the units of that loss.

    At most `points` points of each part are looked at, taken evenly; theorems that need all training points are silent
    if there are more. `trust`: also a run whose model is a "module:factory", whose code is then imported and called. Margins are those that the run has, else measured at `margin_points` points of each part. The
    model is left as it was and nothing is written: see `Audit.write`.
    """
    tell = progress or (lambda phase, done, total: None)
    name, saved, setting = _subject(what, data, descent, loss, threshold, trust)
    model, set_ = saved.model, saved.data
    check_weights(model)
    points, margin_points = check_count(points, "points"), check_count(margin_points, "margin_points")
    check_flag(units, "units"), check_flag(with_margins, "with_margins")
    parts = {part: saved.points(part, points) for part in PARTS}
    parts = {part: pair for part, pair in parts.items() if len(pair[0])}
    if "train" not in parts:
        raise InputError("expected at least one training point; got none")
    x, y = parts["train"]
    for part, (inputs, labels) in parts.items():
        check_finite(inputs, f"{part} points")
        check_finite(labels, f"{part} labels")
    outputs = _outputs(model, x)
    if set_.classes and (most := max(int(labels.max()) for _, labels in parts.values())) >= max(2, outputs + 1):
        raise InputError(
            f"data: expected labels below the number of classes; got {most} for a model with {outputs} outputs"
        )

    def begin(stage: str) -> None:
        tell(stage, STAGES[stage], 100)

    def searched(done: float) -> None:
        tell("margins", round(STAGES["margins"] + done * (100 - STAGES["margins"])), 100)

    begin("layers and units")
    layers = richness(model, x, units=units)
    begin("theorems")
    subject = Subject(model, x, y, len(set_.x_train), len(set_.classes), setting, saved.threshold)
    spoken, silent = promises(subject)
    begin("steepness")
    steep = tuple(steepness(model, {part: pair[0] for part, pair in parts.items()}, norm) for norm in NORMS)
    found, why = _margins(saved, min(points, margin_points), with_margins, searched)
    tell("margins", 100, 100)
    decide = decisions(model, saved.threshold)
    return Audit(
        name=name,
        step=saved.step if saved.step >= 0 else None,
        model=f"{type(model).__name__} with {sum(p.numel() for p in model.parameters())} parameters",
        outputs=outputs,
        data=repr(set_).removeprefix("Dataset(").removesuffix(")"),
        points={part: (len(pair[0]), len(getattr(set_, f"x_{part}"))) for part, pair in parts.items()},
        accuracy={part: accuracy(model, decide, *pair) for part, pair in parts.items()}
        if set_.classes and y.numel() == len(y)
        else {},
        layers=layers,
        units_asked=units,
        asked=setting.asked,
        promises=spoken,
        silent=silent,
        steepness=steep,
        margins=found,
        margins_why=why,
    )


def _subject(
    what: Any, data: Any, descent: float | Descent | None, loss: AuditLoss | None, threshold: float, trust: bool
) -> tuple[str, SavedModel, Setting]:
    if isinstance(what, nn.Module):
        if data is None:
            raise InputError("expected data with a model: a Dataset, or training points and labels (x, y)")
        if loss is not None:
            check_choice(loss, "loss", ("squared", "mse", "cross-entropy"))
        threshold = check_number(threshold, "threshold")
        rule = None if descent is None else as_descent(descent)
        absent = [name for name, one in (("loss", loss), ("step size", rule)) if one is None]
        why = (
            Setting.why if len(absent) == 2 else f"the {absent[0]} it was trained with was not given" if absent else ""
        )
        setting = Setting("squared" if loss == "mse" else loss, rule, why, averaged=loss == "mse")
        return type(what).__name__, SavedModel(what, _dataset(data), threshold, Path(), -1), setting
    if data is not None or descent is not None or loss is not None:
        raise InputError("a run brings its own data, loss and step size: give them with a model only")
    saved = what if isinstance(what, SavedModel) else load_model(what, trust=trust)
    with load_run(saved.run) as run:
        config = stored_config(run, trust=saved.trusted)
    setting = setting_of(config, len(saved.data.x_train))
    setting = replace(setting, start=lambda: build_model(config, saved.data))
    return saved.run.resolve().name, saved, setting


def _dataset(data: Any) -> Dataset:
    if isinstance(data, Dataset):
        return data
    if not (isinstance(data, tuple | list) and len(data) == 2 and all(isinstance(t, Tensor) for t in data)):
        raise InputError(f"data: expected a Dataset or tensors (x, y); got {shown(data)}")
    x, y = (check_dense(part, "data") for part in data)
    if not x.dim() or not y.dim() or not len(x) or len(x) != len(y):
        raise InputError(
            f"data: expected a label for each point, at least one; got {tuple(x.shape)} and {tuple(y.shape)}"
        )
    classes: tuple[str, ...] = ()
    if not y.is_floating_point():
        classes = tuple(map(str, range(_classes(y))))
    return Dataset("data", x, y, x[:0], y[:0], classes, None, "")


def _classes(y: Tensor) -> int:
    """How many classes integer labels stand for: 0 to m − 1."""
    if y.is_complex() or not y.numel():
        raise InputError(f"data: expected integer labels or real targets; got {shown(y)}")
    low, high = int(y.min()), int(y.max())
    if low < 0 or high >= _MOST_CLASSES:
        raise InputError(
            f"data: expected labels from 0 to the number of classes − 1, below {_MOST_CLASSES}; got {low} to {high}: relabel the data"
        )
    return max(2, high + 1)


def _outputs(model: nn.Module, x: Tensor) -> int:
    """How many numbers the model gives for a point; says in one line if it does not take these points."""
    try:
        with eval_mode(model), torch.no_grad():
            output = pick_output(model(x[:2].clone()))
    except (RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, ExciteError):
            raise
        line = (str(error).splitlines() or [""])[0]
        raise ModelError(f"the model does not run on points of shape {tuple(x.shape[1:])}: {line}") from error
    if output.dim() == 0 or len(output) != len(x[:2]) or not output[0].numel():
        raise ModelError(
            f"expected an output with one row per point; got {tuple(output.shape)} for {len(x[:2])} points"
        )
    check_output(check_real(output))
    return output[0].numel()


def _margins(
    saved: SavedModel, most: int, wanted: bool, tell: Callable[[float], None]
) -> tuple[dict[str, dict[str, Margins]], str]:
    """Margins by norm and part; those of the run where it has them for this checkpoint."""
    if not wanted:
        return {}, "not asked for"
    if not saved.data.classes:
        return {}, f"{saved.data.name} is a regression: there are no decisions that a change of the input could change"
    if not saved.data.x_train.is_floating_point():
        return {}, f"the inputs are {saved.data.x_train.dtype}, such as token ids, which have no small change"
    found: dict[str, dict[str, Margins]] = {}
    kept = False
    each = [(norm, part) for norm in NORMS for part in PARTS]
    for i, (norm, part) in enumerate(each):
        x, y = saved.points(part, most)
        one = _stored(saved, norm, part)
        kept = kept or one is not None

        def progress(done: int, total: int, i: int = i) -> None:
            tell((i + done / max(1, total)) / len(each))

        if one is None and len(x):
            try:
                one = margins(
                    saved.model, x, y, norm=norm, bounds=saved.data.bounds, threshold=saved.threshold, progress=progress
                )
            except ExciteError as error:
                return {}, str(error)
        if one is not None:
            found.setdefault(norm, {})[part] = one
    return found, "some of them the run had already" if kept else ""


def _stored(saved: SavedModel, norm: str, part: str) -> Margins | None:
    """Margins among the run's artifacts, if they are of this checkpoint."""
    path = saved.run / "artifacts" / f"{artifact_name(norm, part)}.json"
    if saved.step < 0 or not path.is_file():
        return None
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return Margins.from_dict(stored) if stored["step"] == saved.step else None
    except (KeyError, TypeError, ValueError):
        return None  # a damaged file is measured again
