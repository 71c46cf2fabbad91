"""An audit in words: the findings, and a text for the terminal."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from excite.bounds import Assumption
from excite.probes import LayerRichness, Units
from excite.report.audit.target import Promise

if TYPE_CHECKING:
    from excite.report.audit.result import Audit

PART = {"train": "training", "test": "test"}
IS = {True: "held", False: "failed", None: "not checked"}


def number(value: float | None) -> str:
    if value is None:
        return "none"
    return f"{value:.3g}" if math.isfinite(value) else "infinite"


def unit_counts(units: Units) -> dict[str, int]:
    """Every unit in one of four kinds."""
    n, few = units.points, units.points < units.width
    return {
        "excited": int(units.excited.sum()),
        "never active": int((n == 0).sum()),
        "too few points": int((few & (n > 0)).sum()),
        "too few directions": int((~units.excited & ~few).sum()),
    }


def findings(audit: Audit) -> list[str]:
    found = [_richness(audit), _units(audit), *_stability(audit), *_bounds(audit), _steepness(audit), *_margins(audit)]
    return [sentence for sentence in found if sentence]


def summary(audit: Audit) -> str:
    """A table of layers, what the theorems say, and the other findings."""
    at = "" if audit.step is None else f" at step {audit.step}"
    lines = [f"{audit.name}{at}: {audit.model}", f"data: {audit.data}", ""]
    lines += _table(
        ["layer", "width", "effective rank", "rank", "smallest/largest", "units excited"],
        [_layer_row(one) for one in audit.layers],
    )
    lines += ["", "what theory promises:", *(f"  {line}" for one in audit.promises for line in _bound_lines(one))]
    lines += [f"  {one.theorem}\n    says nothing: {one.why}" for one in audit.silent]
    said = [_richness(audit), _units(audit), _steepness(audit), *_margins(audit)]
    return "\n".join([*lines, "", *(f"• {sentence}" for sentence in said if sentence)])


def _layer_row(one: LayerRichness) -> list[str]:
    c = one.covariance
    share = c.effective_rank.over(one.width)
    units = f"{int(one.units.excited.sum())} of {len(one.units)}" if one.units is not None else one.units_why or "–"
    ends = c.smallest.over(float(c.largest) or 1.0)
    return [
        one.layer, str(one.width), f"{c.effective_rank:.1f} ({share:.0%})", f"{c.rank:.0f}", f"{ends:.1e}", units,
    ]  # fmt: skip


def _bound_lines(one: Promise) -> list[str]:
    sign = "≤" if one.bound.side == "upper" else "≥"
    says = f"{one.bound.quantity} {sign} {number(one.bound.value)}"
    if one.bound.value is None:
        says = f"{one.bound.quantity}: no bound"
    measured = "" if one.truth is None else f"; measured {number(one.truth)}"
    failed = "".join(f"\n    failed: {a.text} ({a.detail})" for a in one.bound.failed)
    return [one.bound.name, f"  {says}{measured}; conditions: {tally(one.bound.assumptions)}{failed}"]


def tally(assumptions: tuple[Assumption, ...]) -> str:
    counts = [(IS[state], sum(1 for a in assumptions if a.held is state)) for state in (True, False, None)]
    return ", ".join(f"{n} {word}" for word, n in counts if n) or "none"


def _richness(audit: Audit) -> str:
    shares = {one.layer: float(one.covariance.effective_rank) / one.width for one in audit.layers}
    least = audit.layers[min(shares, key=lambda name: shares[name])]
    c = least.covariance
    poor = " Weights along the other directions are hardly trained." if shares[least.layer] < 0.5 else ""
    return (
        f"Layer {least.layer} sees the fewest directions for its width: an effective rank of {c.effective_rank:.1f} of "
        f"{least.width} ({shares[least.layer]:.0%}).{poor}"
    )


def hidden(audit: Audit) -> list[LayerRichness]:
    """Layers whose units the theorems ask about: all but the last, where units were judged."""
    return [one for one in list(audit.layers)[:-1] if one.units is not None]


def _units(audit: Audit) -> str:
    judged = hidden(audit)
    if not judged:
        return "" if audit.units_asked else "Units were not judged."
    totals = {k: sum(unit_counts(one.units)[k] for one in judged if one.units is not None) for k in
              ("excited", "never active", "too few points", "too few directions")}  # fmt: skip
    every = sum(totals.values())
    text = f"{totals['excited']} of {every} hidden units are excited: every weight of theirs gets a signal from some point."
    reasons = [
        (totals["never active"], "no point activates"),
        (totals["too few points"], "are activated by fewer points than they have weights"),
        (totals["too few directions"], "see points that leave some direction out"),
    ]
    left = "; ".join(f"{n} {why}" for n, why in reasons if n)
    return text + (f" Of the deficient ones, {left}." if left else "")


def _stability(audit: Audit) -> list[str]:
    found = [one for one in audit.promises if one.bound.name.startswith("Stability")]
    if not found:
        return []
    terms = found[0].bound.terms
    top, limit = terms["sharpness"], terms["limit"]
    held = found[0].bound.assumptions[0].held
    if held is False:
        return [
            f"The loss is {top / limit:.2g} times sharper here than the step size allows ({number(top)} against "
            f"{number(limit)}): gradient descent on all points with this step would leave, so no theorem that rests on it applies."
        ]
    if held is None:
        return [
            f"Whether the step size allows the sharpness of the loss is open: {found[0].bound.assumptions[0].detail}."
        ]
    return [
        f"The step size allows a sharpness of {number(limit)}; the loss has {number(top)} here, {top / limit:.0%} of it."
    ]


def _theory(audit: Audit) -> list[Promise]:
    return [one for one in audit.promises if not one.bound.name.startswith("Stability")]


def _says_something(one: Promise) -> bool:
    return one.bound.value is not None and math.isfinite(one.bound.value)


def _bounds(audit: Audit) -> list[str]:
    theory = _theory(audit)
    if not theory:
        return [f"No {'other ' if audit.promises else ''}theorem speaks about networks and trainings of this kind."]
    said = [one for one in theory if _says_something(one)]
    found = []
    for one in said:
        unsure = "" if one.bound.holds else ", if what was not checked holds"
        least = "at most" if one.bound.side == "upper" else "at least"
        loose = "" if one.ratio is None else f"; measured: {number(one.truth)}"
        found.append(f"{one.bound.name}: {one.bound.quantity} {least} {number(one.bound.value)}{loose}{unsure}.")
    mute = [one for one in theory if not _says_something(one)]
    if mute:
        why = list(dict.fromkeys(a.text for one in mute for a in one.bound.failed))
        names = ", ".join(dict.fromkeys(one.bound.name for one in mute))
        found.append(f"No number from {names}. " + (f"What failed: {'; '.join(why)}." if why else "It is infinite."))
    return found


def _steepness(audit: Audit) -> str:
    one = audit.steepness[0]
    if not one.local:
        return f"Local Lipschitz constants were not measured: {one.why}."
    text = (
        f"At the points looked at, a small change of the input changes the output by up to {number(one.largest)} times its "
        f"length (median {number(one.median('train'))}, 2-norm)."
    )
    if one.guaranteed is None:
        return f"{text} No constant is known for all inputs."
    return f"{text} For all inputs at most {number(one.guaranteed)} is guaranteed."


def _margins(audit: Audit) -> list[str]:
    found = [] if audit.margins else [f"Margins were not measured: {audit.margins_why}."]
    for norm, parts in audit.margins.items():
        medians = ", ".join(f"{PART[part]} {number(m.median)}" for part, m in parts.items())
        doubt = ""
        if any(m.flags for m in parts.values()):
            doubt = " The search shows signs of failure: they may be smaller."
        elif any(m.evidence is None for m in parts.values()):
            doubt = " Whether the search worked was not checked."
        found.append(f"Median margin in the {norm}-norm: {medians}.{doubt}")
    return found


def _table(heads: list[str], rows: list[list[str]]) -> list[str]:
    lines = [heads, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(line, widths)).rstrip() for line in lines]
