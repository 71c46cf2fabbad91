"""What people look at: figures and the static report."""

from excite.report.page import Report, make_report

__all__ = ["Report", "make_report"]
