"""`audit`: measures a trained model on its data and applies the theorems to it."""

from __future__ import annotations

import json
import shlex
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
from excite._core.progress import Progress
from excite.bounds import Descent
from excite.bounds.stability import as_descent
from excite.data import Dataset
from excite.errors import ExciteError, InputError, ModelError
from excite.margin import Margins, margins
from excite.margin.normalize import pixel_range, unit_of
from excite.probes import richness
from excite.report.audit.lipschitz import lipschitz_constants
from excite.report.audit.result import Audit
from excite.report.audit.target import AuditTarget
from excite.report.audit.theorems import apply_theorems
from excite.report.audit.training_setup import AuditLoss, TrainingSetup, training_setup
from excite.train.evaluate import PARTS, SavedModel, artifact_name, in_unit, load_model
from excite.train.from_config import build_model
from excite.train.models.loading import Model, made_by_train
from excite.train.predictions import accuracy, decisions

NORMS: tuple[Literal["2", "inf"], ...] = ("2", "inf")
_MAX_CLASSES = 10**6
STAGES = {"layers and units": 0, "theorems": 20, "Lipschitz constants": 50, "margins": 60}  # in percent of the time


@model_errors
def audit(
    what: str | Path | SavedModel | nn.Module, data: Dataset | tuple[Tensor, Tensor] | None = None, *, train:
    tuple[Tensor, Tensor] | None = None, test: tuple[Tensor, Tensor] | None = None, descent: float | Descent |
    None = None, loss: AuditLoss | None = None, threshold: float = 0.5, points: int = 1000, margin_points: int =
    200, units: bool = True, with_margins: bool = True, model: Model | None = None, trust: bool = False, progress:
    Progress | None = None,
) -> Audit:  # fmt: skip
    """Audits a trained model: richness of its layers, theorems that apply, Lipschitz constants and margins.

    The model is left unchanged and nothing is written: see `Audit.write`.

    Args:
        what: A run folder, a checkpoint in one, or a loaded one: data, loss, step size and threshold are then the run's, as far as
            it has them. Or a file of weights, with `model` and `data`. Or a model, with its `data`.
        data: For a model, or a run without data, a `Dataset`, or training points x (N, ...) and labels or targets y; for a run
            also the name or the file of a dataset.
        train: Training points and labels (x, y), instead of `data`.
        test: For a model with tensors as training points, test points and labels (x, y).
        descent: For a model, the step size, or `excite.bounds.Descent`, it was trained with on all points.
        loss: For a model, the loss it was trained with, a mean over points: "squared" of ‖f − y‖², a sum over outputs;
            "mse" of ‖f − y‖²/m, a mean over m outputs as in `F.mse_loss`; or "cross-entropy". The step size is in the
            units of that loss.
        threshold: For a model with one output, class 1 where f > threshold.
        points: At most this many points per part, evenly spaced. Theorems that require all training points do not apply
            if there are more.
        margin_points: At most this many points per part for margins that the run does not have yet.
        units: Whether to measure single units.
        with_margins: Whether to measure margins.
        model: For a run or a file of weights, how to build the model instead of what the run says: "module:factory", which is
            imported and called, the name of a built-in model, a function, or a module.
        trust: Also load a run whose model is a "module:factory"; its code is then imported and called.
        progress: Called with (stage, percent done, 100).

    Returns:
        The measurements; `print` shows a summary, `Audit.write` makes a page.

    Raises:
        InputError: If the data, the labels or a setting cannot be used.
        ModelError: If the model does not run on the points.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
        >>> x = torch.randn(20, 2)
        >>> result = excite.audit(model, train=(x, (x[:, 0] > 0).long()), with_margins=False)
        >>> 0 <= result.accuracy["train"] <= 1
        True
    """
    report = progress or (lambda stage, done, total: None)
    if data is not None and train is not None:
        raise InputError("expected either data= or train=; got both")
    name, saved, setup = _load(what, train if data is None else data, test, descent, loss, threshold, model, trust)
    check_weights(saved.model)
    points, margin_points = check_count(points, "points"), check_count(margin_points, "margin_points")
    check_flag(units, "units"), check_flag(with_margins, "with_margins")
    return _measure(name, saved, setup, points, margin_points, units, with_margins, report)


def _measure(
    name: str,
    saved: SavedModel,
    setup: TrainingSetup,
    points: int,
    margin_points: int,
    units: bool,
    with_margins: bool,
    report: Progress,
) -> Audit:
    """All measurements of an audit, from arguments that were checked."""
    by_split, outputs = _parts(saved, points)
    x, y = by_split["train"]
    report("layers and units", STAGES["layers and units"], 100)
    layers = richness(saved.model, x, units=units)
    report("theorems", STAGES["theorems"], 100)
    classes = len(saved.data.classes)
    target = AuditTarget(saved.model, x, y, len(saved.data.x_train), classes, setup, saved.threshold)
    theorems, not_applicable = apply_theorems(target)
    report("Lipschitz constants", STAGES["Lipschitz constants"], 100)
    inputs = {split: pair[0] for split, pair in by_split.items()}
    constants = tuple(lipschitz_constants(saved.model, inputs, norm) for norm in NORMS)
    measured, margins_why = _margins(saved, min(points, margin_points), with_margins, report)
    report("margins", 100, 100)
    return Audit(
        name=name,
        step=saved.step if saved.step >= 0 else None,
        model=f"{type(saved.model).__name__} with {sum(p.numel() for p in saved.model.parameters())} parameters",
        outputs=outputs,
        data=repr(saved.data).removeprefix("Dataset(").removesuffix(")"),
        points={split: (len(pair[0]), len(getattr(saved.data, f"x_{split}"))) for split, pair in by_split.items()},
        accuracy=_accuracies(saved, by_split),
        layers=layers,
        units_measured=units,
        training_conditions=setup.conditions,
        theorems=theorems,
        not_applicable=not_applicable,
        lipschitz=constants,
        margins=measured,
        margins_why=margins_why,
        path="" if saved.run is None else shlex.quote(str(saved.run)) + (" --trust" if saved.trusted else ""),
    )


def _load(
    what: Any,
    data: Any,
    test: Any,
    descent: float | Descent | None,
    loss: AuditLoss | None,
    threshold: float,
    model: Model | None,
    trust: bool,
) -> tuple[str, SavedModel, TrainingSetup]:
    """(name, model with its data, training setup) of a run or a model."""
    if loss is not None:
        check_choice(loss, "loss", ("squared", "mse", "cross-entropy"))
    rule = None if descent is None else as_descent(descent)
    if isinstance(what, nn.Module):
        if data is None:
            raise InputError("expected data with a model: a Dataset, or training points and labels (x, y)")
        threshold = check_number(threshold, "threshold")
        return type(what).__name__, SavedModel(what, _dataset(data, test), threshold, None, -1), _setup(loss, rule)
    return _load_saved(what, data, test, _setup(loss, rule), model, trust)


def _load_saved(
    what: Any, data: Any, test: Any, setup: TrainingSetup, model: Model | None, trust: bool
) -> tuple[str, SavedModel, TrainingSetup]:
    """The same of a run or a file of weights. A run of `excite train` has its own data, loss and step size."""
    passed = data is not None or setup.loss is not None or setup.descent is not None
    if test is not None and data is None:
        raise InputError("test: expected training points as well: pass train=(x, y)")
    if passed and (isinstance(what, SavedModel) or made_by_train(what)):
        raise InputError("a run has its own data, loss and step size: pass them with a model only")
    points = data if data is None or isinstance(data, str | Path) else _dataset(data, test)
    saved = what if isinstance(what, SavedModel) else load_model(what, model=model, data=points, trust=trust)
    if saved.config is None or saved.data_from == "other":
        return saved.name, saved, setup
    config = saved.config
    setup = training_setup(config, len(saved.data.x_train))
    if saved.trusted or ":" not in config.model.name:  # building it runs the factory
        setup = replace(setup, start=lambda: build_model(config, saved.data))
    return saved.name, saved, setup


def _setup(loss: AuditLoss | None, descent: Descent | None) -> TrainingSetup:
    missing = [name for name, value in (("loss", loss), ("step size", descent)) if value is None]
    why = {0: "", 2: TrainingSetup.why}.get(
        len(missing), f"the {missing[0]} of the training was not passed" if missing else ""
    )
    return TrainingSetup("squared" if loss == "mse" else loss, descent, why, averaged=loss == "mse")


def _parts(saved: SavedModel, max_points: int) -> tuple[dict[str, tuple[Tensor, Tensor]], int]:
    """(points, labels) of each part that has any, checked, and the number of the model's outputs."""
    every = {split: saved.points(split, max_points) for split in PARTS}
    by_split = {split: pair for split, pair in every.items() if len(pair[0])}
    if "train" not in by_split:
        raise InputError("expected at least one training point; got none")
    for split, (inputs, labels) in by_split.items():
        check_finite(inputs, f"{split} points")
        check_finite(labels, f"{split} labels")
    outputs = _outputs(saved.model, by_split["train"][0])
    largest = max(int(labels.max()) for _, labels in by_split.values()) if saved.data.classes else 0
    if largest >= max(2, outputs + 1):
        raise InputError(
            f"data: expected labels below the number of classes; got {largest} for a model with {outputs} outputs"
        )
    return by_split, outputs


def _accuracies(saved: SavedModel, by_split: dict[str, tuple[Tensor, Tensor]]) -> dict[str, float]:
    y = by_split["train"][1]
    if not saved.data.classes or y.numel() != len(y):
        return {}
    decide = decisions(saved.model, saved.threshold)
    return {split: accuracy(saved.model, decide, *pair) for split, pair in by_split.items()}


def _dataset(data: Any, test: Any = None) -> Dataset:
    if isinstance(data, Dataset):
        if test is not None:
            raise InputError("test: a Dataset has its own test points; pass training points (x, y) as data")
        return data
    x, y = _points(data, "data")
    x_test, y_test = (x[:0], y[:0]) if test is None else _points(test, "test")
    if x_test.shape[1:] != x.shape[1:] or y_test.dtype != y.dtype:
        raise InputError(f"test: expected points of shape {tuple(x.shape[1:])} and labels {y.dtype}; got {shown(test)}")
    classes: tuple[str, ...] = ()
    if not y.is_floating_point():
        classes = tuple(map(str, range(max(_classes(y), _classes(y_test) if len(y_test) else 0))))
    return Dataset("data", x, y, x_test, y_test, classes, None, "")


def _points(pair: Any, name: str) -> tuple[Tensor, Tensor]:
    if not (isinstance(pair, tuple | list) and len(pair) == 2 and all(isinstance(t, Tensor) for t in pair)):
        expected = "a Dataset or tensors (x, y)" if name == "data" else "tensors (x, y)"
        raise InputError(f"{name}: expected {expected}; got {shown(pair)}")
    x, y = (check_dense(tensor, name) for tensor in pair)
    if not x.dim() or not y.dim() or not len(x) or len(x) != len(y):
        raise InputError(
            f"{name}: expected a label for each point, at least one; got {tuple(x.shape)} and {tuple(y.shape)}"
        )
    return x, y


def _classes(y: Tensor) -> int:
    """Number of classes of integer labels 0 to m − 1."""
    if y.is_complex() or not y.numel():
        raise InputError(f"data: expected integer labels or real targets; got {shown(y)}")
    low, high = int(y.min()), int(y.max())
    if low < 0 or high >= _MAX_CLASSES:
        raise InputError(
            f"data: expected labels from 0 to the number of classes − 1, below {_MAX_CLASSES}; got {low} to {high}: relabel the data"
        )
    return max(2, high + 1)


@model_errors
def _outputs(model: nn.Module, x: Tensor) -> int:
    """Number of outputs per point."""
    with eval_mode(model), torch.no_grad():
        output = pick_output(model(x[:2].clone()))
    if output.dim() == 0 or len(output) != len(x[:2]) or not output[0].numel():
        raise ModelError(
            f"expected an output with one row per point; got {tuple(output.shape)} for {len(x[:2])} points"
        )
    check_output(check_real(output))
    return output[0].numel()


def _margins(
    saved: SavedModel, max_points: int, wanted: bool, report: Progress
) -> tuple[dict[str, dict[str, Margins]], str]:
    """Margins by norm and part, from the run where it has them for this checkpoint; and why there are none."""
    if not wanted:
        return {}, "not requested"
    if not saved.data.classes:
        return {}, f"{saved.data.name} is a regression: there is no decision that a perturbation could change"
    if not saved.data.x_train.is_floating_point():
        return {}, f"the inputs are {saved.data.x_train.dtype}, such as token ids, which cannot be perturbed slightly"
    measured: dict[str, dict[str, Margins]] = {}
    from_run = False
    searches = [(norm, split) for norm in NORMS for split in PARTS]
    images = [x for split in PARTS if len(x := saved.points(split)[0])]
    unit = unit_of(images[0], pixel_range(images)) if images else None  # for the words: the search has no bounds then
    for i, (norm, split) in enumerate(searches):
        x, y = saved.points(split, max_points)
        result = _stored(saved, norm, split)
        from_run = from_run or result is not None

        def searched(done: int, total: int, i: int = i) -> None:
            fraction = (i + done / max(1, total)) / len(searches)
            report("margins", round(STAGES["margins"] + fraction * (100 - STAGES["margins"])), 100)

        if result is None and len(x):
            try:
                result = margins(
                    saved.model,
                    x,
                    y,
                    norm=norm,
                    threshold=saved.threshold,
                    progress=searched,
                    **in_unit(saved),
                )
            except ExciteError as error:
                return {}, str(error)
        if result is not None:
            measured.setdefault(norm, {})[split] = result if result.unit is not None else replace(result, unit=unit)
    return measured, "some were measured before and are stored in the run" if from_run else ""


def _stored(saved: SavedModel, norm: str, split: str) -> Margins | None:
    """Margins among the run's artifacts, if they are of this checkpoint."""
    if saved.run is None or saved.step < 0 or saved.data_from != "run":
        return None
    path = saved.run / "artifacts" / f"{artifact_name(norm, split)}.json"
    if not path.is_file():
        return None
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return Margins.from_dict(stored) if stored["step"] == saved.step else None
    except (KeyError, TypeError, ValueError):
        return None  # a damaged file is measured again
