"""What changed during a training and what it means, in words, from the history alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from excite.probes.conserved.unchecked import REASONS
from excite.report.history import MetricHistory
from excite.report.trends import Change, binned_median, fall, finite, first_nonfinite, rise, since_step

LARGE = 0.3  # a rank or a steepness that changed by less than this share is not worth a sentence
FLAT = 0.1  # a loss that changed by less than this share stands still
UNEXPLAINED = 1e-2  # drift of a conserved quantity, over the squared weights, that no part of the ledger explains
_NAMED = 3  # layers named in one breath


@dataclass(frozen=True)
class Finding:
    """One sentence. `kind` is "warning" for what one should look at, "good" or "note" otherwise."""

    kind: Literal["warning", "good", "note"]
    text: str


def findings(history: MetricHistory) -> list[Finding]:
    """Remarks on one run; what asks for attention comes first."""
    rules = (
        _nonfinite,
        _loss,
        _ranks,
        _units,
        _steepness,
        _margin,
        _balance,
        _alignment,
        _signs,
        _steady,
        _distance,
        _statistics,
        _labels,
    )
    found = [finding for rule in rules for finding in rule(history)]
    rank = {"warning": 0, "good": 1, "note": 2}
    return sorted(found, key=lambda finding: rank[finding.kind])


def _nonfinite(history: MetricHistory) -> list[Finding]:
    step = first_nonfinite(history["loss/step"])
    if step is None:
        return []
    return [Finding("warning", f"The loss is not a finite number at step {step:,}: training has broken down there. "
                              "A smaller learning rate or radius may help.")]  # fmt: skip


def _loss(history: MetricHistory) -> list[Finding]:
    steps, values = binned_median(history["loss/step"])
    if len(steps) < 2:
        return []
    start, low, now = float(values[0]), float(values.min()), float(values[-1])
    up = rise(history["loss/step"])
    if up is not None and now > start and up.fraction > LARGE:
        return [Finding("warning", f"The loss has risen from {number(up.before)} to {number(now)} since step {up.since:,}, "
                                  "above where it began: training diverges.")]  # fmt: skip
    text = f"The loss went from {number(start)} to {number(now)}"
    if up is not None and up.fraction > LARGE:
        text += f"; it has been lower, {number(low)} at step {up.since:,}"
    return [Finding("note", text + ".")]


def _fallen(history: MetricHistory) -> list[tuple[str, Change]]:
    """Layers whose effective rank fell, the worst first."""
    falls = {layer: fall(series) for layer, series in history.layers("rank/effective").items()}
    found = [(k, d) for k, d in falls.items() if d is not None and d.fraction > LARGE and d.before - d.now >= 1]
    return sorted(found, key=lambda item: -item[1].fraction)


def _ranks(history: MetricHistory) -> list[Finding]:
    shares, lost, fallen = history.layers("rank/share"), _lost(history), _fallen(history)
    names = {layer for layer, _ in fallen}
    risen: list[tuple[str, Change]] = []
    for layer, series in history.layers("rank/effective").items():
        up = rise(series) if layer not in names else None
        if up is not None and up.fraction > LARGE and up.now - up.before >= 1:
            risen.append((layer, up))
    found = []
    for layer, down in fallen[:_NAMED]:
        text = f"Layer {layer}'s input activations fell from rank {number(down.before)} to {number(down.now)} {_since(down)}"
        share = float(finite(shares[layer])[1][-1]) if layer in shares and len(finite(shares[layer])[1]) else 0.0
        seen = (
            f"it now sees about {number(down.now)} of {down.now / share:.0f} directions"
            if share > 0
            else "it sees few directions"
        )
        rest = f"; {lost[layer]}." if layer in lost else ", and its weights along the others are no longer excited."
        found.append(Finding("warning", f"{text}: {seen}{rest}"))
    if (more := len(fallen) - _NAMED) > 0:
        found.append(Finding("warning", f"{more} more layer{'s' if more > 1 else ''} lost rank."))
    if risen:
        listed = "; ".join(
            f"{layer} from {number(up.before)} to {number(up.now)} {_since(up)}" for layer, up in risen[:_NAMED]
        )
        rest = f", and {len(risen) - _NAMED} more" if len(risen) > _NAMED else ""
        found.append(Finding("good", f"Layers gained rank, they see more directions of their input: {listed}{rest}."))
    return found


def _lost(history: MetricHistory) -> dict[str, str]:
    """By layer "units 3, 17 and 40 are no longer excited": `rank/unit/LAYER/UNIT` is 1 from the step at which a unit stopped
    being excited, 0 from the step at which it was again."""
    named: dict[str, list[int]] = {}
    for name, series in history.layers("rank/unit").items():
        layer, _, unit = name.rpartition("/")
        values = finite(series)[1]
        if layer and unit.isdecimal() and len(values) and values[-1] > 0.5:
            named.setdefault(layer, []).append(int(unit))
    return {
        layer: f"{_units_listed(sorted(units))} {'is' if len(units) == 1 else 'are'} no longer excited"
        for layer, units in named.items()
    }


def _units(history: MetricHistory) -> list[Finding]:
    """Layers whose rank fell say so themselves; `rank/deficient/LAYER` is the share of all units."""
    found = []
    lost, told = _lost(history), {layer for layer, _ in _fallen(history)[:_NAMED]}
    for layer, text in lost.items():
        if layer not in told:
            found.append(Finding("warning", f"In layer {layer}, {text} by the example."))
    for layer, series in history.layers("rank/deficient").items():
        up = rise(series)
        if up is not None and layer not in lost and up.now - up.before >= 0.05:
            text = f"In layer {layer}, {up.now:.0%} of the units are not excited by the example, {up.before:.0%} at best before"
            found.append(
                Finding(
                    "warning", f"{text} ({_since(up)}): nothing in training bounds their weights along some directions."
                )
            )
    return found


def _steepness(history: MetricHistory) -> list[Finding]:
    found = []
    for key in ("trajectory/mean", "lipschitz/mean", "trajectory/lipschitz"):
        for layer, series in history.of(key).items():
            up, down = rise(series), fall(series)
            if up is not None and up.before > 0 and up.fraction > LARGE:
                loss = binned_median(since_step(history["loss/step"], up.since))[1]
                flat = len(loss) >= 2 and abs(loss[-1] - loss[0]) <= FLAT * abs(loss[0])
                text = f"The function became {number(up.ratio)} times steeper at the training points {_since(up)}"
                text += f" (seen at {layer})" if layer else ""
                if flat:
                    found.append(
                        Finding("warning", f"{text} while the loss hardly moved: it fits details, which costs margin.")
                    )
                else:
                    found.append(Finding("note", f"{text}, while the loss moved too."))
            elif down is not None and down.now > 0 and down.fraction > LARGE:
                found.append(
                    Finding(
                        "good",
                        f"The function became {number(1 / down.ratio)} times flatter at the training points {_since(down)}.",
                    )
                )
        if found:
            return found[:_NAMED]
    return found


def _margin(history: MetricHistory) -> list[Finding]:
    for key in ("margin/median", "margins/median"):
        for layer, series in history.of(key).items():
            where = f" ({layer})" if layer else ""
            down, up = fall(series), rise(series)
            # Margins of a network that has not learned yet are large for no good reason: a fall from there is no news.
            if down is not None and down.fraction > LARGE and down.since > 0:
                return [
                    Finding(
                        "warning",
                        f"The median margin{where} fell from {number(down.before)} to {number(down.now)} {_since(down)}: smaller changes of the input change decisions.",
                    )
                ]
            if up is not None and up.fraction > LARGE:
                return [
                    Finding(
                        "good",
                        f"The median margin{where} grew from {number(up.before)} to {number(up.now)} {_since(up)}.",
                    )
                ]
    return []


def _balance(history: MetricHistory) -> list[Finding]:
    def last(key: str) -> dict[str, float]:
        return {law: float(finite(s)[1][-1]) for law, s in history.layers(key).items() if len(finite(s)[1])}

    unchecked = last("conservation/unchecked")
    rests = {law: rest for law, rest in last("conservation/rest").items() if law not in unchecked}
    moved = last("conservation/drift")
    worst = max(rests, key=lambda law: rests[law], default=None)
    if worst is not None and rests[worst] > UNEXPLAINED:
        text = (
            f"The balance of {worst} drifted by {rests[worst]:.1%} of its squared weights without an explanation by step size, "
            "momentum or decay: something else changes these weights."
        )
        return [Finding("warning", text), *_unchecked(unchecked, history)]
    checked = [value for law, value in moved.items() if law not in unchecked]
    if checked and max(checked) > 0:
        tail = f"; step size, momentum and decay explain it to within {max(rests.values()):.1g}" if rests else ""
        text = f"The balance of layers moved by up to {max(checked):.2%} of the squared weights{tail}."
        return [Finding("note", text), *_unchecked(unchecked, history)]
    return _unchecked(unchecked, history)


def _unchecked(laws: Mapping[str, float], history: MetricHistory) -> list[Finding]:
    """Laws whose drift is explained by definition, and why."""
    if not laws:
        return []
    names = list(laws)
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    reasons = [REASONS.get(key, key) for key in history.layers("conservation/label")]
    why = f": {'; '.join(reasons)}" if reasons else ""
    return [Finding("note", f"The balance of {', '.join(names[:_NAMED])}{more} was not checked{why}.")]


def _alignment(history: MetricHistory) -> list[Finding]:
    listed = []
    for layer, series in history.layers("alignment/aligned").items():
        up = rise(series)
        if up is not None and up.fraction > LARGE and up.now > 0.5:
            listed.append(f"{layer} from {up.before:.2f} to {up.now:.2f}")
    if not listed:
        return []
    more = f", and {len(listed) - _NAMED} more" if len(listed) > _NAMED else ""
    return [
        Finding(
            "note", f"Neighbouring layers turned towards each other (1 is aligned): {'; '.join(listed[:_NAMED])}{more}."
        )
    ]


def _signs(history: MetricHistory) -> list[Finding]:
    stable, since = finite(history["signs/stable"]), finite(history["signs/since"])
    if not len(stable[1]) or not len(since[1]):
        return []
    steps, now = int(since[1][-1]), int(since[0][-1])
    if stable[1][-1] > 0.5:
        return [
            Finding(
                "note",
                f"No weight has changed its sign for {steps:,} steps, since step {now - steps:,}: the stable sign regime has held since then.",
            )
        ]
    changed = finite(history["signs/changed"])[1]
    if not len(changed):
        return []
    return [Finding("note", f"Signs still change: {changed[-1]:.2%} of the weights changed theirs lately.")]


def _steady(history: MetricHistory) -> list[Finding]:
    """(τ, φ)-steady, unless φ still grows: then the last update is always the largest, and that is no news."""
    if first_nonfinite(history["loss/step"]) is not None:
        return []
    listed = []
    for layer, series in history.layers("trajectory/phi").items():
        tau = history[f"trajectory/tau/{layer}"][1]
        up = rise(since_step(series, series[0][-1] // 2)) if len(tau) else None
        if up is None or up.fraction > LARGE:
            continue
        if np.isfinite(series[1][-1]) and np.isfinite(tau[-1]):
            since = f"since step {tau[-1]:,.0f}" if tau[-1] > 0 else "since the start"
            listed.append(f"{number(float(series[1][-1]))} at layer {layer} {since}")
    if not listed:
        return []
    more = f", and {len(listed) - _NAMED} more" if len(listed) > _NAMED else ""
    return [Finding("note", f"Updates are steady: none was seen above {'; '.join(listed[:_NAMED])}{more}.")]


_LABEL_TEXTS = {
    "random": "The trajectory's values are those of the sub-networks that dropout, or other random layers, drew.",
    "coupled": "The trajectory's values are not those of single samples: batch normalization couples the batch.",
    "repeated": "Several backward passes went through one forward pass: the trajectory counts the first.",
}


def _labels(history: MetricHistory) -> list[Finding]:
    """What the trajectory's values are not."""
    return [
        Finding("note", text) for label, text in _LABEL_TEXTS.items() if len(history[f"trajectory/label/{label}"][1])
    ]


def _distance(history: MetricHistory) -> list[Finding]:
    values = finite(history["distance/relative"])[1]
    if not len(values) or values[-1] <= 0:
        return []
    return [Finding("note", f"The weights have moved by {values[-1]:.0%} of their initial norm.")]


def _statistics(history: MetricHistory) -> list[Finding]:
    """Which statistics normalizations used when layers were measured: `rank/statistics/SOURCE` counts them."""
    series = {source: one for source, one in history.layers("rank/statistics").items() if len(one[0])}
    if not series:
        return []
    last = max(int(steps[-1]) for steps, _ in series.values())
    counts = {source: int(values[-1]) for source, (steps, values) in series.items() if steps[-1] == last}
    said = "; ".join(f"{counts[source]} {text}" for source, text in _STATISTICS_TEXTS.items() if source in counts)
    text = f"Statistics of the normalizations when layers were measured: {said}."
    changed = len(counts) < len(series) or any(len(set(values)) > 1 for _, values in series.values())
    if changed:
        text += " It was not the same at all steps: ranks before and after such a change do not compare."
    return [Finding("warning" if changed or "few" in counts else "note", text)]


_STATISTICS_TEXTS = {
    "example": "with those of the example, as in training",
    "running": "with running statistics, because they are in evaluation mode",
    "few": "with running statistics, because the example has one value per channel: those of an untrained network at first",
}


def number(value: float) -> str:
    """Three digits, or all that stand before the point."""
    return (
        f"{value:,.0f}"
        if abs(value) >= 100
        else f"{value:.2g}"
        if abs(value) < 0.1 or abs(value) >= 10
        else f"{value:.2f}".rstrip("0").rstrip(".")
    )


def _since(change: Change) -> str:
    return f"since step {change.since:,}" if change.since else "since the start"


def _units_listed(units: Sequence[int]) -> str:
    if len(units) == 1:
        return f"unit {units[0]}"
    if len(units) <= 5:
        return f"units {', '.join(map(str, units[:-1]))} and {units[-1]}"
    return f"units {', '.join(map(str, units[:4]))} and {len(units) - 4} more"
