"""`excite.trace`: what a model is made of."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from excite._core.checks import Batch, Pick, check_model, check_values, model_errors, shapes_only, tensors
from excite._core.intercept.names import clean_path
from excite._core.wrappers import is_sharded, refuse_lazy, unsharded_shapes, unwrap
from excite.errors import InputError
from excite.wiring.channels import follow
from excite.wiring.channels.slots import ParameterView, Slot, entries_slot
from excite.wiring.cuts import Cut, cuts
from excite.wiring.export import ExportFailed, exported
from excite.wiring.groups import Group, Site, assemble, names
from excite.wiring.layers import Layer, record
from excite.wiring.roles.attention import Attention, find_attentions
from excite.wiring.roles.labels import roles_by_name
from excite.wiring.roles.names import WeightRoles, find_roles
from excite.wiring.roles.provenance import follow_origins
from excite.wiring.table import group_rows, layer_rows, render
from excite.wiring.translations import Translation, find_translations

if TYPE_CHECKING:
    import networkx


@dataclass(frozen=True)
class Wiring:
    """The affine layers of a model in order of execution, and how their channels connect. `print` shows it as a table.

    Attributes:
        layers: The affine calls in order of execution.
        groups: Sets of channels that scale together, with their producers, their consumers and what is conserved.
        notes: What is not known, such as parameters that are part of no layer that Excite recognizes.
        attentions: The attentions of the model in order of execution, with the weights of their queries, keys, values and
            outputs by head. Empty where `torch.export` cannot follow the model; kernels that are not understood are named in
            the notes.
        translations: The last layer, if its sums over the classes are conserved under softmax cross-entropy.
        parameters: By path, the role of each parameter: "weight of NAME", "bias of NAME", "normalization", "embedding",
            "scaling", …
        roles: What the parts of a transformer do, by their names in metrics: layers, modules that own parameters, heads
            (`h.3.attn/head5`), blocks and laws. Empty for models without attention.

    Example:
        >>> wiring = excite.trace(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)), torch.zeros(2, 4))
        >>> [(layer.name, layer.in_shape, layer.out_shape) for layer in wiring.layers]
        [('0', (4,), (8,)), ('2', (8,), (1,))]
    """

    layers: tuple[Layer, ...]
    groups: tuple[Group, ...]
    notes: tuple[str, ...] = ()
    parameters: Mapping[str, str] = field(default_factory=dict, repr=False)
    attentions: tuple[Attention, ...] = ()
    translations: tuple[Translation, ...] = ()
    roles: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        return render(self.layers, self.groups, self.cuts(), self.notes)

    def __getitem__(self, name: str) -> Layer:
        """Returns the layer with this name.

        Raises:
            InputError: If there is none.
        """
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise InputError(f"no layer {name!r}: the layers are {', '.join(layer.name for layer in self.layers)}")

    def cuts(self) -> tuple[Cut, ...]:
        """Returns the cuts of the model: Σ w² of what enters a set of channels minus Σ w² of what leaves it is conserved.

        See Lemma 4 of Training invariances, and `excite.wiring.cuts`.
        """
        return cuts(self.groups)

    def rows(self) -> dict[str, list[dict[str, Any]]]:
        """Returns the table as plain data: "layers", "groups" and "roles", one dict of strings and numbers per row."""
        roles = [{"name": name, "role": role} for name, role in self.roles.items()]
        return {"layers": layer_rows(self.layers), "groups": group_rows(self.groups), "roles": roles}

    def graph(self) -> networkx.DiGraph[str]:
        """Returns a directed graph with layers as nodes, for networkx.

        Edges lead from the producers of a group to its consumers and to the normalizations that consume it. They have
        attributes `law` and `channels`; nodes have `kind`, `in_shape` and `out_shape`.
        """
        import networkx

        graph: networkx.DiGraph[str] = networkx.DiGraph()
        for layer in self.layers:
            graph.add_node(layer.name, kind=layer.kind, in_shape=layer.in_shape, out_shape=layer.out_shape)
        for group in self.groups:
            for producer in names(group.producers):
                for consumer in (*names(group.consumers), *group.norms):
                    graph.add_edge(producer, consumer, law=group.law, channels=group.channels)
        return graph


@model_errors
def trace(model: nn.Module, example: Batch, *, output: Pick = None) -> Wiring:
    """Finds the affine layers of a model and how their channels connect.

    Runs the model on the example and follows the channels through its exported graph. Layers are those that the model
    runs in its current mode. Laws are about training: a model in evaluation mode is read as if its normalizations used the
    statistics of the batch. The model, its mode, its running statistics and the random state are left unchanged.

    A model on the meta device is traced from its shapes, without memory for its weights: 8 billion weights take seconds. What depends on
    the values of its buffers is then not known; the notes name them. So is a model whose weights are sharded by FSDP2, by each process
    alone.

    Args:
        model: Any module; subclasses, hooks or changes are not needed.
        example: A batch as the model takes it: a tensor, a tuple of arguments, or a dict of keyword arguments.
        output: Selects the output of a model that returns a tuple or a dict, by index, key or function.

    Returns:
        The layers, the channel groups with their conservation laws, and notes on what is not known.

    Raises:
        ModelError: If the model does not run on the example, or has no affine layer.
        InputError: If the example has NaN or infinite values.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> wiring = excite.trace(model, torch.zeros(2, 4))
        >>> [layer.name for layer in wiring.layers]
        ['0', '2']
        >>> wiring.groups[0].law, wiring.groups[0].why
        ('channel', 'through relu')
    """
    model = unwrap(check_model(model))
    refuse_lazy(model)
    if is_sharded(model):
        model = unsharded_shapes(model)
    with shapes_only(), _no_garbage_collection():
        return _trace(model, _placed(model, example), output)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Wide models have millions of labels, which Python's collector would visit again and again: half of the time, for nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _placed(model: nn.Module, example: Batch) -> Batch:
    """The example, with finite values; on the meta device if the model is."""
    leaves = tensors(example)
    if _on_meta(model.parameters()):
        return tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, example)  # type: ignore[no-any-return]
    if _on_meta(leaves):
        raise InputError(
            "the example is on the meta device and the model is not: move both to it, or both to a device with memory"
        )
    check_values(leaves, "values in the example")
    return example


def _on_meta(tensors: Iterable[Tensor]) -> bool:
    return any(tensor.device.type == "meta" for tensor in tensors)


def _trace(model: nn.Module, example: Batch, output: Pick) -> Wiring:
    # Tensors that a model makes without naming a device go to that of a model on the meta device.
    placed = torch.device("meta") if _on_meta(model.parameters()) else nullcontext()
    with placed:
        layers, parameters, notes = record(model, example, output)
    attentions: tuple[Attention, ...] = ()
    translations: tuple[Translation, ...] = ()
    roles: WeightRoles | None = None
    try:
        with placed:
            graph = exported(model, example, output)
        ctx = follow(model, graph)
        groups = assemble(ctx)
        translations = find_translations(graph, ctx)
        result = follow_origins(graph, ctx)
        attentions = find_attentions(result)
        roles = find_roles(result, attentions, parameters)
        layers, groups = tuple(map(roles.of_layer, layers)), tuple(map(roles.of_group, groups))
        unknown = [clean_path(path) for path, buffer in model.named_buffers() if buffer.is_meta]
        if unknown:
            notes += (f"on the meta device the values of buffers are not known: {', '.join(unknown)}",)
        notes += tuple(
            f"attention of {module} cannot be determined: it calls {op}" for module, op in result.unknown.items()
        )
    except ExportFailed as failure:
        # A weight that is computed on the fly (weight normalization) is no parameter that a group could hold.
        alone = [layer for layer in layers if layer.weight_name is not None]
        groups = tuple(_lonely(layer, f"torch.export failed: {failure}") for layer in alone)
    wiring = Wiring(layers, groups, notes, parameters, attentions, translations)
    return replace(wiring, roles=roles_by_name(roles, wiring)) if roles is not None and attentions else wiring


def _lonely(layer: Layer, why: str) -> Group:
    """The group of a layer whose consumers are not known."""
    path = str(layer.weight_name)
    shape = tuple(layer.weight.shape)
    count = shape[0] if shape else 1
    slot = Slot(ParameterView(path, shape), (1, count, max(layer.weight.numel() // count, 1), 1))
    index = tuple((i,) for i in range(count))
    sites = [Site(layer.name, path, "out", 0, index, slot)]
    if layer.bias is not None and layer.bias_name is not None and layer.bias.numel() == count:
        bias = entries_slot(layer.bias_name, tuple(layer.bias.shape))
        sites.append(Site(layer.name, layer.bias_name, "out", 0, index, bias))
    return Group(count, tuple(sites), (), "none", why)
