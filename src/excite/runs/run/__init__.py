"""A run: its folder, opened for reading or writing."""

from excite.runs.run.run import Run, load_run

__all__ = ["Run", "load_run"]
