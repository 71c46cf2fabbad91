"""One line in a training loop: measure while a network trains, and write it to a run."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from excite.errors import ExciteError, InputError, RunError
from excite.probes import Probe, default_probes
from excite.probes.protocol import Moment
from excite.probes.reduce import rank_and_size, reduce
from excite.runs import Run
from excite.wiring.calling import Batch
from excite.wiring.untouched import device_of
from excite.wiring.wrappers import eagerly, unwrap

_PENDING = 64  # steps whose values may wait on the device before they are fetched
_SECONDS = 1.0  # and how long


class Watch:
    """Measures on each probe's schedule and writes to a run. Use `excite.watch(...)` to make one.

    With several processes every one of them calls `step`; values are reduced across them and the first one writes.
    """

    def __init__(
        self,
        model: nn.Module,
        example: Batch | None,
        run: Run | None,
        optimizer: torch.optim.Optimizer | None,
        probes: Sequence[Probe],
        strict: bool,
        owns_run: bool,
    ):
        self.model, self.example, self.optimizer, self.run = unwrap(model), example, optimizer, run
        self.probes = list(probes)
        self.strict = strict
        self.steps = 0
        self._owns_run = owns_run
        self._pending: list[tuple[int, Probe, dict[str, float | Tensor]]] = []
        self._closed = False
        self._flushed = time.monotonic()
        start = self._moment(None)
        try:
            for probe in self.probes:
                probe.attach(start)
            self._measure(start)
        except BaseException:
            self._detach()
            raise

    def step(self, loss: Tensor | float | None = None) -> None:
        """Say that one optimizer step is done; `loss` is that step's loss. Measures what is due."""
        if self._closed:
            raise InputError("watch.step after the watch was closed: call it inside the with block")
        self.steps += 1
        node = loss.grad_fn if isinstance(loss, Tensor) else None
        if isinstance(loss, Tensor):
            if loss.numel() != 1:
                raise InputError(f"watch.step: expected one loss; got a tensor of shape {tuple(loss.shape)}")
            loss = loss.detach()
        elif loss is not None:
            if isinstance(loss, bool) or not isinstance(loss, int | float):
                raise InputError(f"watch.step: expected the loss as a number or a tensor; got {loss!r}")
            loss = torch.as_tensor(float(loss))
        self._measure(self._moment(loss, node))

    def flush(self) -> None:
        """Write everything measured so far to the run."""
        pending, self._pending = self._pending, []
        self._flushed = time.monotonic()
        device = device_of(self.model)
        for step, probe, values in pending:
            numbers = {f"{probe.name}/{key}": float(value) for key, value in values.items()}
            numbers = reduce(numbers, probe.reduction, device)
            if self.run is not None:
                self.run.log(step, numbers)
        if self.run is not None:
            self.run.flush()

    def close(self) -> None:
        """Detach every probe and write what is left. Closing twice does nothing."""
        if self._closed:
            return
        self._closed = True
        failed = self._detach()
        self.flush()
        if failed is not None:
            raise failed

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint has to keep, so that a resumed training is watched as if it had not stopped."""
        self.flush()
        return {"steps": self.steps, "probes": {probe.name: probe.state_dict() for probe in self.probes}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._pending.clear()
        self.steps = int(state["steps"])
        for probe in self.probes:
            if probe.name in state["probes"]:
                probe.load_state_dict(state["probes"][probe.name])

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        finally:
            if self._owns_run and self.run is not None:
                self.run.__exit__(kind, error, trace)

    # -- inside --------------------------------------------------------------------------------------------------
    def _detach(self) -> Exception | None:
        """Detach every probe, whatever happens in the others; the first exception, if any."""
        first = None
        for probe in self.probes:
            try:
                probe.detach()
            except Exception as error:
                first = first or error
        return first

    def _moment(self, loss: Tensor | None, node: object = None) -> Moment:
        return Moment(self.model, self.steps, loss, self.example, self.optimizer, node)

    def _measure(self, now: Moment) -> None:
        for probe in [probe for probe in self.probes if probe.schedule.due(now.step)]:
            try:
                with eagerly(self.model):
                    values = {key: _one(probe, key, value) for key, value in probe.measure(now).items()}
            except Exception as error:
                # With several processes the others would wait for this one's values for ever.
                if self.strict or rank_and_size()[1] > 1:
                    raise
                self._switch_off(probe, error)
                continue
            if values:
                self._pending.append((now.step, probe, values))
        # Several processes reduce together, so only the count of steps, the same for all, may decide then.
        late = rank_and_size()[1] == 1 and time.monotonic() - self._flushed > _SECONDS
        if self._pending and (late or now.step - self._pending[0][0] >= _PENDING):
            self.flush()

    def _switch_off(self, probe: Probe, error: Exception) -> None:
        # A broken probe must not end somebody's training.
        self.probes.remove(probe)
        with suppress(Exception):
            probe.detach()
        message = str(error) if isinstance(error, ExciteError) else f"{type(error).__name__}: {error}"
        warnings.warn(
            f"probe {probe.name!r} is switched off, training goes on; at step {self.steps} it raised: {message}",
            stacklevel=4,
        )


def _one(probe: Probe, key: str, value: object) -> float | Tensor:
    """One number, in memory of its own: a view of a weight would show the weight of a later step."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach().reshape(()).clone()
    if isinstance(value, int | float):
        return float(value)
    what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    raise InputError(f"{probe.name}/{key}: expected one number; got {what}")


def watch(
    model: nn.Module,
    example: Batch | None = None,
    run: str | os.PathLike[str] | Run | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    probes: Sequence[Probe] | None = None,
    *,
    strict: bool = False,
) -> Watch:
    """Watch a model while it trains.

        with excite.watch(model, example=x, run="runs/first", optimizer=optimizer) as watch:
            for x, y in loader:
                ...                      # your usual step
                watch.step(loss)         # once per optimizer step

    Args:
        example: a fixed batch on which layers are looked at; needed by the rank probe, left out with it if not given.
        run: a folder for a new run, or an open `Run` (to continue one, with `load_state_dict` from its checkpoint).
        probes: what to measure; by default the loss, the distance to initialization and the rank of each layer's input.
        strict: let an exception in a probe end the training; otherwise the probe is switched off with a warning.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"watch: expected a torch.nn.Module; got {type(model).__name__}")
    chosen = list(default_probes() if probes is None else probes)
    if probes is None and example is None:
        chosen = [probe for probe in chosen if probe.name != "rank"]
    for probe in chosen:
        if not isinstance(probe, Probe):
            raise InputError(f"watch: expected probes such as excite.probes.Rank(); got {probe!r}")
    if not isinstance(run, Run | str | os.PathLike | None):
        raise InputError(f"watch: expected a folder or an open Run; got {run!r}")
    names = [probe.name for probe in chosen]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"watch: two probes are called {name!r}: give each its own name")
    owns = not isinstance(run, Run)
    if owns and run is not None:
        # Only the first process writes, and only it looks: to the others its new run would seem an old one.
        first = rank_and_size()[0] == 0
        if first and (Path(run) / "run.json").exists():  # type: ignore[arg-type]
            raise RunError(f"{run} holds a run already: choose another folder, or give an open Run to continue it")
        settings = {"watch": {"probes": names, "model": type(unwrap(model)).__name__}}
        run = Run.create(run, settings) if first else None  # type: ignore[arg-type]
    try:
        return Watch(model, example, run, optimizer, chosen, strict, owns)  # type: ignore[arg-type]
    except BaseException:
        if owns and isinstance(run, Run):
            run.close("failed", "the watch could not be attached")
        raise
