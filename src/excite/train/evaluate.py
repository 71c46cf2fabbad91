"""What is measured of a saved model: its wiring, accuracy and margins, kept as artifacts of its run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from excite._core.checks import parse_norm
from excite._core.compatibility import renamed_keywords
from excite.data import Dataset
from excite.errors import InputError, RunError, one_line
from excite.margin import Margins, SearchOptions, margins
from excite.runs import Run, load_run
from excite.train.from_config import load_trained
from excite.train.predictions import accuracy as share_right
from excite.train.predictions import decisions
from excite.wiring import trace

Progress = Callable[[str, int, int], None]
PARTS = ("train", "test")


@dataclass(frozen=True)
class SavedModel:
    """A model with the data and the decision rule it was trained for."""

    model: nn.Module
    data: Dataset
    threshold: float
    run: Path  # the run folder it comes from
    step: int
    trusted: bool = False  # loaded with trust=True: its model may be a "module:factory"

    def points(self, part: str, most: int | None = None) -> tuple[Tensor, Tensor]:
        """Training or test points, at most `most` of them, taken evenly."""
        x, y = (getattr(self.data, f"{axis}_{part}") for axis in "xy")
        if most is not None and most < len(x):
            chosen = torch.linspace(0, len(x) - 1, most).round().long()
            x, y = x[chosen], y[chosen]
        return x, y

    def to(self, device: torch.device | str) -> SavedModel:
        """Model and data on `device`; margins come back on the CPU from anywhere."""
        return replace(self, model=self.model.to(device), data=self.data.to(device))


def load_model(path: str | Path, *, trust: bool = False) -> SavedModel:
    """The newest model of a run folder, or the one in a checkpoint file of a run.

    `trust`: also a model "module:factory", whose code is then imported and called.
    """
    path = Path(path)
    folder = path.resolve().parent.parent if path.is_file() else path
    with load_run(folder) as run:
        if not {"model", "data"} <= run.config.keys():
            raise RunError(
                f"{folder} was not made by `excite train`: its config names no model and data to build again"
            )
        known = run.checkpoints()
        chosen = [c for c in known if path == folder or path.resolve() == c.path.resolve()]
        if not chosen:
            what = f"{path.name} is not a checkpoint" if path.is_file() else "there is no checkpoint"
            raise RunError(f"{what} in {folder}: there are {', '.join(c.path.name for c in known) or 'none'}")
        step = chosen[-1].step
        model, config, data = load_trained(run, step, trust=trust)
    threshold = config.excitation.threshold if config.excitation is not None else 0.5
    return SavedModel(model, data, threshold, folder, step, trust)


@renamed_keywords(arm="variant")
def measure(
    saved: SavedModel,
    *,
    variant: str | None = None,
    parts: tuple[str, ...] = PARTS,
    norm: str = "inf",
    most: int | None = None,
    progress: Progress | None = None,
    store: bool = True,
    **options: Any,
) -> dict[str, Margins]:
    """Margins of training and test points; with wiring and accuracies they are written into the run's artifacts if `store`.

    The run is open for writing meanwhile: one that another process writes to is refused before anything is measured.

    `variant` names the way of training in reports; by default the name stored before, or that of the run folder. Margins in each norm are kept beside each
    other, and those of fewer points never replace those of more.
    """
    if not saved.data.classes:
        raise InputError(f"{saved.data.name} is a regression: margins need classes")
    kind = parse_norm(norm, ("inf", "2"))
    with closing(Run.open(saved.run, "a")) if store else nullcontext() as run:
        found, accuracy = _measure(saved, kind, parts, most, progress, options)
        if run is not None:
            _store(run, saved, kind, variant, found, accuracy)
    return found


def why_not_stored(folder: Path) -> str | None:
    """Why nothing can be written into a run now, such as another process that does; None if it can."""
    try:
        Run.open(folder, "a").close()
    except RunError as error:
        return one_line(error)
    return None


def _measure(
    saved: SavedModel,
    kind: Literal["inf", "2", "1"],
    parts: tuple[str, ...],
    most: int | None,
    progress: Progress | None,
    options: dict[str, Any],
) -> tuple[dict[str, Margins], dict[str, float]]:
    """Margins and accuracies by part."""
    search = {field.name: options[field.name] for field in fields(SearchOptions) if field.name in options}
    options = {name: value for name, value in options.items() if name not in search}
    if search:
        options["options"] = SearchOptions(**search)
    decide = decisions(saved.model, saved.threshold)
    found: dict[str, Margins] = {}
    accuracy: dict[str, float] = {}
    for part in parts:
        x, y = saved.points(part)
        if not len(x):
            continue
        accuracy[part] = share_right(saved.model, decide, x, y)
        tell = None if progress is None else partial(progress, f"margins, {part}")
        x, y = saved.points(part, most)
        found[part] = margins(
            saved.model, x, y, norm=kind, bounds=saved.data.bounds, threshold=saved.threshold, progress=tell, **options
        )
    return found, accuracy


def _store(
    run: Run, saved: SavedModel, kind: str, variant: str | None, found: dict[str, Margins], accuracy: dict[str, float]
) -> None:
    for part, result in found.items():
        # margins of another kind lie beside those of the input, which reports compare
        name = artifact_name(kind, part) if result.layers == "input" else f"layer-{artifact_name(kind, part)}"
        if _kept_points(run, name) <= len(result):
            run.write_json(name, {**result.to_dict(), "step": saved.step})
    run.write_json("wiring", trace(saved.model, saved.data.x_train[:2]).rows())
    known = run.read_json("summary") if _exists(run, "summary") else {}
    stored = known.get("arm") if isinstance(known, dict) else None  # the key that earlier versions read
    run.write_json(
        "summary", {"arm": variant or stored or saved.run.resolve().name, "step": saved.step, "accuracy": accuracy}
    )


def artifact_name(norm: str, part: str) -> str:
    """Returns the name of the artifact that holds margins."""
    return f"margins-{norm}-{part}"


def _exists(run: Run, name: str) -> bool:
    return (run.path / "artifacts" / f"{name}.json").exists()


def _kept_points(run: Run, name: str) -> int:
    stored = run.read_json(name) if _exists(run, name) else {}
    return len(stored.get("values", ())) if isinstance(stored, dict) else 0
