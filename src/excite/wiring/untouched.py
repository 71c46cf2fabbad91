"""Run a model without leaving a trace in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Buffers:
    """The buffers of a model (running statistics, counters, power-iteration vectors) as they were, to be put back.

    Only what changed is written, so that a tensor saved for somebody's backward pass keeps its version.
    """

    def __init__(self, model: nn.Module):
        self._saved: list[tuple[nn.Module, str, Tensor, Tensor, int]] = [
            (module, name, buffer, buffer.detach().clone(), buffer._version)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def restore(self) -> None:
        for i, (module, name, buffer, value, version) in enumerate(self._saved):
            module._buffers[name] = buffer
            if buffer._version != version:
                with torch.no_grad():
                    buffer.copy_(value)
                self._saved[i] = (module, name, buffer, value, buffer._version)


class RandomState:
    """The state of the global random generators that a model on `device` can draw from."""

    def __init__(self, device: torch.device):
        self._cuda = device if device.type == "cuda" else None
        self._cpu_state = torch.get_rng_state()
        self._cuda_state = torch.cuda.get_rng_state(device) if self._cuda else None

    def restore(self) -> None:
        torch.set_rng_state(self._cpu_state)
        if self._cuda_state is not None:
            torch.cuda.set_rng_state(self._cuda_state, self._cuda)  # type: ignore[arg-type]


def device_of(model: nn.Module) -> torch.device:
    first = next(model.parameters(), None)
    return first.device if first is not None else torch.device("cpu")


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Whatever runs inside, afterwards the model's buffers, its modes and the global random state are as before."""
    buffers, random = Buffers(model), RandomState(device_of(model))
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        buffers.restore()
        random.restore()
        for module, training in modes:
            module.training = training


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """`untouched`, with the model in evaluation mode: no dropout, running statistics for normalizations."""
    with untouched(model):
        model.eval()
        yield
