"""One line in a training loop: measure while a network trains, and write it to a run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from excite._core.calls import Batch, Pick, tensors
from excite._core.checks import Bounds, check_dense, check_flag, check_model, check_placed
from excite._core.distributed import rank_and_size
from excite._core.wrappers import refuse_compiled, refuse_lazy, unwrap
from excite.errors import InputError, RunError
from excite.margin.normalize import Normalize
from excite.monitor.alerts import Alerts, Rule, default_alerts
from excite.monitor.checkpoint import make_saver
from excite.monitor.defaults import Every, chosen_probes
from excite.monitor.live_margins import LiveMargins
from excite.monitor.settings import as_settings
from excite.monitor.watcher import Watch, WatchSettings
from excite.monitor.writer import Sink
from excite.probes import Probe
from excite.probes.margin import Margin
from excite.runs import Run
from excite.runs.folder import check_folder_name

__all__ = ["Watch", "watch"]


def watch(
    model: nn.Module, example: Batch | None = None, run: str | os.PathLike[str] | Run | None = None,
    optimizer: torch.optim.Optimizer | None = None, probes: Sequence[Probe] | None = None, every: Every | None = None, *,
    train: Any = None, test: Any = None, normalize: Normalize | None = None, bounds: Bounds | None = None, threshold: float = 0.5,
    margin_batch: tuple[Tensor, Tensor] | Margin | None = None, output: Pick = None, alerts: Sequence[Rule] | None = None,
    sinks: Sequence[str | Sink] = (), config: object = None, checkpoint: object = None, strict: bool = False,
) -> Watch:  # fmt: skip
    """Monitors a model while it trains.

    Probes measure the model at the start, on their schedules and at the end, restore all state, and write to a run: a monitored
    training produces the same weights, bit by bit, as one that is not monitored. Nothing in the training loop waits for a device.
    With several processes every one calls `watch` and `step`; values are reduced and the first process writes.

    Args:
        model: The model that is trained, also wrapped by DistributedDataParallel or torch.compile.
        example: A fixed batch on which layers are measured. Default: some of `train`. Probes that need one are left out without it.
        run: Folder for a new run, or an open `Run` to continue (then `load_state_dict` from its checkpoint). None: sinks only.
        optimizer: The optimizer of the training; needed for conserved quantities and gradient norms.
        probes: What to measure. Default: `excite.probes.default_probes()`.
        every: When to measure, instead of each probe's schedule: a number of steps, a `Budget(0.03)`, or a dict by probe name.
        train: Training data, of which a fixed sample is drawn and its margins are measured: tensors (x, y), a dataset or a loader.
        test: Test data, likewise.
        normalize: (mean, std) per channel, if these data are (pixel − mean)/std: margins are then in pixels from 0 to 1.
        bounds: (lowest, highest) value of an input. Default: (0, 1) with `normalize`, or the range of images within [0, 1] or [−1, 1].
        threshold: For a model with one output, class 1 is where it is larger; 0 for logits.
        margin_batch: Points and labels (x, y) whose margins are measured every 500 steps, or a `Margin` probe.
        output: Which part of the model's return value is the output, if it returns several.
        alerts: Rules (`excite.monitor.alerts`). Default: `default_alerts()`; [] for none.
        sinks: "tensorboard", "wandb", "mlflow", or objects with `log` and `close`.
        config: Settings of the training, stored in the run, shown and compared by the pages: a dict, a dataclass, an
            `argparse.Namespace` or a pydantic model. Values that are not JSON are stored as text.
        checkpoint: Store the weights for `excite margins` and `excite audit`: True at the end; a number of steps also that often;
            a factory, "module:function" or a callable; or a dict with "factory", "options" and "every". See `Run.save`.
        strict: Raise exceptions of probes and of the writer instead of issuing a warning and switching the probe off.

    Returns:
        The open `Watch`. Use it as a context manager, or call `close` at the end.

    Raises:
        InputError: If an argument is not what is expected, such as data that can be read only once.
        RunError: If `run` is a folder that already holds a run.

    Example:
        >>> with excite.watch(model, run="runs/first", optimizer=optimizer, train=(x[:4], y[:4]), test=(x[4:], y[4:])) as watch:
        ...     for _ in range(3):
        ...         optimizer.zero_grad()
        ...         loss = (model(x)[:, 0] - y).square().mean()
        ...         loss.backward()
        ...         optimizer.step()
        ...         watch.step(loss)  # once per optimizer step
    """
    _check(model, example, run, strict)
    margins = LiveMargins.draw(model, train, test, normalize=normalize, bounds=bounds, threshold=threshold)
    example = margins.example(model) if example is None else example
    chosen = chosen_probes(probes, every, example, optimizer, output, margins.probes(margin_batch, output), model)
    settings = WatchSettings(
        example, None, optimizer, chosen, strict, not isinstance(run, Run), (), _checked_rules(alerts), probes is None, output,
        make_saver(checkpoint, model, run),
    )  # fmt: skip
    stored = {**_settings(config, run), "watch": _described(model, chosen, margins, example)}
    return _attached(model, run, stored, sinks, settings, margins)


def _attached(
    model: nn.Module,
    run: str | os.PathLike[str] | Run | None,
    stored: dict[str, Any],
    sinks: Sequence[str | Sink],
    settings: WatchSettings,
    margins: LiveMargins,
) -> Watch:
    """Opens the run and attaches the watch; if that fails the run says so."""
    opened = run if isinstance(run, Run) else _create_run(run, stored)
    try:
        made = _make_sinks(sinks, opened)
        watching = Watch(model, replace(settings, run=opened, sinks=made))
        margins.store(watching)
        return watching
    except BaseException:
        if settings.owns_run and opened is not None:
            opened.close("failed", "the watch could not be attached")
        raise


def _check(model: nn.Module, example: Batch | None, run: object, strict: bool) -> None:
    check_flag(strict, "strict")
    refuse_lazy(check_model(model))
    check_placed(model)
    for leaf in () if example is None else tensors(example):
        check_dense(leaf, "an example batch")
    if not isinstance(run, Run | str | os.PathLike | None):
        raise InputError(f"watch: expected a folder or an open Run; got {run!r}")
    refuse_compiled(model)


def _checked_rules(alerts: Sequence[Rule] | None) -> list[Rule]:
    rules = default_alerts() if alerts is None else list(alerts)
    Alerts(rules)  # raises InputError if one is not a rule
    return rules


def _settings(config: object, run: object) -> dict[str, Any]:
    """The user's config as the run stores it. An open run has its own, which has to be the same."""
    if config is None:
        return {}
    settings = {"config": as_settings(config)}
    if isinstance(run, Run):
        if "config" not in run.config:
            raise InputError("config: an open Run has its own: pass the settings to Run.create, or a folder as run")
        if changed := run.changed_settings({**run.config, **settings}):
            raise InputError(f"config: {run.path} was made with another one ({changed}): choose another folder")
    elif run is None and rank_and_size()[0] == 0:
        raise InputError("config: expected a run to store it in: pass run=, or leave config out")
    return settings


def _described(
    model: nn.Module, probes: Sequence[Probe], margins: LiveMargins, example: Batch | None
) -> dict[str, Any]:
    """The description of the watch that the run stores."""
    described: dict[str, Any] = {"probes": [probe.name for probe in probes], "model": type(unwrap(model)).__name__}
    leaves = [] if example is None else list(tensors(example))
    if leaves and not any(leaf.is_floating_point() for leaf in leaves):
        described["inputs"] = "integers"  # such as token ids, which have no margin
    return {**described, "margins": margins.described()} if margins.drawn else described


def _create_run(folder: str | os.PathLike[str] | None, config: dict[str, Any]) -> Run | None:
    """Creates the run on the first process, the only one that writes; None on the others and without a folder."""
    if folder is None or rank_and_size()[0] != 0:
        return None
    if (check_folder_name(folder) / "run.json").exists():
        raise RunError(f"{folder} holds a run already: choose another folder, or give an open Run to continue it")
    return Run.create(folder, config)


def _make_sinks(sinks: Sequence[str | Sink], run: Run | None) -> list[Sink]:
    """Creates the sinks on the first process; none on the others."""
    if not sinks or rank_and_size()[0] != 0:
        return []
    from excite.monitor.sinks import make_sinks

    return make_sinks(sinks, None if run is None else run.path)
