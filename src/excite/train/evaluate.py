"""Measurements of a saved model: its wiring, accuracy and margins, kept as artifacts of its run."""

from __future__ import annotations

from contextlib import closing, nullcontext, suppress
from dataclasses import fields
from functools import partial
from typing import Any, Literal

from excite._core.checks import is_whole, parse_norm
from excite._core.compatibility import renamed_keywords
from excite._core.progress import Progress
from excite.errors import ExciteError, InputError, RunError, one_line
from excite.margin import Margins, SearchOptions, margins
from excite.runs import Run, load_run
from excite.train.models.loading import SavedModel, load_model
from excite.train.predictions import accuracy as share_right
from excite.train.predictions import decisions
from excite.wiring import trace

__all__ = ["PARTS", "SavedModel", "artifact_name", "in_unit", "load_model", "measure", "more_points", "why_not_stored"]

PARTS = ("train", "test")


@renamed_keywords(arm="variant", parts="splits", most="max_points")
def measure(
    saved: SavedModel,
    *,
    variant: str | None = None,
    splits: tuple[str, ...] = PARTS,
    norm: str = "inf",
    max_points: int | None = None,
    progress: Progress | None = None,
    store: bool = True,
    **options: Any,
) -> dict[str, Margins]:
    """Margins of training and test points; with wiring and accuracies they are written into the run's artifacts if `store`.

    The run is open for writing meanwhile: one that another process writes to is refused before anything is measured.

    `variant` names the way of training in reports; by default the name stored before, or that of the run folder. Margins in each
    norm are kept beside each other, and those of fewer points do not replace those of more, unless these are of an earlier step.
    """
    if not saved.data.classes:
        raise InputError(f"{saved.data.name} is a regression: margins need classes")
    parsed_norm = parse_norm(norm, ("inf", "2"))
    with closing(Run.open(saved.folder, "a")) if store else nullcontext() as run:
        margins_by_split, accuracy = _measure(saved, parsed_norm, splits, max_points, progress, options)
        if run is not None:
            _store(run, saved, variant, margins_by_split, accuracy)
    return margins_by_split


def why_not_stored(saved: SavedModel) -> str | None:
    """Why results cannot be written into the run of a model now, such as another process that does; None if they can."""
    if saved.run is None:
        return "a file of weights is not a run"
    if saved.data_from == "other":
        return "measured on other data than the run's own"
    try:
        Run.open(saved.run, "a").close()
    except RunError as error:
        return one_line(error)
    return None


def _measure(
    saved: SavedModel,
    norm: Literal["inf", "2", "1"],
    splits: tuple[str, ...],
    max_points: int | None,
    progress: Progress | None,
    options: dict[str, Any],
) -> tuple[dict[str, Margins], dict[str, float]]:
    """Margins and accuracies by split."""
    search = {field.name: options[field.name] for field in fields(SearchOptions) if field.name in options}
    options = {name: value for name, value in options.items() if name not in search}
    if search:
        options["options"] = SearchOptions(**search)
    decide = decisions(saved.model, saved.threshold)
    margins_by_split: dict[str, Margins] = {}
    accuracy: dict[str, float] = {}
    for split in splits:
        x, y = saved.points(split)
        if not len(x):
            continue
        accuracy[split] = share_right(saved.model, decide, x, y)
        on_progress = None if progress is None else partial(progress, f"margins, {split}")
        x, y = saved.points(split, max_points)
        margins_by_split[split] = margins(
            saved.model, x, y, norm=norm, threshold=saved.threshold, progress=on_progress,
            **{**options, **in_unit(saved, options.get("layers", "input"))},
        )  # fmt: skip
    return margins_by_split, accuracy


def in_unit(saved: SavedModel, layers: object = "input") -> dict[str, Any]:
    """The keywords of `margins` for the bounds and the normalization of the data.

    With a normalization the bounds are those of the pixels, which says nothing about margins at other layers than the input.
    """
    if saved.normalize is None:
        return {"bounds": saved.data.bounds}
    return {"bounds": saved.data.bounds, "normalize": saved.normalize} if layers == "input" else {}


def more_points(saved: SavedModel, results: dict[str, Margins]) -> int:
    """Number of points of the margins that a run keeps because these are of fewer; 0 if it stores these."""
    with load_run(saved.folder) as run:
        stored = {
            split: _kept_points(run, _result_name(result, split), saved.step) for split, result in results.items()
        }
    return max((stored[split] for split, result in results.items() if stored[split] > len(result)), default=0)


def _result_name(result: Margins, split: str) -> str:
    # margins of another kind lie beside those of the input, which reports compare
    name = artifact_name(result.norm, split)
    return name if result.layers == "input" else f"layer-{name}"


def _store(
    run: Run, saved: SavedModel, variant: str | None, results: dict[str, Margins], accuracy: dict[str, float]
) -> None:
    for split, result in results.items():
        name = _result_name(result, split)
        if _kept_points(run, name, saved.step) <= len(result):
            run.write_json(name, {**result.to_dict(), "step": saved.step})
    with suppress(ExciteError):  # pages do without
        run.write_json(
            "wiring", trace(saved.model, saved.points("train" if "train" in results else "test")[0][:2]).rows()
        )
    known = run.read_json("summary") if _exists(run, "summary") else {}
    stored = known.get("arm") if isinstance(known, dict) else None  # the key that earlier versions read
    run.write_json(
        "summary", {"arm": variant or stored or run.path.resolve().name, "step": saved.step, "accuracy": accuracy}
    )


def artifact_name(norm: str, split: str) -> str:
    """Returns the name of the artifact that holds margins."""
    return f"margins-{norm}-{split}"


def _exists(run: Run, name: str) -> bool:
    return (run.path / "artifacts" / f"{name}.json").exists()


def _kept_points(run: Run, name: str, step: int) -> int:
    """Number of points of the margins that a run has of this step or a later one."""
    stored = run.read_json(name) if _exists(run, name) else {}
    if not isinstance(stored, dict) or (is_whole(last := stored.get("step", step)) and last < step):
        return 0
    return len(stored.get("values", ()))
