"""Loading what was trained from a config: the config of a run, and its model with the weights of a checkpoint."""

from __future__ import annotations

from torch import nn

from excite.data import Dataset
from excite.errors import InputError
from excite.runs import Run
from excite.train.config import TrainConfig, parse_config
from excite.train.from_config.building import build_model, load_data
from excite.train.models.weights import load_weights


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
