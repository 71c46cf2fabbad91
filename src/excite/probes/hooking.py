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
from torch.utils._pytree import tree_leaves

from excite.errors import ExciteError, ModelError
from excite.probes.sites import Site
from excite.probes.updates import row_norms
from excite.wiring.affine import AffineCall, AffineMode, Names
from excite.wiring.calling import Pick, pick_output
from excite.wiring.untouched import is_aside

Look = Callable[[Site, Tensor, Tensor], None]  # site, dL/dz, ‖dL/df‖


def _eager(hook: Callable[..., None]) -> Callable[..., None]:
    """The hook for compiled models too: there it runs between the compiled parts."""
    apart: Callable[..., None] = torch.compiler.disable(hook)

    def either(*args: Any) -> None:
        if torch.compiler.is_compiling():
            apart(*args)
        else:
            hook(*args)

    return either


class _Pass:
    """One forward pass and its backward pass."""

    __slots__ = ("error", "slope", "turns", "waiting")

    def __init__(self) -> None:
        self.error: Tensor | None = None  # ‖dL/df‖ (B,)
        self.slope: Tensor | None = None  # of the link function at f
        self.turns: dict[str, int] = {}
        self.waiting: list[tuple[Site, Tensor, Tensor | None]] = []  # what came from z before dL/df: z may be f itself


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


class Hooks:
    """Installed at once; `remove` takes them all off. An exception in a hook is kept in `failure`, not raised into training.

    `pair` is called with a site's name, ‖dL/dz‖ and ‖dL/df‖, each (B,), for every backward pass, `before` with the model's
    arguments before every training pass: it says whether `look` gets dL/dz of that pass. `forwards`, `outputs` and
    `reaches` count forward passes with gradients, gradients that arrived at f, and at each site.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: Sequence[Site],
        output: Pick = None,
        *,
        pair: Callable[[str, Tensor, Tensor], None],
        sigmoid: bool = False,
        before: Callable[[tuple[Any, ...], dict[str, Any]], bool] | None = None,
        look: Look | None = None,
        directions: bool = False,
    ):
        self.model, self.output, self.sigmoid = model, output, sigmoid
        self.by_name = {site.name: site for site in sites}
        self.forwards = self.outputs = 0
        self.reaches = dict.fromkeys(self.by_name, 0)
        self.recomputed: set[str] = set()  # modules that ran within a backward pass
        self.side = False  # whether another output received a gradient
        self.number = 0  # of the node that made f, in the order of autograd
        self.direction: Tensor | None = None  # the last dL/df, if asked for
        self.failure: Exception | None = None
        self.resting = False  # passes go by unseen
        self._take, self._before, self._look, self._directions = pair, before, look, directions
        self._looking = False
        self._now: _Pass | None = None
        self._mode: _Mode | None = None
        self._live = True
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
        self._live = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._leave()
        self.direction = None

    # -- forward -------------------------------------------------------------------------------------------------
    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._leave()
        if self.resting or not (self._live and torch.is_grad_enabled()) or self.failure is not None or is_aside():
            return
        self._now = _Pass()
        try:
            self._looking = self._before(args, kwargs) if self._before is not None else False
        except Exception as error:
            self._fail(error)
        if self._functional and self._names is not None:
            self._mode = _Mode(self._names, self)
            self._mode.__enter__()  # type: ignore[no-untyped-call]

    def _leave(self) -> None:
        self._now = None
        if self._mode is not None:
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._mode = None

    def _returned(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        now = self._now
        if now is None:  # outside the model's own forward: a part used alone, or recomputed by checkpointing
            if torch._C._current_graph_task_id() != -1:
                self.recomputed.add(path)
            return
        turn = now.turns[path] = now.turns.get(path, 0) + 1
        site = self._owned.get((path, turn))
        if site is not None and isinstance(output, Tensor):
            self.reached(site, output)

    def reached(self, site: Site, z: Tensor) -> None:
        if self._now is not None and z.requires_grad:
            z.register_hook(partial(self._at_z, self._now, site, self._looking))

    def _end(self, module: nn.Module, args: Any, returned: Any) -> None:
        now = self._now
        self._leave()
        if now is None or returned is None:
            return
        try:
            f = pick_output(returned, self.output)
            if not f.requires_grad:
                return
            self.forwards += 1
            self.number = f.grad_fn._sequence_nr() if f.grad_fn is not None else 0
            if self.sigmoid:
                p = torch.sigmoid(f.detach().reshape(-1))
                now.slope = p * (1 - p)
            f.register_hook(partial(self._at_f, now))
            if f is not returned:
                for leaf in tree_leaves(returned):
                    if isinstance(leaf, Tensor) and leaf.requires_grad and leaf is not f:
                        leaf.register_hook(self._at_side)
        except Exception as error:
            self._fail(error)

    # -- backward ------------------------------------------------------------------------------------------------
    def _at_side(self, gradient: Tensor) -> None:
        self.side = True

    def _at_f(self, now: _Pass, gradient: Tensor) -> None:
        if not self._live or self.failure is not None:
            return
        try:
            error = row_norms(gradient)
            now.error = error if now.slope is None else error / now.slope
            if self._directions:
                self.direction = gradient.detach()
            self.outputs += 1
            for site, norm, whole in now.waiting:
                self._pair(site, norm, whole, now.error)
            now.waiting.clear()
        except Exception as problem:
            self._fail(problem)

    def _at_z(self, now: _Pass, site: Site, looking: bool, gradient: Tensor) -> None:
        if not self._live or self.failure is not None:
            return
        try:
            norm = row_norms(gradient, site.axis)
            self.reaches[site.name] += 1
            whole = gradient.detach() if looking else None
            if now.error is None:
                now.waiting.append((site, norm, whole))
            else:
                self._pair(site, norm, whole, now.error)
        except Exception as problem:
            self._fail(problem)

    def _pair(self, site: Site, norm: Tensor, whole: Tensor | None, error: Tensor) -> None:
        if norm.shape != error.shape:
            raise ModelError(
                f"layer {site.name!r} saw {len(norm)} samples and the output has {len(error)}: expected one row per sample"
            )
        self._take(site.name, norm, error)
        if whole is not None and self._look is not None:
            self._look(site, whole, error)

    def _fail(self, problem: Exception) -> None:
        if isinstance(problem, ExciteError):
            self.failure = problem
        else:
            self.failure = ModelError(f"a hook of the trajectory probe failed: {type(problem).__name__}: {problem}")
            self.failure.__cause__ = problem
