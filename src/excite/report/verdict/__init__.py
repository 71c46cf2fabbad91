"""Verdict on runs: the first line of a page, the ranking of runs, and the comparison of their gaps."""

from excite.report.verdict.comparison import Comparison, compare, verdict
from excite.report.verdict.headline import Headline, headline
from excite.report.verdict.outcome import RunOutcome
from excite.report.verdict.ranking import Ranked, rank

__all__ = ["Comparison", "Headline", "Ranked", "RunOutcome", "compare", "headline", "rank", "verdict"]
