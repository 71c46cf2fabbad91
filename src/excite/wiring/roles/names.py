"""Names by role: "layer 3, head 5, query" beside the path of a weight."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from excite.wiring.channels.slots import Use
from excite.wiring.groups import Group, Site
from excite.wiring.layers import Layer
from excite.wiring.roles.attention import Attention, Projection, block_number, block_of, block_paths
from excite.wiring.roles.provenance import Origin, Provenance

_PARTS = ("query", "key", "value", "output")


@dataclass
class WeightRoles:
    """Roles of the parameters of a transformer.

    Attributes:
        layers: By name of a layer, its role: "layer 3, query", "layer 3, MLP gate".
        by_path: By path, the role of parameters that belong to no affine layer: embeddings and normalizations.
        attentions: The attentions of the model.
    """

    layers: dict[str, str] = field(default_factory=dict)
    by_path: dict[str, str] = field(default_factory=dict)
    attentions: tuple[Attention, ...] = ()

    def of_layer(self, layer: Layer) -> Layer:
        """The layer with its role."""
        return replace(layer, role=self.layers.get(layer.name, ""))

    def of_group(self, group: Group) -> Group:
        """The group with the roles of its sites and a name by head."""
        producers, consumers = ([self._site(site) for site in sites] for sites in (group.producers, group.consumers))
        first = group.producers[0]
        name = next((name for site in group.producers if (name := self._name(site))), "")
        role = (
            producers[0].role
            if self._projection_of(first) or first.parameter in self.by_path
            else self.layers.get(first.layer, "")
        )
        return replace(group, producers=tuple(producers), consumers=tuple(consumers), role=role, name=name)

    def _site(self, site: Site) -> Site:
        return replace(site, role=self._role(site))

    def _role(self, site: Site) -> str:
        result = self._projection_of(site)
        if result is None:
            return self.by_path.get(site.parameter) or self.layers.get(site.layer, "")
        attention, projection_name, heads = result
        count = len(getattr(attention, projection_name).index)
        shared = "key " if projection_name in ("key", "value") and attention.key_heads < attention.heads else ""
        return ", ".join(
            [attention.name, *([f"{shared}{_heads(heads)}"] if len(heads) < count else []), projection_name]
        )

    def _projection_of(self, site: Site) -> tuple[Attention, str, list[int]] | None:
        """The attention, the part of it and the heads that a site belongs to."""
        numbers = {number for numbers in site.index for number in numbers}
        for attention in self.attentions:
            for projection_name in _PARTS:
                projection: Projection | None = getattr(attention, projection_name)
                if projection is None or projection.layer != site.layer or (site.side == "in") != projection.reads:
                    continue
                heads = [h for h, index in enumerate(projection.index) if numbers & set(index)]
                is_whole = site.parameter == projection.parameter and site.slot == projection.slot
                if heads and (is_whole or (site.parameter == projection.bias and site.of == projection.slot.outputs)):
                    return attention, projection_name, heads
        return None

    def _name(self, site: Site) -> str:
        """The layer, with the part of a fused projection and the heads, where the site is not all of them."""
        result = self._projection_of(site)
        if result is None:
            return ""
        attention, projection_name, heads = result
        same = [p for p in _PARTS[:3] if (other := getattr(attention, p)) and other.parameter == site.parameter]
        name = f"{site.layer.partition('#')[0]}/{projection_name}" if len(same) > 1 else site.layer
        if len(heads) == len(getattr(attention, projection_name).index):
            return name if len(same) > 1 else ""
        return f"{name}/head{heads[0]}" + (f"-{heads[-1]}" if len(heads) > 1 else "")


def _heads(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"head {numbers[0]}"
    span = numbers[-1] - numbers[0] + 1 == len(numbers)
    return f"heads {numbers[0]}–{numbers[-1]}" if span else f"heads {', '.join(map(str, numbers))}"


def find_roles(provenance: Provenance, attentions: tuple[Attention, ...], parameters: Mapping[str, str]) -> WeightRoles:
    """Returns the roles of the parameters of a model with attention; of other models, none.

    Args:
        provenance: Where the numbers of the model's graph come from.
        attentions: Its attentions.
        parameters: What every parameter does, by path (`Wiring.parameters`).
    """
    roles = WeightRoles(attentions=attentions)
    if not attentions:
        return roles
    for attention in attentions:
        by_layer: dict[str, list[str]] = {}
        for projection_name in _PARTS:
            projection = getattr(attention, projection_name)
            if projection is not None:
                by_layer.setdefault(projection.layer, []).append(projection_name)
        for layer, projection_names in by_layer.items():
            roles.layers.setdefault(layer, f"{attention.name}, {_list(projection_names)}")
    paths = block_paths(attention.module for attention in attentions)
    blocks = {paths[attention.module]: attention.name.partition(",")[0] for attention in attentions}
    _feedforward(provenance, roles, blocks)
    _routers(provenance, roles, blocks, parameters)
    _outputs(provenance, roles)
    _embeddings(provenance, roles, parameters)
    _norms(provenance, roles, blocks)
    return roles


def _list(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _block(path: str, blocks: Mapping[str, str]) -> str:
    """The name of the block that a layer is in: that of the attention there, or its number."""
    for block, name in blocks.items():
        if block and path.startswith(f"{block}."):
            return name
    return f"layer {block_number(path, 0)}" if block_of(path) else ""


def _label(path: str, blocks: Mapping[str, str], description: str) -> str:
    return ", ".join(text for text in (_block(path, blocks), _expert(path), description) if text)


def _expert(path: str) -> str:
    """The number of the expert in a path such as blocks.0.mlp.experts.2.up: "expert 2"; empty if it has none."""
    parts = path.split(".")
    numbers = (number for name, number in pairwise(parts) if "expert" in name.lower() and number.isdecimal())
    return next((f"expert {number}" for number in numbers), "")


def _makers(provenance: Provenance, origin: Origin | None) -> list[Use]:
    """The affine calls that make the channels of a signal."""
    if origin is None:
        return []
    origins = [provenance.origin_of(label) for label in dict.fromkeys(origin.labels.flatten().tolist())]
    return list({id(o[0]): o[0] for o in origins if o is not None and isinstance(o[0], Use)}.values())


def _feedforward(provenance: Provenance, roles: WeightRoles, blocks: Mapping[str, str]) -> None:
    """MLP: what an activation or a gate stands behind, and who reads it."""
    for use, read, _ in provenance.calls:
        if read is None or use.layer in roles.layers:
            continue
        made = [maker for maker in _makers(provenance, read) if maker.inp is not None]
        gates = _makers(provenance, read.partner)
        if len(made) != 1 or not (read.functions or gates) or made[0].layer in roles.layers:
            continue
        if not _block(use.layer, blocks):  # a head behind the blocks
            continue
        fused = any(gate is made[0] for gate in gates)
        roles.layers[made[0].layer] = _label(made[0].layer, blocks, "MLP in and gate" if fused else "MLP in")
        for gate in gates:
            if not fused:
                roles.layers.setdefault(gate.layer, _label(gate.layer, blocks, "MLP gate"))
        roles.layers[use.layer] = _label(use.layer, blocks, "MLP out")


def _routers(provenance: Provenance, roles: WeightRoles, blocks: Mapping[str, str], parameters: Iterable[str]) -> None:
    """The layer that weighs the experts beside it: a router, or a gate."""
    parents = {path.partition(".experts.")[0] for path in parameters if ".experts." in path}
    for use, _, _ in provenance.calls:
        parent, _, name = use.layer.rpartition(".")
        if parent in parents and name in ("router", "gate"):
            roles.layers.setdefault(use.layer, _label(use.layer, blocks, "router"))


def _outputs(provenance: Provenance, roles: WeightRoles) -> None:
    for origin in provenance.outputs[:1]:
        for use in _makers(provenance, origin):
            roles.layers.setdefault(use.layer, "output")  # blocks that add to the stream have roles of their own


def _embeddings(provenance: Provenance, roles: WeightRoles, parameters: Mapping[str, str]) -> None:
    """Embeddings, also of patches; one that is tied to the output layer is both."""
    weights = {use.slot.source.path: use.layer for use, read, _ in provenance.calls if use.inp is not None}
    for path, role in parameters.items():
        embedding = role == "embedding" or path in {u.slot.source.path for u, _, _ in provenance.calls if u.inp is None}
        if not embedding:
            continue
        name = path.rpartition(".")[0].rpartition(".")[2] or path
        label = next((text for key, text in _EMBEDDINGS.items() if key in name.lower()), "embedding")
        if path in weights:
            roles.layers[weights[path]] = roles.by_path[path] = f"{label}, tied to the output"
        else:
            roles.by_path[path] = label
    for path, layer in weights.items():
        if "patch" in path.lower():
            roles.layers.setdefault(layer, "patch embedding")


_EMBEDDINGS = {
    "wpe": "position embedding", "pos": "position embedding", "type": "token type embedding", "segment": "segment embedding",
    "wte": "token embedding", "word": "token embedding", "tok": "token embedding",
}  # fmt: skip


def _norms(provenance: Provenance, roles: WeightRoles, blocks: Mapping[str, str]) -> None:
    """Normalizations, by what reads them."""
    readers: dict[str, list[str]] = {}
    for use, read, _ in provenance.calls:
        for norm in read.norms[-1:] if read is not None else ():
            readers.setdefault(norm, []).append(roles.layers.get(use.layer, ""))
    names = {module: _norm_role(read) for module, read in readers.items()}
    for attention in roles.attentions:
        for projection_name in _PARTS[:2]:
            projection: Projection | None = getattr(attention, projection_name)
            if projection is not None and projection.norm is not None:
                names[projection.norm] = f"{attention.name}, {projection_name} norm"
    for use in provenance.ctx.uses:
        module = use.slot.source.path.rpartition(".")[0]
        if module in names and use.slot.shape[1:3].count(1) and use.slot.source.path not in roles.by_path:
            role = names[module]
            if role == "norm before attention" and _outside(module, readers[module], blocks):
                role = "norm after MLP"  # BERT's, at the end of a block
            known = not role or role.startswith(("layer", "final")) or " layer " in role
            roles.by_path[use.slot.source.path] = role if known else _label(module, blocks, role)


def _outside(module: str, readers: Iterable[str], blocks: Mapping[str, str]) -> bool:
    """Whether what reads a normalization is in another block than the normalization itself."""
    block = _block(module, blocks)
    return bool(block) and not any(reader == block or reader.startswith(f"{block},") for reader in readers)


def _norm_role(readers: Iterable[str]) -> str:
    result = list(readers)
    if any(role.endswith(("query", "key", "value")) for role in result):
        return "norm before attention"
    if any("MLP" in role for role in result):
        return "norm before MLP"
    return "final norm" if any("output" in role for role in result) else ""
