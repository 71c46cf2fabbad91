"""Hooks on the user's own forward and backward passes: norms of dL/dz and dL/df for every sample, nothing else kept.

A forward hook on the module that makes an affine call (a torch function mode, for bare functional calls) sees z, one on
the model sees f; each puts a hook on that tensor. Hooks hold norms (B,), never a tensor of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves

from excite._core.calls import Pick, pick_output
from excite._core.intercept.affine import AffineCall, AffineMode, Names
from excite._core.preserve import probes_ignored
from excite._core.wrappers import is_sharded
from excite.errors import ExciteError, ModelError
from excite.probes.bias_trajectory.sites import TracedLayer

Inspect = Callable[[TracedLayer, Tensor, Tensor], None]  # site, dL/dz, ‖dL/df‖
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def row_norms(gradient: Tensor, axis: int = 0) -> Tensor:
    """‖·‖₂ of every sample, (..., B, ...) with the batch at `axis` -> (B,), in float32 or better; no copy is made."""
    wide = torch.promote_types(gradient.dtype, torch.float32)
    other_axes = tuple(i for i in range(gradient.dim()) if i != axis)
    if not other_axes or gradient.numel() == gradient.shape[axis]:
        return gradient.detach().to(wide).abs().reshape(-1)
    norms: Tensor = torch.linalg.vector_norm(gradient.detach(), dim=other_axes, dtype=wide)
    return norms


def _eager(hook: Callable[..., None]) -> Callable[..., None]:
    """The hook for compiled models too: there it runs between the compiled parts."""
    apart: Callable[..., None] = torch.compiler.disable(hook)

    def either(*args: Any) -> None:
        if torch.compiler.is_compiling():
            apart(*args)
        else:
            hook(*args)

    return either


class _Gradients:
    """Of one forward pass in one backward pass: ‖dL/df‖ (B,), and by site ‖dL/dz‖ (B,) with dL/dz where it is needed."""

    __slots__ = ("at_z", "backward", "direction", "error")

    def __init__(self, backward: int):
        self.backward = backward  # its number
        self.error: Tensor | None = None
        self.direction: Tensor | None = None  # dL/df, with `directions`
        self.at_z: list[tuple[TracedLayer, Tensor, Tensor | None]] = []


class _Pass:
    """One forward pass. Its samples count once, in the first backward pass that reaches its output and the parameters.

    A backward pass with create_graph=True that stops at the inputs belongs to a penalty on gradients. The loss then has terms
    of second order in dL/dz, so where both go through one forward pass the gradients of the penalty's count: `inner`.
    """

    __slots__ = ("arguments", "calls", "counted", "inner", "outer", "paired", "parameters", "slope")

    def __init__(self, inputs: Arguments | None, parameters: tuple[Tensor, ...] | None) -> None:
        self.arguments = inputs  # the model's arguments, with `directions`
        self.parameters = parameters  # where others stand in for the model's own (torch.func.functional_call)
        self.slope: Tensor | None = None  # of the link function at f
        self.calls: dict[str, int] = {}
        self.inner: _Gradients | None = None
        self.outer: _Gradients | None = None
        self.paired: set[str] = set()  # sites for which `inner` counted
        self.counted: int | None = None  # the number of the backward pass in which the samples counted


class _Mode(AffineMode):
    def __init__(self, names: Names, hooks: Hooks):
        super().__init__(names)
        self._hooks = hooks

    def visit(self, call: AffineCall) -> Tensor:
        output = call.run(call.input)
        site = self._hooks.by_name.get(call.name)
        if site is not None:
            self._hooks.reached(site, output)
        return output


def _computed(node: Any) -> bool:
    """Whether the current backward pass computes the gradient that this node of the graph stands for."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # it is among the inputs of torch.autograd.grad
        return True


class Hooks:
    """Installed at once; `remove` takes them all off. An exception in a hook is kept in `failure`, not raised into training.

    `pair` is called with a site's name, ‖dL/dz‖ and ‖dL/df‖, each (B,), once for every forward pass that is trained on, `before` with the model's
    arguments before every training pass: it says whether `inspect` gets dL/dz of that pass. `forwards`, `outputs` and
    `reaches` count forward passes with gradients, gradients that arrived at f, and at each site.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: Sequence[TracedLayer],
        output: Pick = None,
        *,
        pair: Callable[[str, Tensor, Tensor], None],
        sigmoid: bool = False,
        before: Callable[[tuple[Any, ...], dict[str, Any]], bool] | None = None,
        inspect: Inspect | None = None,
        directions: bool = False,
    ):
        self.model, self.output, self.sigmoid = model, output, sigmoid
        self.by_name = {site.name: site for site in sites}
        self.forwards = self.outputs = 0
        self.reaches = dict.fromkeys(self.by_name, 0)
        self.recomputed: set[str] = set()  # modules that ran within a backward pass
        self.side = False  # whether another output received a gradient
        self.repeated = False  # whether several backward passes went through one forward pass
        self.number = 0  # of the node that made f, in the order of autograd
        self.direction: Tensor | None = None  # the last dL/df, with `directions`,
        self.arguments: Arguments | None = None  # and the arguments of its forward pass
        self.failure: Exception | None = None
        self.resting = False  # passes go by unseen
        self._on_pair, self._before, self._inspect, self._directions = pair, before, inspect, directions
        self._inspecting = False
        self._current: _Pass | None = None
        self._mode: _Mode | None = None
        self._live = True
        names = ((m, name) for m in model.modules() for name, p in m._parameters.items() if p is not None)
        self._first_owner = next(names, None)  # of the first parameter
        self._first = None if self._first_owner is None else self._first_owner[0]._parameters[self._first_owner[1]]
        self._node: Any = None  # of its gradient; looked up once, because that takes a while
        self._sharded = is_sharded(model) or any(
            type(m).__name__ == "FullyShardedDataParallel" for m in model.modules()
        )
        self._backward: tuple[int, bool] = (
            -1,
            False,
        )  # the number of the current one, and whether it reaches parameters
        self._owned = {(site.module, site.turn): site for site in sites}
        modules = dict(model.named_modules())
        self._functional = any(site.module is None for site in sites)
        self._names = Names(model) if self._functional else None
        owners = [] if self._functional else list(dict.fromkeys(site.module for site in sites))
        # The hooks on the model come last: it may itself be the module that makes the call.
        self._handles = [
            modules[path].register_forward_hook(_eager(partial(self._returned, path)))
            for path in owners
            if path is not None
        ]
        self._handles.append(model.register_forward_pre_hook(_eager(self._begin), with_kwargs=True, prepend=True))
        self._handles.append(model.register_forward_hook(_eager(self._end), always_call=True))

    def remove(self) -> None:
        """Removes all hooks."""
        self._live = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._end_pass()
        self.direction = self.arguments = self._node = None

    # -- forward -------------------------------------------------------------------------------------------------
    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._end_pass()
        if self.resting or not (self._live and torch.is_grad_enabled()) or self.failure is not None or probes_ignored():
            return
        swapped = (
            self._first_owner is not None
            and self._first_owner[0]._parameters.get(self._first_owner[1]) is not self._first
        )
        parameters = tuple(self.model.parameters()) if swapped else None
        self._current = _Pass((args, kwargs) if self._directions else None, parameters)
        try:
            self._inspecting = self._before(args, kwargs) if self._before is not None else False
        except Exception as error:
            self._fail(error)
        if self._functional and self._names is not None:
            self._mode = _Mode(self._names, self)
            self._mode.__enter__()  # type: ignore[no-untyped-call]

    def _end_pass(self) -> None:
        self._current = None
        if self._mode is not None:
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._mode = None

    def _returned(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        current = self._current
        if current is None:  # outside the model's own forward: a part used alone, or recomputed by checkpointing
            if torch._C._current_graph_task_id() != -1:
                self.recomputed.add(path)
            return
        turn = current.calls[path] = current.calls.get(path, 0) + 1
        site = self._owned.get((path, turn))
        if site is not None and isinstance(output, Tensor):
            self.reached(site, output)

    def reached(self, site: TracedLayer, z: Tensor) -> None:
        """Registers a hook on the output z of a layer."""
        if self._current is not None and z.requires_grad:
            z.register_hook(partial(self._at_z, self._current, site, self._inspecting))

    def _end(self, module: nn.Module, args: Any, returned: Any) -> None:
        current = self._current
        self._end_pass()
        if current is None or returned is None:
            return
        try:
            f = pick_output(returned, self.output)
            if not f.requires_grad:
                return
            self.forwards += 1
            self.number = f.grad_fn._sequence_nr() if f.grad_fn is not None else 0
            if self.sigmoid:
                p = torch.sigmoid(f.detach().reshape(-1))
                current.slope = p * (1 - p)
            f.register_hook(partial(self._at_f, current))
            if f is not returned:
                for leaf in tree_leaves(returned):
                    if isinstance(leaf, Tensor) and leaf.requires_grad and leaf is not f:
                        leaf.register_hook(self._at_side)
        except Exception as error:
            self._fail(error)

    # -- backward ------------------------------------------------------------------------------------------------
    def _at_side(self, gradient: Tensor) -> None:
        self.side = True

    def _at_f(self, current: _Pass, gradient: Tensor) -> None:
        if not self._live or self.failure is not None:
            return
        try:
            result = self._gradients(current)
            if result is None:
                return
            error = row_norms(gradient)
            result.error = error if current.slope is None else error / current.slope
            result.direction = gradient.detach() if self._directions else None
            if result is current.outer:
                self.outputs += 1
                self._count(current)
        except Exception as problem:
            self._fail(problem)

    def _at_z(self, current: _Pass, site: TracedLayer, inspecting: bool, gradient: Tensor) -> None:
        if not self._live or self.failure is not None:
            return
        try:
            result = self._gradients(current)
            if result is None:
                return
            norm = row_norms(gradient, site.axis)
            result.at_z.append((site, norm, gradient.detach() if inspecting else None))
            if result is current.outer:
                self.reaches[site.name] += 1
                if result.error is not None:
                    self._count(current)
        except Exception as problem:
            self._fail(problem)

    def _gradients(self, current: _Pass) -> _Gradients | None:
        """Where the gradients of the current backward pass belong; None if they do not count."""
        number = torch._C._current_graph_task_id()
        if number != self._backward[0]:
            self._backward = (number, self._reaches(current.parameters))
        if self._backward[1]:
            if current.outer is None or (current.outer.backward != number and current.counted is None):
                current.outer = _Gradients(number)
            if current.outer.backward == number:
                return current.outer
            self.repeated = True
            return None
        if not torch.is_grad_enabled() or current.outer is not None:  # an attack, or a map of gradients: not training
            return None
        if current.inner is None:
            current.inner = _Gradients(number)
        return current.inner if current.inner.backward == number else None

    def _reaches(self, parameters: tuple[Tensor, ...] | None) -> bool:
        """Whether the current backward pass computes the gradient of a parameter; one with inputs= may not."""
        if self._sharded:  # the model computes with other tensors than its parameters
            return not torch.is_grad_enabled()
        if parameters is None and self._first is not None and self._first.requires_grad:
            self._node = self._node or get_gradient_edge(self._first).node
            if _computed(self._node):  # nearly always
                return True
        trained = [p for p in (self.model.parameters() if parameters is None else parameters) if p.requires_grad]
        return not trained or any(_computed(get_gradient_edge(p).node) for p in trained)

    def _count(self, current: _Pass) -> None:
        """Pair what has come; z may be f itself, so either may be first."""
        result, inner = current.outer, current.inner
        assert result is not None
        assert result.error is not None
        if current.counted is None:
            current.counted, self.direction, self.arguments = result.backward, result.direction, current.arguments
            if inner is not None and inner.error is not None:
                self.repeated, self.direction = True, inner.direction
                current.paired = {site.name for site, _, _ in inner.at_z}
                for site, norm, full_norm in inner.at_z:
                    self._pair(site, norm, full_norm, inner.error)
                current.inner = None
        for site, norm, full_norm in result.at_z:
            if site.name not in current.paired:
                self._pair(site, norm, full_norm, result.error)
        result.at_z.clear()

    def _pair(self, site: TracedLayer, norm: Tensor, full_norm: Tensor | None, error: Tensor) -> None:
        if norm.shape != error.shape:
            raise ModelError(
                f"layer {site.name!r} saw {len(norm)} samples and the output has {len(error)}: expected one row per sample"
            )
        self._on_pair(site.name, norm, error)
        if full_norm is not None and self._inspect is not None:
            self._inspect(site, full_norm, error)

    def _fail(self, problem: Exception) -> None:
        if isinstance(problem, ExciteError):
            self.failure = problem
        else:
            self.failure = ModelError(f"a hook of the trajectory probe failed: {type(problem).__name__}: {problem}")
            self.failure.__cause__ = problem
