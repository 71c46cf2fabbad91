"""The run folder: config, environment, metrics, checkpoints, resume."""

from excite.runs.checkpoints import Checkpoint
from excite.runs.checkpoints import read as read_checkpoint
from excite.runs.folder import Run, load_run

__all__ = ["Checkpoint", "Run", "load_run", "read_checkpoint"]
