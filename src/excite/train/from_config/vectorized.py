"""Training configs that differ only in their seeds in one vectorized step, each into its own run folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from excite._core.progress import Progress
from excite._core.randomness import own_randomness
from excite.errors import InputError, ModelError, TrainingStopped
from excite.excitation import PersistentExcitation, Relative
from excite.excitation.radius import base_radius
from excite.excitation.radius_control import FitController
from excite.runs import Run, load_run
from excite.train.config import TrainConfig
from excite.train.from_config.training import prepare
from excite.train.trainer import Trainer
from excite.train.vectorized.trainer import fit_together


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
        raise InputError("only training runs that differ in nothing but their seeds can be done together")
    left, stopped = list(range(len(configs))), dict[int, TrainingStopped]()
    while left:
        try:
            _attempt([configs[i] for i in left], [folders[i] for i in left], progress)
            break
        except TrainerFailed as error:
            stopped[left.pop(error.index)] = error
    if stopped:
        first = next(iter(stopped))
        raise TrainingStopped(
            f"{len(stopped)} of {len(configs)} training runs stopped; {folders[first]}: {stopped[first]}"
        )
    return [load_run(folder) for folder in folders]


def _attempt(configs: Sequence[TrainConfig], folders: Sequence[Path], progress: Progress | None) -> None:
    """Trains all configs; ends with the first network that cannot continue."""
    trainers: list[Trainer] = []
    try:
        with ExitStack() as stack:
            for config, folder in zip(configs, folders):
                trainers.append(prepare(stack, config, folder, None))
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
