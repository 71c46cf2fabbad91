"""Margins that a watch and later measurements store in a run: the points, the margins and a summary.

`artifacts/points.safetensors` holds the points that were drawn, x_train, y_train, x_test and y_test, and in its header under "settings"
the JSON text of how they are measured, so that margins can be measured again later without the data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from excite._core.files import write_bytes
from excite.errors import RunError
from excite.runs import Run

POINTS = "points.safetensors"
MAX_BYTES = 64_000_000  # of the points that are stored


@dataclass(frozen=True, eq=False)
class StoredPoints:
    """Points of a run, and how their margins are measured.

    Attributes:
        data: Points and labels by part, "train" and "test".
        settings: `norm`, `bounds`, `normalize`, `threshold`, `output` and `key`, as far as they are plain values.
    """

    data: dict[str, tuple[Tensor, Tensor]]
    settings: dict[str, Any]


def artifact_name(norm: str, split: str) -> str:
    """Returns the name of the artifact that holds margins."""
    return f"margins-{norm}-{split}"


def store_points(run: Run, data: Mapping[str, tuple[Tensor, Tensor]], settings: Mapping[str, Any]) -> bool:
    """Writes points into a run.

    Args:
        run: A run open for writing.
        data: Points and labels by part.
        settings: How margins are measured; what is not JSON is left out.

    Returns:
        Whether they were written: not if they take more than 64 MB.
    """
    from safetensors.torch import save

    tensors = {f"{axis}_{split}": tensor for split, pair in data.items() for axis, tensor in zip("xy", pair)}
    if sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) > MAX_BYTES:
        return False
    plain = {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    header = {"format": "excite-points", "version": "1", "settings": json.dumps(plain_settings(settings))}
    write_bytes(run.path / "artifacts" / POINTS, save(plain, header))
    return True


def read_points(folder: Path) -> StoredPoints | None:
    """Reads the points of a run; None if it has none.

    Args:
        folder: The run folder.

    Raises:
        RunError: If the file is damaged.
    """
    from safetensors import SafetensorError, safe_open

    path = folder / "artifacts" / POINTS
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a dict)
        settings = json.loads(header.get("settings", "{}"))
        data = {
            split: (tensors[f"x_{split}"], tensors[f"y_{split}"])
            for split in ("train", "test")
            if f"x_{split}" in tensors
        }
    except (OSError, SafetensorError, ValueError, RuntimeError, KeyError) as error:
        raise RunError(f"{path} is damaged ({error}): delete it, and pass the data again") from error
    return StoredPoints(data, settings if isinstance(settings, dict) else {})


def plain_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are JSON, tensors as lists."""
    plain: dict[str, Any] = {}
    for name, value in settings.items():
        value = _plain(value)
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            continue
        plain[name] = value
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


def store_results(run: Run, artifacts: Mapping[str, dict[str, Any]]) -> None:
    """Writes the results of probes as JSON. A summary keeps the name that the run has in reports."""
    for name, value in artifacts.items():
        if name == "summary":
            value = {"arm": variant_of(run), **value}
        run.write_json(name, value)


def variant_of(run: Run) -> str:
    """The name of a run's variant in reports: the one stored before, else the name of the folder."""
    path = run.path / "artifacts" / "summary.json"
    known = run.read_json("summary") if path.exists() else {}
    stored = known.get("arm") if isinstance(known, dict) else None  # the key that earlier versions read
    return str(stored or run.path.resolve().name)
