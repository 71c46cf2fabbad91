"""Spikes of the loss: does anything that the flight recorder notes move before the loss does, and does QK-norm help?

Not an experiment of the papers. A GPT is trained on text with a learning rate that rises to a value drawn for each seed, with and
without normalized queries and keys, until its loss spikes or its steps are over. The flight recorder notes every step. A warning
is an unusual value of any layer's series. How unusual is calibrated on the quiet windows of half of the runs, by the largest value over
all series; all reported numbers are of the other half.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from excite.data.text import batches, load_text
from excite.probes.base import Deferred, StepContext
from excite.probes.flight_recorder.recorder import FlightRecorder
from excite.probes.flight_recorder.spikes import Floats
from excite.studies.computed import Computed, OnProgress, Outcome, Resumable, StepsScale
from excite.studies.study import Claim, Study, Variant, VariantResult
from excite.train.models.gpt import GPT

if TYPE_CHECKING:
    from matplotlib.figure import Figure
from excite.studies.beyond.spike_warnings import (
    AHEAD,
    ANY,
    LOSS,
    QUANTITIES,
    SpikeRun,
    calibrate,
    choose,
    loss_onset,
    unusualness,
)

PLAIN, NORMALIZED = "plain", "QK-norm"
_OWN = "not in the papers"
_AFTER = 20  # steps that are trained after a spike is found
_WARM_UP = 20  # steps of rising learning rate at the beginning


@dataclass(frozen=True, kw_only=True)
class SpikesScale(StepsScale):
    """The text, the network and the learning rates of a scale."""

    text: str
    model: Mapping[str, int]  # width, depth, heads, context
    batch: int
    rates: tuple[
        float, float, float
    ]  # at the beginning, and the range of the last one, drawn log-uniformly for each seed


SCALES = {
    "quick": SpikesScale(
        name="quick", seeds=24, steps=400, text="python-topics", batch=16, rates=(3e-3, 3e-2, 3.0),
        model={"width": 32, "depth": 2, "heads": 2, "context": 32},
        words="a GPT of 42,000 weights on Python's help texts, 400 steps of 16 × 32 bytes, 24 rates",
    ),
    "paper": SpikesScale(
        name="paper", seeds=75, steps=600, text="moby-dick", batch=16, rates=(1e-3, 3e-3, 1.0),
        model={"width": 384, "depth": 6, "heads": 6, "context": 128},
        words="a GPT of 10.9 million weights on Moby-Dick, at most 600 steps of 16 × 128 bytes in bfloat16, 75 rates",
    ),
}  # fmt: skip


def variants(scale: SpikesScale) -> list[Variant]:
    """Variants that are trained at a scale."""
    base = {
        "text": scale.text, "steps": scale.steps, "batch": scale.batch, "rates": list(scale.rates), "model": dict(scale.model),
    }  # fmt: skip
    return [Variant(PLAIN, {**base, "qk_norm": False}), Variant(NORMALIZED, {**base, "qk_norm": True})]


def last_rate(rates: Sequence[float], seed: int) -> float:
    """The learning rate that the run of a seed ends with, the same for all variants."""
    _, low, high = rates
    return float(low * (high / low) ** np.random.default_rng([seed, 22]).random())


def compute(settings: Mapping[str, Any], seed: int, device: str, folder: Path, on_progress: OnProgress) -> Outcome:
    """Trains one network until its loss spikes or its steps are over."""
    steps, sizes = settings["steps"], settings["model"]
    torch.manual_seed(seed)
    model = GPT(256, **sizes, qk_norm=settings["qk_norm"]).to(device)
    text, drawn = load_text(settings["text"]).to(device), torch.Generator().manual_seed(seed)
    first, last = settings["rates"][0], last_rate(settings["rates"], seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=first, betas=(0.9, 0.999), weight_decay=0.0, fused=device != "cpu"
    )
    recorder = FlightRecorder(steps=max(steps, 200), warn=False)
    recorder.attach(StepContext(model, 0, optimizer=optimizer))
    history, end = recorder.history, steps
    assert history is not None
    reports: dict[str, Any] = _measure(recorder, StepContext(model, 0, optimizer=optimizer))
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = first * (last / first) ** (step / steps) * min(1.0, step / _WARM_UP)
        tokens = batches(text, settings["batch"], sizes["context"] + 1, drawn)
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=device != "cpu"):
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        final = step >= end
        reports |= _measure(recorder, StepContext(model, step, loss.detach(), optimizer=optimizer))
        if history.count:
            end = min(end, step + _AFTER)
        if step % 20 == 0:
            on_progress(step / steps)
        if final:
            break
    reports |= _measure(recorder, StepContext(model, step, optimizer=optimizer, final=True))
    recorder.detach()
    _, losses, table = history.arrays(scaled=True)
    first_report = min(reports.values(), key=lambda report: report["step"], default=None)
    return _outcome(losses, table, history.columns, first_report, last)


def _measure(recorder: FlightRecorder, ctx: StepContext) -> dict[str, Any]:
    """Passes a step to the recorder; reports on spikes that are complete by then."""
    measured = recorder.measure(ctx)
    if isinstance(measured, Deferred):
        measured.compute()
    return ctx.artifacts


def _outcome(
    losses: Floats, table: Floats, columns: Sequence[tuple[str, str]], spike: Mapping[str, Any] | None, rate: float
) -> Outcome:
    """The numbers of one run that do not depend on thresholds; the statistics that warnings are made of are its detail."""
    names = [quantity for quantity, _ in columns]
    unusual = unusualness(np.column_stack([losses, table]))
    statistics = {LOSS: unusual[:, 0]}
    for quantity in QUANTITIES:
        own = [i for i, name in enumerate(names, start=1) if name == quantity]
        statistics[quantity] = unusual[:, own].max(1) if own else np.zeros(len(losses))
    statistics[ANY] = np.max([statistics[quantity] for quantity in QUANTITIES], 0)
    onset = None if spike is None else loss_onset(losses, int(spike["step"]), spike["limit"])
    first = None if spike is None else spike["first"]
    values = {"rate": rate, "spiked": float(spike is not None), "onset": math.nan if onset is None else float(onset)}
    if first is not None:
        values |= {"first_update": float(first["quantity"] == "update"), "first_lead": float(first["lead"])}
    detail = {
        "losses": _rounded(losses),
        "onset": onset,
        "first": None if first is None else [first["quantity"], first["layer"], first["lead"]],
        "statistics": {name: _rounded(series) for name, series in statistics.items()},
    }
    return Outcome(values, detail)


def combine(numbers: Sequence[VariantResult], details: Mapping[str, Sequence[Any]]) -> list[VariantResult]:
    """Calibrates and chooses the warning on the runs with even seeds, and judges it on all."""
    taken = {name: iter(rows) for name, rows in details.items()}
    runs = [_run(next(taken[result.variant])) for result in numbers]
    tuning = [run for run, result in zip(runs, numbers) if result.seed % 2 == 0]
    thresholds = calibrate(tuning)
    chosen = choose(tuning, thresholds)
    held_out = [run for run, result in zip(runs, numbers) if result.seed % 2]
    alarms, quiet = (
        sum(run.false_alarms(chosen, thresholds[chosen]) for run in held_out),
        sum(r.quiet for r in held_out),
    )
    chance = 1 - math.exp(-AHEAD * alarms / max(1, quiet))
    judged = []
    for result, run in zip(numbers, runs):
        values = {
            **result.values,
            "held_out": float(result.seed % 2),
            "chosen": float((ANY, *QUANTITIES).index(chosen)),
            "threshold": thresholds[chosen],
            "quiet": float(run.quiet),
            "false": float(run.false_alarms(chosen, thresholds[chosen])),
            "chance": chance,
        }
        if run.onset is not None:
            lead, loss_lead = run.lead(chosen, thresholds[chosen]), run.lead(LOSS, thresholds[LOSS])
            values |= {"hit": float(lead > 0), "loss_hit": float(loss_lead > 0), "lead": lead}
        judged.append(replace(result, values=values))
    return judged


def _run(detail: Mapping[str, Any]) -> SpikeRun:
    statistics = {
        name: np.array([math.inf if value is None else value for value in series], dtype=np.float64)
        for name, series in detail["statistics"].items()
    }
    return SpikeRun(statistics, detail["onset"])


def _rounded(series: Floats) -> list[float | None]:
    return [float(f"{value:.4g}") if math.isfinite(value) else None for value in series]


def _held_out(n: Mapping[str, VariantResult]) -> bool:
    return all(result.held_out == 1 for result in n.values())


def _spiked(n: Mapping[str, VariantResult]) -> bool:
    return _held_out(n) and any(result.spiked == 1 for result in n.values())


def _over_spikes(n: Mapping[str, VariantResult], name: str) -> float:
    """Mean of a number over the runs of a seed that spiked; NaN if none has it."""
    values = [result.values.get(name, math.nan) for result in n.values() if result.spiked == 1]
    known = [value for value in values if math.isfinite(value)]
    return float(np.mean(known)) if known else math.nan


def claims(scale: SpikesScale) -> list[Claim]:
    """Sentences and the numbers that decide them, seed by seed: seeds are runs, each with its own learning rate."""
    both = (PLAIN, NORMALIZED)
    return [
        Claim(
            "with normalized queries and keys fewer runs spike at the same rates", _OWN,
            "whether the run without QK-norm spiked, minus whether the one with it did", both,
            lambda n: n[PLAIN].spiked - n[NORMALIZED].spiked, above=0.0,
        ),
        Claim(
            "a warning comes before the loss leaves its range in more than half of the spikes", _OWN,
            "fraction of held-out spikes with a warning in the 50 steps before", both,
            lambda n: _over_spikes(n, "hit"), above=0.5, premise=_spiked,
        ),
        Claim(
            "warnings come before spikes more often than false alarms fall there by chance", _OWN,
            "fraction of held-out spikes with a warning in the 50 steps before, minus the fraction expected by chance", both,
            lambda n: _over_spikes(n, "hit") - n[PLAIN].chance, above=0.0, premise=_spiked,
        ),
        Claim(
            "the layers' series warn of more spikes than the loss itself, judged in the same way", _OWN,
            "fraction of held-out spikes with a warning, minus that with a warning from the loss alone", both,
            lambda n: _over_spikes(n, "hit") - _over_spikes(n, "loss_hit"), above=0.0, premise=_spiked,
        ),
        Claim(
            "where a warning comes, it leads the loss by at least ten steps", _OWN,
            "steps from the warning to the loss leaving its range, held-out spikes with a warning", both,
            lambda n: _over_spikes(n, "lead"), above=10.0,
            premise=lambda n: _spiked(n) and math.isfinite(_over_spikes(n, "lead")),
        ),
        Claim(
            "on held-out runs there are fewer than ten false alarms in 10,000 steps", _OWN,
            "false alarms per 10,000 quiet steps", both,
            lambda n: 1e4 * sum(result.false for result in n.values()) / max(1.0, sum(result.quiet for result in n.values())), below=10.0,
            premise=lambda n: _held_out(n) and sum(result.quiet for result in n.values()) > 0,
        ),
        Claim(
            "updates move first", "marin-community/marin, issue 1368 (an observation on one training)",
            "fraction of spikes whose first mover is an update", both, lambda n: _over_spikes(n, "first_update"), above=0.5,
            premise=lambda n: math.isfinite(_over_spikes(n, "first_update")),
        ),
    ]  # fmt: skip


def summary(numbers: Sequence[VariantResult], draws: int = 2000) -> dict[str, tuple[float, float, float]]:
    """Hit rate, median lead and false alarms per 10,000 steps of the held-out runs: value and 95 % interval by resampling runs."""
    held_out = [result for result in numbers if result.held_out == 1]
    if not held_out:
        return {}
    table = np.array(
        [[result.values.get(k, math.nan) for k in ("hit", "lead", "false", "quiet")] for result in held_out]
    )
    rng = np.random.default_rng(0)
    samples = [table, *(table[rng.integers(len(table), size=len(table))] for _ in range(draws))]

    def median(rows: Floats) -> float:
        known = rows[np.isfinite(rows[:, 1]), 1]
        return float(np.median(known)) if len(known) else math.nan

    def hits(rows: Floats) -> float:
        known = rows[np.isfinite(rows[:, 0]), 0]
        return float(known.mean()) if len(known) else math.nan

    medians = {}
    for name, value in (
        ("hit", hits),
        ("lead", median),
        ("false", lambda r: 1e4 * r[:, 2].sum() / max(1, r[:, 3].sum())),
    ):
        values = np.array([value(rows) for rows in samples])
        low, high = (
            np.nanquantile(values[1:], (0.025, 0.975)) if np.isfinite(values[1:]).any() else (math.nan, math.nan)
        )
        medians[name] = (float(values[0]), float(low), float(high))
    return medians


def draw(
    study: Study, scale: Any, details: Mapping[str, list[Any]], numbers: Sequence[VariantResult]
) -> dict[str, tuple[str, Figure]]:
    """Runs by learning rate, the statistic before spikes and in quiet runs, and what each statistic would have warned of."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    colours = {PLAIN: "#d95f02", NORMALIZED: "#1b9e77"}
    for row, (variant, colour) in enumerate(colours.items()):
        for spiked, marker in ((0.0, "o"), (1.0, "X")):
            rates = [result.rate for result in numbers if result.variant == variant and result.spiked == spiked]
            label = f"{variant}, {'spiked' if spiked else 'no spike'} ({len(rates)})"
            jitter = row + 0.16 * np.random.default_rng(row).standard_normal(len(rates))
            left.plot(
                rates, jitter, marker, color=colour, label=label, alpha=0.8, fillstyle="full" if spiked else "none"
            )
    left.set(xscale="log", xlabel="last learning rate", yticks=[0, 1], yticklabels=list(colours), title="Runs")
    left.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    taken = {name: iter(rows) for name, rows in details.items()}
    pairs = [(result, next(taken[result.variant])) for result in numbers]
    chosen = (ANY, *QUANTITIES)[int(numbers[0].chosen)]
    for result, detail in pairs:
        if (onset := detail["onset"]) is not None and result.held_out:
            series = _run(detail).statistics[chosen][max(0, onset - 1 - 2 * AHEAD) : onset + 4]
            at = np.arange(len(series)) - (len(series) - 5)
            middle.plot(at, np.clip(series, 0.3, 1e3), color=colours[result.variant], linewidth=0.6, alpha=0.7)
    middle.axhline(numbers[0].threshold, color="black", linewidth=1, linestyle="--")
    middle.axvline(0, color="black", linewidth=0.8)
    middle.set(yscale="log", xlabel="steps from where the loss leaves its range", ylabel="deviations from the usual size",
               title=f"Held-out spikes: statistic '{chosen}'")  # fmt: skip
    tuning = [_run(detail) for result, detail in pairs if not result.held_out]
    thresholds = calibrate(tuning)
    names = (ANY, *QUANTITIES, LOSS)
    spikes = [_run(detail) for result, detail in pairs if result.held_out and detail["onset"] is not None]
    hits = [[run.lead(name, thresholds[name]) > 0 for run in spikes] for name in names]
    right.barh(
        range(len(names)),
        [sum(result) / max(1, len(result)) for result in hits],
        color=["#7570b3" if name == chosen else "#bbbbbb" for name in names],
    )
    right.set(yticks=range(len(names)), yticklabels=names, xlim=(0, 1), xlabel="held-out spikes warned of",
              title="Each statistic, thresholds calibrated alike")  # fmt: skip
    right.invert_yaxis()
    for axis in (left, middle, right):
        axis.grid(alpha=0.3)
    figure.suptitle(_heading(numbers, len(spikes)), fontsize=11)
    return {
        "figure": (
            f"{study.title}: runs, the statistic before spikes, and the spikes that each statistic warns of",
            figure,
        )
    }


def _heading(numbers: Sequence[VariantResult], spikes: int) -> str:
    figures_of_text = summary(numbers)
    if not figures_of_text:
        return "no held-out runs"
    runs = sum(result.held_out == 1 for result in numbers)
    (hit, *hits), (lead, *leads), (false, *falses) = (figures_of_text[name] for name in ("hit", "lead", "false"))
    return (
        f"Held-out runs: {spikes} of {runs} spiked. Warned of {hit:.0%} [{hits[0]:.0%}, {hits[1]:.0%}], median lead {lead:.0f} steps "
        f"[{leads[0]:.0f}, {leads[1]:.0f}], {false:.1f} false alarms in 10,000 steps [{falses[0]:.1f}, {falses[1]:.1f}]"
    )


STUDY = Study(
    "spikes",
    "What changes before the loss of a language model spikes",
    "no figure of the papers",
    "A GPT on bytes of text, learning rates rising until the loss spikes",
    Computed(
        Resumable(compute),
        {
            "spiked": ("spiked", "{:.2f}"),
            "false": ("false alarms", "{:.2f}"),
            "quiet": ("quiet steps", "{:.0f}"),
        },
        draw,
        "Left: one marker per run, by the learning rate it would end with. Middle: the chosen statistic before the spikes of held-out runs; dashed:\n"
        "its threshold. Right: the fraction of held-out spikes that each statistic would have warned of at its own threshold. The heading has\n"
        "value and 95 % interval, held-out runs drawn with replacement.",
        "Means over all runs, with the range; claims on warnings are judged on runs with odd seeds only. *False alarms* are warnings in quiet steps: all but\n"
        "the 50 before the loss left its range and those after.",
        (
            "AdamW (β 0.9 and 0.999, no decay, no clipping); the learning rate rises geometrically from its first value to one drawn log-uniformly for each seed. A run ends 20 to 30 steps after its first spike.",
            "The loss spikes by the rule of `FlightRecorder`: the smallest of five losses exceeds the mean of the 100 before by 6 standard deviations and by 0.05. It left its range at the first loss above that limit.",
            "Statistic: a series' deviation from the median of the 100 values up to 10 steps before, in median absolute deviations of logarithms (at least 2 %), three steps in a row, updates over the learning rate; "
            "the largest over layers (gradient, update, m, v, residual) or over all of them (any).",
            "Thresholds: 99 % quantile of the largest value in quiet windows of 100 steps of the runs with even seeds, so that one false alarm is expected in 10,000 steps. The statistic is the one that warned of most spikes of those runs.",
        ),
        combine=combine,
    ),
    SCALES,
    variants,
    claims,
    (
        "A learning rate that rises all the time provokes spikes within few steps; training runs at a constant rate may spike in other ways.",
        "At scale paper 96 seeds were planned; the results have those 75 that were done when the time on the GPU was over, taken in their order.",
        "Of the 150 training runs at scale paper 44 spiked, 16 of them in the held-out half, where at least 40 were wanted: fractions of spikes have wide intervals.",
        "Scale quick reads Python's help texts, which need no download and differ between versions of Python.",
    ),
    asks="what warns of loss spikes?",
    seconds={"quick": 190},
)  # fmt: skip
