"""Run a model with other tensors in place of its parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn


class OtherWeights:
    """Where the modules of a model keep some of its parameters, so that other tensors can stand there for a while.

    What `torch.func.functional_call` does, which looks for these places at every call: for a small transformer that takes longer than
    to launch its forward pass.

    Args:
        model: The model.
        parameters: Some of its parameters by path. One that several modules share is replaced in all of them.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from excite._core.intercept.other_weights import OtherWeights
        >>> model = nn.Linear(2, 1, bias=False)
        >>> with OtherWeights(model, {"weight": model.weight}).swapped_in({"weight": torch.ones(1, 2)}):
        ...     print(float(model(torch.ones(2)).detach()))
        2.0
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, Tensor]):
        paths = {id(p): path for path, p in parameters.items()}
        self._places = [
            (module._parameters, name, paths[id(p)])
            for module in model.modules()
            for name, p in module._parameters.items()
            if id(p) in paths
        ]

    @contextmanager
    def swapped_in(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """The model has these tensors, by path, until the end of the context; then its parameters again, whatever happens."""
        own = [(slots, name, slots[name]) for slots, name, _ in self._places]
        try:
            self.put(tensors)
            yield
        finally:
            for slots, name, p in own:
                slots[name] = p

    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Inside `swapped_in`: the model has these tensors instead, by path."""
        for slots, name, path in self._places:
            slots[name] = tensors[path]  # type: ignore[assignment]
