"""Training from a config: building what it names, training into a run folder, loading what was trained."""

from excite.train.from_config.building import (
    build_excitation,
    build_model,
    build_optimizer,
    build_transform,
    find_device,
    load_data,
)
from excite.train.from_config.loading import load_trained, stored_config
from excite.train.from_config.training import train, train_across
from excite.train.from_config.vectorized import train_together

__all__ = [
    "build_excitation",
    "build_model",
    "build_optimizer",
    "build_transform",
    "find_device",
    "load_data",
    "load_trained",
    "stored_config",
    "train",
    "train_across",
    "train_together",
]
