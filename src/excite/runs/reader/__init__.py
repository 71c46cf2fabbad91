"""Reading a run while another process writes it."""

from excite.runs.reader.metrics_reader import MetricsReader, read_status
from excite.runs.reader.overview import Overview, loss_ends, overview, read_overview

__all__ = ["MetricsReader", "Overview", "loss_ends", "overview", "read_overview", "read_status"]
