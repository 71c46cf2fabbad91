"""Findings of an audit, and its summary for the terminal."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from excite.bounds import Assumption
from excite.probes import LayerRichness, Units
from excite.report.audit.target import TheoremResult
from excite.report.verdict.headline import Headline, headline
from excite.report.verdict.outcome import RunOutcome, from_margins

if TYPE_CHECKING:
    from excite.report.audit.result import Audit

SPLIT_NAMES = {"train": "training", "test": "test"}
IS = {True: "held", False: "failed", None: "not checked"}


def number(value: float | None) -> str:
    """Three significant digits."""
    if value is None:
        return "none"
    return f"{value:.3g}" if math.isfinite(value) else "infinite"


def unit_counts(units: Units) -> dict[str, int]:
    """Number of units that are excited, and of deficient ones by reason."""
    n, few = units.points, units.points < units.width
    return {
        "excited": int(units.excited.sum()),
        "never active": int((n == 0).sum()),
        "too few points": int((few & (n > 0)).sum()),
        "too few directions": int((~units.excited & ~few).sum()),
    }


def first_line(audit: Audit) -> Headline:
    """The first line of an audit, from margins in the sup norm if there are any."""
    known: dict[str, Any] = {
        "label": audit.name,
        "classes": max(2, audit.outputs),
        "measurable": audit.path != "",
    }
    norm = "inf" if "inf" in audit.margins else next(iter(audit.margins), None)
    if norm is None:
        line = headline([RunOutcome(accuracy=audit.accuracy, **known)], name=audit.path)
        line = replace(
            line, text=f"Robustness was not measured: {audit.margins_why}. {_richness(audit)}", link="#layers"
        )
        return (
            line if audit.accuracy else replace(line, action="Read the bounds and Lipschitz constants below instead.")
        )
    line = headline([from_margins(audit.margins[norm], audit.accuracy, **known)], name=audit.path)
    return replace(line, link=f"#chart-margins-{norm}")


def findings(audit: Audit) -> list[str]:
    """Sentences on layers, units, stability, bounds, Lipschitz constants and margins."""
    sentences = [
        _richness(audit),
        _units(audit),
        *_stability(audit),
        *_bounds(audit),
        _lipschitz(audit),
        *_margins(audit),
    ]
    return [sentence for sentence in sentences if sentence]


def summary(audit: Audit) -> str:
    """Table of the layers, results of the theorems, and the other findings."""
    at = "" if audit.step is None else f" at step {audit.step}"
    lines = [f"{audit.name}{at}: {audit.model}", f"data: {audit.data}", ""]
    lines += _table(
        ["layer", "width", "effective rank", "rank", "smallest/largest", "units excited"],
        [_layer_row(layer) for layer in audit.layers],
    )
    lines += ["", "theorems:", *(f"  {line}" for theorem in audit.theorems for line in _bound_lines(theorem))]
    lines += [f"  {theorem.theorem}\n    does not apply: {theorem.why}" for theorem in audit.not_applicable]
    sentences = [_richness(audit), _units(audit), _lipschitz(audit), *_margins(audit)]
    return "\n".join([*lines, "", *(f"• {sentence}" for sentence in sentences if sentence)])


def _layer_row(layer_richness: LayerRichness) -> list[str]:
    c = layer_richness.covariance
    fraction = c.effective_rank.over(layer_richness.width)
    units = (
        f"{int(layer_richness.units.excited.sum())} of {len(layer_richness.units)}"
        if layer_richness.units is not None
        else layer_richness.units_why or "–"
    )
    ends = c.smallest.over(float(c.largest) or 1.0)
    return [
        layer_richness.layer, str(layer_richness.width), f"{c.effective_rank:.1f} ({fraction:.0%})", f"{c.rank:.0f}", f"{ends:.1e}", units,
    ]  # fmt: skip


def _bound_lines(theorem_result: TheoremResult) -> list[str]:
    sign = "≤" if theorem_result.bound.side == "upper" else "≥"
    says = f"{theorem_result.bound.quantity} {sign} {number(theorem_result.bound.value)}"
    if theorem_result.bound.value is None:
        says = f"{theorem_result.bound.quantity}: no bound"
    measured = "" if theorem_result.measured is None else f"; measured {number(theorem_result.measured)}"
    failed = "".join(f"\n    failed: {a.text} ({a.detail})" for a in theorem_result.bound.failed)
    return [
        theorem_result.bound.name,
        f"  {says}{measured}; conditions: {count_assumptions(theorem_result.bound.assumptions)}{failed}",
    ]


def count_assumptions(assumptions: tuple[Assumption, ...]) -> str:
    """As in "3 held, 1 failed"."""
    counts = [(IS[state], sum(1 for a in assumptions if a.held is state)) for state in (True, False, None)]
    return ", ".join(f"{n} {outcome}" for outcome, n in counts if n) or "none"


def _richness(audit: Audit) -> str:
    fractions = {layer.layer: float(layer.covariance.effective_rank) / layer.width for layer in audit.layers}
    poorest = audit.layers[min(fractions, key=lambda name: fractions[name])]
    c = poorest.covariance
    poor = (
        " Its weights along the other directions receive hardly any training signal."
        if fractions[poorest.layer] < 0.5
        else ""
    )
    return (
        f"Layer {poorest.layer} has the lowest effective rank for its width: {c.effective_rank:.1f} of "
        f"{poorest.width} ({fractions[poorest.layer]:.0%}).{poor}"
    )


def hidden(audit: Audit) -> list[LayerRichness]:
    """Layers whose units the theorems depend on: all but the last, where units were measured."""
    return [layer for layer in list(audit.layers)[:-1] if layer.units is not None]


def _units(audit: Audit) -> str:
    layers = hidden(audit)
    if not layers:
        return "" if audit.units_measured else "Units were not measured."
    totals = {k: sum(unit_counts(layer.units)[k] for layer in layers if layer.units is not None) for k in
              ("excited", "never active", "too few points", "too few directions")}  # fmt: skip
    every = sum(totals.values())
    text = f"{totals['excited']} of {every} hidden units are excited: each of their weights receives a training signal."
    reasons = [
        (totals["never active"], "are activated by no point"),
        (totals["too few points"], "are activated by fewer points than they have weights"),
        (totals["too few directions"], "are activated by points that miss some direction"),
    ]
    listed = "; ".join(f"{n} {why}" for n, why in reasons if n)
    return text + (f" Of the deficient ones, {listed}." if listed else "")


def _stability(audit: Audit) -> list[str]:
    result = [theorem for theorem in audit.theorems if theorem.bound.name.startswith("Stability")]
    if not result:
        return []
    terms = result[0].bound.terms
    top, limit = terms["sharpness"], terms["limit"]
    holds = result[0].bound.assumptions[0].held
    if holds is False:
        return [
            f"The sharpness of the loss is {top / limit:.2g} times what the step size allows ({number(top)} against "
            f"{number(limit)}): gradient descent on all points with this step size would not stay here, so theorems that assume it do not apply."
        ]
    if holds is None:
        return [
            f"Whether the step size allows the sharpness of the loss is undecided: {result[0].bound.assumptions[0].detail}."
        ]
    return [
        f"The step size allows a sharpness of {number(limit)}; that of the loss is {number(top)}, {top / limit:.0%} of it."
    ]


def _theory(audit: Audit) -> list[TheoremResult]:
    return [theorem for theorem in audit.theorems if not theorem.bound.name.startswith("Stability")]


def _is_informative(theorem_result: TheoremResult) -> bool:
    return theorem_result.bound.value is not None and math.isfinite(theorem_result.bound.value)


def _bounds(audit: Audit) -> list[str]:
    theory = _theory(audit)
    if not theory:
        return [f"No {'other ' if audit.theorems else ''}theorem applies to this network and training."]
    informative = [theorem for theorem in theory if _is_informative(theorem)]
    sentences = []
    for theorem in informative:
        unsure = "" if theorem.bound.holds else ", if the unchecked assumptions hold"
        side = "at most" if theorem.bound.side == "upper" else "at least"
        loose = "" if theorem.ratio is None else f"; measured: {number(theorem.measured)}"
        sentences.append(
            f"{theorem.bound.name}: {theorem.bound.quantity} {side} {number(theorem.bound.value)}{loose}{unsure}."
        )
    uninformative = [theorem for theorem in theory if not _is_informative(theorem)]
    if uninformative:
        why = list(dict.fromkeys(a.text for theorem in uninformative for a in theorem.bound.failed))
        names = ", ".join(dict.fromkeys(theorem.bound.name for theorem in uninformative))
        sentences.append(f"No bound from {names}: " + (f"{'; '.join(why)} (failed)." if why else "it is infinite."))
    return sentences


def _lipschitz(audit: Audit) -> str:
    constants = audit.lipschitz[0]
    if not constants.local:
        return f"Local Lipschitz constants were not measured: {constants.why}."
    text = (
        f"Local Lipschitz constant (2-norm) at the measured points: at most {number(constants.largest)}, "
        f"median {number(constants.median('train'))} on training points."
    )
    if constants.guaranteed is None:
        return f"{text} No upper bound for all inputs is known."
    return f"{text} Guaranteed for all inputs: at most {number(constants.guaranteed)}."


def _margins(audit: Audit) -> list[str]:
    sentences = [] if audit.margins else [f"Margins were not measured: {audit.margins_why}."]
    for norm, by_split in audit.margins.items():
        medians = ", ".join(f"{SPLIT_NAMES[split]} {number(m.median)}" for split, m in by_split.items())
        doubt = ""
        if any(m.flags for m in by_split.values()):
            doubt = " The search shows signs of failure: true margins may be smaller."
        elif any(m.evidence is None for m in by_split.values()):
            doubt = " The search was not verified."
        sentences.append(f"Median margin in the {norm}-norm: {medians}.{doubt}")
    return sentences


def _table(heads: list[str], rows: list[list[str]]) -> list[str]:
    lines = [heads, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(line, widths)).rstrip() for line in lines]
