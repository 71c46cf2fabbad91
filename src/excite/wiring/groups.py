"""Channel groups: channels that scale together, their producers and consumers, and the conservation law that follows.

Scale the producers of a channel by a > 0 and its consumers by 1/a: if the function stays the same, then for any loss the
squared norm of the producers minus that of the consumers is conserved by gradient flow, channel by channel.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from excite.wiring.channels.labels import Classes, State
from excite.wiring.channels.signals import ChannelContext
from excite.wiring.channels.slots import Slot, Use

Law = Literal["matrix", "channel", "norm", "none"]


@dataclass(frozen=True)
class Site:
    """The part of one parameter that produces, or consumes, the channels of a group.

    `rows` does the arithmetic: use it rather than `axis` and `index`.

    Attributes:
        layer: The layer's name.
        parameter: Path of the parameter.
        side: "out" where the parameter produces the channels, "in" where it consumes them. Consumers are on side "in", with
            one exception: in attention, keys count as consumers of queries.
        axis: The axis of the parameter that counts these channels, where one axis does. The input channels of a grouped
            convolution are counted through all blocks, although axis 1 counts within a block.
        index: For every channel of the group, its numbers among the output or input channels of the parameter. Usually
            one number each; several where a convolution is flattened into a linear layer.
        slot: The layout of the parameter, for `rows`.
        times: How often it counts: 2 for a consumer of the square of a channel, which scales by a².
        role: What these channels are in a transformer: "layer 3, head 5, query"; empty where that is not known.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> site = excite.trace(model, torch.zeros(2, 4)).groups[0].producers[0]
        >>> site.parameter, site.side, site.rows(model[0].weight).shape
        ('0.weight', 'out', torch.Size([8, 4]))
    """

    layer: str
    parameter: str
    side: Literal["out", "in"]
    axis: int | None
    index: tuple[tuple[int, ...], ...]
    slot: Slot = field(repr=False, compare=False)
    times: int = 1
    role: str = ""
    _placed: dict[torch.device, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def rows(self, tensor: Tensor) -> Tensor:
        """Returns the entries that belong to each channel.

        Args:
            tensor: The parameter, its gradient, or anything of its shape.

        Returns:
            Tensor (channels, entries), with entries in the same order for every channel, so that rows(W) @ rows(W).T is
            the matrix of the law.
        """
        rows = self.slot.out_rows(tensor) if self.side == "out" else self.slot.in_rows(tensor)
        if rows.device not in self._placed:  # a copy to a GPU waits for it: once
            with torch.inference_mode(False):
                self._placed[rows.device] = torch.tensor(self.index, device=rows.device)
        return rows[self._placed[rows.device]].flatten(1)

    def put(self, tensor: Tensor, rows: Tensor) -> Tensor:
        """Returns a copy of the parameter with other entries for the channels of the group: the inverse of `rows`.

        Args:
            tensor: The parameter, or anything of its shape.
            rows: Tensor (channels, entries), as `rows` returns it.
        """
        positions = self.rows(torch.arange(tensor.numel(), device=tensor.device).view(tensor.shape))
        result = tensor.detach().clone(memory_format=torch.contiguous_format)
        result.view(-1)[positions.reshape(-1)] = rows.reshape(-1)
        return result

    @property
    def of(self) -> int:
        """Number of channels that the parameter has on this side, in the group or not."""
        return self.slot.outputs if self.side == "out" else self.slot.inputs


@dataclass(frozen=True)
class NormSite:
    """The positions of the channels of a group in the input of a normalization.

    Attributes:
        module: Path of the normalization.
        op: "batch_norm", "instance_norm", "group_norm", "layer_norm" or "rms_norm".
        index: For every channel of the group, its positions: channels for batch and instance normalization, groups for
            group normalization, 0 for layer and RMS normalization (heads, if `axis` is given).
        sign: The power with which the channels enter: −1 where they do so inversely, as keys do.
        why: Not empty where the positions differ between samples or calls; then they are not listed.
        eps: The eps of a normalization that is written out (pow, mean, rsqrt); None for torch's own.
        axis: The axis of the input, counted from the end, that counts the positions of layer and RMS normalization.
        positions: The number of positions along that axis.
    """

    module: str
    op: str
    index: tuple[tuple[int, ...], ...]
    sign: int = 1
    why: str = ""
    eps: float | None = None
    axis: int | None = None
    positions: int = 1


@dataclass(frozen=True)
class Group:
    """A set of channels with the same producers and consumers.

    `law` says what gradient flow conserves, with R = site.rows(parameter) and sums over all sites, each `site.times`:

    - "matrix": every entry of Σ R R' over producers minus Σ R R' over consumers, a (channels, channels) matrix;
    - "channel": its diagonal, one number per channel;
    - "norm": the same numbers; a normalization consumes the channels, so they need no other consumer (exact for eps = 0);
    - "none": nothing that Excite knows of; `why` says what breaks it.

    Attributes:
        channels: Number of channels that scale independently: all features in front of a layer normalization are one
            channel, with several entries in the index of its sites.
        producers: Parts of parameters that produce the channels.
        consumers: Parts of parameters that consume them.
        law: "matrix", "channel", "norm" or "none".
        why: Through which functions the law holds, or what breaks it.
        through: The functions between producers and consumers.
        norms: Paths of the normalizations that consume the channels.
        norm_sites: Which parts of the inputs of these belong to the group.
        product: Whether a product of activations is involved: it has a law for each of its factors, and its consumers
            belong to all of them.
        role: What the channels are in a transformer, as the role of the first producer; empty where that is not known.
        name: Name of its law, for one head of attention: `c_attn/query/head5`; empty for others.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> group = excite.trace(model, torch.zeros(2, 4)).groups[0]
        >>> group.channels, group.law, [site.parameter for site in group.consumers]
        (8, 'channel', ['2.weight'])
    """

    channels: int
    producers: tuple[Site, ...]
    consumers: tuple[Site, ...]
    law: Law
    why: str
    through: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()
    norm_sites: tuple[NormSite, ...] = ()
    product: bool = False
    role: str = ""
    name: str = ""

    @property
    def width(self) -> int:
        """Number of channels of a producer that belong to the group: more than `channels` before a layer normalization."""
        return min(sum(len(numbers) for numbers in site.index) for site in self.producers)


def named(groups: Iterable[Group]) -> list[tuple[str, Group]]:
    """Groups under the name of their first producer, heads of attention as `name/head5`.

    Further ones of the same name are `name#2`, `name#3` and so on.
    """
    return _counted(groups, lambda group: group.name or group.producers[0].layer)


def named_by_number(groups: Iterable[Group]) -> list[str]:
    """Names as before heads had names of their own: all groups of a layer are numbered."""
    return [name for name, _ in _counted(groups, lambda group: group.producers[0].layer)]


def _counted(groups: Iterable[Group], name_of: Callable[[Group], str]) -> list[tuple[str, Group]]:
    counts: dict[str, int] = {}
    result = []
    for group in groups:
        name = name_of(group)
        counts[name] = counts.get(name, 0) + 1
        result.append((name if counts[name] == 1 else f"{name}#{counts[name]}", group))
    return result


Side = tuple[int, Literal["out", "in"], int]  # number of the slot, which of its channels, and how often they count


@dataclass
class _Member:
    """One class of labels: which channels of which slots belong to it, and fingerprints of the maps that consume it."""

    state: State
    producers: dict[Side, dict[int, None]] = field(default_factory=dict)  # channels, each once
    consumers: dict[Side, dict[int, None]] = field(default_factory=dict)
    prints: list[float] = field(default_factory=list)
    blocks: list[tuple[int, int]] = field(default_factory=list)
    normalized: dict[tuple[str, int], dict[int, None]] = field(default_factory=dict)  # (module, sign): positions

    product: bool = False

    def absorb(self, other: _Member, power: int) -> None:
        """Adds channels that scale by this power of the member's factor; if negative, producers count as consumers."""
        self.state.absorb(other.state)
        sides = (other.producers, other.consumers) if power > 0 else (other.consumers, other.producers)
        for target, source in zip((self.producers, self.consumers), sides):
            for (slot, side, times), positions in source.items():
                target.setdefault((slot, side, times * abs(power)), {}).update(positions)
        self.prints += other.prints
        self.blocks += other.blocks
        for (module, sign), positions in other.normalized.items():
            self.normalized.setdefault((module, sign * power), {}).update(positions)


def assemble(ctx: ChannelContext) -> tuple[Group, ...]:
    """Returns the groups of a model whose graph has been followed, in order of their first producer."""
    slots, layers = _slots(ctx.uses)
    table: dict[object, list[_Member]] = {}
    for member in _members(ctx, slots):
        table.setdefault(_signature(member), []).append(member)
    normalizations = _normalizations(ctx)
    groups = []
    for alike in table.values():
        groups += [_group(alike_channels, law, slots, layers, normalizations) for alike_channels, law in _split(alike)]
    return tuple(groups)


# Operation, why positions cannot be determined, eps, axis of the positions and their number.
_Normalization = tuple[str, str, float | None, int | None, int]


def _normalizations(ctx: ChannelContext) -> dict[str, _Normalization]:
    """The kind of normalization of every module that normalizes."""
    normalizations: dict[str, _Normalization] = {}
    roots: dict[str, list[list[int]]] = {}
    for read in ctx.norm_reads:
        for row in read.labels.unique(dim=0).tolist():
            roots.setdefault(read.module, []).append([ctx.classes.find(label) for label in row])
        why = f"{read.module} normalizes other channels at other places or calls"
        same = all(row == roots[read.module][0] for row in roots[read.module])
        normalizations[read.module] = read.op, "" if same else why, read.eps, read.axis, read.labels.shape[1]
    return normalizations


def _slots(uses: Sequence[Use]) -> tuple[list[Slot], list[str]]:
    """Each slot once, under the name of its first use: an entry counts once however often it is used."""
    slots: list[Slot] = []
    layers: list[str] = []
    for use in uses:
        if use.slot not in slots:
            slots.append(use.slot)
            layers.append(use.layer)
    return slots, layers


def _members(ctx: ChannelContext, slots: list[Slot]) -> list[_Member]:
    classes: Classes = ctx.classes
    members: dict[int, _Member] = {}

    def member_of(label: int) -> _Member:
        root = classes.find(label)
        member = members.get(root)
        if member is None:
            member = members[root] = _Member(classes.state(root))
        return member

    for use in ctx.uses:
        number = slots.index(use.slot)
        if use.out is not None:
            for position, member in _each(use.out, member_of):
                _count(member.producers, (number, "out", 1), position, use, member)
        if use.inp is not None:
            prints = [] if use.prints is None else use.prints.tolist()
            for position, member in _each(use.inp, member_of):
                _count(member.consumers, (number, "in", 1), position, use, member)
                member.prints += prints[position] if prints else ()
    for labels, more in ctx.more_prints:
        rows = more.tolist()
        for position, member in _each(labels, member_of):
            member.prints += rows[position]
    for read in ctx.norm_reads:
        for row in read.labels.unique(dim=0):
            for position, member in _each(row, member_of):
                member.normalized.setdefault((read.module, 1), {}).setdefault(position)
    for root, factors in ctx.relations.factors().items():
        product = members.get(root)
        if product is not None and not product.producers and product.state.pinned_by is not None:
            for factor in factors:  # there is no law for its consumers: name the producers of its factors
                product.producers |= members[factor].producers if factor in members else {}
    combined = _combined(members, ctx.relations.directions())
    return [combined[root] for root in sorted(combined) if combined[root].producers and _worth_showing(combined[root])]


def _combined(members: dict[int, _Member], directions: list[dict[int, int]]) -> dict[int, _Member]:
    """One member for every way to scale: a class by itself, or several that depend on each other."""
    counts = Counter(root for powers in directions for root in powers)
    result = {root: member for root, member in members.items() if root not in counts}
    for powers in directions:
        first, *further = sorted(powers, key=lambda root: (powers[root] < 0, root))
        member = _Member(State(), product=any(counts[root] > 1 or abs(power) > 1 for root, power in powers.items()))
        for root in (first, *further):
            if root in members:
                member.absorb(members[root], powers[root])
        result[first if first not in result else max(result) + 1] = member
    return result


def _each(labels: Tensor, member_of: Callable[[int], _Member]) -> Iterator[tuple[int, _Member]]:
    return ((position, member_of(label)) for position, label in enumerate(labels.tolist()) if label > 0)


def _count(sites: dict[Side, dict[int, None]], side: Side, position: int, use: Use, member: _Member) -> None:
    sites.setdefault(side, {}).setdefault(position)
    if use.slot.blocks > 1:
        per_block = (use.slot.outputs if side[1] == "out" else use.slot.inputs) // use.slot.blocks
        member.blocks.append((side[0], position // per_block))


def _worth_showing(member: _Member) -> bool:
    # The rows of the last layer reach the output and nothing else: they have no law, and none is expected.
    is_pinned = member.state.pinned_by is not None and not member.state.excluded
    return bool(member.consumers or member.state.norms or is_pinned)


def _signature(member: _Member) -> object:
    state = member.state
    return (
        tuple((slot, len(numbers)) for slot, numbers in sorted(member.producers.items())),
        tuple((slot, len(numbers)) for slot, numbers in sorted(member.consumers.items())),
        state.pinned_by,
        tuple(state.norms),
        tuple((key, len(positions)) for key, positions in sorted(member.normalized.items())),
        state.nonlinear,
        tuple(sorted(state.through)),
        member.product,
    )


def _split(alike: list[_Member]) -> list[tuple[list[_Member], Law]]:
    """Splits members with the same sites by law.

    Linear ones may be mixed only where they went through the same maps: equal fingerprints and blocks (heads of attention, blocks of a
    grouped convolution).
    """
    state = alike[0].state
    if state.pinned_by is not None:
        return [(alike, "none")]
    if state.norms:
        return [(alike, "norm")]
    if state.nonlinear:
        return [(alike, "channel")]
    bunches: list[list[_Member]] = []
    near: dict[tuple[int, int], list[int]] = {}  # by first fingerprint: bunches that may be equal to it
    width = 1e-6 * max([1.0, *(abs(member.prints[0]) for member in alike if member.prints)])
    for member in alike:
        count = len(member.prints)
        position = math.floor(member.prints[0] / width) if count else 0
        candidates = sorted(i for k in (-1, 0, 1) for i in near.get((count, position + k), ()))
        result = next((i for i in candidates if _interchangeable(bunches[i][0], member)), None)
        if result is None:
            near.setdefault((count, position), []).append(len(bunches))
            bunches.append([member])
        else:
            bunches[result].append(member)
    if len(bunches) > 1:
        alone = [bunch[0] for bunch in bunches if len(bunch) == 1]
        together: list[tuple[list[_Member], Law]] = [(bunch, "matrix") for bunch in bunches if len(bunch) > 1]
        return together + ([(alone, "channel")] if alone else [])
    return [(bunches[0], "matrix")]


def _interchangeable(first: _Member, other: _Member) -> bool:
    if first.blocks != other.blocks or len(first.prints) != len(other.prints):
        return False
    return all(math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9) for a, b in zip(first.prints, other.prints))


def _group(
    members: list[_Member],
    law: Law,
    slots: list[Slot],
    layers: list[str],
    normalizations: dict[str, _Normalization],
) -> Group:
    def site(key: Side, index: list[dict[int, None]]) -> Site:
        slot = slots[key[0]]
        axis = slot.axes[0 if key[1] == "out" else 1]
        return Site(
            layers[key[0]], slot.source.path, key[1], axis, tuple(tuple(sorted(n)) for n in index), slot, key[2]
        )

    first = members[0]
    producers = tuple(site(key, [m.producers[key] for m in members]) for key in sorted(first.producers))
    consumers = tuple(site(key, [m.consumers[key] for m in members]) for key in sorted(first.consumers))
    state = first.state
    why = _why(state, law, names(producers), names(consumers))
    if law in ("matrix", "channel") and any(site.side == "out" for site in consumers):
        attention = [name for name in state.through if "attention" in name]
        why = f"queries against keys of {_few(tuple(attention))}" if attention else f"against each other, {why}"
    norm_sites = []
    for module, sign in sorted(first.normalized) if law == "norm" else ():
        op, unclear, eps, axis, count = normalizations[module]
        index = () if unclear else tuple(tuple(sorted(m.normalized[module, sign])) for m in members)
        norm_sites.append(NormSite(module, op, index, sign, unclear, eps, axis, count))
    return Group(
        len(members),
        producers,
        consumers,
        law,
        why,
        tuple(state.through),
        tuple(state.norms),
        tuple(norm_sites),
        first.product,
    )


def names(sites: Sequence[Site]) -> tuple[str, ...]:
    """The layers of some sites, each once."""
    return tuple(dict.fromkeys(site.layer for site in sites))


def _why(state: State, law: Law, producers: tuple[str, ...], consumers: tuple[str, ...]) -> str:
    if state.pinned_by is not None:
        if not state.pinned_by.function:
            return state.pinned_by.cause
        verdict = (
            "is not positively homogeneous"
            if state.pinned_by.listed
            else "has no column 'channels' in the operator table"
        )
        location = f"between {_few(producers)} and {_few(consumers)}" if consumers else f"after {_few(producers)}"
        return f"{state.pinned_by.cause} {location} {verdict}"
    if law == "norm":
        return f"followed by {_few(tuple(state.norms))}"
    if law == "matrix":
        return "only linear maps between"
    return f"through {_few(tuple(state.through))}" if state.through else "each channel has its own map"


def _few(names: tuple[str, ...], max_names: int = 3) -> str:
    if len(names) > max_names:
        return f"{', '.join(names[:max_names])}, {len(names) - max_names} more"
    return ", ".join(names)
