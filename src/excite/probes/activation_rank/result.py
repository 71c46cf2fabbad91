"""Result of `richness`: a value for every layer, and a table of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from excite.probes.activation_rank.units import Units
from excite.probes.spectrum import Spectrum


@dataclass(frozen=True)
class Sampling:
    """A random sample of the patches of a layer: `rows` of `of` patches were measured.

    `error` is the expected root mean square error of the covariance's eigenvalues over the largest of them; an estimate from above,
    from the spread of the patches themselves (`Moments.sampling_error`).
    """

    rows: int
    of: int
    error: float

    def __str__(self) -> str:
        return f"{self.rows} of {self.of} patches, eigenvalues ± {self.error:.2%} of the largest (root mean square)"


@dataclass(frozen=True)
class LayerRichness:
    """Richness of the input of one layer, over rows of length D.

    Attributes:
        layer: Name of the layer.
        kind: Kind of the affine call, such as "linear".
        points: Number of rows.
        covariance: Spectrum of the covariance, a mean over the rows.
        second: Spectrum of the uncentred second moments, a mean over the rows.
        exact: False if the spectra come from a sketch and have a slack.
        sampling: Number of patches used and the error of using no more; None if all were used.
        units: Excitation of the layer's units, if requested.
        units_why: Why there are no units although they were requested.
        units_note: A restriction of what `units` says.

    Example:
        >>> layer = excite.probes.richness(model, x)["0"]
        >>> layer.width, layer.points, float(layer.covariance.rank)
        (4, 6, 4.0)
    """

    layer: str
    kind: str
    points: int
    covariance: Spectrum
    second: Spectrum
    exact: bool  # False: the spectra come from a sketch and have a slack
    sampling: Sampling | None = None
    units: Units | None = None
    units_why: str = ""  # why there are none although requested
    units_note: str = ""  # what is not as it should be about them

    @property
    def width(self) -> int:
        """Number of inputs of the layer."""
        return self.covariance.width

    def row(self, k: int = 10) -> dict[str, Any]:
        """One line of the table. Ranks over the width, eigenvalues over the largest; ends of ranges for sketches."""
        c = self.covariance
        result = {
            "layer": self.layer,
            "width": self.width,
            "points": self.points,
            "effective_rank": c.effective_rank,
            "effective_share": c.effective_rank.over(self.width),
            "participation_ratio": c.participation_ratio,
            "participation_share": c.participation_ratio.over(self.width),
            "rank": c.rank,
            "rank_share": c.rank.over(self.width),
            f"explained_by_{k}": c.explained(k),
            "smallest": c.smallest.over(float(c.largest) or 1.0),
            "second_rank": self.second.rank,
            "second_smallest": self.second.smallest.over(float(self.second.largest) or 1.0),
        }
        if self.units is not None:
            result |= {"units": len(self.units), "deficient": len(self.units.deficient)}
        return result


@dataclass(frozen=True)
class Richness:
    """Result of `richness`. `result[layer]` is a `LayerRichness`; printing shows a table.

    Attributes:
        layers: One `LayerRichness` per affine layer, in order of execution.

    Example:
        >>> result = excite.probes.richness(model, x)
        >>> [layer.layer for layer in result.layers]
        ['0', '2']
    """

    layers: tuple[LayerRichness, ...]

    def __getitem__(self, layer: str) -> LayerRichness:
        for layer_richness in self.layers:
            if layer_richness.layer == layer:
                return layer_richness
        raise KeyError(f"{layer!r}; layers: {', '.join(layer_richness.layer for layer_richness in self.layers)}")

    def __iter__(self) -> Iterator[LayerRichness]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def deficient(self) -> dict[str, list[int]]:
        """Deficient units by layer, for the layers that have some."""
        return {
            layer.layer: layer.units.deficient
            for layer in self.layers
            if layer.units is not None and layer.units.deficient
        }

    def rows(self, k: int = 10) -> list[dict[str, Any]]:
        """The table, one dict a layer."""
        return [layer.row(k) for layer in self.layers]

    def __str__(self) -> str:
        heads = ["layer", "width", "rows", "effective rank", "participation", "rank", "10 explain", "smallest"]
        lines = [heads]
        for layer, r in zip(self.layers, self.rows()):
            line = [layer.layer, str(layer.width), str(layer.points)]
            for name in ("effective", "participation"):
                value = r["effective_rank" if name == "effective" else "participation_ratio"]
                line.append(f"{value:.1f} ({r[name + '_share']:.0%})")
            line += [f"{r['rank']:.0f} ({r['rank_share']:.0%})", f"{r['explained_by_10']:.1%}", f"{r['smallest']:.1e}"]
            lines.append(line)
        widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
        text = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths)).rstrip() for line in lines]
        for layer in self.layers:
            if not layer.exact:
                text.append(f"{layer.layer}: from a sketch, eigenvalues + up to {layer.covariance.slack:.3g}")
            if layer.sampling is not None:
                text.append(f"{layer.layer}: {layer.sampling}")
            if layer.points <= layer.width:
                text.append(f"{layer.layer}: only {layer.points} rows for {layer.width} directions")
            if layer.units is not None:
                text.append(f"{layer.layer}: {layer.units}" + (f"; {layer.units_note}" if layer.units_note else ""))
            elif layer.units_why:
                text.append(f"{layer.layer}: units not judged: {layer.units_why}")
        return "\n".join(text)
