"""Margins of a dataset of any size: batch by batch from a loader, stored as they are found, resumable, by several processes."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DistributedSampler, RandomSampler

from excite._core.checks import check_count, check_dense, check_model, check_path, model_errors, shown
from excite._core.distributed import rank_and_size
from excite._core.files import read_json, write_json, writing
from excite._core.preserve import device_of
from excite.errors import ExciteError, InputError, ModelError, one_line
from excite.margin.measure import margins
from excite.margin.result import Margins, concatenate


@model_errors
def loader_margins(
    model: nn.Module,
    loader: Iterable[Any],
    folder: str | Path | None = None,
    *,
    batches: int | None = None,
    progress: Callable[[int, int | None], None] | None = None,
    **arguments: Any,
) -> Margins:
    """Margins of all points of a loader, one batch at a time.

    With a `folder` the margins of each batch are stored there when they are found, and a call that is started again continues
    where the last one ended. Stored margins count only for the same points, labels, weights and arguments. Under torchrun the
    batches are dealt out to the processes, each on the device of its model; every process needs the same loader, not shuffled,
    and returns all margins. Each batch is searched on its own: dataset points that others are moved towards are those of the batch.

    Args:
        model: the classifier.
        loader: yields (x, y), such as a `torch.utils.data.DataLoader`.
        folder: where to store margins by batch; nothing is stored without one.
        batches: how many batches to take; by default all.
        progress: called as progress(batches done, batches in all), None for a loader without a length.
        **arguments: those of `excite.margins` but x, y and perturbations.

    Returns:
        `Margins` of all points in the loader's order; evidence is added up over the batches.

    Raises:
        InputError: if the loader yields something else, or nothing, or shuffles under torchrun.
        ModelError: if another process failed; it names the reason.

    Example:
        >>> data = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.randint(0, 2, (8,)))
        >>> loader = torch.utils.data.DataLoader(data, batch_size=4)
        >>> len(loader_margins(torch.nn.Linear(4, 1), loader, bounds=None))
        8
    """
    _check_arguments(arguments)
    check_model(model)
    batches = None if batches is None else check_count(batches, "batches")
    directory = None if folder is None else check_path(folder)
    rank, size = _check_same_everywhere(loader)
    total = _length(loader, batches)
    settings = _digest_of_model(model, arguments) if directory is not None else ""
    by_batch: dict[int, Margins] = {}
    error: Exception | None = None
    try:
        for number, batch in enumerate(_first(loader, batches)):
            if number % size == rank:
                x, y = _pair(batch, device_of(model))
                path = None if directory is None else directory / f"batch-{number:06d}.json"
                by_batch[number] = _batch_margins(model, x, y, path, settings, arguments)
            if progress is not None:
                progress(number + 1, total)
    except Exception as raised:
        if size == 1:
            raise
        error = raised  # the other processes wait for this one's margins
    return _joined(by_batch if size == 1 else _from_all(by_batch, error, size))


def _joined(by_batch: dict[int, Margins]) -> Margins:
    """The margins of all batches, in their order."""
    if not by_batch:
        raise InputError("loader: expected at least one batch; it yields none")
    return concatenate([by_batch[number] for number in sorted(by_batch)])


def _check_arguments(arguments: dict[str, Any]) -> None:
    """Refuses what the loader supplies, and what is not kept of a whole dataset."""
    if {"x", "y", "perturbations"} & set(arguments):
        raise InputError(
            "x and y come from the loader, and perturbations of a whole dataset are not kept: leave them out"
        )


def _batch_margins(
    model: nn.Module, x: Tensor, y: Tensor, path: Path | None, settings: str, arguments: dict[str, Any]
) -> Margins:
    """The margins of one batch, from its file if that has them."""
    if path is None:
        return margins(model, x, y, **arguments)
    hasher = hashlib.sha256(settings.encode())
    for tensor in (x, y):
        hasher.update(str((tensor.dtype, tuple(tensor.shape))).encode() + _bytes(tensor))
    fingerprint = hasher.hexdigest()
    stored = _read(path)
    if stored is not None and stored.get("fingerprint") == fingerprint:
        return Margins.from_dict(stored["margins"])
    result = margins(model, x, y, **arguments)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"fingerprint": fingerprint, "margins": result.to_dict()})
    return result


def _read(path: Path) -> dict[str, Any] | None:
    """The stored margins; None if there are none, or they cannot be read: then they are measured again."""
    try:
        stored = read_json(path) if path.exists() else None
    except (ExciteError, OSError, ValueError):
        return None
    return stored if isinstance(stored, dict) and isinstance(stored.get("margins"), dict) else None


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _digest_of_model(model: nn.Module, arguments: dict[str, Any]) -> str:
    """Weights, buffers and arguments, in a few letters. Functions count by name."""
    hasher = hashlib.sha256()
    for name, value in model.state_dict().items():
        hasher.update(name.encode())
        if isinstance(value, Tensor) and value.numel():
            hasher.update(_bytes(value))
    for name in sorted(arguments):
        value = arguments[name]
        for item in value if isinstance(value, tuple | list) else (value,):
            # not the text of tensors, which is shortened
            known = _bytes(item) if isinstance(item, Tensor) else _name_of(item).encode()
            hasher.update(f"{name}={len(known)} ".encode() + known)
    return hasher.hexdigest()


def _name_of(argument: Any) -> str:
    return getattr(argument, "__qualname__", None) or repr(argument)


def _check_same_everywhere(loader: Any) -> tuple[int, int]:
    """Rank and number of the processes; refuses loaders whose batches differ between them."""
    rank, size = rank_and_size()
    sampler = getattr(loader, "sampler", None)
    if size > 1 and isinstance(sampler, RandomSampler | DistributedSampler):
        raise InputError(
            f"loader: expected the same batches in every process, which are dealt out here; got a loader with a "
            f"{type(sampler).__name__}: use DataLoader(..., shuffle=False) without a sampler"
        )
    return rank, size


def _length(loader: Iterable[Any], batches: int | None) -> int | None:
    try:
        length = len(loader)  # type: ignore[arg-type]
    except TypeError:
        return batches
    return length if batches is None else min(length, batches)


def _first(loader: Iterable[Any], batches: int | None) -> Iterable[Any]:
    try:
        iterator = iter(loader)
    except TypeError as error:
        raise InputError(f"loader: expected an iterable of (x, y); got {shown(loader)}") from error
    yield from itertools.islice(iterator, batches)


def _pair(batch: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    if (
        not isinstance(batch, tuple | list)
        or len(batch) != 2
        or not all(isinstance(tensor, Tensor) for tensor in batch)
    ):
        raise InputError(f"loader: expected batches (x, y) of two tensors; got {shown(batch)}")
    for tensor, name in zip(batch, ("x", "y")):
        check_dense(tensor, name)
    x, y = batch
    return x.to(device), y.to(device)


def _from_all(by_batch: dict[int, Margins], error: Exception | None, size: int) -> dict[int, Margins]:
    """The margins of all processes by batch, in every process; raises in all of them if one failed."""
    gathered: list[Any] = [None] * size
    own = {number: margins.to_dict() for number, margins in by_batch.items()}
    dist.all_gather_object(gathered, own if error is None else f"{type(error).__name__}: {one_line(error)}")
    if error is not None:
        raise error
    for rank, stored in enumerate(gathered):
        if isinstance(stored, str):
            raise ModelError(f"process {rank} of {size} failed: {stored}")
    return {number: Margins.from_dict(stored) for some in gathered for number, stored in some.items()}
