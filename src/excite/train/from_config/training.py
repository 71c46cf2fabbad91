"""Training from a config, into a run folder: on one process, or one model on all processes of torchrun."""

from __future__ import annotations

import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from excite._core.files import TEMPORARY, read_json, writing
from excite._core.progress import Progress
from excite._core.randomness import own_randomness
from excite._version import __version__
from excite.data import Dataset
from excite.errors import InputError
from excite.excitation import AdversarialTraining, PersistentExcitation
from excite.monitor.watch import watch
from excite.probes import Distance, Every, Loss, Rank
from excite.runs import Run, load_run
from excite.runs.checkpoints import find as find_checkpoints
from excite.runs.folder import check_folder_name, check_marker
from excite.runs.lock import Lock
from excite.train import squared_error
from excite.train.config import TrainConfig, parse_config
from excite.train.distributed.processes import Processes, alone, many_processes, these_processes
from excite.train.fitting import make_trainer
from excite.train.from_config.building import (
    build_excitation,
    build_model,
    build_optimizer,
    build_transform,
    find_device,
    load_data,
    robust_evaluation,
    training_data,
    uses_channels_last,
)
from excite.train.schedule import RateSchedule
from excite.train.settings import TrainerSettings
from excite.train.trainer import Trainer

_EXAMPLES = 200  # training points on which the watch looks at the layers


def train(
    config: TrainConfig | Mapping[str, Any], run_path: str | os.PathLike[str], progress: Progress | None = None
) -> Run:
    """Trains as a config says, into a run folder.

    A run folder that exists and was made by the same config is resumed from its last checkpoint; if it is done, nothing is
    trained.

    Args:
        config: Config, or its keys and values (see `excite.train.load_config`).
        run_path: Run folder.
        progress: Called as `progress("training", steps_done, steps_total)`.

    Returns:
        The run, open for reading.

    Raises:
        InputError: If the config is invalid, or this is one of several processes (use `train_across`).
        RunError: If the folder holds a run of another config, or another process is writing to it.
        TrainingStopped: If the loss or the weights are not finite, or the run cannot be written.

    Example:
        >>> config = {"data": {"name": "moons"}, "model": {"name": "mlp"}, "optimizer": {"name": "sgd", "lr": 0.1}}
        >>> run = train({**config, "epochs": 5, "batch": 20}, "runs/moons")
        >>> run.status
        'done'
    """
    settings = config if isinstance(config, TrainConfig) else parse_config(config)
    if these_processes().size > 1:
        raise InputError(f"world_size is {these_processes().size}: call train_across on every rank")
    _train(settings, Path(run_path), progress, these_processes())
    return load_run(run_path)


def train_across(
    config: TrainConfig | Mapping[str, Any], run_path: str | os.PathLike[str], progress: Progress | None = None
) -> Run | None:
    """Trains one model on all processes that torchrun started; on one process, the same as `train`.

    Every rank calls this. Only rank 0 writes the run and calls `progress`. A run can be resumed on another number of
    processes.

    Args:
        config: Config, or its keys and values.
        run_path: Run folder.
        progress: Called as `progress("training", steps_done, steps_total)`.

    Returns:
        The run, open for reading, on rank 0; None on other ranks.

    Raises:
        InputError: If the config is invalid or differs between ranks.
        RunError: If the folder holds a run of another config, or another process is writing to it.
        TrainingStopped: If the loss or the weights are not finite, a rank is lost, or the run cannot be written.

    Example:
        >>> config = {"data": {"name": "moons"}, "model": {"name": "mlp"}, "optimizer": {"name": "sgd", "lr": 0.1}}
        >>> train_across({**config, "epochs": 1, "batch": 100}, "runs/moons").status  # torchrun --nproc-per-node 4 script.py
        'done'
    """
    settings = config if isinstance(config, TrainConfig) else parse_config(config)
    with many_processes(settings.device) as processes:
        with processes.ending_together():
            _train(settings, Path(run_path), progress if processes.first else None, processes)
        return load_run(run_path) if processes.first else None


def _train(settings: TrainConfig, path: Path, progress: Progress | None, processes: Processes) -> None:
    with ExitStack() as stack:
        trainer = prepare(stack, settings, path, progress, processes)
        with trainer.record_failure(), own_randomness(settings.seed, trainer.device):
            trainer.begin()
            trainer.train()
    if processes.size == 1:
        trainer.raise_interrupt()


def prepare(
    stack: ExitStack, settings: TrainConfig, path: Path, progress: Progress | None, processes: Processes | None = None
) -> Trainer:
    """Builds a trainer; `stack` closes its run and detaches its watch."""
    processes = processes or alone()
    with processes.raise_together():
        device = find_device(settings.device) if processes.size == 1 else processes.local_device(settings.device)
        data = load_data(settings.data) if processes.first_of_machine else None
    with processes.raise_together():  # the others find what the first of their machine has fetched
        data = load_data(settings.data) if data is None else data
        model = build_model(settings, data).to(device)
        if uses_channels_last(settings, data):
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    save_best = settings.robust is not None and settings.robust.save_best
    if save_best and settings.model.sharded and processes.size > 1:
        raise InputError(
            "robust.save_best: the weights are sharded over processes: leave it out, or train without model.sharded"
        )
    if processes.size > 1:
        processes.check_same(_identity(settings, data))
        model = processes.wrap(model, settings.model.sharded)
    run = None
    with processes.raise_together():
        excitation = build_excitation(settings, model, data)
        optimizer = build_optimizer(settings, model, captured=processes.size == 1)
        loss = _loss_of(settings, model, excitation, optimizer, device)
        transform = build_transform(settings, data)
        if processes.first:
            check_folder_name(path)
            _clear_unstarted(path)
            run = stack.enter_context(Run.create(path, _as_stored(settings, path), resume=True, keep=settings.keep))
    watching = None
    if settings.watch:
        every = 10 if settings.watch is True else settings.watch
        probes = [Loss(), Distance(Every(every)), Rank(Every(every))]
        examples = data.x_train[:: max(1, len(data.x_train) // _EXAMPLES)][:_EXAMPLES].to(device)
        watching = stack.enter_context(watch(model, examples, run, optimizer, probes))
    return make_trainer(
        model,
        training_data(settings, data),
        loss,
        optimizer,
        TrainerSettings(
            settings.epochs,
            settings.batch,
            settings.seed,
            run=run,
            excitation=excitation,
            watch=watching,
            checkpoint_every=settings.checkpoint_every,
            progress=progress,
            transform=transform,
            schedule=None
            if settings.schedule == "constant"
            else RateSchedule(settings.schedule, optimizer, processes.size == 1),
            evaluate=robust_evaluation(settings, model, training_data(settings, data)),
            save_best="robust/test" if save_best else None,
        ),
    )


def _identity(settings: TrainConfig, data: Dataset) -> dict[str, object]:
    """Values that have to be the same on all ranks."""
    some = torch.cat([data.x_train[:100].flatten(), data.x_train[-100:].flatten()]).contiguous()
    return {
        "version of Excite": __version__,
        "version of torch": torch.__version__,
        "config": settings.model_dump_json(),
        "training points": (tuple(data.x_train.shape), zlib.crc32(some.numpy().tobytes())),
        "labels": zlib.crc32(data.y_train.contiguous().numpy().tobytes()),
    }


def _as_stored(settings: TrainConfig, path: Path) -> dict[str, Any]:
    """Settings as the run at `path` stores them, if they are equal: a run made before a key was added lacks it."""
    if (path / "run.json").exists():
        stored = read_json(path / "config.json")
        with suppress(InputError):
            if parse_config(stored) == settings:
                return dict(stored)
    return settings.model_dump(mode="json")


def _clear_unstarted(path: Path) -> None:
    """Removes a run of `train` that ended before its first checkpoint: there is nothing to resume from."""
    if not _unstarted(path):
        return
    lock = Lock(path / "lock", path)  # or it is being written to: refused
    try:
        if not _unstarted(path):  # another start was faster
            return
        with writing(path):
            temporary = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=path.parent))
            os.rename(path, temporary / "run")  # in one step: no other process sees part of it
        shutil.rmtree(temporary, ignore_errors=True)
    finally:
        lock.release()


def _unstarted(path: Path) -> bool:
    if not (path / "run.json").exists():
        return False
    # "running" is what a killed one says, or its lock is held.
    if check_marker(path) == "done" or find_checkpoints(path / "checkpoints"):
        return False
    with suppress(InputError):
        parse_config(read_json(path / "config.json"))
        return True
    return False  # another kind of run


def _loss_of(
    settings: TrainConfig,
    model: nn.Module,
    excitation: PersistentExcitation | AdversarialTraining | None,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss of a batch, in the precision of the settings."""
    loss = excitation.loss if excitation is not None else squared_error(model)
    if isinstance(excitation, AdversarialTraining) and settings.adversarial and settings.adversarial.free:
        loss = partial(excitation.free_loss, optimizer=optimizer)
    return partial(_in_bfloat16, loss, device.type) if settings.precision == "bfloat16" else loss


def _in_bfloat16(loss: Callable[[Tensor, Tensor], Tensor], device: str, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast(device, torch.bfloat16):
        return loss(x, y)
