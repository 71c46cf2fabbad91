"""Checkpoints: one safetensors file each, complete or absent, with a checksum over everything that is restored.

Tensors lie under readable names ("model/0.weight"); all other state is JSON text in the header. safetensors itself does
not notice a flipped bit, so the header also holds the SHA-256 over the step, that text, the number of commits to the metrics
(see `excite.runs.metrics`) and every tensor's name, dtype, shape and bytes.
"""

from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from excite._core.files import write_bytes
from excite.errors import InputError, RunError
from excite.runs.checks import check_version
from excite.runs.state import flatten, unflatten

FORMAT = "excite-checkpoint"
VERSION = 2  # 2: the header says how far the metrics had come
_NAME = re.compile(r"(step|final)-(\d{8,})\.safetensors")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint file.

    Attributes:
        step: Number of optimizer steps done.
        path: The safetensors file.
        final: Whether it is the end of the training.

    Example:
        >>> with Run.create("runs/first", {}) as run:
        ...     checkpoint = run.save_checkpoint(10, {"model": model.state_dict()})
        >>> checkpoint.step, checkpoint.path.name
        (10, 'step-00000010.safetensors')
    """

    step: int
    path: Path
    final: bool = False


def path_of(folder: Path, step: int, final: bool) -> Path:
    """Returns the path of a checkpoint."""
    return folder / f"{'final' if final else 'step'}-{step:08d}.safetensors"


def find(folder: Path) -> list[Checkpoint]:
    """Returns the checkpoints of a folder, oldest first."""
    checkpoints = []
    for path in folder.glob("*.safetensors"):
        if match := _NAME.fullmatch(path.name):
            checkpoints.append(Checkpoint(int(match[2]), path, match[1] == "final"))
    return sorted(checkpoints, key=lambda c: (c.step, c.final))


def write(folder: Path, step: int, state: dict[str, Any], *, final: bool, keep: int, commits: int) -> Checkpoint:
    """Write the state after `step` steps, then remove all but the last `keep` (final ones always stay).

    `commits`: how often the metrics had been written by then.
    """
    from safetensors.torch import save

    tensors, structure = flatten(state)
    # Copies: safetensors refuses tensors that share memory (tied weights), and wants them contiguous and on the CPU.
    plain = {name: plain_tensor(name, tensor) for name, tensor in tensors.items()}
    header = {"format": FORMAT, "version": str(VERSION), "step": str(step), "state": structure, "metrics": str(commits)}
    header["sha256"] = checksum(step, plain, structure, header["metrics"])
    try:
        content = save(plain, header)
    except (KeyError, ValueError, RuntimeError) as error:
        raise InputError(f"the state cannot be stored as safetensors: {error}") from error
    checkpoint = Checkpoint(step, path_of(folder, step, final), final)
    write_bytes(checkpoint.path, content)
    # The one just written stays, also where later ones are left of a training that has gone back.
    others = [c for c in find(folder) if not c.final and c.path != checkpoint.path]
    for old in others[: max(0, len(others) - (keep if final else keep - 1))]:
        with suppress(OSError):
            old.path.unlink()
    return checkpoint


def read(path: Path) -> tuple[int, Any]:
    """Reads a checkpoint file and verifies its checksum.

    Args:
        path: The safetensors file.

    Returns:
        Step and state, with tensors on the CPU.

    Raises:
        RunError: If the file is missing, damaged or not a checkpoint of Excite.

    Example:
        >>> with Run.create("runs/first", {}) as run:
        ...     checkpoint = run.save_checkpoint(10, {"model": model.state_dict()})
        >>> step, state = read_checkpoint(checkpoint.path)
        >>> step, list(state)
        (10, ['model'])
    """
    step, state, _ = read_with_commits(path)
    return step, state


def read_with_commits(path: Path) -> tuple[int, Any, int]:
    """Reads a checkpoint as `read` does, and the number of commits to the metrics before it; 0 if unknown."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            if header.get("format") != FORMAT:
                raise RunError(f"{path} is not a checkpoint of Excite")
            version = check_version(path, header.get("version"), VERSION)
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a dict)
    except FileNotFoundError as error:
        raise RunError(f"there is no checkpoint {path}") from error
    except OSError as error:
        raise RunError(f"cannot read {path}: {error}") from error
    except (SafetensorError, ValueError, RuntimeError, KeyError) as error:
        raise RunError(f"{path} is damaged ({error}){_fallback(path)}") from error
    structure = header.get("state", "")
    step = int(header["step"]) if header.get("step", "").isdecimal() else -1
    commits = header.get("metrics", "") if version > 1 else ""
    if checksum(step, tensors, structure, commits) != header.get("sha256"):
        raise RunError(f"{path} is damaged (its checksum differs){_fallback(path)}")
    return step, unflatten(tensors, structure), int(commits or 0)


def _fallback(path: Path) -> str:
    others = [c for c in find(path.parent) if c.path.name != path.name]
    if others:
        return f": delete it to continue from step {others[-1].step}"
    return ": delete it to start from the beginning"


def plain_tensor(name: str, tensor: Tensor) -> Tensor:
    """A copy of a tensor as safetensors takes it: dense, contiguous, on the CPU."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise InputError(f"state {name!r}: only dense tensors can be stored; got {tensor.layout}")
    if tensor.device.type == "meta":
        raise InputError(f"state {name!r}: only tensors with values can be stored; got one on the meta device")
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def checksum(step: int, tensors: dict[str, Tensor], structure: str, commits: str) -> str:
    """SHA-256 over everything that a file restores."""
    digest = hashlib.sha256(f"{step}\n{structure}".encode())
    if commits:
        digest.update(f"\nmetrics {commits}".encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        if tensor.numel():
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
