"""One training step as one CUDA graph: search, loss, gradients and update are launched together.

Small networks leave a GPU waiting for Python: a step with excitation launches hundreds of kernels of a few microseconds
each. A graph launches them all at once. It holds for fixed shapes and settings; when these change (a smaller last batch,
a new radius, another learning rate) the step runs plainly a few times, as training steps like any other, and is captured
again. What cannot be captured runs plainly, and `why_not` says why.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from excite._core.background import drain
from excite.train.step import Loss, Step

_WARM = 3  # plain steps before a capture: libraries choose their algorithms, optimizers make their state
_MIN_STEPS = 8  # steps of one shape that are worth a capture
_T = TypeVar("_T")


class NotCapturable(Exception):
    """A function that a CUDA graph cannot hold."""


class CaptureStream:
    """The CUDA stream on which functions run before and while they are captured.

    One stream for both: each stream that multiplies matrices gets a workspace of its own.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._stream = torch.cuda.Stream(device)

    def run(self, function: Callable[[], _T]) -> _T:
        """Runs a function without capturing it, as a later capture needs it."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            result = function()
        torch.cuda.current_stream().wait_stream(self._stream)
        return result

    def capture(self, function: Callable[[], _T]) -> tuple[torch.cuda.CUDAGraph, _T]:
        """Captures a function without running it.

        Returns:
            The graph, and the function's result, which a replay fills.

        Raises:
            NotCapturable: If the function does what a graph cannot hold; nothing has run then.
        """
        drain()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self._stream):
                result = function()
        except RuntimeError as error:
            torch.cuda.synchronize()
            raise NotCapturable(f"the step cannot be captured: {' '.join(str(error).split())[:200]}") from error
        return graph, result


@dataclass(eq=False)
class CapturedStep(Step):
    """A step that becomes a CUDA graph after a few plain ones; on the CPU it stays plain."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._graphs: dict[Hashable, _Graph] = {}
        self._plain: dict[Hashable, int] = {}
        self._current: Hashable = None
        self.why_not = _refusal(self.optimizer)
        self._stream = CaptureStream() if self.why_not is None else None

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Does one training step by replaying the captured graph, and returns the loss."""
        if self.why_not is not None:
            return super().__call__(x, y)
        rates = tuple(
            tuple(v for v in group.values() if isinstance(v, int | float)) for group in self.optimizer.param_groups
        )
        setting = (self.setting(), rates)
        if setting != self._current:  # graphs of a radius that is gone would only take memory
            self._graphs.clear()
            self._plain.clear()
            self._current = setting
        shapes = (x.shape, x.dtype, y.shape, y.dtype)
        graph = self._graphs.get(shapes)
        if graph is None:
            self._plain[shapes] = count = self._plain.get(shapes, 0) + 1
            rare = len(self._graphs) > 0 and count <= _MIN_STEPS
            if count <= _WARM or rare:
                assert self._stream is not None
                plain = super().__call__
                return self._stream.run(lambda: plain(x, y))
            graph = self._capture(x, y)
            if graph is None:
                return super().__call__(x, y)
            self._graphs[shapes] = graph
        self.adapt(x, y)
        return graph.replay(x, y)

    def _capture(self, x: Tensor, y: Tensor) -> _Graph | None:
        assert self._stream is not None
        try:
            return _Graph(super().__call__, x, y, self._stream)
        except NotCapturable as error:
            self.why_not = str(error)
            self.optimizer.zero_grad()
            # A capture that was broken off leaves the random numbers of the device in a state that refuses to draw any.
            random = torch.cuda.default_generators[x.device.index or 0]
            random.graphsafe_set_state(random.clone_state())
            return None


class _Graph:
    """A captured step with the tensors it reads and writes."""

    def __init__(self, step: Loss, x: Tensor, y: Tensor, stream: CaptureStream):
        self._x, self._y = x.clone(), y.clone()
        self._graph, self._loss = stream.capture(lambda: step(self._x, self._y))

    def replay(self, x: Tensor, y: Tensor) -> Tensor:
        """Runs the step on another batch."""
        self._x.copy_(x)
        self._y.copy_(y)
        self._graph.replay()
        return self._loss.clone()  # in memory of its own: the next step writes over the graph's


def _refusal(optimizer: torch.optim.Optimizer) -> str | None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(p.device.type != "cuda" for p in parameters):
        return "not on a CUDA device"
    if any(not group.get("capturable", True) for group in optimizer.param_groups):
        return f"{type(optimizer).__name__} keeps numbers on the CPU: construct it with capturable=True"
    return None
