"""Margins of training and test points while a network trains, and the gap between them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from excite._core.calls import Pick, pick_output
from excite._core.checks import check_count, check_dense, check_number, first_line, parse_norm
from excite._core.distributed import rank_and_size
from excite._core.preserve import device_of, eval_mode
from excite._core.warn import say
from excite._core.wrappers import is_sharded
from excite.errors import ExciteError, InputError, ModelError, one_line
from excite.probes.base import Probe, StepContext, Values
from excite.probes.findings import Finding, MetricSeries, Panel, number
from excite.probes.schedules import PaidSchedule, Schedule

if TYPE_CHECKING:
    from excite.margin import Margins

PARTS = ("train", "test")
_FIRST = 8  # points per part that are timed before it is decided how many are measured
_NAMES = {"train": "training", "test": "test"}
_CLEAR = 0.1  # chance level up to which a gap below it is worth a sentence: some 370 points per part

Pair = tuple[Tensor, Tensor]
_Measure = Callable[[str, slice, float], "Margins"]  # of points of a part, until a time


class _TimeUp(ExciteError):
    """The time for a measurement is used up."""


class MarginGap(Probe):
    """Distances of training and of test points to the decision boundary, found by attack, and the gap between them.

    Records, for each part that was given:
        ``margin_gap/median/PART``: median over the points.
        ``margin_gap/low/PART``: a tenth of the points are closer than this.
        ``margin_gap/accuracy/PART``: fraction of the points that are classified correctly.
        ``margin_gap/censored/PART``: fraction for which no adversarial example was found; they count as infinitely far.
        ``margin_gap/points/PART``: number of points.
    and of the two together:
        ``margin_gap/gap``: largest vertical distance between the two margin curves (Kolmogorov–Smirnov).
        ``margin_gap/chance``: distance that two samples of this size from one distribution exceed once in 20.

    During training a few points are searched, each from the perturbation found last; at the start and at the end, which no budget
    covers, as many as `seconds` allow, at the end with the search of `excite.margins` and its evidence. A search that is not done by
    then is abandoned: where not even a few points are searched in half of the time, the end is measured like the start, as many points as
    before first. With several processes each measures its part of the points.

    Args:
        train: Points (N, ...) and labels (N,) of the training data, or None.
        test: The same of the test data.
        schedule: When to measure during training. Default: as often as 2.7 % of the training time pays for, and 1.8 seconds in
            advance: 3 % of ten minutes, and several measurements in a training of a few seconds.
        points: Largest number of points per part during training.
        final_points: The same at the end.
        seconds: Largest time of the measurement at the start, and of the one at the end; the pass of the model that is under way
            then is the last.
        key: Keyword under which the model takes its input, such as "pixel_values". Default: the first argument.
        **options: `norm`, `bounds`, `normalize`, `threshold` and `output` of `excite.margins`.

    Raises:
        InputError: If there is not one label for each point, or neither part.

    Example:
        >>> from excite.probes import Loss, MarginGap
        >>> probes = [Loss(), MarginGap((x[:4], y[:4]), (x[4:], y[4:]), norm="2")]
    """

    name = "margin_gap"
    reduction = "first"
    at_end = True
    panel = Panel(
        "margin_gap",
        "Closest points and accuracy",
        "Of the same samples of the training and the test data as the margins above: the margin of the closest tenth of the "
        "points, the accuracy, and the fraction for which the search found no adversarial example.",
        (
            ("median", "median margin"),
            ("gap", "largest distance between the two margin curves"),
            ("chance", "distance explained by chance"),
            ("low", "margin of the closest tenth"),
            ("accuracy", "fraction classified correctly"),
            ("censored", "fraction without an adversarial example"),
        ),
        order=5,
        hidden=("points", "median", "gap", "chance"),  # the first chart of a page shows these
    )

    def __init__(
        self,
        train: Pair | None = None,
        test: Pair | None = None,
        schedule: Schedule | None = None,
        *,
        points: int = 64,
        final_points: int = 500,
        seconds: float = 60.0,
        key: str | None = None,
        **options: Any,
    ):
        super().__init__(PaidSchedule(0.027, advance=1.8) if schedule is None else schedule)
        data = {split: pair for split, pair in (("train", train), ("test", test)) if pair is not None}
        if not data:
            raise InputError("MarginGap: expected points and labels, train=(x, y), test=(x, y) or both; got neither")
        self.data = {split: _checked(pair, split) for split, pair in data.items()}
        self.points, self.final_points = check_count(points, "points"), check_count(final_points, "final_points")
        self.seconds = check_number(seconds, "seconds", 0)
        self.options = _checked_options(options)
        for split, (x, _) in self.data.items():
            _check_range(x, split, self.options)
        self.key = key
        self._sizes = {split: min(self.points, len(y)) for split, (_, y) in self.data.items()}  # during training
        self._perturbations: dict[str, Tensor] = {}  # perturbations found last
        self._batch: int | None = None

    def attach(self, ctx: StepContext) -> None:
        """Checks that points and labels suit the model."""
        if is_sharded(ctx.model):
            raise ModelError(
                "margins of a model whose weights are sharded (FSDP) are not measured: leave train and test out"
            )
        for split, (x, y) in self.data.items():
            self._try(ctx.model, split, x[:2], y)

    def measure(self, ctx: StepContext) -> Values:
        """Margins of a few points, or of many at the end; see the class."""
        if ctx.final:
            return self._measure_end(ctx)
        if ctx.step == 0:
            return self._measure_start(ctx)
        points_here = {split: self._own_count(n) for split, n in self._sizes.items()}
        results = self._together(
            ctx, lambda: {split: self._track(ctx.model, split, slice(0, n)) for split, n in points_here.items()}
        )
        return {} if results is None else _values(results)

    # -- the measurements ----------------------------------------------------------------------------------------
    def _measure_start(self, ctx: StepContext) -> Values:
        began = time.monotonic()
        points_here = {split: self._own_count(n) for split, n in self._sizes.items()}

        def measure() -> dict[str, Margins]:
            results = self._within(points_here, self._tracker(ctx.model), began + self.seconds)
            self._sizes |= {split: len(margins) * rank_and_size()[1] for split, margins in results.items()}
            return results

        results = self._together(ctx, measure)
        if results is None:
            return {}
        ctx.messages.append(self._line("at the start", results, time.monotonic() - began))
        return _values(results)

    def _measure_end(self, ctx: StepContext) -> Values:
        began = time.monotonic()
        points_wanted = {split: min(self.final_points, len(y)) for split, (_, y) in self.data.items()}
        if rank_and_size()[0] == 0:
            points = " and ".join(f"{n} {_NAMES[split]}" for split, n in points_wanted.items())
            say(f"measuring margins at the end: {points} points, at most {self.seconds:g} s")
        points_here = {split: self._own_count(n) for split, n in points_wanted.items()}

        def measure() -> dict[str, Margins]:
            end = began + self.seconds
            results = self._within(points_here, self._searcher(ctx.model), end, began + self.seconds / 2)
            first = max(map(len, self._perturbations.values()), default=_FIRST)  # there was time for as many before
            return results or self._within(points_here, self._tracker(ctx.model), end, first=first)

        results = self._together(ctx, measure)
        if results is None:
            ctx.messages.append("margins at the end: none, since the model returns NaN or infinite values")
            return {}
        ctx.messages.append(self._line("at the end", results, time.monotonic() - began))
        if not results:
            return {}
        for split, margins in results.items():
            ctx.artifacts[f"margins-{margins.norm}-{split}"] = {**margins.to_dict(), "step": ctx.step}
        ctx.artifacts["summary"] = {
            "step": ctx.step,
            "accuracy": {split: _accuracy(margins) for split, margins in results.items()},
            "points": {split: len(margins) for split, margins in results.items()},
        }
        return _values(results)

    def _together(self, ctx: StepContext, measure: Callable[[], dict[str, Margins]]) -> dict[str, Margins] | None:
        """The margins of all processes, each of which measures its part of the points; None if the model has diverged."""
        error: Exception | None = None
        results: dict[str, Margins] | None = None
        try:
            results = measure()
        except Exception as raised:
            error = raised
            if isinstance(raised, ModelError) and not self._finite(ctx.model):
                error = None
        if rank_and_size()[1] > 1:  # also after an exception: the others wait here
            by_rank: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(by_rank, results if error is None else f"{type(error).__name__}: {one_line(error)}")
            failed = [other for other in by_rank if isinstance(other, str)]
            if failed and error is None:
                error = ModelError(f"another process raised {failed[0]}")
            elif not failed:
                results = None if None in by_rank else _gathered(by_rank)
        if error is not None:
            raise error
        return results

    def _finite(self, model: nn.Module) -> bool:
        """Whether the outputs at the points are finite numbers."""
        with eval_mode(model), torch.no_grad():
            for split, n in self._sizes.items():
                x, _ = self._points(split, slice(0, self._own_count(n)), model)
                f = pick_output(self._called(model)(x), self.options.get("output"))
                if not bool(torch.isfinite(f).all()):
                    return False
        return True

    def _track(self, model: nn.Module, split: str, rows: slice, end: float = math.inf) -> Margins:
        """The quick search, from the perturbations found last; these are replaced. Raises `_TimeUp` after `end`."""
        from excite.margin.measure import tracked_margins

        x, y = self._points(split, rows, model)
        before = self._perturbations.get(split)
        start = None if before is None or rows.stop > len(before) else before[rows]
        options = {**self.options, "output": self._output(end)}
        margins = self._with_memory(
            lambda batch: tracked_margins(self._called(model), x, y, start, batch=batch, **options)
        )
        d = margins.perturbations
        assert isinstance(d, Tensor)
        self._perturbations[split] = (
            d.cpu() if rows.start == 0 or before is None else torch.cat([before[: rows.start], d.cpu()])
        )
        return replace(margins, perturbations=None)

    def _tracker(self, model: nn.Module) -> _Measure:
        return lambda split, rows, end: self._track(model, split, rows, end)

    def _searcher(self, model: nn.Module) -> _Measure:
        """The search of `excite.margins`, with evidence."""
        from excite.margin import SearchOptions, margins

        options = SearchOptions(restarts=3, certify=False)

        def measure(split: str, rows: slice, end: float) -> Margins:
            x, y = self._points(split, rows, model)
            search_options = {**self.options, "output": self._output(end)}
            return self._with_memory(
                lambda batch: margins(self._called(model), x, y, batch=batch, options=options, **search_options)
            )

        return measure

    def _output(self, end: float) -> Pick:
        """Picks the model's output; raises `_TimeUp` after the time `end`."""
        output = self.options.get("output")
        if end == math.inf:
            return output

        def pick(returned: Any) -> Tensor:
            if time.monotonic() > end:
                raise _TimeUp(f"not done within {self.seconds:g} s")
            return pick_output(returned, output)

        return pick

    # -- points and time -----------------------------------------------------------------------------------------
    def _points(self, split: str, rows: slice, model: nn.Module) -> Pair:
        """Points `rows` of this process's share, on the device of the model."""
        rank, size = rank_and_size()
        x, y = self.data[split]
        device = device_of(model)
        return x[rank::size][rows].to(device), y[rank::size][rows].to(device)

    def _own_count(self, count: int) -> int:
        """How many of the first `count` points this process measures; at least one."""
        rank, size = rank_and_size()
        return max(1, len(range(rank, count, size)))

    def _within(
        self,
        num_points: dict[str, int],
        measure: _Measure,
        end: float,
        first_end: float | None = None,
        first: int = _FIRST,
    ) -> dict[str, Margins]:
        """Measures as many of the points as there is time until `end`: the first ones of each part, which are timed, then more.

        The first ones are abandoned at `first_end`; without them the result is empty.
        """
        max_points = max(num_points.values())
        done, count, each = 0, min(first, max_points), 0.0
        results: dict[str, list[Margins]] = {}
        while count > 0 and (count >= min(_FIRST, max_points - done)):
            start, more = time.monotonic(), {}
            try:
                for split, n in num_points.items():
                    if done < n:
                        more[split] = measure(
                            split, slice(done, min(done + count, n)), end if results else first_end or end
                        )
            except _TimeUp:
                break
            for split, margins in more.items():
                results.setdefault(split, []).append(margins)
            time_now = time.monotonic()
            done, each = done + count, (time_now - start) / count
            count = min(max_points - done, int(0.5 * (end - time_now) / max(each, 1e-9)))
        return {split: _joined(pieces) for split, pieces in results.items()}

    def _with_memory(self, measure: Callable[[int | None], Margins]) -> Margins:
        """With smaller batches where a GPU has not enough memory left beside the training."""
        while True:
            try:
                return measure(self._batch)
            except torch.OutOfMemoryError:
                if self._batch == 1:
                    raise
                self._batch = 64 if self._batch is None else max(1, self._batch // 4)
            torch.cuda.empty_cache()

    # -- checks and words ----------------------------------------------------------------------------------------
    def _try(self, model: nn.Module, split: str, x: Tensor, y: Tensor) -> None:
        """Whether points and labels suit the model: raises if not."""
        from excite.margin.inputs import check_labels, check_outputs, check_points
        from excite.margin.normalize import is_images

        if x.dtype is torch.uint8 and is_images(x):
            raise InputError(
                f"{split}: images of bytes have no margin, since the model takes floating-point numbers: give them as in the training, such as "
                "(x / 255, y)"
            )
        if not x.is_floating_point():
            raise InputError(
                f"{split}: inputs of type {x.dtype} such as token ids have no margin, since they cannot be changed a little: "
                "margins are not measured"
            )
        check_points(x)
        try:
            with eval_mode(model), torch.no_grad():
                f = pick_output(self._called(model)(x.to(device_of(model))), self.options.get("output"))
        except ExciteError:
            raise
        except Exception as error:
            raise ModelError(f"{split}: the model raised {first_line(error)} on points {tuple(x.shape)}") from error
        if not bool(torch.isfinite(f).all()):
            return
        classes = check_outputs(f, x)
        strange = y[(y != 0) & (y != 1)] if classes == 1 else y[y != y.round()]
        if len(strange) and y.is_floating_point():
            raise InputError(
                f"{split}: expected class labels, {'0 or 1' if classes == 1 else f'0 to {classes - 1}'}; got {float(strange[0]):.4g}: "
                "regression targets have no margin, leave train and test out"
            )
        y = y.long() if classes > 1 else y
        check_labels(y, self.data[split][0], classes)

    def _called(self, model: nn.Module) -> nn.Module:
        """The model as a function of the points."""
        from excite.margin.normalize import NormalizedInput

        return model if self.key is None else NormalizedInput(model, None, None, self.key)

    def _line(self, when: str, results: Mapping[str, Margins], seconds: float) -> str:
        if not results:
            return f"margins {when}: none, since {_FIRST} points of each part take longer than {self.seconds:g} s"
        sentences = [
            f"{len(margins)} {_NAMES[split]} points, median {_short(margins.median)}, accuracy {_accuracy(margins):.1%}"
            for split, margins in results.items()
        ]
        text = f"margins {when}: {'; '.join(sentences)}"
        values = _values(results)
        if "gap" in values:
            text += f"; gap {values['gap']:.3f}, by chance up to {values['chance']:.3f}"
        requested = self.final_points if when == "at the end" else self.points
        if any(len(margins) < min(requested, len(self.data[split][1])) for split, margins in results.items()):
            text += f"; fewer points than {requested}, for want of time"
        if when == "at the end" and any(margins.evidence is None for margins in results.values()):
            text += "; quick search without evidence, for want of time"
        return f"{text} ({seconds:.1f} s)"

    def state_dict(self) -> dict[str, Any]:
        """The perturbations found last, the number of points, and what a measurement costs."""
        state: dict[str, Any] = {"found": dict(self._perturbations), "sizes": dict(self._sizes)}
        if isinstance(self.schedule, PaidSchedule):
            state["cost"] = self.schedule.cost
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from the perturbations of a checkpoint."""
        for split, d in state.get("found", {}).items():
            # A start is only a hint: perturbations are checked against the model and these points.
            if split in self.data and d.shape[1:] == self.data[split][0].shape[1:]:
                self._perturbations[split] = d.cpu()
        for split, n in state.get("sizes", {}).items():
            if split in self._sizes:
                self._sizes[split] = min(int(n), len(self.data[split][1]))
        if isinstance(self.schedule, PaidSchedule):
            self.schedule.cost = float(state.get("cost", self.schedule.cost))

    @classmethod
    def findings(cls, history: MetricSeries) -> list[Finding]:
        """Whether training and test margins differ beyond chance."""
        gaps, chances = history["margin_gap/gap"], history["margin_gap/chance"]
        medians = [history[f"margin_gap/median/{split}"] for split in PARTS]
        if not len(gaps[0]) or not all(len(series[0]) for series in (chances, *medians)):
            return []
        gap, chance = float(gaps[1][-1]), float(chances[1][-1])
        train, test = (float(series[1][-1]) for series in medians)
        both = f"the median is {number(train)} on training and {number(test)} on test data"
        if gap > chance:
            more = "larger" if train > test else "smaller" if train < test else "distributed otherwise"
            text = (
                f"Training margins are {more} than test margins"
                if more != "distributed otherwise"
                else ("Training margins are distributed otherwise than test margins")
            )
            text += f": the curves differ by {gap:.2f}, chance explains {chance:.2f}; {both}."
            action = "Choose models by test margins; exciting the layers narrows the gap." if train > test else ""
            return [Finding("warning" if train > test else "note", text, action)]
        if chance <= _CLEAR and test > 0:  # of a network that misclassifies most points the curves agree, too
            return [
                Finding(
                    "good",
                    f"Training and test margins do not differ beyond chance: their curves by {gap:.2f}, two samples of one "
                    f"distribution by up to {chance:.2f}; {both}.",
                )
            ]
        return []


def _checked(pair: Any, split: str) -> Pair:
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(isinstance(tensor, Tensor) for tensor in pair):
        raise InputError(f"{split}: expected points and labels, two tensors (x, y); got {type(pair).__name__}")
    x, y = (check_dense(tensor, split).detach() for tensor in pair)
    if not x.dim() or len(x) == 0 or len(x) != y.numel():
        raise InputError(
            f"{split}: expected points (N, ...) and one label each; got shapes {tuple(x.shape)} and {tuple(y.shape)}"
        )
    return x.clone(), y.reshape(-1).clone()


def _checked_options(options: dict[str, Any]) -> dict[str, Any]:
    known = ("norm", "bounds", "normalize", "threshold", "output")
    for name in options:
        if name not in known:
            raise InputError(f"MarginGap: unknown option {name!r}; expected one of {', '.join(known)}")
    parse_norm(options.get("norm", "inf"), ("inf", "2"))
    check_number(options.get("threshold", 0.5), "threshold")
    return options


def _check_range(x: Tensor, split: str, options: dict[str, Any]) -> None:
    """Raises unless the points, as pixels if `normalize` is given, lie within the bounds."""
    from excite.margin.inputs import points_within
    from excite.margin.normalize import in_pixels

    if not x.is_floating_point():  # refused where the model is known
        return
    try:
        _, pixels, bounds = in_pixels(nn.Identity(), x, options.get("normalize"), options.get("bounds"), "input")
        points_within(bounds, pixels)
    except InputError as error:
        raise InputError(f"{split}: {error}") from None


def _gathered(by_rank: list[dict[str, Margins]]) -> dict[str, Margins]:
    """The margins of all processes by part; empty if none had the time for a part."""
    pieces = {split: [of_rank[split] for of_rank in by_rank if split in of_rank] for split in PARTS}
    return {split: _joined(margins) for split, margins in pieces.items() if margins}


def _joined(pieces: list[Margins]) -> Margins:
    """Margins of several sets of points as one."""
    from excite.margin.result import concatenate

    return pieces[0] if len(pieces) == 1 else concatenate(pieces)


def _accuracy(margins: Margins) -> float:
    return float((margins.values > 0).double().mean())


def _values(results: Mapping[str, Margins]) -> dict[str, float]:
    from excite.margin.gap import chance_gap, ks_of_samples

    values: dict[str, float] = {}
    for split, margins in results.items():
        values |= {
            f"median/{split}": margins.median,
            f"low/{split}": margins.quantile(0.1),
            f"accuracy/{split}": _accuracy(margins),
            f"censored/{split}": float(margins.censored.double().mean()),
            f"points/{split}": float(len(margins)),
        }
    if len(results) == 2:
        train, test = (np.asarray(results[split].values) for split in PARTS)
        values |= {"gap": ks_of_samples(train, test), "chance": chance_gap(len(train), len(test))}
    return values


def _short(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "beyond reach"
