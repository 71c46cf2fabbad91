"""What `audit` returns: values, a text for the terminal, and a page."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from excite._core.files import write_bytes, writing
from excite.bounds import Assumption
from excite.margin import Margins
from excite.probes import Between, LayerRichness, Richness
from excite.report.audit.lipschitz import Steepness
from excite.report.audit.target import Promise, Silent
from excite.runs import Run


@dataclass(frozen=True)
class Audit:
    """Everything measured of one model.

    points: (used, there are) by part. asked: conditions of the theorems on the training, empty if nothing is known of
    it. promises: what theorems say, with the measured quantity beside. silent: theorems that do not speak about the
    model, and why. margins: by norm and part; `margins_why` says why there are none.
    """

    name: str
    step: int | None
    model: str
    outputs: int
    data: str
    points: Mapping[str, tuple[int, int]]
    accuracy: Mapping[str, float]
    layers: Richness
    units_asked: bool
    asked: tuple[Assumption, ...]
    promises: tuple[Promise, ...]
    silent: tuple[Silent, ...]
    steepness: tuple[Steepness, ...]
    margins: Mapping[str, Mapping[str, Margins]]
    margins_why: str

    @property
    def sentences(self) -> list[str]:
        """What the numbers say, in words."""
        from excite.report.audit.narrative import findings

        return findings(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, ready for JSON. Spectra and local constants are there in full."""
        return {
            "name": self.name,
            "step": self.step,
            "model": self.model,
            "outputs": self.outputs,
            "data": self.data,
            "points": {part: list(pair) for part, pair in self.points.items()},
            "accuracy": dict(self.accuracy),
            "sentences": self.sentences,
            "layers": [_layer(one) for one in self.layers],
            "training": [_assumption(one) for one in self.asked],
            "bounds": [_promise(one) for one in self.promises],
            "silent": [{"theorem": one.theorem, "why": one.why} for one in self.silent],
            "lipschitz": {
                one.norm: {"local": plain(one.local), "guaranteed": one.guaranteed, "why": one.why}
                for one in self.steepness
            },
            "margins": {n: {part: m.to_dict() for part, m in parts.items()} for n, parts in self.margins.items()},
            "margins_why": self.margins_why,
        }

    def __str__(self) -> str:
        from excite.report.audit.narrative import summary

        return summary(self)

    def write(self, target: str | os.PathLike[str]) -> Path:
        """Write the page, one self-contained HTML file, to `target`; returns its path."""
        from excite.report.audit.page import render  # only the page needs plotly

        path, html = Path(target), render(self)
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, html.encode())
        return path

    def keep(self, folder: str | os.PathLike[str]) -> None:
        """Write `to_dict` as the artifact "audit" of the run at `folder`."""
        with closing(Run.open(folder, "a")) as run:  # its status stays
            run.write_json("audit", self.to_dict())


def plain(value: Any) -> Any:
    """Arrays, tensors and ranges as numbers, lists and dicts."""
    if isinstance(value, Between):
        return value.low if value.exact else [value.low, value.high]
    if isinstance(value, np.ndarray | np.generic | Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(one) for one in value]
    return value


def _layer(one: LayerRichness) -> dict[str, Any]:
    found: dict[str, Any] = plain(one.row()) | {
        "kind": one.kind,
        "exact": one.exact,
        "eigenvalues": one.covariance.values.tolist(),
        "sampling": None if one.sampling is None else str(one.sampling),
        "units_why": one.units_why,
    }
    if one.units is not None:
        u = one.units
        found["units"] = {
            "deficient": u.deficient,
            "silent": u.silent,
            "points": u.points.tolist(),
            "rank": u.rank.tolist(),
            "smallest": u.smallest.tolist(),
            "largest": u.largest.tolist(),
            "width": u.width,
            "tolerance": u.tolerance,
        }
        found.pop("deficient")
    return found


def _assumption(one: Assumption) -> dict[str, Any]:
    return {"text": one.text, "held": one.held, "detail": one.detail}


def _promise(one: Promise) -> dict[str, Any]:
    bound = one.bound
    return {
        "name": bound.name,
        "quantity": bound.quantity,
        "side": bound.side,
        "value": bound.value,
        "measured": one.truth,
        "how": one.how,
        "assumptions": [_assumption(a) for a in bound.assumptions],
        "terms": plain(bound.terms),
    }
