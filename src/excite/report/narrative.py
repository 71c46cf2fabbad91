"""Findings about a run, as sentences: those of every built-in probe, from its metrics alone."""

from __future__ import annotations

from dataclasses import replace

from excite.probes import built_in_probes
from excite.probes.findings import Finding, number
from excite.report.history import MetricHistory

_PAGE = "serve.md#the-page-of-a-run"  # of panels without a section of their own
__all__ = ["Finding", "findings", "number"]


def findings(history: MetricHistory) -> list[Finding]:
    """The findings about one run, warnings first.

    Args:
        history: The metrics of the run.

    Returns:
        Findings of all built-in probes, each with the panel that shows it: warnings, then what went well, then notes.
    """
    result = [
        finding
        if probe.panel is None
        else replace(finding, panel=finding.panel or probe.panel.id, docs=finding.docs or probe.panel.docs or _PAGE)
        for probe in built_in_probes()
        for finding in probe.findings(history)
    ]
    rank = {"warning": 0, "good": 1, "note": 2}
    return sorted(result, key=lambda finding: rank[finding.kind])
