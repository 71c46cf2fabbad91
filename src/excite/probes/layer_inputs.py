"""Inputs of the weight of a layer, as rows: activations for linear layers, patches for convolutions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from excite._core.intercept.affine import AffineCall

Patches = int | Literal["whole"] | None


@dataclass(frozen=True)
class LayerInputs:
    """Rows (R, D) that a weight multiplies, out of `total`; the rest is None where it is not known.

    `active` (R, units) says where the input of the unit's activation is positive, `sample_index` (R,) which item of the first axis
    of the call's input a row belongs to. With `groups` above 1 unit k sees columns D/groups · ⌊k · groups / units⌋ and on.
    """

    rows: Tensor
    total: int
    sample_index: Tensor
    items: int
    active: Tensor | None = None
    groups: int = 1


def layer_inputs(
    call: AffineCall,
    input: Tensor,
    output: Tensor | None = None,
    patches: Patches = None,
    *,
    first: int = 0,
    seed: int = 0,
) -> LayerInputs:
    """Rows of `input` that `call` multiplies; `active` only if its `output` is given, or what its activation gets, laid out like it.

    Patches: so many of each item, None for all of them, "whole" for the items themselves, flattened. Which ones depends
    on the seed and on the item's number, counted from `first`, alone.
    """
    active = None if output is None else unit_rows(call, input.shape, output > 0, patches, first=first, seed=seed)
    if call.kind == "linear":
        rows = linear_rows(call, input)
        items = len(input) if input.dim() > 1 else 1
        sample_index = torch.arange(len(rows)) * items // max(1, len(rows))
        return LayerInputs(rows, len(rows), sample_index, items, active)
    weight = call.weight
    axes = weight.dim() - 2
    transposed = "transpose" in call.function.__name__
    if patches != "whole":
        input = call.entering(input)
    if input.dim() == axes + 1:  # one image without a batch axis
        input = input[None]
    items = len(input)
    if patches == "whole":
        return LayerInputs(input.flatten(1), items, torch.arange(items), items)
    # (B, C, ...) -> (B, positions..., C · kernel...)
    windows = input.movedim(1, -1) if transposed else _windows(call, input, weight.shape[2:])
    places = windows.shape[1 : 1 + axes]
    sample_index, index = _places_of(items, tuple(places), patches, first, seed, input.device)
    groups = 1 if transposed else weight.shape[0] and input.shape[1] // weight.shape[1]
    total = items * math.prod(places)
    return LayerInputs(windows[index].flatten(1), total, sample_index, items, active, groups)


def unit_rows(
    call: AffineCall, shape: torch.Size, output: Tensor, patches: Patches = None, *, first: int = 0, seed: int = 0
) -> Tensor | None:
    """The outputs of units for the rows that `layer_inputs` takes, (R, units).

    `output` is laid out like the output of `call` for an input of this shape. The units of a convolution are its channels. None where
    what one unit sees is not known.
    """
    if call.kind == "linear":
        return _linear(call, call.entering(torch.empty(shape, device="meta")), output)[1]
    if "transpose" in call.function.__name__ or patches == "whole":
        return None
    if output.dim() == call.weight.dim() - 1:  # one image without a batch axis
        output = output[None]
    if patches is None:
        return output.movedim(1, -1).flatten(0, -2)
    _, index = _places_of(len(output), tuple(output.shape[2:]), patches, first, seed, output.device)
    return output.movedim(1, -1)[index]


def linear_rows(call: AffineCall, x: Tensor) -> Tensor:
    """(R, D): `x`, laid out like the input of a linear call, as the vectors that its weight multiplies."""
    return _linear(call, call.entering(x) if call.before else x, None)[0]


def _places_of(
    items: int, places: tuple[int, ...], patches: int | None, first: int, seed: int, device: torch.device
) -> tuple[Tensor, tuple[Tensor, ...]]:
    # The same example is measured again and again: its places are cached, because to send them to a GPU waits for it.
    find = _cached_index if patches is not None and not first else _index
    return find(items, places, patches, first, seed, device)


def _index(
    items: int, places: tuple[int, ...], patches: int | None, first: int, seed: int, device: torch.device
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The item of every row, and where the rows stand."""
    at = _places(items, math.prod(places), patches, first, seed)
    sample_index = torch.arange(items).repeat_interleave(at.shape[1])
    coordinates = map(torch.from_numpy, np.unravel_index(at.reshape(-1), places))
    return sample_index, tuple(i.to(device) for i in (sample_index, *coordinates))


_cached_index = lru_cache(maxsize=64)(_index)


def _places(items: int, places: int, patches: int | None, first: int, seed: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """(items, n) places out of `places`: one at random in each of n equal intervals, every place as likely as another."""
    if patches is None or patches >= places:
        return np.broadcast_to(np.arange(places), (items, places))
    draw = np.arange(patches, dtype=np.uint64)
    item = np.arange(first, first + items, dtype=np.uint64)[:, None]
    uniform = _mixed(_mixed(_mixed(np.uint64(seed % 2**64)) ^ item) ^ draw) / 2.0**64
    return np.asarray(np.minimum((draw + uniform) * (places / patches), places - 1), dtype=np.int64)


def _mixed(x: Any) -> Any:
    """The finalizer of SplitMix64: neighbouring numbers become unrelated ones."""
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def _linear(call: AffineCall, x: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Axes that are summed over go last. Where these are not known: the last axis."""
    terms = call.terms(x)
    if terms is None:
        return x.reshape(-1, x.shape[-1] if x.dim() else 1), None
    own, weight_letters, result_letters = terms
    summed = [a for a in own if a not in result_letters]
    retained = [a for a in own if a in result_letters]
    rows = x.permute([own.index(a) for a in retained + summed]).reshape(
        -1, math.prod(x.shape[own.index(a)] for a in summed)
    )
    # Where other factors share an axis that stays, what a unit sees depends on the place along it.
    if out is None or out.dim() != len(result_letters) or any(a in other for a in retained for other in weight_letters):
        return rows, None
    free = [a for a in result_letters if a not in retained]
    return rows, out.permute([result_letters.index(a) for a in retained + free]).reshape(len(rows), -1)


def _windows(call: AffineCall, x: Tensor, kernel: torch.Size) -> Tensor:
    """(B, C, ...) -> a view (B, positions..., C, kernel...)."""
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    arguments: dict[str, Any] = {**dict(zip(names, call.args)), **call.kwargs}
    stride, dilation = (_tuple(arguments.get(key, 1), len(kernel)) for key in ("stride", "dilation"))
    x = F.pad(x, [side for pair in reversed(_padding(arguments.get("padding", 0), kernel, dilation)) for side in pair])
    for axis, (size, step, gap) in enumerate(zip(kernel, stride, dilation)):
        x = x.unfold(axis + 2, gap * (size - 1) + 1, step)[..., ::gap]
    return x.movedim(1, 1 + len(kernel))


def _tuple(value: Any, n: int) -> tuple[int, ...]:
    return (value,) * n if isinstance(value, int) else tuple(value) * (n if len(value) == 1 else 1)


def _padding(value: Any, kernel: torch.Size, dilation: tuple[int, ...]) -> list[tuple[int, int]]:
    if value == "same":
        totals = [gap * (size - 1) for size, gap in zip(kernel, dilation)]
        return [(total // 2, total - total // 2) for total in totals]
    sides = (0,) * len(kernel) if value == "valid" else _tuple(value, len(kernel))
    return [(side, side) for side in sides]
