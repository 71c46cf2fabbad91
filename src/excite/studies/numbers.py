"""The numbers of one training, read from its run folder."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from excite.errors import RunError
from excite.margin import Margins
from excite.measuring import PARTS, artifact_name
from excite.runs import load_run


@dataclass(frozen=True)
class Numbers:
    """Accuracies are of all training and test images, the rest of those whose margins were measured."""

    arm: str
    seed: int
    accuracy_train: float
    accuracy_test: float
    margin_train: float  # medians; infinite where more than half of the points were never broken
    margin_test: float
    gap: float  # largest vertical distance between the margin curves of training and test images
    censored_train: float  # shares of points that were never broken
    censored_test: float
    suspect_train: float  # shares of points at which the search shows signs of failure
    suspect_test: float
    flags: tuple[str, ...]  # what speaks against the margins; empty if they can be trusted

    def plain(self) -> dict[str, Any]:
        """Ready for JSON: what is infinite is None."""
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in vars(self).items()}


def read_numbers(arm: str, seed: int, folder: Path) -> tuple[Numbers, dict[str, Margins]]:
    """The numbers of a finished task, and its margins by part."""
    with load_run(folder) as run:
        try:
            accuracy = run.read_json("summary")["accuracy"]
            margins = {part: Margins.from_dict(run.read_json(artifact_name("inf", part))) for part in PARTS}
            right = {part: float(accuracy[part]) for part in PARTS}
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(f"the artifacts of {folder} are damaged ({error!r}): delete them and start again") from error
    train, test = margins["train"], margins["test"]
    numbers = Numbers(
        arm=arm,
        seed=seed,
        accuracy_train=right["train"],
        accuracy_test=right["test"],
        margin_train=train.median,
        margin_test=test.median,
        gap=train.gap(test, resamples=1).value,
        censored_train=_share(train.censored),
        censored_test=_share(test.censored),
        suspect_train=_share(train.suspect),
        suspect_test=_share(test.suspect),
        flags=tuple(f"{part}: {flag}" for part in PARTS for flag in margins[part].flags),
    )
    return numbers, margins


def _share(of: Tensor | None) -> float:
    return math.nan if of is None else float(of.double().mean())
