"""Weights of a model with how to build it: `artifacts/model.safetensors` of a run.

The file is plain safetensors, tensors under the names of the model's state_dict, so that other programs read it as well. Its header
has the step, the factory, the options and a SHA-256 over everything, as JSON text under the key "excite".
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from excite._core.files import open_regular, write_bytes
from excite.errors import InputError, RunError
from excite.runs.checkpoints import checksum, plain_tensor
from excite.runs.checks import check_version
from excite.runs.import_paths import ModelSource, tensors_of

NAME, BEST = (
    "artifacts/model.safetensors",
    "artifacts/best.safetensors",
)  # in a run folder: the newest, those of the best epoch
FORMAT, VERSION = "excite-model", 1


@dataclass(frozen=True)
class StoredWeights:
    """Weights that were read from a file.

    Attributes:
        state: Tensors by name, on the CPU.
        step: Number of optimizer steps done; -1 if the file does not say.
        source: How the model is built, as far as the file says.
    """

    state: dict[str, Tensor]
    step: int
    source: ModelSource


def not_rebuilt(source: ModelSource, advice: str = "pass factory='module:function' and options") -> str:
    """The line that says what is missing to build a model again, and where to pass it."""
    return (
        f"the weights are stored without a way to build the model ({source.missing}): {advice}, or load them with "
        "--model MODULE:FACTORY"
    )


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a model, without wrappers. Of a sharded model (FSDP) all processes have to ask."""
    state = tensors_of(model)
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise InputError(
                f"state {name!r}: only tensors can be stored; got {type(value).__name__}: use run.save_checkpoint"
            )
        if (full_tensor := getattr(value, "full_tensor", None)) is not None:
            state[name] = full_tensor()
    return state


def write(path: Path, state: dict[str, Tensor], step: int, source: ModelSource) -> Path:
    """Writes the file, whole or not at all."""
    from safetensors.torch import save

    # Copies: tied weights share memory, which safetensors refuses.
    plain = {name: plain_tensor(name, tensor) for name, tensor in state.items()}
    about: dict[str, Any] = {"format": FORMAT, "version": VERSION, "step": step, "factory": source.factory}
    about |= {"options": source.options, "missing": source.missing}
    about["sha256"] = checksum(step, plain, _signed(about), "")
    try:
        content = save(plain, {"format": "pt", "excite": json.dumps(about)})
    except (KeyError, ValueError, RuntimeError) as error:
        raise InputError(f"the weights cannot be stored as safetensors: {error}") from error
    write_bytes(path, content)
    return path


def read(path: Path) -> StoredWeights:
    """Reads a safetensors file of weights: one that `write` made, whose checksum is verified, or any other.

    Raises:
        RunError: If the file is missing or damaged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        os.close(open_regular(path))
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            state = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a dict)
    except FileNotFoundError as error:
        raise RunError(f"there is no file {path}") from error
    except OSError as error:
        raise RunError(f"cannot read {path}: {error}") from error
    except (SafetensorError, ValueError, RuntimeError, KeyError) as error:
        raise RunError(f"{path} is damaged or not a safetensors file ({error})") from error
    if "excite" not in header:
        return StoredWeights(state, -1, ModelSource(None, {}, "it holds tensors only"))
    return _described(path, state, header["excite"])


def _described(path: Path, state: dict[str, Tensor], header: str) -> StoredWeights:
    try:
        about = json.loads(header)
        if about["format"] != FORMAT:
            raise ValueError(f"format {about['format']!r}")
        check_version(path, about["version"], VERSION)
        step, factory, options = int(about["step"]), about["factory"], dict(about["options"])
        source = ModelSource(None if factory is None else str(factory), options, str(about["missing"]))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise RunError(f"{path} is damaged: its header cannot be read ({error})") from error
    if checksum(step, state, _signed(about), "") != about.get("sha256"):
        raise RunError(f"{path} is damaged (its checksum differs)")
    return StoredWeights(state, step, source)


def _signed(about: dict[str, Any]) -> str:
    return json.dumps({key: value for key, value in about.items() if key != "sha256"}, sort_keys=True)
