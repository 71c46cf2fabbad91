"""Junctions: neighbouring layers, as two matrices whose rows are the channels between them.

A channel group with its producers and its consumers is a junction. In the language of Training invariances the producers
side by side are the matrix representation of a layer with output channels as rows ([U Z] for a residual block with a free
skip), and the consumers are that of what follows, with input channels as rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from excite._core.intercept.affine import clean_path
from excite.wiring.groups import Group, Law, Site, names

if TYPE_CHECKING:
    from excite.wiring.tracing import Wiring


@dataclass(frozen=True)
class Junction:
    """Two layers with the channels between them: `before` makes the channels, `after` reads them.

    Biases belong to what makes. `law` is that of the group, and "norm" where normalizations stand between: their own scales are left
    out.

    `part` distinguishes junctions of the same layers: "head0", "head1", … for heads of attention (of keys and values, where
    several query heads share them), "part0", … otherwise, in the order of their channels; "" for a junction that has its
    layers for itself.
    """

    channels: int
    before: tuple[Site, ...]
    after: tuple[Site, ...]
    law: Law
    why: str
    attention: bool = False  # whether attention stands between
    part: str = ""

    @property
    def made_by(self) -> str:
        """Names of the producing layers."""
        return "+".join(names(self.before))

    @property
    def name(self) -> str:
        """Names of the layers on both sides, and the part."""
        layers = f"{self.made_by}>{'+'.join(names(self.after))}"
        return f"{layers}/{self.part}" if self.part else layers

    def made(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """(channels, numbers): what makes each channel."""
        return _side_by_side(self.before, self._plain[0], parameters)

    def read(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """(channels, numbers): what reads each channel."""
        return _side_by_side(self.after, self._plain[1], parameters)

    @cached_property
    def _plain(self) -> tuple[list[bool], list[bool]]:
        return [plain(site) for site in self.before], [plain(site) for site in self.after]


def _side_by_side(sites: Sequence[Site], is_plain: Sequence[bool], parameters: Mapping[str, Tensor]) -> Tensor:
    rows = [
        plain_rows(s, parameters[s.parameter]) if w else s.rows(parameters[s.parameter])
        for s, w in zip(sites, is_plain)
    ]
    return rows[0] if len(rows) == 1 else torch.cat(rows, 1)


def plain(site: Site) -> bool:
    """All channels of the parameter, in their own order."""
    return site.index == tuple((k,) for k in range(site.of))


def plain_rows(site: Site, tensor: Tensor) -> Tensor:
    """`site.rows` of such a site, without an index, which a GPU would have to wait for."""
    return site.slot.out_rows(tensor) if site.side == "out" else site.slot.in_rows(tensor)


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """The model's parameters by the names that sites use, detached: they share memory with the model."""
    return {clean_path(path): p.detach() for path, p in model.named_parameters()}


def junctions(wiring: Wiring) -> list[Junction]:
    """All pairs of neighbouring affine layers. Channels are followed through normalizations that keep them apart."""
    behind: dict[str, Group] = {norm: group for group in wiring.groups for norm in group.norms}
    result = []
    for group in wiring.groups:
        before: list[Site] = []
        law: Law = "none" if group.product else group.law  # a product is no path from layer to layer
        for site in group.producers:
            if site.layer in behind:
                law = "norm"
                made = behind[site.layer]
                if made.channels == group.channels and plain(site) and all(map(plain, made.producers)):
                    before += [producer for producer in made.producers if producer not in before]
            else:
                before.append(site)
        if before and group.consumers and group.channels == group.width:
            result.append(Junction(group.channels, tuple(before), group.consumers, law, group.why, attends(group)))
    return numbered(result)


def numbered(unnumbered: Sequence[Junction]) -> list[Junction]:
    """The junctions, each with a name of its own: those between the same layers are numbered by their first channel."""
    alike: dict[str, list[int]] = {}
    for number, junction in enumerate(unnumbered):
        alike.setdefault(junction.name, []).append(number)
    result = list(unnumbered)
    for numbers in alike.values():
        if len(numbers) > 1:
            prefix = "head" if all(unnumbered[number].attention for number in numbers) else "part"
            for rank, number in enumerate(sorted(numbers, key=lambda number: unnumbered[number].before[0].index)):
                result[number] = replace(unnumbered[number], part=f"{prefix}{rank}")
    return result


def attends(group: Group) -> bool:
    """Whether attention stands between what makes the channels and what reads them."""
    return "scaled_dot_product_attention" in group.through
