"""Reading a run while another process writes it."""

from excite.runs.reader.metrics_reader import MetricsReader, read_last, read_status

__all__ = ["MetricsReader", "read_last", "read_status"]
