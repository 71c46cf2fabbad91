"""The config of a training: what `excite train` reads from a TOML or JSON file."""

from excite.train.config.parsing import load_config, parse_config, read_config
from excite.train.config.sections import (
    AdamConfig,
    AdversarialConfig,
    AugmentConfig,
    DataConfig,
    ExcitationConfig,
    ModelConfig,
    RobustConfig,
    SGDConfig,
    TrainConfig,
)

__all__ = [
    "AdamConfig",
    "AdversarialConfig",
    "AugmentConfig",
    "DataConfig",
    "ExcitationConfig",
    "ModelConfig",
    "RobustConfig",
    "SGDConfig",
    "TrainConfig",
    "load_config",
    "parse_config",
    "read_config",
]
