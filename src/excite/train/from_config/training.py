"""Training from a config, into a run folder."""

from __future__ import annotations

import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from excite._core.files import TEMPORARY, read_json, writing
from excite._core.randomness import own_randomness
from excite._core.wrappers import unwrap
from excite._version import __version__
from excite.data import Dataset, load
from excite.data.dataset import corrupted
from excite.errors import InputError, ModelError, TrainingStopped
from excite.excitation import AdversarialTraining, PersistentExcitation, Relative, Stages
from excite.excitation.radius import base_radius
from excite.excitation.radius_control import FitController
from excite.margin.fixed_radius import robust_accuracy
from excite.monitor.watch import watch
from excite.probes import Distance, Every, Loss, Rank
from excite.runs import Run, load_run
from excite.runs.checkpoints import find as find_checkpoints
from excite.runs.folder import check_folder_name, check_marker
from excite.runs.lock import Lock
from excite.train import make_model, squared_error
from excite.train.batches import augmented
from excite.train.config import DataConfig, SGDConfig, TrainConfig, parse_config
from excite.train.distributed.processes import Processes, alone, many_processes, these_processes
from excite.train.models.architectures import ARCHITECTURES, options_for
from excite.train.models.weights import load_weights
from excite.train.momentum import zero_momentum
from excite.train.schedule import RateSchedule
from excite.train.settings import TrainerSettings
from excite.train.trainer import Trainer, make_trainer
from excite.train.vectorized.trainer import fit_together

Progress = Callable[[str, int, int], None]
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
        trainer = _prepare(stack, settings, path, progress, processes)
        with trainer.record_failure(), own_randomness(settings.seed, trainer.device):
            trainer.begin()
            trainer.train()
    if processes.size == 1:
        trainer.raise_interrupt()


class TrainerFailed(TrainingStopped):
    """One of several networks cannot continue. `index` is its position."""

    def __init__(self, index: int, reason: TrainingStopped):
        super().__init__(str(reason))
        self.index = index


def train_together(
    configs: Sequence[TrainConfig], paths: Sequence[str | os.PathLike[str]], progress: Progress | None = None
) -> list[Run]:
    """Trains configs that differ only in their seeds in one vectorized step, each into its own run folder.

    The results are those of `train`, up to rounding. Networks that cannot be stacked (dropout, running statistics) are
    trained one after the other. A network that cannot continue does not stop the others and is reported at the end.

    Args:
        configs: Configs that differ only in `seed` and `data.seed`.
        paths: One run folder per config.
        progress: Called as `progress("training", steps_done, steps_total)`.

    Returns:
        The runs, open for reading, in the order of `configs`.

    Raises:
        InputError: If the configs differ in anything else, or the numbers of configs and folders differ.
        TrainingStopped: If networks could not continue; the others are done.

    Example:
        >>> from excite.train.config import TrainConfig
        >>> settings = {"data": {"name": "moons"}, "model": {"name": "mlp"}, "optimizer": {"name": "sgd", "lr": 0.1}}
        >>> configs = [TrainConfig(**settings, epochs=1, batch=100, seed=seed) for seed in range(2)]
        >>> [run.status for run in train_together(configs, ["runs/seed0", "runs/seed1"])]
        ['done', 'done']
    """
    folders = [Path(path) for path in paths]
    if len(configs) != len(folders):
        raise InputError(f"expected a folder for each config; got {len(configs)} configs and {len(folders)} folders")
    if len({_without_seeds(config) for config in configs}) > 1:
        raise InputError("only trainings that differ in nothing but their seeds can be done together")
    left, stopped = list(range(len(configs))), dict[int, TrainingStopped]()
    while left:
        try:
            _attempt([configs[i] for i in left], [folders[i] for i in left], progress)
            break
        except TrainerFailed as error:
            stopped[left.pop(error.index)] = error
    if stopped:
        first = next(iter(stopped))
        raise TrainingStopped(f"{len(stopped)} of {len(configs)} trainings stopped; {folders[first]}: {stopped[first]}")
    return [load_run(folder) for folder in folders]


def _attempt(configs: Sequence[TrainConfig], folders: Sequence[Path], progress: Progress | None) -> None:
    """Trains all configs; ends with the first network that cannot continue."""
    trainers: list[Trainer] = []
    try:
        with ExitStack() as stack:
            for config, folder in zip(configs, folders):
                trainers.append(_prepare(stack, config, folder, None))
            for trainer in trainers:
                stack.enter_context(trainer.record_failure())
            stack.enter_context(own_randomness(configs[0].seed, trainers[0].device))
            for trainer in trainers:
                trainer.begin()
            for step in sorted({trainer.step for trainer in trainers}):
                _train_group([trainer for trainer in trainers if trainer.step == step], progress)
    except TrainingStopped as error:
        failed = [index for index, trainer in enumerate(trainers) if trainer.failure is error]
        if not failed:
            raise
        raise TrainerFailed(failed[0], error) from error
    for trainer in trainers:
        trainer.raise_interrupt()


def _train_group(group: Sequence[Trainer], progress: Progress | None) -> None:
    """Trains networks that are at the same step together if they can be stacked, else one after the other."""
    group[0].progress = progress
    try:
        fit_together(group, partial(_losses, group[0]))
    except ModelError:
        for trainer in group:
            trainer.train()


def _losses(trainer: Trainer, model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns the loss per sample of a stacked model."""
    excitation, settings = trainer.excitation, trainer.settings
    if settings.transform is not None:
        raise ModelError("each network draws its own augmented data: train one by one")
    if settings.schedule is not None:
        raise ModelError("learning rates that move are not known to the step of several networks: train one by one")
    if not isinstance(excitation, PersistentExcitation) or isinstance(
        base_radius(excitation.radius), Relative | FitController
    ):
        raise ModelError("radii relative to the layers are those of each network: train one by one")
    if excitation.random_start:
        raise ModelError("each network draws its own random starts: train one by one")
    stacked = excitation.of(model)

    def losses(x: Tensor, y: Tensor) -> Tensor:
        stacked.advance(excitation.progress)
        return stacked.losses(x, y)

    return losses


def _without_seeds(config: TrainConfig) -> str:
    same = config.model_copy(update={"seed": 0, "data": config.data.model_copy(update={"seed": 0})})
    return same.model_dump_json()


def _prepare(
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
        if _channels_last(settings, data):
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if processes.size > 1:
        processes.check_same(_identity(settings, data))
        model = processes.wrap(model, settings.model.sharded)
    run = None
    with processes.raise_together():
        excitation = build_excitation(settings, model, data)
        optimizer = build_optimizer(settings, model, captured=processes.size == 1)
        loss = excitation.loss if excitation is not None else squared_error(model)
        if settings.precision == "bfloat16":
            loss = partial(_in_bfloat16, loss, device.type)
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
        _trained_on(settings, data),
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
            evaluate=_robust_evaluation(settings, model, _trained_on(settings, data)),
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
            os.rename(path, temporary / "run")  # at once: nobody finds half of it
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


def stored_config(run: Run, *, trust: bool = False) -> TrainConfig:
    """Returns the config of a run.

    Args:
        run: The run.
        trust: Whether to accept a model "module:factory", which names code that building the model imports and calls.

    Returns:
        The config.

    Raises:
        InputError: If the model is a "module:factory" and `trust` is False, or the config is invalid.
    """
    settings = parse_config(run.config, str(run.path / "config.json"))
    if not trust and ":" in settings.model.name:
        raise InputError(
            f"{run.path}: its config.json builds the model by calling {settings.model.name!r}, which may run any code: pass "
            "--trust (trust=True in Python) if you trust the run"
        )
    return settings


def load_trained(run: Run, step: int | None = None, *, trust: bool = False) -> tuple[nn.Module, TrainConfig, Dataset]:
    """Loads the model of a run made by `train`.

    Args:
        run: The run.
        step: Step of the checkpoint. Default: the newest.
        trust: Whether to load a model "module:factory" too, whose code is then imported and called.

    Returns:
        The model, in evaluation mode on the CPU; its config; its data.

    Raises:
        InputError: If the run's model is a "module:factory" and `trust` is False.
        RunError: If the run has no such checkpoint.

    Example:
        >>> config = {"data": {"name": "moons"}, "model": {"name": "mlp"}, "optimizer": {"name": "sgd", "lr": 0.1}}
        >>> model, config, data = load_trained(train({**config, "epochs": 1, "batch": 100}, "runs/moons"))
        >>> model(data.x_test).shape
        torch.Size([..., 1])
    """
    settings = stored_config(run, trust=trust)
    data = load_data(settings.data)
    model = build_model(settings, data)
    _, state = run.load_checkpoint(step)
    return load_weights(model, state["model"], run.path), settings, data


def find_device(name: str) -> torch.device:
    """Returns a device by name; "auto" is a GPU if one is available, else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device).item()  # fails where the device is not available, or holds no numbers
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(f"device {name!r} is not available: expected 'cpu', 'cuda', 'cuda:0' or 'auto'") from error
    return device


def load_data(config: DataConfig) -> Dataset:
    """Loads the data set of a config."""
    classes = None if config.classes is None else tuple(config.classes)
    sizes = {"train": config.train, "test": config.test}
    low, high = config.scale
    data = load(config.name, classes=classes, seed=config.seed, scale=(low, high), **sizes, **config.options)  # type: ignore[arg-type]
    if not config.label_noise:
        return data
    if not data.classes:
        raise InputError(f"label_noise needs classes; {data.name} is a regression: leave label_noise out")
    labels = corrupted(data.y_train, config.label_noise, config.seed, len(data.classes))
    return replace(
        data, y_train=labels, description=f"{data.description}, {config.label_noise:.0%} of the labels random"
    )


def build_model(config: TrainConfig, data: Dataset) -> nn.Module:
    """Builds the model of a config; shapes of built-in models follow from the data."""
    options = dict(config.model.options)
    if config.model.name in ARCHITECTURES:
        options = {**options_for(config.model.name, data.shape, _classes(config, data) or 1), **options}
    return make_model(config.model.name, seed=config.seed, **options)


def _classes(config: TrainConfig, data: Dataset) -> int | None:
    """Number of outputs, one per class; None for one output and a threshold."""
    return len(data.classes) if len(data.classes) > 2 or config.loss == "cross-entropy" else None


def build_excitation(
    config: TrainConfig, model: nn.Module, data: Dataset
) -> PersistentExcitation | AdversarialTraining | None:
    """Builds the excitation of a config; radius 0 for plain training, on the same scale; None for regression."""
    excitation, adversarial = config.excitation, config.adversarial
    if not data.classes:
        for name, section in (("excitation", excitation), ("adversarial", adversarial)):
            if section is not None:
                raise InputError(f"{name} needs classes; {data.name} is a regression: leave {name} out")
        if config.loss == "cross-entropy":
            raise InputError(f"loss 'cross-entropy' needs classes; {data.name} is a regression: choose 'squared'")
        return None
    target: dict[str, Any] = {"classes": _classes(config, data), "loss": config.loss}
    if adversarial is not None:
        input_radius: Any = adversarial.radius
        hidden: Any = adversarial.hidden_radius
        held_out_points = None if adversarial.held_out is None else _held_out(data, adversarial.held_out)
        return AdversarialTraining(
            model, input_radius if adversarial.stages is None else Stages(input_radius, adversarial.stages), adversarial.norm,
            adversarial.steps, adversarial.step_size, adversarial.random_start, bounds=_pair(adversarial.bounds),
            layers=adversarial.layers, awp=adversarial.awp,
            hidden_radius=hidden if adversarial.hidden_stages is None else Stages(hidden, adversarial.hidden_stages),
            trades=adversarial.trades, keep_best=adversarial.keep_best, held_out=held_out_points,
            gap_target=adversarial.gap_target, gap_every=adversarial.gap_every, **target,
        )  # fmt: skip
    if excitation is None:
        return PersistentExcitation(model, 0.0, **target)
    radius: Any = Relative(excitation.relative) if excitation.relative is not None else excitation.radius
    if excitation.stages is not None:
        radius = Stages(radius, excitation.stages)
    threshold = excitation.threshold if target["classes"] is None else None
    return PersistentExcitation(
        model, radius, excitation.norm, excitation.steps, excitation.layers, threshold, _pair(excitation.bounds),
        kind=excitation.kind, **target,
    )  # fmt: skip


def _robust_evaluation(
    config: TrainConfig, model: nn.Module, data: Dataset
) -> Callable[[int], dict[str, float]] | None:
    """The function that measures robust accuracy where it is due; None if the config does not ask for it."""
    settings = config.robust
    if settings is None:
        return None
    if not data.classes:
        raise InputError(f"robust needs classes; {data.name} is a regression: leave robust out")
    options = {"norm": settings.norm, "bounds": _pair(settings.bounds), "steps": settings.steps, "restarts": 1}
    points = {}
    for split, x, y in (("train", data.x_train, data.y_train), ("test", data.x_test, data.y_test)):
        count = min(settings.points, len(x))
        if count:
            chosen = torch.arange(count) * len(x) // count
            points[split] = x[chosen], y[chosen]

    def evaluate(epochs_done: int) -> dict[str, float]:
        if epochs_done % settings.every and epochs_done != config.epochs:
            return {}
        classes = _classes(config, data)
        return {
            f"robust/{split}": robust_accuracy(unwrap(model), x, y, [settings.radius], classes=classes, **options)[0]
            for split, (x, y) in points.items()
        }

    return evaluate


def _held_out(data: Dataset, count: int) -> tuple[Tensor, Tensor]:
    """Training points, evenly spaced, that `_trained_on` leaves out."""
    chosen = _held_out_mask(len(data.x_train), count)
    return data.x_train[chosen], data.y_train[chosen]


def _trained_on(config: TrainConfig, data: Dataset) -> Dataset:
    """The data without the training points that are held out."""
    count = None if config.adversarial is None else config.adversarial.held_out
    if count is None:
        return data
    chosen = ~_held_out_mask(len(data.x_train), count)
    return replace(data, x_train=data.x_train[chosen], y_train=data.y_train[chosen])


def _held_out_mask(points: int, count: int) -> Tensor:
    if count >= points:
        raise InputError(f"held_out: expected fewer than the {points} training points; got {count}")
    mask = torch.zeros(points, dtype=torch.bool)
    mask[torch.arange(count) * points // count] = True
    return mask


def _pair(bounds: list[float] | None) -> tuple[float, float] | None:
    return None if bounds is None else (bounds[0], bounds[1])


def build_transform(config: TrainConfig, data: Dataset) -> Callable[[Tensor], Tensor] | None:
    """Builds the function applied to the points of every batch; None if there is nothing to do."""
    layout = torch.channels_last if _channels_last(config, data) else torch.contiguous_format
    if config.augment is None:
        return None if layout == torch.contiguous_format else lambda x: x.contiguous(memory_format=layout)
    if len(data.shape) != 3:
        raise InputError(f"augment needs images; {data.name} has points of shape {data.shape}: leave augment out")
    flip, shift = config.augment.flip, config.augment.shift
    return lambda x: augmented(x, flip, shift).contiguous(memory_format=layout)


def _channels_last(config: TrainConfig, data: Dataset) -> bool:
    """The layout in which convolutions in half precision are fast."""
    return config.precision == "bfloat16" and len(data.shape) == 3


def _in_bfloat16(loss: Callable[[Tensor, Tensor], Tensor], device: str, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast(device, torch.bfloat16):
        return loss(x, y)


def build_optimizer(config: TrainConfig, model: nn.Module, captured: bool = True) -> torch.optim.Optimizer:
    """Builds the optimizer; on a GPU such that a step `captured` in a CUDA graph can contain it."""
    parameters: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise InputError(f"model {config.model.name!r} has no parameters to train")
    options = config.optimizer.model_dump(exclude={"name", "momentum_start"})
    if "betas" in options:
        options["betas"] = tuple(options["betas"])
    captured = captured and parameters[0].is_cuda
    if config.optimizer.name != "sgd" and captured:
        options["capturable"] = True  # its step counts stay on the GPU, so that the step can be captured
    if config.optimizer.name == "sgd" and config.schedule != "constant" and captured:
        options["fused"] = True  # the one kind that takes its rate from the GPU
    classes: dict[str, type[torch.optim.Optimizer]] = {
        "sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW
    }  # fmt: skip
    try:
        optimizer = classes[config.optimizer.name](parameters, **options)
    except ValueError as error:
        raise InputError(f"optimizer: {error}") from error
    if isinstance(config.optimizer, SGDConfig) and config.optimizer.momentum_start == "zero":
        zero_momentum(optimizer)
    return optimizer
