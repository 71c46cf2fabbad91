"""Nested state to a flat table of tensors and back.

A checkpoint is a tree of dicts, lists and tuples whose leaves are tensors or plain scalars. safetensors stores a flat
table of tensors and a table of strings; `flatten` splits a tree into the two and `unflatten` puts it together again,
bit for bit: key types, the difference between lists and tuples, NaN and infinities, shapes and dtypes are kept.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from excite.errors import InputError, RunError

State = dict[str, Any]


def flatten(tree: Any) -> tuple[dict[str, Tensor], str]:
    """Tensors by readable path ("model/0.weight") and the JSON text of everything else."""
    tensors: dict[str, Tensor] = {}
    return tensors, json.dumps(_encode(tree, (), tensors), separators=(",", ":"))


def unflatten(tensors: Mapping[str, Tensor], structure: str) -> Any:
    """The tree that `flatten` took apart."""
    try:
        return _decode(json.loads(structure), tensors)
    except (KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
        raise RunError(f"the structure of the state cannot be read ({type(error).__name__}: {error})") from error


# Scalars stand for themselves in the JSON text; everything else is a list whose first entry says what it is.
def _encode(value: Any, path: tuple[str, ...], tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return ["tensor", _store(value, path, tensors)]
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        for key in value:
            if type(key) not in (str, int):
                raise InputError(f"state {_show(path)}: keys are str or int; got {key!r} ({type(key).__name__})")
        return ["dict", *([key, _encode(item, (*path, str(key)), tensors)] for key, item in value.items())]
    if isinstance(value, list | tuple):
        sequence_type = "list" if isinstance(value, list) else "tuple"
        return [sequence_type, *(_encode(item, (*path, str(i)), tensors) for i, item in enumerate(value))]
    raise InputError(
        f"state {_show(path)}: expected tensors, dicts, lists, tuples, str, int, float, bool or None; "
        f"got {type(value).__name__}"
    )


def _store(tensor: Tensor, path: tuple[str, ...], tensors: dict[str, Tensor]) -> str:
    # Different paths can join to the same text ("a/b" inside "c", "b" inside "c/a"): count until the name is free.
    name = base = "/".join(path) or "state"
    count = 1
    while name in tensors:
        count += 1
        name = f"{base}~{count}"
    tensors[name] = tensor
    return name


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        sequence_type, items = value[0], value[1:]
        if sequence_type == "tensor":
            return tensors[items[0]]
        if sequence_type == "dict":
            return {key: _decode(item, tensors) for key, item in items}
        if sequence_type in ("list", "tuple"):
            decoded = [_decode(item, tensors) for item in items]
            return decoded if sequence_type == "list" else tuple(decoded)
        raise ValueError(f"unknown kind {sequence_type!r}")
    if isinstance(value, dict):
        raise ValueError("unexpected object")
    return value


def _show(path: tuple[str, ...]) -> str:
    return repr("/".join(path)) if path else "at the top"
