"""Margins of training and test data in a watch: the points, how they are measured, and what is stored of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from excite._core.calls import Pick
from excite._core.distributed import rank_and_size
from excite._core.preserve import device_of
from excite._core.warn import warn_user
from excite.errors import InputError
from excite.margin.normalize import pixel_range, unit_of
from excite.monitor.points import Points, as_called, check_inputs, draw_parts
from excite.monitor.results import MAX_BYTES, plain_settings, store_points
from excite.probes import Probe
from excite.probes.margin import Margin
from excite.probes.margin_gap import MarginGap

if TYPE_CHECKING:
    from excite.monitor.watcher import Watch

_EXAMPLE = 128  # points on which layers are measured


@dataclass(frozen=True, eq=False)
class LiveMargins:
    """Points drawn from the training and test data, by part, and the settings of `excite.margins` for them."""

    drawn: Mapping[str, Points]
    settings: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def draw(
        cls, model: nn.Module, train: Any, test: Any, *, normalize: Any, bounds: Any, threshold: float
    ) -> LiveMargins:
        """Draws the points, and chooses the bounds if they are not given."""
        drawn = draw_parts(train, test)
        check_inputs(drawn, model)
        drawn = as_called(drawn, model)
        if not drawn and (normalize is not None or bounds is not None):
            raise InputError("normalize and bounds are for margins: give train=, test= or both, or leave them out")
        if bounds is None:
            bounds = getattr(train, "bounds", None) if hasattr(train, "x_train") else None
        settings = {"normalize": normalize, "bounds": pixel_bounds(drawn, bounds, normalize), "threshold": threshold}
        return cls(drawn, settings)

    def example(self, model: nn.Module) -> Any:
        """Points of the training data, or of the test data without these, as a batch for the model; None without points."""
        points = self.drawn.get("train") or self.drawn.get("test")
        if points is None:
            return None
        x = points.x[:_EXAMPLE].to(device_of(model))
        return x if points.key is None else {points.key: x}

    def probes(self, margin_batch: Any, output: Pick) -> list[Probe]:
        """The probes of margins: of `margin_batch`, and of the points drawn."""
        probes: list[Probe] = [] if margin_batch is None else [_margin(margin_batch, output)]
        if self.drawn:
            pairs = {split: (points.x, points.y) for split, points in self.drawn.items()}
            key = next(iter(self.drawn.values())).key
            probes.append(MarginGap(pairs.get("train"), pairs.get("test"), key=key, output=output, **self.settings))
        return probes

    def described(self) -> dict[str, Any]:
        """The settings as JSON, with the unit of the margins if it is known."""
        unit = unit_of(next(iter(self.drawn.values())).x, self.settings.get("bounds"))
        return plain_settings(self.settings) | ({} if unit is None else {"unit": unit.to_dict()})

    def store(self, watch: Watch) -> None:
        """Writes the points into the run of the watch; if they are too large, a warning says so."""
        probe = next((probe for probe in watch.probes if isinstance(probe, MarginGap)), None)
        if watch.run is None or probe is None or rank_and_size()[0] != 0:
            return
        if not store_points(watch.run, probe.data, {**probe.options, "key": probe.key}):
            warn_user(
                f"the points whose margins are measured are not stored, they take more than {MAX_BYTES // 10**6} MB: later commands "
                "need --data"
            )


def pixel_bounds(drawn: Mapping[str, Points], bounds: Any, normalize: Any) -> Any:
    """The bounds of the inputs, if they were not given: (0, 1) for data that are normalized or images within it.

    Images within [−1, 1] that have negative values are taken as scaled to it. Anything else has no bounds.
    """
    if bounds is not None or not drawn:
        return bounds
    if normalize is not None:
        return (0.0, 1.0)
    return pixel_range([points.x for points in drawn.values()])


def _margin(passed: Any, output: Pick) -> Margin:
    if isinstance(passed, Margin):
        return passed
    if not isinstance(passed, tuple | list) or len(passed) != 2:
        raise InputError(f"margin_batch: expected (x, y) or a Margin probe; got {type(passed).__name__}")
    return Margin(passed[0], passed[1], output=output)
