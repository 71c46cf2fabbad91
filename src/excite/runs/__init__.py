"""The run folder: config, environment, metrics, checkpoints, resume."""

from excite.runs.checkpoints import Checkpoint
from excite.runs.checkpoints import read as read_checkpoint
from excite.runs.folder import Run, load_run
from excite.runs.repairing import Problem, Repair, repair

__all__ = ["Checkpoint", "Problem", "Repair", "Run", "load_run", "read_checkpoint", "repair"]
