"""Files of weights, and whether they fit a model. Nothing in a file is executed."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from excite._core.checks import first_line
from excite.errors import InputError, ModelError, RunError
from excite.runs import checkpoints, weights
from excite.runs.import_paths import ModelSource
from excite.runs.weights import StoredWeights

_INSIDE = ("state_dict", "model", "model_state_dict")  # keys under which frameworks keep the weights
_SHOWN = 3  # names in a message


def read_weights(path: Path) -> StoredWeights:
    """Reads weights: a safetensors file, a checkpoint of Excite, or a file of `torch.save` with tensors only.

    Pickled code is never run: `torch.load` is called with ``weights_only=True``.

    Args:
        path: The file.

    Returns:
        The weights, on the CPU, with how to build the model as far as the file says.

    Raises:
        RunError: If the file is missing or damaged.
        InputError: If it holds something else than weights.
    """
    if path.suffix != ".safetensors":
        state = _tensors(path, _torch_load(path))
        return StoredWeights(state, -1, ModelSource(None, {}, "it holds tensors only"))
    if is_checkpoint(path):
        step, saved = checkpoints.read(path)
        if not isinstance(saved, Mapping) or "model" not in saved:
            raise RunError(f"{path} holds no model: expected a checkpoint with 'model', the model's state_dict")
        return StoredWeights(_tensors(path, saved["model"]), step, ModelSource(None, {}, "a checkpoint does not say"))
    return weights.read(path)


def is_checkpoint(path: Path) -> bool:
    """Whether a safetensors file is a checkpoint of Excite, with tensors under other names than the model's."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return (file.metadata() or {}).get("format") == checkpoints.FORMAT
    except (SafetensorError, OSError, ValueError):
        return False  # refused with the reason where it is read


def _torch_load(path: Path) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on other protocols of pickle, before the file is refused
            return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise RunError(f"there is no file {path}") from error
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{path} is refused: it holds something else than tensors, which could run code: "
            "store model.state_dict(), or safetensors"
        ) from error
    except Exception as error:  # whatever a damaged file leads to
        if "TorchScript" in str(error):  # PyTorch's own message advises to load it unsafely
            raise InputError(
                f"{path} is refused: it is a TorchScript archive, which holds code: store model.state_dict(), or safetensors"
            ) from error
        raise RunError(f"{path} cannot be read as weights: {first_line(error)}") from error


def _tensors(path: Path, result: Any) -> dict[str, Tensor]:
    """The table of tensors in what a file holds."""
    for key in _INSIDE:
        if isinstance(result, Mapping) and isinstance(result.get(key), Mapping):
            result = result[key]
            break
    if not isinstance(result, Mapping) or not result or not all(isinstance(name, str) for name in result):
        raise InputError(f"{path}: expected a state_dict, tensors by name; got {type(result).__name__}")
    return {name: value for name, value in result.items() if isinstance(value, Tensor)}


def load_weights(model: nn.Module, state: Mapping[str, Tensor], where: object) -> nn.Module:
    """Loads weights into a model, all of them or none.

    Prefixes that wrappers put before every name ("module.", "_orig_mod.", or the attribute of a LightningModule) are removed.

    Args:
        model: The model, changed in place.
        state: Tensors by name.
        where: What they were read from, for messages.

    Returns:
        The model, in evaluation mode.

    Raises:
        ModelError: If names or shapes differ; the message says which.
    """
    needed = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    state = _without_prefix(dict(state), needed)
    shapes = [
        f"{name} {tuple(state[name].shape)} instead of {tuple(value.shape)}"
        for name, value in needed.items()
        if name in state and state[name].shape != value.shape
    ]
    differences = {
        "missing": [name for name in needed if name not in state],
        "unexpected": [name for name in state if name not in needed],
        "of another shape": shapes,
    }
    if listed := [f"{difference} {_listed(names)}" for difference, names in differences.items() if names]:
        raise ModelError(f"{where} does not fit the {type(model).__name__}: {'; '.join(listed)}")
    try:
        model.load_state_dict(state)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ModelError(f"{where} does not fit the {type(model).__name__}: {first_line(error)}") from error
    return model.eval()


def _without_prefix(state: dict[str, Tensor], needed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    state = {name.replace("_orig_mod.", ""): value for name, value in state.items()}
    while state.keys() != needed.keys():
        firsts = {name.partition(".")[0] for name in state}
        shorter = {name.partition(".")[2]: value for name, value in state.items()}
        if len(firsts) != 1 or "" in shorter:
            break
        if firsts != {"module"} and shorter.keys() != needed.keys():
            break
        state = shorter
    return state


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
