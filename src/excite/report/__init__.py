"""What people look at: figures and the static report."""

from excite.report.page import write_report

__all__ = ["write_report"]
