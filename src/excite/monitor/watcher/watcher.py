"""The object behind `excite.watch`: attached probes, measured on their schedules, written to a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from excite._core.calls import Pick
from excite._core.checks import as_scalar, is_number, shown
from excite._core.distributed import let_go, rank_and_size
from excite._core.preserve import device_of
from excite._core.warn import say, warn_user
from excite._core.wrappers import eagerly, is_sharded, resharded, unwrap
from excite.errors import ExciteError, InputError, RunError, one_line
from excite.monitor.alerts import Alerts, act
from excite.monitor.buffer import DeviceScalars, MetricBuffer
from excite.monitor.logged import LOGGED, LOGGED_BY_FRAMEWORK, check_logged
from excite.monitor.reduce import reduce_rows
from excite.monitor.results import store_results
from excite.monitor.watcher.clock import TrainingClock
from excite.monitor.watcher.failures import ProbeFailures
from excite.monitor.watcher.settings import WatchSettings
from excite.monitor.writer import MetricWriter, StepValues
from excite.probes import Probe
from excite.probes.base import StepContext
from excite.probes.schedules import Budget, PaidSchedule, budgets
from excite.wiring.layers import record
from excite.wiring.tracing import Wiring


class Watch:
    """Attached probes that are measured on their schedules and written to a run. Created by `excite.watch`.

    Attributes:
        steps: Optimizer steps so far.
        probes: The probes that are attached; one that raised is removed.
        run: The run, or None.
        share: Fraction of the training time that `step` took: by so much it is slower.

    Example:
        >>> with excite.watch(model, example=x) as watch:
        ...     watch.step(loss=0.7)
        >>> watch.steps
        1
    """

    def __init__(self, model: nn.Module, settings: WatchSettings):
        run = settings.run
        self.model, self.example, self.optimizer, self.run = unwrap(model), settings.example, settings.optimizer, run
        self.probes = list(settings.probes)
        self.strict = settings.strict
        self.steps = 0
        self._owns_run = settings.owns_run
        self._saver = settings.saver
        self._writer = MetricWriter(run, settings.sinks, settings.strict)
        self._alerts = Alerts(settings.alerts)
        self._buffer = MetricBuffer()
        self._failures = ProbeFailures(self.probes, settings.strict)
        self._closed, self._failing = False, False
        self._device = device_of(self.model)
        self._modules = list(self.model.modules())
        self._sharded = is_sharded(self.model)
        self._clock = TrainingClock(self._device)
        self._measured_at: dict[str, int] = {}  # last step by probe
        self._loss: Tensor | None = None  # of the last step
        self._roles: Mapping[str, str] = {}  # by the names of layers, heads and laws in metrics
        try:
            start = self._attach(settings.optional)
            self._roles = next((wiring.roles for wiring in start.wirings.values() if wiring.roles), {})
            self._describe(start, settings.output)
            self._measure(self._context(None))
            self._failures.warn(self._trained_model)
        except BaseException:
            self._detach()
            raise
        self._buffer.start()
        self._clock.begin_training()

    def step(self, loss: Tensor | float | None = None) -> None:
        """Reports one optimizer step and measures what is due.

        Args:
            loss: The loss of that step, a number or a tensor with one element.

        Raises:
            InputError: If the watch is closed, or `loss` is not one number.
            AlertRaised: If an alert with ``then="raise"`` became true.
        """
        if self._closed:
            raise InputError("watch.step after the watch was closed: call it inside the with block")
        self.steps += 1
        self._clock.steps += 1
        node = loss.grad_fn if isinstance(loss, Tensor) else None
        if isinstance(loss, Tensor):
            if loss.numel() != 1:
                raise InputError(f"watch.step: expected one loss; got a tensor of shape {tuple(loss.shape)}")
            loss = loss.detach()
        elif loss is not None:
            if not is_number(number := as_scalar(loss)):
                raise InputError(f"watch.step: expected the loss as a number or a tensor; got {shown(loss)}")
            loss = torch.as_tensor(float(number))
        self._loss = loss
        self._measure(self._context(loss, node))
        self._failures.warn(self._trained_model)
        if self._saver is not None and self._saver.due(self.steps):
            self._saver.save(self.run, self.model, self.steps, self.strict)

    def log(self, values: Mapping[str, Any] | None = None, /, **named: Any) -> None:
        """Records values of the training at the current step: to the run, the sinks and the pages.

        Numbers, True and False (1 and 0) and tensors with one element; a tensor on a device is not waited for. NaN and
        infinities are recorded. With several processes the values of the first are recorded: reduce them before.

        Args:
            values: Values by name, for names that are no identifiers, such as {"val/accuracy": 0.9}.
            **named: Values by name.

        Raises:
            InputError: If the watch is closed, a value is not one number, or a name belongs to a probe; then none is recorded.

        Example:
            >>> watch.log(lr=scheduler.get_last_lr()[0])  # doctest: +SKIP
            >>> watch.log({"val/accuracy": accuracy})  # doctest: +SKIP
        """
        self._log(check_logged(values, named, self.probes), LOGGED)

    def log_to_run(self, values: Mapping[str, Any]) -> None:
        """Records values as `log` does, but not to the sinks: for those that a framework sends to its loggers itself."""
        self._log(check_logged(values, {}, self.probes), LOGGED_BY_FRAMEWORK)

    @property
    def share(self) -> float:
        """Fraction of the time since training began that `step` took from it, without what was measured before.

        On a GPU this is the time on its own clock: what the host spends while the GPU is busy with training costs nothing.
        """
        return self._clock.fraction

    def flush(self) -> None:
        """Writes everything measured so far to the run, and waits until it is on the disk."""
        self._write()
        self._buffer.request(self.steps)
        self._write()
        self._failures.warn(self._trained_model)
        self._writer.drain()

    def close(self) -> None:
        """Measures a last time, detaches every probe and writes what is buffered. Closing twice does nothing."""
        self._close(measure=True)

    def state_dict(self) -> dict[str, Any]:
        """The state to store in a checkpoint, so that a resumed training is measured as if it had not been interrupted.

        Returns:
            A nested dict of tensors and plain values.
        """
        self.flush()
        probes = {probe.name: probe.state_dict() for probe in self.probes}
        return {"steps": self.steps, "probes": probes, "alerts": self._alerts.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from the state of a checkpoint. Load the model and the optimizer first.

        Args:
            state: What `state_dict` returned.
        """
        self._buffer.clear()
        self.steps = int(state["steps"])
        self._writer.rewind(self.steps)
        if "alerts" in state:
            self._alerts.load_state_dict(state["alerts"])
        for probe in self.probes:
            if probe.name in state["probes"]:
                probe.load_state_dict(state["probes"][probe.name])
        for budget in budgets([probe.schedule for probe in self.probes]):
            budget.next = self.steps + 1
        self._announce()

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._failing = error is not None
        try:
            self._close(measure=error is None)
        except BaseException as own:
            error_type, error, trace = error_type or type(own), error or own, trace or own.__traceback__
            raise
        finally:
            if self._owns_run and self.run is not None:
                self._close_run(error_type, error, trace)

    # -- inside --------------------------------------------------------------------------------------------------
    def _log(self, values: Mapping[str, Any], probe: Probe) -> None:
        if self._closed:
            raise InputError("watch.log after the watch was closed: call it inside the with block")
        scalars = DeviceScalars(values)
        if len(scalars) and rank_and_size()[0] == 0:
            self._buffer.add_scalars(self.steps, probe, scalars)

    def _close(self, *, measure: bool) -> None:
        if self._closed:
            return
        self._closed = True
        failed: Exception | None = None
        try:
            if measure:
                self._measure_last()
        finally:
            failed = self._detach()
            try:
                self.flush()
                if self._saver is not None and not (self._sharded and self._failing):  # the others may not come
                    self._saver.save(self.run, self.model, self.steps, self.strict)
            finally:
                self._writer.close()
                let_go()
        if failed is not None:
            raise failed

    def _close_run(self, error_type: Any, error: Any, trace: Any) -> None:
        try:
            with self.run.patience(5.0):  # type: ignore[union-attr]
                self.run.__exit__(error_type, error, trace)  # type: ignore[union-attr]
        except RunError as problem:
            if self.strict:
                raise
            warn_user(f"the run could not be closed, what was trained is not touched: {problem}")

    def _attach(self, optional: bool) -> StepContext:
        start = self._context(None)
        for probe in list(self.probes):
            try:
                # A pass leaves the weights gathered: the next probe is to find them sharded again.
                with eagerly(self._modules), resharded(self._modules) if self._sharded else nullcontext():
                    probe.attach(start)
            except ExciteError as error:
                if not optional or self.strict:
                    raise
                self._failures.switch_off(probe, 0, error)
        return start

    def _describe(self, start: StepContext, output: Pick) -> None:
        """Writes what the model is made of beside the run.

        With several processes only where a probe has found it already: finding it runs the model, which all of them would have to do.
        """
        if self.run is None or self.example is None or (self.run.path / "artifacts" / "wiring.json").exists():
            return
        try:
            with eagerly(self.model):
                if start.wirings:
                    rows = next(iter(start.wirings.values())).rows()
                elif rank_and_size()[1] == 1:
                    rows = Wiring(record(self.model, self.example, output)[0], ()).rows()
                else:
                    return
            self.run.write_json("wiring", rows)
        except Exception:  # pages do without
            if self.strict:
                raise

    def _detach(self) -> Exception | None:
        """Detach every probe, whatever happens in the others; the first exception, if any."""
        first = None
        for probe in self.probes:
            try:
                probe.detach()
            except Exception as error:
                first = first or error
        return first

    @property
    def _trained_model(self) -> nn.Module | None:
        """The model once it has been trained; None if this process has a shard of it only."""
        return None if self._sharded or self.steps == 0 else self.model

    def _context(self, loss: Tensor | None, node: object = None, final: bool = False) -> StepContext:
        return StepContext(
            self.model, self.steps, loss, self.example, self.optimizer, node, final=final, roles=self._roles
        )

    def _measure(self, ctx: StepContext) -> None:
        due = self._due(ctx.step)
        paid = budgets([probe.schedule for probe in due])
        start = self._clock.start(wait=bool(paid))
        costs = self._measure_probes(due, ctx, paid)
        if self._buffer.ready(ctx.step):
            self._write()
        if self._buffer.due(ctx.step):
            self._write()
            self._buffer.request(ctx.step)
            if self._buffer.ready(ctx.step):
                self._write()
        self._clock.stop(start)
        self._clock.paid += sum(costs[id(budget)] for budget in paid if isinstance(budget, PaidSchedule))
        shared = sum(costs[id(budget)] for budget in paid if not isinstance(budget, PaidSchedule))
        for budget in paid:
            cost = costs[id(budget)] if isinstance(budget, PaidSchedule) else shared
            planned = budget.plan(ctx.step, self._clock.steps, cost, self._clock.spent, self._clock.trained)
            budget.next = self._agreed(planned)
        self._announce()

    def _due(self, step: int) -> list[Probe]:
        """The probes to measure now. What has a `PaidSchedule` waits until it is paid for, which needs no synchronization."""
        due = [probe for probe in self.probes if probe.schedule.due(step)]
        if step == 0:
            return due
        for budget in budgets([probe.schedule for probe in due]):
            if isinstance(budget, PaidSchedule):
                budget.next = self._agreed(budget.postpone(step, self._clock.steps, self._clock.trained))
        return [probe for probe in due if not isinstance(probe.schedule, PaidSchedule) or probe.schedule.due(step)]

    def _measure_probes(self, due: Sequence[Probe], ctx: StepContext, paid: Sequence[Budget]) -> dict[int, float]:
        """Measures probes; the seconds that those of each budget took, by the budget's id."""
        costs = {id(budget): 0.0 for budget in paid}
        with eagerly(self._modules) if any(probe.runs_model for probe in due) else nullcontext():
            for probe in due:
                timed = id(probe.schedule) in costs
                start = self._clock.now() if timed else 0.0
                self._measure_probe(probe, ctx)
                self._measured_at[probe.name] = ctx.step
                if timed:
                    costs[id(probe.schedule)] += self._clock.now(wait=True) - start
        if (ctx.messages or ctx.artifacts or ctx.earlier) and rank_and_size()[0] == 0:
            for step, values in ctx.earlier:
                self._buffer.add_scalars(step, LOGGED_BY_FRAMEWORK, DeviceScalars(values))
            for message in ctx.messages:
                say(message)
            self._store(ctx)
        return costs

    def _measure_last(self) -> None:
        """Measures the probes that were not measured at the last step, and those that measure more at the end."""
        if not self._clock.steps:
            return
        due = [probe for probe in self.probes if probe.at_end or self._measured_at.get(probe.name) != self.steps]
        self._measure_probes(due, self._context(self._loss, final=True), ())

    def _store(self, ctx: StepContext) -> None:
        if self.run is None or not ctx.artifacts:
            return
        try:
            store_results(self.run, ctx.artifacts)
        except RunError as error:
            if self.strict:
                raise
            warn_user(f"results could not be stored: {one_line(error)}")

    def _announce(self) -> None:
        for probe in list(self.probes):
            if type(probe).announce is Probe.announce:  # most of them, at every step
                continue
            try:
                probe.announce(probe.schedule.due(self.steps + 1))
            except Exception as error:
                self._failures.raised(probe, self.steps, error)

    def _measure_probe(self, probe: Probe, ctx: StepContext) -> None:
        if probe.name not in self._failures.muted:
            try:
                with resharded(self._modules) if self._sharded and probe.runs_model else nullcontext():
                    measurement = probe.measure(ctx)
                self._buffer.add(ctx.step, probe, measurement)
                return
            except Exception as error:
                self._failures.raised(probe, ctx.step, error)
                if rank_and_size()[1] == 1:
                    return
        self._buffer.add(ctx.step, probe, None)

    def _write(self) -> None:
        """Writes what was requested; waits for it."""
        alerts = []
        rows: list[StepValues] = []
        only_run: list[StepValues] = []
        for step, probe, values in self._buffer.drain():
            if probe in (LOGGED, LOGGED_BY_FRAMEWORK) and isinstance(values, dict):
                (rows if probe is LOGGED else only_run).append((step, values))
                continue
            if isinstance(values, Exception):
                if probe.name not in self._failures.muted:
                    self._failures.raised(probe, step, values)
                values = None
            alerts.append((step, probe, values))
        for (step, probe, _), reduced in zip(alerts, reduce_rows(alerts, self._device)):
            if reduced is None:
                self._failures.switch_off(probe, step, None)
            else:
                rows.append((step, reduced))
        begun = [alert for step, values in rows + only_run for alert in self._alerts.update(step, values)]
        rows += [(alert.step, {f"alert/{alert.rule}/{alert.name}": alert.value}) for _, alert in begun]
        self._writer.write(only_run, to_sinks=False)
        self._writer.write(rows)
        act(begun, speak=rank_and_size()[0] == 0, roles=self._roles)

    def _agreed(self, step: int) -> int:
        """The first process decides."""
        if rank_and_size()[1] == 1:
            return step
        first_step = torch.tensor(step, dtype=torch.int64, device=self._device)
        dist.broadcast(first_step, 0)
        return int(first_step)
