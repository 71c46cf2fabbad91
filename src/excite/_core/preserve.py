"""Run a model and restore its state: buffers, modes, random state."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

_local = threading.local()


def modules_of(model: nn.Module) -> list[nn.Module]:
    """`list(model.modules())`, in a third of the time: not by a generator inside a generator for each level.

    Args:
        model: The model.

    Example:
        >>> from torch import nn
        >>> from excite._core.preserve import modules_of
        >>> [type(module).__name__ for module in modules_of(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))]
        ['Sequential', 'Linear', 'ReLU']
    """
    modules: list[nn.Module] = []
    visited: set[nn.Module] = set()
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if module not in visited:
            visited.add(module)
            modules.append(module)
            waiting += [child for child in reversed(module._modules.values()) if child is not None]
    return modules


@contextmanager
def ignore_probes() -> Iterator[None]:
    """Disables probe hooks during internal forward passes."""
    _local.depth = getattr(_local, "depth", 0) + 1
    try:
        yield
    finally:
        _local.depth -= 1


def probes_ignored() -> bool:
    """Whether the current thread is inside `ignore_probes`."""
    return getattr(_local, "depth", 0) > 0


class Buffers:
    """A copy of a model's buffers (running statistics, counters, power-iteration vectors) that can be restored."""

    def __init__(self, model: nn.Module):
        self._owners = [
            (module, name, buffer)
            for module in modules_of(model)
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._values = [buffer.detach().clone() for _, _, buffer in self._owners]
        self._versions = [buffer._version for _, _, buffer in self._owners]

    def restore(self, *, thorough: bool = True) -> None:
        """Restores the buffers; with `thorough=False` only those whose autograd version changed.

        Normalizations update their running statistics without a change of version. Values are written the same way, so that
        a tensor saved for a backward pass keeps its version: it has its old value again.
        """
        for i, (module, name, buffer) in enumerate(self._owners):
            module._buffers[name] = buffer
            if thorough or buffer._version != self._versions[i]:
                buffer.data.copy_(self._values[i])
                self._versions[i] = buffer._version


def capturing() -> bool:
    """Whether a CUDA graph is being captured, so that no value can be read on the host."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class RandomState:
    """The state of the global random generators that a model on `device` can draw from.

    A graph draws from a generator of its own that moves on with every replay: there is no state to take during capture.
    """

    def __init__(self, device: torch.device):
        self._cuda = device if device.type == "cuda" and not capturing() else None
        self._cpu_state = torch.get_rng_state()
        self._cuda_state = torch.cuda.get_rng_state(device) if self._cuda else None

    def moved(self) -> bool:
        """Whether random numbers have been drawn since."""
        cuda = self._cuda_state is not None and not torch.equal(torch.cuda.get_rng_state(self._cuda), self._cuda_state)  # type: ignore[arg-type]
        return cuda or not torch.equal(torch.get_rng_state(), self._cpu_state)

    def restore(self) -> None:
        torch.set_rng_state(self._cpu_state)
        if self._cuda_state is not None:
            torch.cuda.set_rng_state(self._cuda_state, self._cuda)  # type: ignore[arg-type]


def device_of(model: nn.Module) -> torch.device:
    """The device of the first parameter; the CPU for a model without parameters."""
    first = next(model.parameters(), None)
    return first.device if first is not None else torch.device("cpu")


@contextmanager
def preserve_state(model: nn.Module) -> Iterator[None]:
    """Restores the model's buffers, its training modes and the global random state on exit, and disables probe hooks."""
    buffers, random = Buffers(model), RandomState(device_of(model))
    modes = [(module, module.training) for module in modules_of(model)]
    try:
        with ignore_probes():
            yield
    finally:
        buffers.restore()
        random.restore()
        for module, training in modes:
            if module.training != training:  # setting attributes of modules is slow
                module.training = training


@contextmanager
def preserve_random_state(model: nn.Module) -> Iterator[None]:
    """Restores the state of the global random generators that the model can draw from on exit."""
    random = RandomState(device_of(model))
    try:
        yield
    finally:
        random.restore()


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """`preserve_state` with the model in evaluation mode: no dropout, running statistics for normalizations."""
    with preserve_state(model):
        model.eval()
        yield
