"""The first line of every page: how robust, whether training tells the truth about test, how sure, what to do next."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from excite.probes.findings import Finding
from excite.report.panels import anchor
from excite.report.verdict.links import docs_url
from excite.report.verdict.outcome import RunOutcome, hardly
from excite.report.verdict.ranking import Ranked, rank
from excite.report.verdict.units import describe, fraction, short

Kind = Literal["good", "note", "warning", "bad", "diverged"]
ROBUST, FRAGILE = 8 / 255, 2 / 255  # of the inputs' range, in the sup norm
EXCLUDED = 0.2  # a gap above this has to be excluded before training counts as agreeing with test
MIN_POINTS = 100  # per part; below, the first line recommends more
_LONG = 160  # characters of a finding that the first line repeats
_CHART, _PANEL = "#chart-margins", "#margin-history"


@dataclass(frozen=True)
class Headline:
    """One line about a run, or about several.

    Attributes:
        kind: "good", "note", "warning", "bad" or "diverged".
        text: The line.
        action: What to do next.
        link: Anchor of the chart that shows it, or empty.
        docs: Address of the section of the documentation.
    """

    kind: Kind
    text: str
    action: str
    link: str = ""
    docs: str = ""

    def to_dict(self) -> dict[str, str]:
        """Fields by name, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.text} Next: {self.action}"


def headline(outcomes: Sequence[RunOutcome], worst: Finding | None = None, name: str = "RUN") -> Headline:
    """The first line about one run, or about several that are compared.

    Args:
        outcomes: What each run, or each variant, achieved.
        worst: The most important finding, which is mentioned if margins were not measured.
        name: The run in commands, such as its path.

    Returns:
        The line.
    """
    result = _single(outcomes[0], worst, name) if len(outcomes) == 1 else _several(outcomes, name)
    notes = dict.fromkeys(outcome.note for outcome in outcomes if outcome.note)
    return replace(result, text=" ".join([result.text, *notes]))


def _single(outcome: RunOutcome, worst: Finding | None, name: str) -> Headline:
    if outcome.status == "diverged":
        return Headline(
            "diverged",
            f"Diverged: {outcome.reason}. What was measured after that says nothing about robustness.",
            "Lower the learning rate or the radius, or clip gradients, and start again from a checkpoint before.",
            "#panel-losses",
            docs_url("serve.md#diverged-runs"),
        )
    if not outcome.medians:
        return _unmeasured(outcome, worst, name)
    category, robust = _robustness(outcome)
    agrees, gap = _gap(outcome)
    sure = _certainty(outcome)
    doubtful = outcome.verified is False or (outcome.points and min(outcome.points.values()) < MIN_POINTS)
    if category in ("good", "note") and (agrees is False or doubtful):
        category = "warning"
    if not outcome.final:
        when = "So far" if outcome.status == "running" else "In the last measurement"
        robust = f"{when}{f', at step {outcome.step:,}' if outcome.step else ''}: {robust[0].lower()}{robust[1:]}"
    text = f"{robust}; {gap}. {sure}" if gap else f"{robust}. {sure}"
    action, page = _action(outcome, category, agrees, name)
    return Headline(category, text, action, _CHART if outcome.final else _PANEL, docs_url(page))


def _unmeasured(outcome: RunOutcome, worst: Finding | None, name: str) -> Headline:
    how = (
        f"Measure it: excite margins {name}."
        if outcome.measurable
        else "Measure it: pass train=(x, y) and test=(x, y) to excite.watch."
    )
    if outcome.status == "running":
        how = "Margins appear here while the network trains if excite.watch gets train=(x, y) and test=(x, y)."
    text = "Robustness was not measured."
    if outcome.discrete:
        text = (
            "Robustness was not measured: inputs are whole numbers such as token ids, which cannot be changed a little."
        )
        how = "Read the findings below; margins exist for images, embeddings and other floating-point inputs."
    if outcome.status == "failed":
        text = f"The run failed: {outcome.reason or 'no reason is known'}. {text}"
    if worst is not None:
        head, colon, _ = worst.text.partition(": ")
        listed = colon and len(worst.text) > _LONG  # many layers: the findings name them
        text += f" Most important otherwise: {head + '.' if listed else worst.text}"
    warned = outcome.status == "failed" or (worst is not None and worst.kind == "warning")
    link = anchor(worst.panel) if worst is not None and worst.panel else ""
    return Headline("warning" if warned else "note", text, how, link, docs_url("margins.md"))


def _robustness(outcome: RunOutcome) -> tuple[Kind, str]:
    """How robust, by the median margin on test data, or on the only data that was measured."""
    split = next(split for split in ("test", "train", "batch") if split in outcome.medians)
    where = {"test": "test data", "train": "training data", "batch": "a fixed batch of training data"}[split]
    value = outcome.medians[split].value
    accuracy = outcome.accuracy.get(split)
    if value == 0:
        wrong = "more than half" if accuracy is None else f"{1 - accuracy:.0%}"
        return "bad", f"Not accurate: {wrong} of the {where} is misclassified, so that the median margin is 0"
    if accuracy is not None and outcome.classes and accuracy < hardly(outcome.classes):
        return "bad", (
            f"Hardly better than chance: {accuracy:.0%} of the {where} is classified correctly, so that margins say nothing "
            "about robustness"
        )
    if math.isinf(value):
        return (
            "warning",
            f"No adversarial example was found for most of the {where}, which may be a failure of the search",
        )
    size = fraction(value, outcome.norm, outcome.unit)
    perhaps = ", perhaps much less," if outcome.verified is False else ""
    change = describe(value, outcome.norm, outcome.unit).removeprefix("a change of ")
    text = f"a change of {change}{perhaps} is enough to change half of the decisions on {where}"
    if size is None or outcome.verified is False:
        return "note", text[0].upper() + text[1:]
    if size >= ROBUST:
        return "good", f"Robust: {text}"
    return ("bad", f"Not robust: {text}") if size < FRAGILE else ("note", f"Somewhat robust: {text}")


def _gap(outcome: RunOutcome) -> tuple[bool | None, str]:
    """Whether training agrees with test (None: undecided or not measured), in words."""
    if outcome.gap is None or outcome.chance is None:
        return None, "" if "batch" in outcome.medians else "training and test data were not both measured"
    gap, chance = outcome.gap, f"{outcome.chance:.2f}"
    if gap.low > 0:
        measured = f"(gap {gap.value:.2f}, by chance up to {chance})"
        if outcome.widest is not None:
            at, train, test = outcome.widest
            over = "overstates" if test > train else "understates"
            size = short(at, outcome.norm, outcome.unit)
            return (
                False,
                f"training {over} it: {train:.0%} of training and {test:.0%} of test decisions change within {size} {measured}",
            )
        train, test = (outcome.medians[split].value for split in ("train", "test"))
        over = "overstates" if train > test else "understates"
        return False, f"training {over} it, {short(train, outcome.norm, outcome.unit)} on training data {measured}"
    if gap.high <= EXCLUDED:
        return True, f"training tells the truth about test (gap {gap.value:.2f}, by chance up to {chance})"
    return (
        None,
        f"too few points to tell whether training agrees with test (gap {gap.value:.2f}, by chance up to {chance})",
    )


def _certainty(outcome: RunOutcome) -> str:
    counts = [
        f"{outcome.points[split]:,} {data_name}"
        for split, data_name in (("train", "training"), ("test", "test"))
        if split in outcome.points
    ]
    measured = f"Measured on {' and '.join(counts)} points" if counts else "Measured"
    if outcome.flags:
        more = f" (and {len(outcome.flags) - 1} more signs)" if len(outcome.flags) > 1 else ""
        return f"{measured}; the search shows signs of failure: {outcome.flags[0]}{more}."
    if outcome.verified:
        return f"{measured}; the search was verified."
    return (
        f"{measured}, with a quick search that was not verified."
        if not outcome.final
        else f"{measured}; the search was not verified."
    )


def _action(outcome: RunOutcome, category: Kind, agrees: bool | None, name: str) -> tuple[str, str]:
    """One action, and the section of the documentation on it: the first of these that applies."""
    command = f"excite margins {name}" if outcome.measurable else "excite.margins(model, x, y)"
    if category == "bad" and (outcome.medians.get("test") or next(iter(outcome.medians.values()))).value == 0:
        return "Train longer, or find out why it does not learn, before looking at margins.", "margins.md"
    if category == "bad" and outcome.classes and outcome.accuracy.get("test", 1.0) < hardly(outcome.classes):
        return "Find out why it does not learn before looking at margins.", "margins.md"
    if outcome.verified is False or math.isinf(outcome.margin or 0.0):
        steps = (
            f"{command} --steps 500"
            if outcome.measurable
            else "excite.margins with SearchOptions(steps=500, restarts=5)"
        )
        return f"Search longer, {steps}, and look for masked gradients.", "margins.md#reliability-of-the-search"
    if not outcome.final and outcome.status == "running":
        return "Wait for the end: margins are then measured on more points.", "watch.md"
    if "test" not in outcome.medians or outcome.gap is None:
        return f"Measure both training and test data: {command}.", "margins.md"
    if (outcome.points and min(outcome.points.values()) < MIN_POINTS) or agrees is None:
        points = f"{command} --points 500" if outcome.measurable else "500 points of training and of test data"
        return f"Measure more points: {points}.", "margins.md#comparing-curves"
    if category == "bad":
        return "Train with perturbations: persistent excitation or adversarial training.", "excitation.md"
    if agrees is False:
        return "Choose models by test margins; excitation of the layers makes the gap smaller.", "excitation.md"
    if outcome.verified is None:
        return f"Verify the search: {command}.", "margins.md#reliability-of-the-search"
    if category == "good":
        return (
            f"Try another norm: {command} --norm 2." if outcome.measurable else "Try another norm: norm='2'.",
            "margins.md",
        )
    return "Train with perturbations if it has to be more robust.", "excitation.md"


def _several(outcomes: Sequence[RunOutcome], name: str) -> Headline:
    rows = rank(outcomes)
    diverged = [row.outcome.label for row in rows if row.outcome.status == "diverged"]
    diverged_text = f" Diverged: {', '.join(diverged)}." if diverged else ""
    measured = [row for row in rows if row.outcome.margin is not None and row.outcome.status != "diverged"]
    if len(diverged) == len(rows):
        return Headline(
            "diverged", f"All {len(rows)} runs diverged.", "Lower the learning rate or the radius, or clip gradients.",
            "#panel-losses", docs_url("serve.md#diverged-runs"),
        )  # fmt: skip
    if not measured:
        how = (
            f"excite margins {name}"
            if any(outcome.measurable for outcome in outcomes)
            else "excite.watch(train=, test=)"
        )
        category: Kind = "warning" if diverged else "note"
        text = f"Robustness was not measured in these {len(rows)} runs.{diverged_text}"
        return Headline(category, text, f"Measure it: {how}.", "", docs_url("margins.md"))
    if not any(row.outcome.margin for row in measured):
        return _inaccurate(measured, len(rows), diverged_text)
    return Headline(
        "warning" if diverged else "note",
        f"{_order(measured, len(rows))}{diverged_text}",
        _next(measured, name),
        _CHART if measured[0].outcome.final else _PANEL,
        docs_url("serve.md#comparing-runs"),
    )


def _inaccurate(rows: Sequence[Ranked], total: int, diverged_text: str) -> Headline:
    """All that was measured misclassifies half of the test data or more."""
    best = rows[0].outcome
    accurate = f"; the most accurate is {best.label}, {best.accuracy['test']:.0%}" if "test" in best.accuracy else ""
    return Headline(
        "bad",
        f"Not accurate: {'each' if len(rows) == total else len(rows)} of {total} runs misclassifies half of the test data or more, so that "
        f"the median margins are 0{accurate}.{diverged_text}",
        "Train longer, or find out why they do not learn, before comparing margins.",
        _CHART if best.final else _PANEL,
        docs_url("serve.md#comparing-runs"),
    )


def _order(rows: Sequence[Ranked], total: int) -> str:
    """Who is first, who shares its place, who follows."""

    def named(row: Ranked) -> str:
        return f"{row.outcome.label} ({row.outcome.margin_text})"

    first = [row for row in rows if row.rank == 1]
    lower = [row for row in rows if row.rank is not None and row.rank > 1]
    apart = [row for row in rows if row.rank is None]
    if len(first) > 1:
        text = f"Undecided which of {total} is most robust: {', '.join(map(named, first))} are within noise"
    elif len(rows) == 1:
        text = f"Only {named(first[0])} was measured"
    else:
        size = describe(first[0].outcome.margin or 0.0, first[0].outcome.norm, first[0].outcome.unit)
        text = (
            f"Most robust of {total}: {first[0].outcome.label}, where a change of {size} is enough to change half of the "
            "decisions on test data"
        )
    if lower:
        text += f"; then {', '.join(map(named, lower))}"
    if apart:
        text += f"; not comparable, since less accurate: {', '.join(map(named, apart))}"
    return f"{text}."


def _next(rows: Sequence[Ranked], name: str) -> str:
    best = [row for row in rows if row.rank == 1]
    measurable = all(row.outcome.measurable for row in best)
    command = f"excite margins {name}" if measurable else "excite.margins with"
    if any(row.outcome.verified is False for row in best):
        steps = "--steps 500" if measurable else "SearchOptions(steps=500)"
        return f"Search longer where the search shows signs of failure, {command} {steps}: its margins may be smaller."
    if len(best) > 1:
        points = f"{command} --points 500" if measurable else "500 points of each part"
        return f"Measure more points, {points}, or train more seeds, to tell them apart."
    norm = "--norm 2" if measurable else "norm='2'"
    return f"Continue with {best[0].outcome.label}, and verify it in another norm: {command} {norm}."
