"""Sizes of perturbations in words, in the unit of the data."""

from __future__ import annotations

import math
from typing import Any, Protocol

_LEVELS = 255  # steps of a pixel between its smallest and its largest value


class InputUnit(Protocol):
    """The range of one element of an input, and whether inputs are images (`excite.margin.normalize.Unit`)."""

    @property
    def low(self) -> float:
        """Smallest value of an element."""

    @property
    def high(self) -> float:
        """Largest value of an element."""

    @property
    def pixels(self) -> bool:
        """Whether an element is a pixel."""


def unit_of(margins: Any) -> InputUnit | None:
    """The unit of `Margins`; None for results without one, such as those of earlier versions."""
    unit: InputUnit | None = getattr(margins, "unit", None)
    return unit


def describe(value: float, norm: str, unit: InputUnit | None = None) -> str:
    """A perturbation size as a phrase.

    Args:
        value: The size.
        norm: "inf", "2" or "1".
        unit: Range of the inputs, or None if it is not known.

    Returns:
        "9/255 per pixel" for images in the sup norm, "0.12 per input value (4 % of their range)" for other inputs, and
        "0.5 in Euclidean distance (2-norm)" in the other norm.
    """
    if not math.isfinite(value):
        return "no size that was tried"
    if norm == "inf" and unit is not None and unit.pixels:
        return short(value, norm, unit)
    if norm == "2":
        return f"{_digits(value)} in Euclidean distance (2-norm)"
    if norm != "inf":
        return f"{_digits(value)} in the {norm}-norm"
    relative = fraction(value, norm, unit)
    return f"{_digits(value)} per input value" + ("" if relative is None else f" ({_percent(relative)} of their range)")


def short(value: float, norm: str, unit: InputUnit | None = None) -> str:
    """The size in a few characters, for a table: "9/255 per pixel" or "0.12"."""
    if not math.isfinite(value):
        return "not reached"
    relative = fraction(value, norm, unit)
    if relative is not None and unit is not None and unit.pixels:
        return f"{_digits(relative * _LEVELS, total=3)}/{_LEVELS} per pixel"
    return _digits(value)


def fraction(value: float, norm: str, unit: InputUnit | None) -> float | None:
    """Size in the sup norm over the range of the inputs; None in other norms or if the range is not known."""
    if norm != "inf" or unit is None or not unit.high > unit.low:
        return None
    return value / (unit.high - unit.low)


def _digits(value: float, total: float = 100) -> str:
    """Two significant digits; a whole number from `total` on."""
    return f"{value:.0f}" if abs(value) >= total else f"{value:.2g}"


def _percent(fraction: float) -> str:
    return f"{_digits(100 * fraction, total=1)} %"
