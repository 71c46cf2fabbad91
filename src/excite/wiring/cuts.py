"""Cuts through a model, and the conserved difference of their squared norms (Lemma 4 of Training invariances).

Scale all channels behind a cut by a > 0: the entries that cross the cut scale by a, those that leave the scaled channels
for the model's output by 1/a, and everything between keeps its size. So Σ w² over what enters a set of channels minus
Σ w² over what leaves it is conserved. It is the sum of the laws of these channels: a cut needs no accumulator of its own.
Biases are edges from an input that is always one, so a cut contains the biases of all later layers too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from excite._core.checks import shown
from excite.errors import InputError
from excite.wiring.groups import Group


@dataclass(frozen=True)
class Cut:
    """The entries that enter a set of channel groups, minus those that leave it.

    Every path into the set crosses the cut exactly once: no entry leads from the set back into what lies before it
    (Definition 6, with "exactly once" added).

    Attributes:
        groups: Numbers of the groups behind the cut in `wiring.groups`.
        enters: Paths of the parameters that enter the set; those of which only some entries do are followed by "[part]".
        leaves: Paths of the parameters that leave it, likewise.

    Example:
        >>> wiring = excite.trace(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)), torch.zeros(2, 4))
        >>> [cut.enters for cut in excite.wiring.cuts(wiring.groups)][0]
    """

    groups: tuple[int, ...]
    enters: tuple[str, ...]
    leaves: tuple[str, ...]

    def value(self, groups: Sequence[Group], parameters: Mapping[str, Tensor]) -> Tensor:
        """Returns Σ w² over what enters minus Σ w² over what leaves: the sum of the laws of all channels behind the cut.

        Args:
            groups: The groups of the wiring that the cut belongs to.
            parameters: The model's parameters by path, `dict(model.named_parameters())`.

        Returns:
            A scalar in double precision on the CPU, conserved by gradient flow.
        """
        total = torch.zeros((), dtype=torch.float64)
        for number in self.groups:
            for sites, sign in ((groups[number].producers, 1), (groups[number].consumers, -1)):
                for site in sites:
                    total = total + sign * site.rows(parameters[site.parameter].detach()).double().square().sum().cpu()
        return total


def cuts(groups: Sequence[Group]) -> tuple[Cut, ...]:
    """Finds one cut in front of each group with a law of channels, from the first to the last.

    Groups that feed each other in a cycle, as the stream of a residual network and its blocks, stay on one side. Queries
    against keys balance each other and are left out, as are products of activations, whose consumers belong to several laws.

    Args:
        groups: The groups of a wiring, `excite.trace(model, x).groups`.

    Returns:
        The cuts, from the first to the last of each part of the model.

    Raises:
        InputError: If `groups` are not those of a wiring.

    Example:
        >>> wiring = excite.trace(model, x)
        >>> [cut.enters for cut in excite.wiring.cuts(wiring.groups)]
    """
    import networkx

    if not isinstance(groups, Sequence) or not all(isinstance(g, Group) for g in groups):
        raise InputError(f"groups: expected the groups of a wiring, excite.trace(model, x).groups; got {shown(groups)}")
    with_law = [
        i
        for i, g in enumerate(groups)
        if g.law in ("matrix", "channel") and g.consumers and _has_consuming_sites(g) and not g.product
    ]
    sizes = _sizes(groups)
    producer, consumer = _ends(groups, with_law, sizes)
    graph: networkx.DiGraph[int] = networkx.DiGraph()
    graph.add_nodes_from(with_law)
    for path in sizes:
        inner = (consumer[path] >= 0) & (producer[path] >= 0)
        pairs = (consumer[path] * len(groups) + producer[path])[inner].unique().tolist()
        graph.add_edges_from(divmod(pair, len(groups)) for pair in pairs)
    components = networkx.condensation(graph)
    result = []
    for apart in networkx.weakly_connected_components(components):  # parts of the model that share no channel
        order = list(networkx.lexicographical_topological_sort(components.subgraph(apart)))
        for i in range(len(order)):
            behind = sorted(number for node in order[i:] for number in components.nodes[node]["members"])
            inside = torch.zeros(len(groups) + 1, dtype=torch.bool)  # the last one stands for "no group"
            inside[behind] = True
            enters: list[str] = []
            leaves: list[str] = []
            for path in sizes:
                produced, consumed = inside[producer[path]], inside[consumer[path]]
                for names, entries in ((enters, produced & ~consumed), (leaves, consumed & ~produced)):
                    if bool(entries.any()):
                        names.append(path if bool(entries.all()) else f"{path}[part]")
            result.append(Cut(tuple(behind), tuple(enters), tuple(leaves)))
    return tuple(sorted(result, key=lambda cut: (cut.groups[-1], -len(cut.groups))))


def _has_consuming_sites(group: Group) -> bool:
    return all(site.side == "in" for site in group.consumers)


def _sizes(groups: Sequence[Group]) -> dict[str, tuple[int, ...]]:
    return {site.parameter: site.slot.source.shape for group in groups for site in (*group.producers, *group.consumers)}


def _ends(
    groups: Sequence[Group], with_law: list[int], sizes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """For the entries of every parameter, the number of the group they produce and of the one they consume; −1 for none.

    Entries of one kernel, or of one column of an embedding, have the same ends: the first of them stands for all.
    """
    ends: list[dict[str, Tensor]] = []
    first = {path: torch.zeros(torch.Size(shape).numel(), dtype=torch.bool) for path, shape in sizes.items()}
    for group in groups:
        for site in (*group.producers, *group.consumers):
            shape = sizes[site.parameter]
            entries = site.slot.canonical(torch.arange(torch.Size(shape).numel()).view(shape))
            first[site.parameter][entries[..., 0].reshape(-1)] = True
    for side in ("producers", "consumers"):
        result = {path: torch.full((torch.Size(shape).numel(),), -1) for path, shape in sizes.items()}
        for number in with_law:
            for site in getattr(groups[number], side):
                shape = sizes[site.parameter]
                entries = torch.arange(torch.Size(shape).numel()).view(shape)
                result[site.parameter][site.rows(entries).reshape(-1)] = number
        ends.append({path: numbers[first[path]] for path, numbers in result.items()})
    return ends[0], ends[1]
