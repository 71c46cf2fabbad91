"""Roles by the names that metrics have: layers, modules, parameters, heads, blocks, laws and junctions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from excite.wiring.groups import Site, named
from excite.wiring.junctions import junctions
from excite.wiring.roles.attention import Attention, block_paths
from excite.wiring.roles.names import WeightRoles

if TYPE_CHECKING:
    from excite.wiring.tracing import Wiring

_SIDES = 2  # roles on one side of a junction, above which it has none


def roles_by_name(roles: WeightRoles, wiring: Wiring) -> dict[str, str]:
    """Returns what the parts of a transformer do, by their names in metrics.

    Args:
        roles: The roles of its parameters.
        wiring: Its layers, groups and parameters.
    """
    result = {layer.name: layer.role for layer in wiring.layers if layer.role}
    further = (
        ((name, group.role) for name, group in named(wiring.groups)),
        _heads(wiring.attentions),
        _modules(roles, wiring.parameters),
        _blocks(wiring.attentions),
        (
            (f"{translation.layer}/translation", f"{result[translation.layer]}, sums over classes")
            for translation in wiring.translations
            if translation.layer in result
        ),
        ((junction.name, _between(junction.before, junction.after)) for junction in junctions(wiring)),
    )
    for name, role in (pair for pairs in further for pair in pairs if pair[1]):
        result.setdefault(name, role)
    return result


def _heads(attentions: Iterable[Attention]) -> Iterable[tuple[str, str]]:
    """Heads as `attention/logit` names them: the module that calls attention, with "#2" for its second call."""
    calls: Counter[str] = Counter()
    for attention in attentions:
        module = attention.module or "attention"
        calls[module] += 1
        name = f"{module}#{calls[module]}" if calls[module] > 1 else module
        if attention.heads == 1 and ", head " in attention.name:  # a module for each head
            yield f"{name}/head0", attention.name
            continue
        yield from ((f"{name}/head{head}", f"{attention.name}, head {head}") for head in range(attention.heads))


def _blocks(attentions: Sequence[Attention]) -> Iterable[tuple[str, str]]:
    blocks = block_paths(attention.module for attention in attentions)
    return ((blocks[attention.module], attention.name.partition(",")[0]) for attention in attentions)


def _modules(roles: WeightRoles, parameters: Iterable[str]) -> Iterable[tuple[str, str]]:
    """Modules whose weights all do one thing, and their parameters; biases do what their weight does."""
    by_module: dict[str, dict[str, str]] = {}
    for path in parameters:
        role = roles.by_path.get(path) or roles.layers.get(path.removesuffix(".weight"), "")
        by_module.setdefault(path.rpartition(".")[0], {})[path] = role
    for module, several in by_module.items():
        weights = {role for path, role in several.items() if role or not path.endswith("bias")}
        role = next(iter(weights)) if len(weights) == 1 else ""
        if module:
            yield module, role
        for path, own in several.items():
            if own or role:
                yield path, f"{own or role}, {path.rpartition('.')[2]}"


def _between(before: Sequence[Site], after: Sequence[Site]) -> str:
    """The roles on both sides of a junction; what both begin with is written once: "layer 3, head 5, query → key"."""
    sides = [list(dict.fromkeys(site.role for site in sites)) for sites in (before, after)]
    if not all(len(side) <= _SIDES and all(side) for side in sides):
        return ""
    read = " and ".join(sides[1]).split(", ")
    shared = [role.split(", ") for role in sides[0]] if len(sides[1]) == 1 else []
    while shared and len(read) > 1 and all(parts[:1] == read[:1] for parts in shared):
        read, shared = read[1:], [parts[1:] for parts in shared]
    return f"{' and '.join(sides[0])} → {', '.join(read)}"
