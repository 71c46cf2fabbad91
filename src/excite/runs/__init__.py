"""The run folder: config, environment, metrics, checkpoints, resume."""

from excite.runs.checkpoints import Checkpoint
from excite.runs.checkpoints import read as read_checkpoint
from excite.runs.repair import Problem, Repair, repair
from excite.runs.run import Run, load_run

__all__ = ["Checkpoint", "Problem", "Repair", "Run", "load_run", "read_checkpoint", "repair"]
