"""Reading a run while another process writes it."""

from excite.runs.reader.metrics_reader import MetricsReader, read_status
from excite.runs.reader.overview import Overview, overview, read_overview

__all__ = ["MetricsReader", "Overview", "overview", "read_overview", "read_status"]
