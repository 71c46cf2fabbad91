"""Result of `alignment`: the rank of every layer, and how well neighbouring layers are aligned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from excite.probes.spectrum import Between


@dataclass(frozen=True)
class LayerAlignment:
    """One layer's weight as a matrix W with output channels as rows (Definition 7), with singular values σ.

    Attributes:
        layer: Name of the layer.
        shape: Rows and columns of W.
        spectral: ‖W‖₂ = σ₁.
        frobenius: ‖W‖_F.
        ratio: σ₁²/Σσ²; 1 for rank one.
        stable_rank: Σσ²/σ₁².
        participation: (Σσ²)²/Σσ⁴; None where the matrix is too large.
        effective_rank: exp of the entropy of σ²/Σσ²; a range where only the first σ are known.
        distance: ‖W/‖W‖_F − u v'‖_F = √(2 − 2σ₁/‖W‖_F), the distance to the rank-one part (equation 15).
        gap: 1 − σ₂²/σ₁². Where it is 0, the leading vectors, and so the alignment, are not determined.
        residual: Residual of the leading vector, relative to σ₁²; 0 where the whole spectrum was computed.

    Example:
        >>> layer = excite.probes.alignment(model, x)["2"]  # one output: a matrix of rank one
        >>> round(layer.ratio, 6), round(layer.stable_rank, 6)
        (1.0, 1.0)
    """

    layer: str
    shape: tuple[int, int]
    spectral: float
    frobenius: float
    ratio: float
    stable_rank: float
    participation: float | None
    effective_rank: Between
    distance: float
    gap: float
    residual: float


@dataclass(frozen=True)
class JunctionAlignment:
    """Alignment of the layers that produce some channels with those that consume them.

    Attributes:
        junction: Name, such as "fc1>fc2".
        law: Kind of the conservation law between them.
        value: |⟨u, v⟩| of the leading singular vectors of producers and consumers.
        ratio: ‖·‖₂²/‖·‖²_F of all producers together, [U Z] for a residual block.

    Example:
        >>> junction = excite.probes.alignment(model, x).junctions[0]
        >>> junction.junction, 0 <= junction.value <= 1
        ('0>2', True)
    """

    junction: str
    law: str
    value: float
    ratio: float


@dataclass(frozen=True)
class Alignments:
    """Result of `alignment`. `result[layer]` is a `LayerAlignment`; printing shows two tables.

    Attributes:
        layers: One `LayerAlignment` per layer.
        junctions: One `JunctionAlignment` per pair of neighbouring layers.

    Example:
        >>> result = excite.probes.alignment(model, x)
        >>> [layer.layer for layer in result.layers], [junction.junction for junction in result.junctions]
        (['0', '2'], ['0>2'])
    """

    layers: tuple[LayerAlignment, ...]
    junctions: tuple[JunctionAlignment, ...]

    def __getitem__(self, layer: str) -> LayerAlignment:
        for alignment in self.layers:
            if alignment.layer == layer:
                return alignment
        raise KeyError(f"{layer!r}; layers: {', '.join(alignment.layer for alignment in self.layers)}")

    def __iter__(self) -> Iterator[LayerAlignment]:
        return iter(self.layers)

    def between(self, junction: str) -> JunctionAlignment:
        """By name, such as "fc1>fc2"."""
        for alignment in self.junctions:
            if alignment.junction == junction:
                return alignment
        raise KeyError(f"{junction!r}; junctions: {', '.join(alignment.junction for alignment in self.junctions)}")

    def __str__(self) -> str:
        lines = [["layer", "matrix", "‖W‖₂²/‖W‖_F²", "stable rank", "effective rank", "distance to rank one"]]
        for layer in self.layers:
            lines.append([layer.layer, "×".join(map(str, layer.shape)), f"{layer.ratio:.4f}", f"{layer.stable_rank:.2f}",
                          f"{layer.effective_rank:.2f}", f"{layer.distance:.4f}"])  # fmt: skip
        lines += [["", "", "", "", "", ""], ["junction", "law", "|⟨u, v⟩|", "ratio of the producers", "", ""]]
        lines += [
            [junction.junction, junction.law, f"{junction.value:.4f}", f"{junction.ratio:.4f}", "", ""]
            for junction in self.junctions
        ]
        widths = [max(len(line[i]) for line in lines) for i in range(6)]
        return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths)).rstrip() for line in lines)
