"""Where perturbations enter when a margin is about more than the input: the inputs of affine calls.

All perturbations of one point lie side by side in one row, so that the search sees one vector per point whatever the
shapes inside the model: N points have perturbations (N, width), and site k owns the columns `InputSite.columns`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from excite._core.calls import Pick, pick_output
from excite._core.intercept.affine import AffineCall, Names
from excite._core.intercept.parameters import account, report
from excite._core.layout import Layout
from excite._core.replay.calibration import resolve_layouts
from excite._core.replay.passes import Pass, Tape, is_model_input
from excite._core.wrappers import eagerly, unwrap
from excite.errors import ModelError
from excite.excitation.radius import unknown_layer
from excite.excitation.search import INPUT

_EXAMPLES = 8  # points with which the sites are found


@dataclass(frozen=True)
class InputSite:
    """The input of one affine layer, or of the model, as a place that is perturbed.

    The layer's name (`INPUT`, "", for the model's own input), where the samples lie in its signal and the shape this has for one
    sample, which columns of the perturbations it owns, and whether the signal is x itself, perhaps rearranged.
    """

    name: str
    layout: Layout
    sample_shape: tuple[int, ...]
    columns: slice
    is_x: bool

    def shape(self, n: int) -> torch.Size:
        """The shape of the signal for n samples."""
        return torch.Size(size * n if axis == self.layout.axis else size for axis, size in enumerate(self.sample_shape))

    def join(self, rows: Tensor, shape: torch.Size) -> Tensor:
        """Rows (n, columns) of one sample each as a tensor of the shape of the signal."""
        if rows.numel() != shape.numel():
            raise ModelError(
                f"the input of layer {self.name!r} has shape {tuple(shape)}, which does not fit {rows.shape[1]} numbers for "
                f"each of {len(rows)} points: the model must take the same path for every batch; leave that layer out "
                "with layers=[...]"
            )
        return self.layout.from_samples(rows, rows.new_empty(1).expand(shape))


@dataclass(frozen=True)
class InputSites:
    """The sites of a model, in order of execution; `entry` is the one at which any change of x can be made, if any."""

    model: nn.Module
    names: Names
    places: tuple[InputSite, ...]
    dtype: torch.dtype
    entry: InputSite | None

    @property
    def width(self) -> int:
        """Number of perturbed elements per sample, over all places."""
        return int(self.places[-1].columns.stop)

    def run(self, x: Tensor, changes: Sequence[Tensor]) -> Any:
        """The model's output for x (n, ...) with parts[k] (n, columns) added at site k."""
        moves = {site.name: (site, change) for site, change in zip(self.places, changes)}
        if INPUT in moves:
            site, change = moves.pop(INPUT)
            x = x + site.join(change, x.shape).to(x.dtype)
        with eagerly(self.model), _AddPerturbations(self.names, len(x), moves):
            return self.model(x)

    def signals(self, x: Tensor, sites: Sequence[InputSite] | None = None) -> list[Tensor]:
        """(n, columns) for each of the wanted sites: what comes there when x goes in, by sample.

        For a site that is x rearranged, this rearranges any tensor of the shape of x.
        """
        sites = self.places if sites is None else sites
        listener = _CaptureSignals(self.names, len(x), {site.name for site in sites})
        if any(site.name != INPUT for site in sites):
            with torch.no_grad(), eagerly(self.model), listener:
                self.model(x.clone())
        listener.signals[INPUT] = x
        return [site.layout.by_sample(listener.signals[site.name], len(x)).to(self.dtype) for site in sites]


class _AddPerturbations(Pass):
    """Adds the perturbations as the model runs."""

    def __init__(self, names: Names, batch: int, moves: dict[str, tuple[InputSite, Tensor]]):
        super().__init__(names, Tape(batch), record=True)
        self._moves = moves

    def affine(self, call: AffineCall) -> Tensor:
        input = call.input
        if call.name in self._moves:
            site, change = self._moves[call.name]
            input = input + site.join(change, input.shape).to(input.dtype)
        return call.run(input)


class _CaptureSignals(Pass):
    """Keeps the inputs of the wanted calls."""

    def __init__(self, names: Names, batch: int, names_to_read: set[str]):
        super().__init__(names, Tape(batch), record=True)
        self._names_to_read = names_to_read
        self.signals: dict[str, Tensor] = {}

    def affine(self, call: AffineCall) -> Tensor:
        if call.name in self._names_to_read:
            self.signals[call.name] = call.input.detach().clone()
        return call.run(call.input)


class _FindInputs(Pass):
    """Gives the input of every call a node of its own.

    Calls that read x are cut off from it, so that a gradient that still reaches x shows that something else reads it too.
    """

    def __init__(self, names: Names, x: Tensor):
        super().__init__(names, Tape(len(x)), record=True)
        self._x = x
        self.inputs: dict[str, Tensor] = {}
        self.readers: set[str] = set()
        self.calls: list[str] = []

    def affine(self, call: AffineCall) -> Tensor:
        self.calls.append(call.name)
        input = call.input
        if not input.is_floating_point() or not torch.is_grad_enabled():
            return call.run(input)
        if is_model_input(input, self._x):
            self.readers.add(call.name)
        cut = call.name in self.readers or not input.requires_grad
        self.inputs[call.name] = input = input.detach().requires_grad_() if cut else input.view_as(input)
        return call.run(input)


def find_sites(model: nn.Module, x: Tensor, layers: str | Sequence[str], output: Pick) -> InputSites:
    """The places named by `layers`, "all" or names of layers, where a perturbation can change the output.

    With "all" these are the inputs of all affine calls, the set of Algorithm 1. If one call alone reads x, its
    perturbation is that of x. Otherwise (a skip connection or a normalization reads x, or several calls do) x has a
    perturbation of its own beside theirs, so that whatever a change of x can do is always possible.
    """
    model = unwrap(model)
    names, x = Names(model), x[:_EXAMPLES]
    leaf = _distinguishable(x).requires_grad_(x.is_floating_point())
    entering = leaf.clone()
    probe = _FindInputs(names, entering)
    probe.roles = account(model) if layers == "all" else None
    with eagerly(model), probe:
        f = pick_output(model(entering), output)
    _check_names(layers, probe.calls)
    report(model, probe.roles)
    gradients = dict(zip([INPUT, *probe.inputs], _gradients(f, [leaf, *probe.inputs.values()])))
    layouts = _layouts(model, names, x, list(probe.inputs), output)
    useful = {name for name in probe.inputs if gradients[name] is not None and layouts[name] is not None}
    readers = probe.readers & useful
    alone = len(readers) == 1 and gradients[INPUT] is None
    order = [name for name in probe.inputs if name in useful and _chosen(name, layers)]
    if layers == "all" and not alone and (readers or gradients[INPUT] is not None):
        order.insert(0, INPUT)
    if not order:
        raise ModelError(
            "nothing could be perturbed: no chosen layer has an input of floating-point numbers, of each sample its own, "
            f"with a gradient path to the output; affine layers: {', '.join(probe.calls) or 'none'}"
        )
    places: list[InputSite] = []
    for name in order:
        layout = Layout() if name == INPUT else layouts[name]
        assert layout is not None
        begin = places[-1].columns.stop if places else 0
        shape = (x if name == INPUT else probe.inputs[name]).shape
        sample_shape = tuple(size // len(x) if axis == layout.axis else size for axis, size in enumerate(shape))
        columns = slice(begin, begin + shape.numel() // len(x))
        places.append(InputSite(name, layout, sample_shape, columns, name == INPUT or name in probe.readers))
    entry = next((site for site in places if site.name == INPUT or (alone and site.is_x)), None)
    types = [x.dtype] if x.is_floating_point() else [probe.inputs[n].dtype for n in order]
    dtype = torch.float64 if torch.float64 in types else torch.float32
    return InputSites(model, names, tuple(places), dtype, entry)


def _distinguishable(x: Tensor) -> Tensor:
    """A copy of x by whose values it can be recognized; points that are all equal are moved a little."""
    if not x.is_floating_point() or not torch.equal(x, x[:1].expand_as(x)):
        return x.detach().clone()
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(x)
    return x.detach() + 1e-3 * noise * x.detach().abs().amax().clamp_min(1e-3)


def _chosen(name: str, layers: str | Sequence[str]) -> bool:
    return layers == "all" or name in layers or name.split("#")[0] in layers


def _check_names(layers: str | Sequence[str], known: list[str]) -> None:
    for name in [] if isinstance(layers, str) else layers:
        if not any(name in (call, call.split("#")[0]) for call in known):
            raise unknown_layer(name, known)


def _gradients(f: Tensor, inputs: list[Tensor]) -> list[Tensor | None]:
    """Whether there is a path: the values do not matter. None for each input that has none."""
    live = [t for t in inputs if t.requires_grad]
    if not f.requires_grad or not live:
        return [None] * len(inputs)
    gradients = iter(torch.autograd.grad(f.sum(), live, allow_unused=True))
    return [next(gradients) if t.requires_grad else None for t in inputs]


def _layouts(model: nn.Module, names: Names, x: Tensor, calls: list[str], output: Pick) -> dict[str, Layout | None]:
    tape, chosen = Tape(len(x)), frozenset(calls)

    def run(forward: Pass, copies: int) -> Tensor:
        with torch.no_grad(), eagerly(model), forward:
            returned = model(torch.cat([x] * copies))
        forward.finish()
        return pick_output(returned, output)

    run(_RegisterInputs(names, tape, chosen, record=True), 1)
    compared = _RegisterInputs(names, tape, chosen, calibrate=True)
    run(compared, 2)
    layouts, _ = resolve_layouts(run, names, tape, chosen, compared.fitting)
    return {name: layout for (name, _), layout in zip(tape.shapes, layouts) if name in chosen}


class _RegisterInputs(Pass):
    """Registers the inputs of the chosen calls as sites."""

    def __init__(self, names: Names, tape: Tape, chosen: frozenset[str], **mode: bool):
        super().__init__(names, tape, **mode)
        self._chosen = chosen

    def affine(self, call: AffineCall) -> Tensor:
        if call.name in self._chosen:
            self.site(call.input, call.name)
        return call.run(call.input)
