"""Pages on runs: curves, findings, verdicts; the static report, the live page and the audit of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from excite.report.page import Report, make_report

__all__ = ["Report", "make_report"]


def __getattr__(name: str) -> Any:
    # Only the page needs jinja2; curves and their distances are also used without it.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from excite.report import page

    return getattr(page, name)
