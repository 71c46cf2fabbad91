"""Building what a config names: device, data, model, excitation, optimizer, transform, evaluation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from excite._core.wrappers import unwrap
from excite.data import Dataset, load
from excite.data.dataset import corrupted
from excite.errors import InputError
from excite.excitation import AdversarialTraining, HiddenOptions, PersistentExcitation, Relative, Stages
from excite.margin.fixed_radius import robust_accuracy
from excite.train import make_model
from excite.train.batches import augmented
from excite.train.config import DataConfig, SGDConfig, TrainConfig
from excite.train.models.architectures import ARCHITECTURES, options_for
from excite.train.momentum import zero_momentum


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
    """Loads the dataset of a config."""
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
        held_out = None if adversarial.held_out is None else held_out_points(data, adversarial.held_out)
        return AdversarialTraining(
            model, input_radius if adversarial.stages is None else Stages(input_radius, adversarial.stages), adversarial.norm,
            adversarial.steps, adversarial.step_size, adversarial.random_start, bounds=_pair(adversarial.bounds),
            layers=adversarial.layers, awp=adversarial.awp,
            hidden_radius=hidden if adversarial.hidden_stages is None else Stages(hidden, adversarial.hidden_stages),
            trades=adversarial.trades, keep_best=adversarial.keep_best, held_out=held_out,
            gap_target=adversarial.gap_target, gap_every=adversarial.gap_every,
            hidden=HiddenOptions(
                adversarial.hidden_norm, adversarial.hidden_budget, adversarial.hidden_random_start, adversarial.hidden_fraction,
                adversarial.hidden_once,
            ),
            **target,
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


def robust_evaluation(config: TrainConfig, model: nn.Module, data: Dataset) -> Callable[[int], dict[str, float]] | None:
    """The function that measures robust accuracy where it is due; None if the config does not ask for it."""
    settings = config.robust
    if settings is None:
        return None
    if not data.classes:
        raise InputError(f"robust needs classes; {data.name} is a regression: leave robust out")
    options = {"norm": settings.norm, "bounds": _pair(settings.bounds), "steps": settings.steps, "restarts": 1}
    points = {}
    for split, x, y in (("train", data.x_train, data.y_train), ("test", data.x_test, data.y_test)):
        if len(x):
            points[split] = evaluated_points(x, y, settings.points)

    def evaluate(epochs_done: int) -> dict[str, float]:
        if epochs_done % settings.every and epochs_done != config.epochs:
            return {}
        classes = _classes(config, data)
        return {
            f"robust/{split}": robust_accuracy(unwrap(model), x, y, [settings.radius], classes=classes, **options)[0]
            for split, (x, y) in points.items()
        }

    return evaluate


def evaluated_points(x: Tensor, y: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The points on which robust accuracy is measured during training: at most `count`, evenly spaced from the first on."""
    count = min(count, len(x))
    chosen = torch.arange(count) * len(x) // count
    return x[chosen], y[chosen]


def held_out_points(data: Dataset, count: int) -> tuple[Tensor, Tensor]:
    """Training points, evenly spaced, that `training_data` leaves out."""
    chosen = _held_out_mask(len(data.x_train), count)
    return data.x_train[chosen], data.y_train[chosen]


def training_data(config: TrainConfig, data: Dataset) -> Dataset:
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
    layout = torch.channels_last if uses_channels_last(config, data) else torch.contiguous_format
    if config.augment is None:
        return None if layout == torch.contiguous_format else lambda x: x.contiguous(memory_format=layout)
    if len(data.shape) != 3:
        raise InputError(f"augment needs images; {data.name} has points of shape {data.shape}: leave augment out")
    flip, shift = config.augment.flip, config.augment.shift
    return lambda x: augmented(x, flip, shift).contiguous(memory_format=layout)


def uses_channels_last(config: TrainConfig, data: Dataset) -> bool:
    """The layout in which convolutions in half precision are fast."""
    return config.precision == "bfloat16" and len(data.shape) == 3


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
