"""The result of `margins`: distances to the decision boundary, what bounds them, and whether to trust them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from excite._core.checks import Norm, check_count, check_number, check_seed, first_line, shown, to_array
from excite.errors import InputError
from excite.margin.evidence import Evidence, total_evidence
from excite.margin.gap import Gap, ks_gap
from excite.margin.normalize import Unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Margins:
    """Distances of N points to the decision boundary, found by search: upper bounds on the true ones.

    Attributes:
        values: (N,), float64 on the CPU; 0 where misclassified, +inf where no adversarial example was found (`censored`).
        norm: "inf", "2" or "1".
        certified: (N,), lower bounds, or None; also under the name `lower`.
        certified_why: the source of the lower bounds, or why there are none.
        evidence: counts that tell whether the search worked; None if not requested.
        suspect: (N,), points at which the search shows signs of failure; None without evidence.
        perturbations: in the shape, type and device of the inputs, zero where misclassified or censored; None if not
            requested.
        layers: "input", or the layers whose inputs were perturbed (`perturbations` is then a dict by layer; "" is x itself).
        relative: whether each layer's perturbation was measured by the size of that layer's input.
        unit: range of one element of an input, as `bounds` gave it; None if there were none.
        left_out: which searches the budget left out; None if none.

    Example:
        >>> m = excite.margins(model, x, y, norm="inf", bounds=(-3, 3), options=SearchOptions(steps=20))
        >>> m.within(0.02)  # fraction of points misclassified within 0.02
        >>> float(m.gap(m))  # largest distance between two margin curves
        0.0
    """

    values: Tensor
    norm: Norm
    certified: Tensor | None = None
    certified_why: str = "not requested"
    evidence: Evidence | None = None
    suspect: Tensor | None = None
    perturbations: Tensor | dict[str, Tensor] | None = None
    layers: str | tuple[str, ...] = "input"
    relative: bool = False
    unit: Unit | None = None
    left_out: str | None = None

    @property
    def lower(self) -> Tensor | None:
        """(N,): certified lower bounds, or None: the true margin lies between `lower` and `values`."""
        return self.certified

    @property
    def censored(self) -> Tensor:
        """Boolean tensor (N,): no adversarial example found."""
        return torch.isinf(self.values)

    @property
    def flags(self) -> tuple[str, ...]:
        """Reasons not to trust the margins, one sentence each (see `Evidence.flags`)."""
        return self.evidence.flags() if self.evidence else ()

    @property
    def trusted(self) -> bool:
        """Whether evidence was requested and gives no reason to doubt the margins."""
        return self.evidence is not None and not self.flags

    @property
    def median(self) -> float:
        """The median margin; infinite if more than half of the points are censored."""
        return self.quantile(0.5)

    def quantile(self, q: float) -> float:
        """The smallest ε within which at least a fraction q is misclassified.

        Args:
            q: fraction of the points, 0 to 1.

        Returns:
            The distance; for q = 0.5 the median, which for an even number of points is the mean of two.

        Raises:
            InputError: if q is not a number from 0 to 1.
        """
        q = check_number(q, "q", 0, 1)
        ordered = np.sort(self._array())
        if q == 0.5:
            return float(np.median(ordered))
        return float(ordered[min(max(math.ceil(q * len(ordered)) - 1, 0), len(ordered) - 1)])

    def within(self, eps: Any) -> Any:
        """The margin curve at ε: the fraction of points misclassified within ε, counting margins ≤ ε.

        Args:
            eps: one distance, or an array of any shape.

        Returns:
            A number for a number, an array for an array.

        Raises:
            InputError: if a distance is negative or not a number.
        """
        at = to_array("eps", eps)
        if np.isnan(at).any() or (at < 0).any():
            raise InputError(f"eps: expected distances of at least 0; got {shown(eps)}")
        values = self._array()
        counts = np.searchsorted(np.sort(values[np.isfinite(values)]), at, side="right") / len(values)
        return float(counts) if at.ndim == 0 else counts

    def band(self, eps: Any, level: float = 0.95) -> tuple[Any, Any]:
        """Interval of the margin curve at ε for the distribution that the points are a sample of, pointwise (Clopper–Pearson).

        It says how far the fraction within ε may be off because of the number of points, not because of the search.

        Args:
            eps: one distance, or an array of any shape.
            level: probability that the interval at one ε covers.

        Returns:
            Lower and upper end: numbers for a number, arrays for an array.

        Raises:
            InputError: if a distance is negative, or the level is not a probability.
        """
        from scipy.stats import beta

        level, n = check_number(level, "level", 0, 1), len(self)
        count = np.round(np.asarray(self.within(eps)) * n)
        tail = (1 - level) / 2
        low = np.where(count > 0, np.nan_to_num(beta.ppf(tail, count, n - count + 1)), 0.0)
        high = np.where(count < n, np.nan_to_num(beta.ppf(1 - tail, count + 1, n - count), nan=1.0), 1.0)
        return (float(low), float(high)) if count.ndim == 0 else (low, high)

    def gap(self, other: Margins, *, level: float = 0.95, resamples: int = 1000, seed: int = 0) -> Gap:
        """The largest vertical distance between the two margin curves (Kolmogorov–Smirnov), with an interval.

        Args:
            other: margins in the same norm and at the same kind of layers, such as those of the test data.
            level: probability that the interval covers the distance of the two distributions.
            resamples: bootstrap samples for the interval.
            seed: of the bootstrap.

        Returns:
            `Gap` with value, low and high; converts to float.

        Raises:
            InputError: if the two cannot be compared.
        """
        if not isinstance(other, Margins):
            raise InputError(f"expected other Margins; got {shown(other)}")
        if other.norm != self.norm:
            raise InputError(f"expected margins in the same norm; got {self.norm!r} and {other.norm!r}")
        if ((other.layers == "input"), other.relative) != ((self.layers == "input"), self.relative):
            raise InputError(f"expected margins of the same kind; got margins {self._where()} and {other._where()}")
        level, resamples, seed = (
            check_number(level, "level", 0, 1),
            check_count(resamples, "resamples"),
            check_seed(seed),
        )
        return ks_gap(self._array(), other._array(), level, resamples, seed)

    def plot(self, ax: Axes | None = None, *, level: float | None = None, **style: Any) -> Axes:
        """Draws the margin curve, the fraction misclassified within ε against ε, and the band up to the certified bound.

        The curve of the true margins lies in the band: no higher than its dashed upper edge, no lower than the curve.

        Args:
            ax: where to draw; by default a new figure.
            level: also draw the pointwise interval of the curve from the number of points, such as 0.95 (see `band`).
            **style: passed to `Axes.step`, such as `label` and `color`.

        Returns:
            The axes.
        """
        import matplotlib.pyplot as plt

        if ax is None:
            ax = plt.figure().subplots()
        ordered = np.sort(self._array())
        finite = ordered[np.isfinite(ordered)]
        end = 1.05 * finite[-1] if len(finite) and finite[-1] > 0 else 1.0
        at = np.concatenate([[0.0], finite, [end]])
        (line,) = ax.step(at, self.within(at), where="post", **style)
        if level is not None:
            low, high = self.band(at, level)
            ax.fill_between(at, low, high, step="post", color=line.get_color(), alpha=0.3, linewidth=0)
        if self.certified is not None:
            safe = np.sort(self.certified.numpy())
            safe = safe[safe <= end]
            at = np.concatenate([[0.0], safe, [end]])
            upper = np.searchsorted(safe, at, side="right") / len(self.values)
            ax.step(at, upper, where="post", color=line.get_color(), linestyle="--", linewidth=0.8)
            positions = np.unique(np.concatenate([at, finite]))
            upper = np.searchsorted(safe, positions, side="right") / len(self.values)
            ax.fill_between(
                positions, self.within(positions), upper, step="post", color=line.get_color(), alpha=0.15, linewidth=0
            )
        ax.set(
            xlabel=f"ε ({self.norm} norm{'' if self.layers == 'input' else ', ' + self._where()})",
            ylabel="fraction misclassified within ε",
            ylim=(0, 1),
            xlim=(0, end),
        )
        return ax

    def to_dict(self) -> dict[str, Any]:
        """Lists and numbers, ready for JSON.

        Returns:
            A dict that `from_dict` takes; censored margins are None, and perturbations are left out.
        """

        def plain(values: Tensor) -> list[float | None]:
            return [v if math.isfinite(v) else None for v in values.tolist()]

        return {
            "norm": self.norm,
            "values": plain(self.values),
            "certified": None if self.certified is None else plain(self.certified),
            "certified_why": self.certified_why,
            "evidence": None if self.evidence is None else self.evidence.to_dict(),
            "suspect": None if self.suspect is None else self.suspect.tolist(),
            "layers": self.layers if isinstance(self.layers, str) else list(self.layers),
            "relative": self.relative,
            "unit": None if self.unit is None else self.unit.to_dict(),
            "left_out": self.left_out,
        }

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Margins:
        """The inverse of `to_dict`.

        Args:
            stored: what `to_dict` returned, perhaps read from JSON.

        Returns:
            The margins, without perturbations.

        Raises:
            InputError: if it is not such a dict.
        """
        try:
            return cls._from_dict(stored)
        except (KeyError, AttributeError, TypeError, ValueError) as error:
            raise InputError(
                f"expected what Margins.to_dict returns; got {shown(stored)}: {first_line(error)}"
            ) from error

    @classmethod
    def _from_dict(cls, stored: dict[str, Any]) -> Margins:
        def tensor(values: list[float | None]) -> Tensor:
            return torch.tensor([math.inf if v is None else v for v in values], dtype=torch.float64)

        layers = stored.get("layers", "input")  # files of before there was a choice have none
        return cls(
            values=tensor(stored["values"]),
            norm=stored["norm"],
            certified=None if stored["certified"] is None else tensor(stored["certified"]),
            certified_why=stored["certified_why"],
            evidence=None if stored["evidence"] is None else Evidence(**stored["evidence"]),
            suspect=None if stored["suspect"] is None else torch.tensor(stored["suspect"], dtype=torch.bool),
            layers=layers if isinstance(layers, str) else tuple(layers),
            relative=stored.get("relative", False),
            unit=None if stored.get("unit") is None else Unit(**stored["unit"]),
            left_out=stored.get("left_out"),
        )

    def __len__(self) -> int:
        return len(self.values)

    def __str__(self) -> str:
        n, wrong, censored = len(self), int((self.values == 0).sum()), int(self.censored.sum())
        quarter, half, three = (_short(q) for q in (self.quantile(0.25), self.median, self.quantile(0.75)))
        layers_text = "" if self.layers == "input" else f" {self._where()}"
        lines = [
            f"margins{layers_text} of {n} points in the norm {self.norm!r}: median {half}, quartiles {quarter} and {three}",
            f"misclassified {wrong} ({wrong / n:.1%}), no adversarial example found {censored} ({censored / n:.1%})",
        ]
        if self.certified is not None:
            lines.append(
                f"certified: median {_short(float(np.median(self.certified.numpy())))}, by the {self.certified_why}"
            )
        else:
            lines.append(f"certified: nothing ({self.certified_why})")
        if self.left_out is not None:
            lines.append(self.left_out)
        if self.evidence is None:
            lines.append("evidence that the search worked: not requested")
        elif self.trusted:
            lines.append(f"the search worked: {self.evidence}")
        else:
            lines += ["not to be trusted, margins may be much smaller:", *(f"  {flag}" for flag in self.flags)]
        if self.evidence is not None and self.evidence.mended is not None:
            lines.append(f"searched again: {self.evidence.mended} gave smaller ones at {self.evidence.improved} points")
        return "\n".join(lines)

    def _where(self) -> str:
        if isinstance(self.layers, str):
            return f"at the {self.layers}"
        hidden = [name for name in self.layers if name]
        many = f"{len(hidden)} layer{'s' if len(hidden) != 1 else ''}"
        many = many if len(hidden) == len(self.layers) else f"the input and {many}"
        return f"at {many}{', relative to their signals' if self.relative else ''}"

    def _array(self) -> npt.NDArray[np.float64]:
        return np.asarray(self.values, dtype=np.float64)


def concatenate(parts: Sequence[Margins]) -> Margins:
    """The margins of several sets of points, measured with the same settings, as one; evidence is added up, perturbations are left out.

    Raises:
        InputError: if there is none, or they are of different norms or kinds.
    """
    if not parts:
        raise InputError("expected at least one Margins to concatenate")
    first = parts[0]
    if any((p.norm, p.layers, p.relative) != (first.norm, first.layers, first.relative) for p in parts):
        raise InputError("expected margins in the same norm and at the same layers")
    certified = [p.certified for p in parts if p.certified is not None]
    suspect = [p.suspect for p in parts if p.suspect is not None]
    evidence = [p.evidence for p in parts if p.evidence is not None]
    return replace(
        first,
        values=torch.cat([p.values for p in parts]),
        certified=torch.cat(certified) if len(certified) == len(parts) else None,
        suspect=torch.cat(suspect) if len(suspect) == len(parts) else None,
        evidence=total_evidence(evidence) if len(evidence) == len(parts) else None,
        perturbations=None,
        left_out=next((p.left_out for p in parts if p.left_out is not None), None),
    )


def _short(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "never reached"
