"""The result of `audit`: values, a text for the terminal, and a page."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from excite._core.compatibility import renamed_attribute
from excite._core.files import write_bytes, writing
from excite.bounds import Assumption
from excite.margin import Margins
from excite.probes import Between, LayerRichness, Richness
from excite.report.audit.lipschitz import LipschitzConstants
from excite.report.audit.target import NotApplicable, TheoremResult
from excite.report.verdict.headline import Headline
from excite.runs import Run


@dataclass(frozen=True)
class Audit:
    """Measurements of one model, and the theorems that apply to it.

    Attributes:
        name: Name of the run or class of the model.
        step: Training step of the checkpoint, or None for a model.
        model: Class and number of parameters.
        outputs: Number of outputs per point.
        data: Description of the data.
        points: (number used, number available) by part, "train" and "test".
        accuracy: Accuracy by part; empty for a regression.
        layers: Richness of each layer's input.
        units_measured: Whether single units were measured.
        training_conditions: Conditions of the theorems on the training; empty if nothing is known about it.
        theorems: Bounds of the theorems that apply, each with the measured quantity.
        not_applicable: Theorems that do not apply to the model, and why.
        lipschitz: Lipschitz constants in the 2-norm and in the inf-norm.
        margins: Margins by norm and part.
        margins_why: Why there are no margins, or which were taken from the run.
        path: The run as an argument of commands; empty for a model and for a file of weights.

    Example:
        >>> result = excite.audit(model, train=(x, y), with_margins=False)
        >>> result.points["train"], [layer.layer for layer in result.layers.layers]
        ((6, 6), ['0', '2'])
    """

    name: str
    step: int | None
    model: str
    outputs: int
    data: str
    points: Mapping[str, tuple[int, int]]
    accuracy: Mapping[str, float]
    layers: Richness
    units_measured: bool
    training_conditions: tuple[Assumption, ...]
    theorems: tuple[TheoremResult, ...]
    not_applicable: tuple[NotApplicable, ...]
    lipschitz: tuple[LipschitzConstants, ...]
    margins: Mapping[str, Mapping[str, Margins]]
    margins_why: str
    path: str = ""

    promises = renamed_attribute("promises", "theorems")
    silent = renamed_attribute("silent", "not_applicable")
    steepness = renamed_attribute("steepness", "lipschitz")
    asked = renamed_attribute("asked", "training_conditions")
    units_asked = renamed_attribute("units_asked", "units_measured")

    @property
    def headline(self) -> Headline:
        """The first line: how robust, whether training tells the truth about test, how sure, what to do next."""
        from excite.report.audit.narrative import first_line

        return first_line(self)

    @property
    def sentences(self) -> list[str]:
        """Findings: one sentence per result."""
        from excite.report.audit.narrative import findings

        return findings(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers for JSON, with complete spectra and local constants."""
        return {
            "name": self.name,
            "step": self.step,
            "model": self.model,
            "outputs": self.outputs,
            "data": self.data,
            "points": {split: list(pair) for split, pair in self.points.items()},
            "accuracy": dict(self.accuracy),
            "verdict": self.headline.to_dict(),
            "sentences": self.sentences,
            "layers": [_layer(layer) for layer in self.layers],
            "training": [_assumption(training_condition) for training_condition in self.training_conditions],
            "bounds": [_theorem(theorem) for theorem in self.theorems],
            "silent": [{"theorem": theorem.theorem, "why": theorem.why} for theorem in self.not_applicable],
            "lipschitz": {
                constants.norm: {
                    "local": plain(constants.local),
                    "guaranteed": constants.guaranteed,
                    "why": constants.why,
                }
                for constants in self.lipschitz
            },
            "margins": {
                n: {split: m.to_dict() for split, m in by_split.items()} for n, by_split in self.margins.items()
            },
            "margins_why": self.margins_why,
        }

    def __str__(self) -> str:
        from excite.report.audit.narrative import summary

        return summary(self)

    def write(self, target: str | os.PathLike[str]) -> Path:
        """Writes the page as one self-contained HTML file.

        Args:
            target: File to write; missing folders are created.

        Returns:
            The path of the file.
        """
        from excite.report.audit.page import render  # only the page needs jinja2

        path, html = Path(target), render(self)
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, html.encode())
        return path

    def keep(self, folder: str | os.PathLike[str]) -> None:
        """Stores `to_dict` as the artifact "audit" of the run at `folder`."""
        with closing(Run.open(folder, "a")) as run:  # its status stays
            run.write_json("audit", self.to_dict())


def plain(value: Any) -> Any:
    """Converts arrays, tensors and ranges to numbers, lists and dicts."""
    if isinstance(value, Between):
        return value.low if value.exact else [value.low, value.high]
    if isinstance(value, np.ndarray | np.generic | Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain(member) for key, member in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(member) for member in value]
    return value


def _layer(layer_richness: LayerRichness) -> dict[str, Any]:
    result: dict[str, Any] = plain(layer_richness.row()) | {
        "kind": layer_richness.kind,
        "exact": layer_richness.exact,
        "eigenvalues": layer_richness.covariance.values.tolist(),
        "sampling": None if layer_richness.sampling is None else str(layer_richness.sampling),
        "units_why": layer_richness.units_why,
    }
    if layer_richness.units is not None:
        u = layer_richness.units
        result["units"] = {
            "deficient": u.deficient,
            "silent": u.silent,
            "points": u.points.tolist(),
            "rank": u.rank.tolist(),
            "smallest": u.smallest.tolist(),
            "largest": u.largest.tolist(),
            "width": u.width,
            "tolerance": u.tolerance,
        }
        result.pop("deficient")
    return result


def _assumption(assumption: Assumption) -> dict[str, Any]:
    return {"text": assumption.text, "held": assumption.held, "detail": assumption.detail}


def _theorem(theorem_result: TheoremResult) -> dict[str, Any]:
    bound = theorem_result.bound
    return {
        "name": bound.name,
        "quantity": bound.quantity,
        "side": bound.side,
        "value": bound.value,
        "measured": theorem_result.measured,
        "how": theorem_result.how,
        "assumptions": [_assumption(a) for a in bound.assumptions],
        "terms": plain(bound.terms),
    }
