"""A small fixed sample of the user's training and test data, drawn without disturbing anything that belongs to the training.

Sources are tensors (x, y), datasets, loaders, and other objects that can be iterated more than once. Random numbers are drawn
from generators of our own; those of the user, global ones and those of loaders, samplers and datasets, are put back.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
)

from excite._core.checks import check_dense, check_finite, first_line, shown
from excite._core.randomness import own_randomness
from excite._core.wrappers import unwrap
from excite.errors import ExciteError, InputError

MAX_POINTS = 500  # points per part
_MAX_BYTES = 512_000_000  # of the points of one part
_MAX_INDICES = 10_000_000  # read from a sampler
_LABELS = ("labels", "label", "y", "target", "targets", "class", "classes")
_INPUTS = (
    "x",
    "input",
    "inputs",
    "image",
    "images",
    "img",
    "pixel_values",
    "input_values",
    "input_features",
    "data",
    "features",
)
_TOKENS = ("input_ids", "tokens", "token_ids")
_FORMS = "a pair of tensors (x, y), a dataset or a loader"
_CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class Points:
    """Points x (N, ...) and labels y (N,) on the CPU; `key` is the keyword under which they came, if in a dict, `beside` the others."""

    x: Tensor
    y: Tensor
    key: str | None = None
    beside: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.x)


def draw(source: Any, split: str, max_points: int = MAX_POINTS, seed: int = 0) -> Points:
    """At most `max_points` points of a source, chosen at random by `seed`; the same in every process.

    Args:
        source: Pair of tensors, dataset, loader, or another object that can be iterated more than once.
        split: "train" or "test", for messages.
        max_points: Largest number of points.
        seed: Seed of the choice.

    Returns:
        The points, on the CPU.

    Raises:
        InputError: If the source cannot be sampled, has no labels, or its points are not finite.
    """
    if isinstance(source, Points):
        return source
    for name in (f"x_{split}", f"y_{split}"):
        if not hasattr(source, name):
            break
    else:  # a dataset of excite.data, of which each part is known
        source = (getattr(source, f"x_{split}"), getattr(source, f"y_{split}"))
    generator = np.random.default_rng([seed, split == "test"])
    try:
        with own_randomness(seed, _CPU), _preserve_generators(source):
            points = _draw(source, split, max_points, generator)
    except ExciteError:
        raise
    except Exception as error:
        raise InputError(
            f"{split}: no points could be drawn: {type(source).__name__} raised {first_line(error)}"
        ) from error
    if not len(points):
        raise InputError(f"{split}: expected at least one point; {type(source).__name__} is empty")
    check_finite(points.x, f"{split} inputs")
    return points


def _draw(source: Any, split: str, max_points: int, generator: np.random.Generator) -> Points:
    if isinstance(source, tuple | list) and len(source) == 2 and all(_is_array(array) for array in source):
        x, y = (check_dense(torch.as_tensor(array), split) for array in source)
        _check_pair(x, y, split)
        chosen = torch.from_numpy(_choose(len(x), _affordable(x, max_points), generator)).to(x.device)
        return Points(_own(x[chosen]), _own(y.to(x.device)[chosen]).reshape(-1))
    if isinstance(source, tuple | list) and source and _is_array(source[0]) and source[0].ndim > 0:
        labels = (
            f"got {shown(source[1])} for y" if len(source) == 2 else f"got a {type(source).__name__} of {len(source)}"
        )
        raise InputError(
            f"{split}: expected a pair (x, y) with the labels y as a tensor or array of class indices; {labels}"
        )
    if isinstance(source, DataLoader):
        return _from_loader(source, split, max_points, generator)
    if isinstance(source, Iterator):
        raise InputError(
            f"{split}: {shown(source)} can be read only once, and drawing points would take them from the training: give {_FORMS}"
        )
    if not isinstance(source, IterableDataset) and hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        if isinstance(source, Mapping | str | Tensor):
            raise InputError(f"{split}: expected {_FORMS}; got {shown(source)}")
        if isinstance(source, list | tuple) and source and _is_batch(source[0]):
            return _from_batches(source, split, max_points)
        return _from_loader(DataLoader(source), split, max_points, generator)
    if isinstance(source, IterableDataset):
        return _from_loader(DataLoader(source, batch_size=64), split, max_points, generator)
    if isinstance(source, Iterable):
        return _from_batches(source, split, max_points)
    raise InputError(f"{split}: expected {_FORMS}; got {shown(source)}")


def _from_loader(loader: DataLoader[Any], split: str, max_points: int, generator: np.random.Generator) -> Points:
    """From the dataset behind a loader, in the loader's way: its workers, its collation, the indices of its sampler."""
    data: Any = loader.dataset
    if isinstance(data, IterableDataset):
        if iter(data) is data:
            raise InputError(
                f"{split}: {type(data).__name__} can be read only once, and drawing points would take them from the training: "
                f"give {_FORMS}"
            )
        return _from_batches(loader, split, max_points)
    indices = _indices(loader, split)
    chosen = [indices[i] for i in _choose(len(indices), max_points, generator)]
    size = getattr(loader, "batch_size", None)
    unbatched = size is None and loader.batch_sampler is None  # each item of the dataset is a batch
    reader = DataLoader(
        Subset(data, chosen),
        batch_size=None if unbatched else min(64, max(1, len(chosen))),
        num_workers=min(loader.num_workers, 2),
        collate_fn=loader.collate_fn,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context if loader.num_workers else None,
        generator=torch.Generator().manual_seed(0),
    )
    return _from_batches(reader, split, max_points)


def _indices(loader: DataLoader[Any], split: str) -> Sequence[Any]:
    """Number of samples that the loader's sampler can draw."""
    batches: Any = loader.batch_sampler
    while hasattr(batches, "batch_sampler"):  # wrapped, as by Accelerate
        batches = batches.batch_sampler
    sampler: Any = getattr(batches, "sampler", None) if batches is not None else loader.sampler
    while not isinstance(sampler, DistributedSampler) and hasattr(sampler, "sampler"):
        sampler = sampler.sampler
    if isinstance(sampler, SubsetRandomSampler):
        return list(sampler.indices)
    known_sampler = isinstance(sampler, SequentialSampler | RandomSampler | DistributedSampler)
    if known_sampler or type(sampler).__name__ == "UnrepeatedDistributedSampler":
        return range(len(loader.dataset))  # type: ignore[arg-type]
    iterable = sampler if sampler is not None else batches
    order = iter(iterable)
    if order is iterable:
        raise InputError(f"{split}: the sampler {type(iterable).__name__} can be read only once: give {_FORMS}")
    read = islice(order, _MAX_INDICES)
    return list(dict.fromkeys(i for batch in read for i in batch)) if sampler is None else list(dict.fromkeys(read))


def _from_batches(batches: Iterable[Any], split: str, max_points: int) -> Points:
    """The first points of an object that gives batches."""
    iterator = iter(batches)
    if iterator is batches:
        raise InputError(
            f"{split}: {type(batches).__name__} can be read only once, and drawing points would take them from the training: "
            f"give {_FORMS}"
        )
    xs: list[Tensor] = []
    ys: list[Tensor] = []
    key, count, beside = None, 0, ()
    for batch in iterator:
        x, y, key = split_batch(batch, split)
        beside = tuple(name for name in batch if name != key) if key is not None else ()
        _check_pair(x, y, split)
        max_points = _affordable(x, max_points)
        xs.append(_own(x[: max_points - count]))
        ys.append(_own(y[: max_points - count]).reshape(-1))
        count += len(xs[-1])
        if count >= max_points:
            break
    if not xs:
        raise InputError(f"{split}: expected at least one batch; {type(batches).__name__} gives none")
    return Points(torch.cat(xs), torch.cat(ys), key, beside)


def draw_parts(train: Any, test: Any) -> dict[str, Points]:
    """Points of the parts that were given; a dataset of `excite.data` as `train` also has the test points."""
    if test is None and hasattr(train, "x_test") and len(train.x_test):
        test = train
    drawn = {split: draw(source, split) for split, source in (("train", train), ("test", test)) if source is not None}
    shapes = {tuple(points.x.shape[1:]) for points in drawn.values()}
    if len(shapes) > 1:
        result = " and ".join(map(str, (tuple(points.x.shape[1:]) for points in drawn.values())))
        raise InputError(f"train and test: expected points of one shape; got {result}")
    return drawn


def check_inputs(drawn: Mapping[str, Points], model: nn.Module) -> None:
    """Refuses points that are one of several inputs of the model: its margins would be those of another function.

    Raises:
        InputError: If the model takes another key of the batches, such as a mask.
    """
    parameters = inspect.signature(unwrap(model).forward).parameters
    for split, points in drawn.items():
        further = [name for name in points.beside if name in parameters and name not in _LABELS]
        if further and points.x.is_floating_point():
            raise InputError(
                f"{split}: the model takes {points.key!r} and {', '.join(map(repr, further))}; margins are those of one input: give "
                "pairs (x, y) and a model of x alone, or leave the data out"
            )


def as_called(drawn: Mapping[str, Points], model: nn.Module) -> dict[str, Points]:
    """Points as the model takes them: without the key of their batches where it takes no such keyword, as `model(batch["image"])`."""
    parameters = inspect.signature(unwrap(model).forward).parameters
    every = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return {
        split: points if points.key is None or every or points.key in parameters else replace(points, key=None)
        for split, points in drawn.items()
    }


def split_batch(batch: Any, split: str) -> tuple[Tensor, Tensor, str | None]:
    """Points, labels, and the key of the points if the batch is a dict.

    Raises:
        InputError: If the batch has no points or no labels that can be identified.
    """
    if isinstance(batch, Mapping):
        return _split_dict(dict(batch), split)
    if isinstance(batch, tuple | list) and len(batch) >= 2 and all(_is_array(array) for array in batch[:2]):
        x, y = (torch.as_tensor(array) for array in batch[:2])
        # What follows is an index or a weight, unless the second item is another input.
        if len(batch) == 2 or (y.dim() <= 2 and y.numel() == len(x) and x.dim() >= 1):
            return x, y, None
    hint = "pairs (x, y), or dicts such as {'x': ..., 'label': ...}"
    if isinstance(batch, Tensor):
        raise InputError(
            f"{split}: the data have no labels, batches are tensors of shape {tuple(batch.shape)}: expected {hint}"
        )
    raise InputError(f"{split}: expected batches that are {hint}; got {_described(batch)}")


def _split_dict(batch: dict[str, Any], split: str) -> tuple[Tensor, Tensor, str]:
    arrays = {key: torch.as_tensor(value) for key, value in batch.items() if _is_array(value)}
    label = next((name for name in _LABELS if name in arrays), None)
    if label is None:
        raise InputError(
            f"{split}: no labels in batches with keys {', '.join(map(repr, batch))}: expected one of {', '.join(_LABELS)}"
        )
    inputs = [name for name in arrays if name != label and arrays[name].dim() > 0]
    input_name = next(
        (name for name in (*_INPUTS, *_TOKENS) if name in inputs), inputs[0] if len(inputs) == 1 else None
    )
    if input_name is None:
        raise InputError(
            f"{split}: which of {', '.join(map(repr, inputs)) or 'no tensors'} is the input cannot be determined: name it 'x', or give "
            "pairs (x, y)"
        )
    return arrays[input_name], arrays[label], input_name


def _check_pair(x: Tensor, y: Tensor, split: str) -> None:
    if x.dim() == 0 or y.dim() == 0 or len(x) != len(y):
        raise InputError(f"{split}: expected one label per point; got shapes {tuple(x.shape)} and {tuple(y.shape)}")
    if y.numel() != len(y):
        raise InputError(
            f"{split}: expected one label per point, of shape ({len(x)},); got {tuple(y.shape)}: one class index each, not one-hot "
            "codes or masks"
        )


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray)


def _own(value: Tensor) -> Tensor:
    return value.detach().to("cpu", copy=True)


def _is_batch(item: Any) -> bool:
    """Whether an item of a list is a batch (x, y), not a single sample."""
    pair = (
        isinstance(item, tuple | list)
        and len(item) >= 2
        and all(_is_array(entry) and entry.ndim > 0 for entry in item[:2])
    )
    return pair and len(item[0]) == len(item[1])


def _affordable(x: Tensor, max_points: int) -> int:
    """At most `max_points` points, and not more than fit in memory."""
    if not len(x):
        return max_points
    return min(max_points, max(2, _MAX_BYTES // max(1, x[0].numel() * x.element_size())))


def _choose(total: int, max_points: int, generator: np.random.Generator) -> Any:
    return generator.permutation(total)[:max_points]


def _described(batch: Any) -> str:
    if isinstance(batch, tuple | list):
        return f"{type(batch).__name__}s of {len(batch)}: {', '.join(shown(item) for item in batch[:4])}"
    return shown(batch)


@contextmanager
def _preserve_generators(source: Any) -> Iterator[None]:
    """Puts back the state of the random generators that a loader, its sampler, its dataset and their transforms hold."""
    generators: dict[int, Any] = {}
    _collect(source, generators, set(), 4)
    states = [(generator, _state(generator)) for generator in generators.values()]
    try:
        yield
    finally:
        for generator, state in states:
            if isinstance(generator, np.random.Generator):
                generator.bit_generator.state = state
            else:
                (generator.setstate if isinstance(generator, random.Random) else generator.set_state)(state)


def _state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return (generator.getstate if isinstance(generator, random.Random) else generator.get_state)()


def _collect(value: Any, generators: dict[int, Any], visited: set[int], depth: int) -> None:
    if isinstance(value, torch.Generator | np.random.Generator | np.random.RandomState | random.Random):
        generators[id(value)] = value
        return
    if depth == 0 or id(value) in visited or isinstance(value, Tensor | np.ndarray | str | bytes | int | float | type):
        return
    visited.add(id(value))
    if isinstance(value, list | tuple):
        if len(value) <= 64:
            for member in value:
                _collect(member, generators, visited, depth - 1)
        return
    for member in list(getattr(value, "__dict__", {}).values()):
        _collect(member, generators, visited, depth - 1)
