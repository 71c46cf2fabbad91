"""The result of `margins`: distances to the decision boundary, what bounds them, and whether to trust them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from excite._core.checks import Norm, check_count, check_number, check_seed, first_line, shown, to_array
from excite.errors import InputError
from excite.margin.evidence import Evidence
from excite.margin.gap import Gap, ks_gap

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Margins:
    """Distances of N points to the decision boundary, found by search: upper bounds on the true ones.

    values (N,): float64 on the CPU; 0 where misclassified, +inf where nothing broke the point (`censored`).
    certified (N,): lower bounds, or None; `certified_why` says where they come from or why there are none.
    suspect (N,): points at which the search shows signs of failure. flags: the same for the model, a sentence each.
    perturbations: in the shape, type and device of the inputs, zero where misclassified or censored; None if not asked for.
    layers: "input", or the layers whose inputs were perturbed (`perturbations` is then a dict by layer; "" is x itself).
    relative: whether each layer's perturbation was measured by the size of that layer's input.
    evidence: None if not asked for; then nothing is known about whether the search worked.
    """

    values: Tensor
    norm: Norm
    certified: Tensor | None = None
    certified_why: str = "not asked for"
    evidence: Evidence | None = None
    suspect: Tensor | None = None
    perturbations: Tensor | dict[str, Tensor] | None = None
    layers: str | tuple[str, ...] = "input"
    relative: bool = False

    @property
    def censored(self) -> Tensor:
        """(N,): points that were never broken."""
        return torch.isinf(self.values)

    @property
    def flags(self) -> tuple[str, ...]:
        return self.evidence.flags() if self.evidence else ()

    @property
    def trusted(self) -> bool:
        """Whether evidence was gathered and none of it speaks against the margins."""
        return self.evidence is not None and not self.flags

    @property
    def median(self) -> float:
        return self.quantile(0.5)

    def quantile(self, q: float) -> float:
        """The smallest ε within which at least a fraction q is misclassified; the median of an even number is the mean of two."""
        q = check_number(q, "q", 0, 1)
        ordered = np.sort(self._array())
        if q == 0.5:
            return float(np.median(ordered))
        return float(ordered[min(max(math.ceil(q * len(ordered)) - 1, 0), len(ordered) - 1)])

    def within(self, eps: Any) -> Any:
        """The fraction of points misclassified within ε, counting margins ≤ ε: the margin curve at ε.

        A number for a number, an array for an array of any shape.
        """
        at = to_array("eps", eps)
        if np.isnan(at).any() or (at < 0).any():
            raise InputError(f"eps: expected distances of at least 0; got {shown(eps)}")
        values = self._array()
        counts = np.searchsorted(np.sort(values[np.isfinite(values)]), at, side="right") / len(values)
        return float(counts) if at.ndim == 0 else counts

    def gap(self, other: Margins, *, level: float = 0.95, resamples: int = 1000, seed: int = 0) -> Gap:
        """The largest vertical distance between the two margin curves; see `Gap` and `ks_gap` for its interval."""
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

    def plot(self, ax: Axes | None = None, **style: Any) -> Axes:
        """Draw the margin curve, the fraction misclassified within ε against ε; dashed, what is certified."""
        import matplotlib.pyplot as plt

        if ax is None:
            ax = plt.figure().subplots()
        ordered = np.sort(self._array())
        finite = ordered[np.isfinite(ordered)]
        end = 1.05 * finite[-1] if len(finite) and finite[-1] > 0 else 1.0
        at = np.concatenate([[0.0], finite, [end]])
        (line,) = ax.step(at, self.within(at), where="post", **style)
        if self.certified is not None:
            safe = np.sort(self.certified.numpy())
            safe = safe[safe <= end]
            at = np.concatenate([[0.0], safe, [end]])
            most = np.searchsorted(safe, at, side="right") / len(self.values)
            ax.step(at, most, where="post", color=line.get_color(), linestyle="--", linewidth=0.8)
        ax.set(
            xlabel=f"ε ({self.norm} norm{'' if self.layers == 'input' else ', ' + self._where()})",
            ylabel="fraction misclassified within ε",
            ylim=(0, 1),
            xlim=(0, end),
        )
        return ax

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, ready for JSON; censored margins are None. Perturbations are left out."""

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
        }

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Margins:
        """The margins that `to_dict` made a dict of."""
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
        )

    def __len__(self) -> int:
        return len(self.values)

    def __str__(self) -> str:
        n, wrong, never = len(self), int((self.values == 0).sum()), int(self.censored.sum())
        quarter, half, three = (_short(q) for q in (self.quantile(0.25), self.median, self.quantile(0.75)))
        where = "" if self.layers == "input" else f" {self._where()}"
        lines = [
            f"margins{where} of {n} points in the norm {self.norm!r}: median {half}, quartiles {quarter} and {three}",
            f"misclassified {wrong} ({wrong / n:.1%}), never broken {never} ({never / n:.1%})",
        ]
        if self.certified is not None:
            lines.append(
                f"certified: median {_short(float(np.median(self.certified.numpy())))}, by the {self.certified_why}"
            )
        else:
            lines.append(f"certified: nothing ({self.certified_why})")
        if self.evidence is None:
            lines.append("evidence that the search worked: not asked for")
        elif self.trusted:
            lines.append(f"the search worked: {self.evidence}")
        else:
            lines += ["not to be trusted, margins may be much smaller:", *(f"  {flag}" for flag in self.flags)]
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


def _short(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "never reached"
