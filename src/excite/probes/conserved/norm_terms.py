"""Effect of the eps of normalizations on the laws in front of them, from the user's own forward and backward passes.

A normalization y = (x − m) / √(v + ε) is invariant to the scale of x up to its ε: if x becomes a·x, then
y(a) = a (x − m) / √(a²v + ε), and at a = 1

    dy/da = y · (1 − v / (v + ε)) = y · ε / (v + ε).

A law in front of it scales everything that makes x by a and everything else that reads the channels by 1/a, so that with
S(w, g) = Σ w·g over producers minus Σ w·g over consumers

    S(w, ∇L) = dL/da = Σ ε / (v + ε) · ⟨∂L/∂y, y⟩,

summed over all that is normalized with one variance: over the batch by channel (batch normalization), by sample and
channel (instance), by sample and group (group), by sample and place (layer, and RMS with m = 0 and v the mean square).
With out = γ y + β, ⟨∂L/∂y, y⟩ = Σ ∂L/∂out · γ y. For batch normalization this is γ · ∂L/∂γ, which training computes anyway.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from excite._core.distributed import rank_and_size
from excite._core.intercept.affine import clean_path
from excite._core.preserve import preserve_state, probes_ignored
from excite.probes.conserved.laws import NamedLaw
from excite.probes.conserved.unchecked import Reason
from excite.wiring.groups import NormSite

_MODULES: dict[str, tuple[type[nn.Module], ...]] = {
    "batch_norm": (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    "instance_norm": (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
    "group_norm": (nn.GroupNorm,),
    "layer_norm": (nn.LayerNorm,),
    "rms_norm": (nn.RMSNorm,),
}
_WRITTEN = ("layer_norm", "rms_norm")
_INPUT_NOT_SAVED = "its input is not kept until the backward pass (activation checkpointing or offloading)"
_BATCH_NODES = ("NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm")


def eps_term(
    module: nn.Module | WrittenModule, op: str, x: Tensor, gradient: Tensor, axis: int | None = None
) -> Tensor:
    """Σ ε / (v + ε) ⟨∂L/∂y, y⟩ by position (see `NormSite`), from the input of a normalization and ∂L/∂out."""
    if axis is not None:  # each entry of this axis is a position of its own
        x, gradient = x.movedim(axis, 0), gradient.movedim(axis, 0)
        return torch.cat([eps_term(module, op, *pair) for pair in zip(x, gradient)])
    eps: float = torch.finfo(x.dtype).eps if module.eps is None else module.eps  # type: ignore[assignment]
    weight: Tensor | None = getattr(module, "weight", None)
    wide = torch.promote_types(x.dtype, torch.float32)
    if op in ("layer_norm", "rms_norm"):
        size = x.shape[-len(module.normalized_shape) :].numel()  # type: ignore[arg-type]
        x, gradient = x.reshape(-1, 1, size), gradient.reshape(-1, 1, size)  # (rows, 1, normalized together)
        weights = None if weight is None else weight.reshape(-1)
    else:
        channels = int(module.num_channels if op == "group_norm" else module.num_features)  # type: ignore[arg-type, union-attr]
        batch = x.numel() // x.shape[1:].numel() if x.shape[1:2] == (channels,) else 1
        x, gradient = x.reshape(batch, channels, -1), gradient.reshape(batch, channels, -1)
        weights = None if weight is None else weight[:, None]
    gradient = gradient.to(wide) if weights is None else gradient * weights.to(wide)
    if op == "group_norm":
        shape = len(x), int(module.num_groups), -1  # type: ignore[arg-type, union-attr]
        x, gradient = x.reshape(shape), gradient.reshape(shape)
    axes = (0, 2) if op == "batch_norm" else (2,)
    x = x.to(wide)
    if op == "rms_norm":
        variance = x.square().mean(axes, keepdim=True)
    else:
        variance, mean = torch.var_mean(x, axes, correction=0, keepdim=True)
        x = x - mean
    inner = (gradient * x).sum(axes, keepdim=True) * (variance + eps).rsqrt()  # ⟨∂L/∂y, y⟩
    return (inner * eps / (variance + eps)).sum((0, 2))


class WrittenModule:
    """A module of the user's own that computes weight · x / √(mean x² + ε) + bias along the last axis, treated as one of torch's.

    Args:
        module: The module.
        eps: The ε that was found in its graph.
    """

    training, running_mean = True, None

    def __init__(self, module: nn.Module, eps: float):
        self.module, self.eps = module, eps
        self.register_forward_hook = module.register_forward_hook

    @property
    def weight(self) -> Tensor:
        """The factor of every entry, as it is now."""
        return self.module.weight  # type: ignore[return-value]

    @property
    def normalized_shape(self) -> tuple[int, ...]:
        """The shape of what is normalized together."""
        return tuple(self.weight.shape)

    @classmethod
    def of(cls, module: nn.Module | None, op: str, eps: float) -> WrittenModule | None:
        """The module in this form; None if it computes something else, as a small pass through it shows."""
        weight = getattr(module, "weight", None)
        if module is None or not isinstance(weight, nn.Parameter) or weight.dim() != 1 or op not in _WRITTEN:
            return None
        generator = torch.Generator().manual_seed(0)
        wide = torch.promote_types(weight.dtype, torch.float32)
        x = torch.randn(3, len(weight), generator=generator).to(weight)
        try:
            with torch.no_grad(), preserve_state(module):
                shift, out = module(torch.zeros_like(x)).to(wide), module(x).to(wide)
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
            return None
        x = x.to(wide) if op == "rms_norm" else x.to(wide) - x.to(wide).mean(-1, keepdim=True)
        expected = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.detach().to(wide) + shift
        close = torch.allclose(
            out, expected, rtol=32 * torch.finfo(weight.dtype).eps, atol=1e-30 + 8 * torch.finfo(weight.dtype).eps
        )
        return cls(module, eps) if close else None


class _Inert:
    """A hook that does nothing, for copies of the model."""

    def __call__(self, *args: Any) -> None:
        return None


class _Hook:
    """A forward hook that copies and saved files of the model do not take along."""

    def __init__(self, function: Callable[[Tensor, Tensor], None]):
        self._function = function

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if args and isinstance(args[0], Tensor) and isinstance(output, Tensor):
            self._function(args[0], output)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Inert:
        return _Inert()

    def __reduce__(self) -> tuple[type[_Inert], tuple[()]]:
        return _Inert, ()


class _Pass:
    """One forward pass through a normalization; it lives as long as the graph that it belongs to."""

    def __init__(self, x: Tensor | None, inverse: Tensor | None):
        self.x, self.inverse = x, inverse  # the input, and 1/√(v + ε) of batch normalization
        self.used = False


class _Norm:
    """The eps term of one module, in the scale of `reference.grad`.

    What is done to that gradient after a backward pass (clipping, unscaling, zeroing) is done to the term.

    For batch normalization with γ and one backward pass since its gradient was None, the term is
    ε/(v + ε) · γ · γ.grad: only 1/√(v + ε) of that pass is kept, which autograd saves anyway.
    """

    def __init__(self, module: nn.Module | WrittenModule, site: NormSite, reference: Tensor, start: int):
        self.module, self.op, self.reference, self._axis = module, site.op, reference, site.axis
        positions = site.positions if site.axis is not None else 1
        counts = {"layer_norm": positions, "rms_norm": positions, "group_norm": getattr(module, "num_groups", 0)}
        self.span = slice(start, start + int(counts.get(site.op, getattr(module, "num_features", 0))))
        self.closure = False  # passes come inside a step, and γ changes before their term is read
        self.untraceable = ""  # why a pass since the last step could not be followed
        self._unfinished: weakref.WeakSet[_Pass] = weakref.WeakSet()
        self.inverse: Tensor | None = None  # of the only pass there was
        self.total: Tensor | None = None
        self.size: Tensor | None = None  # of the reference's gradient when `total` was made
        self._base: Tensor | None = None  # total of the passes before those that come now
        self._unaccumulated: Tensor | None = None  # of passes whose gradient has not reached the reference yet
        self._alone: Tensor | None = None

    def handles(self) -> list[Any]:
        return [
            self.module.register_forward_hook(_Hook(self._forward)),
            self.reference.register_post_accumulate_grad_hook(self._accumulated),
        ]

    def _forward(self, x: Tensor, output: Tensor) -> None:
        if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and output.requires_grad) or probes_ignored():
            return
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        hook_name = "" if hooks is None else getattr(hooks[0], "__qualname__", "")
        if hook_name.startswith("_recomputation_hook"):  # its gradients go through the graph of the first computation
            return
        inverse = None
        if getattr(self.module, "running_mean", None) is not None and not self.module.training:
            self.untraceable = "its statistics are frozen, so there is no law in front of it"
            return
        if self.op == "batch_norm":
            inverse = self._saved(x.detach(), output, is_saved=hooks is None)
            if inverse is None:
                return
        elif hooks is not None:  # to keep the input would keep what checkpointing gives up
            self.untraceable = _INPUT_NOT_SAVED
            return
        forward_pass = _Pass(x.detach() if hooks is None else None, inverse)
        self._unfinished.add(forward_pass)
        output.register_hook(lambda gradient: self._backward(forward_pass, gradient))

    def _saved(self, x: Tensor, output: Tensor, is_saved: bool) -> Tensor | None:
        """1/√(v + ε) of this pass; None where the module computes something else."""
        name = "" if output.grad_fn is None else output.grad_fn.name()
        if not name.startswith(_BATCH_NODES):
            self.untraceable = "it was computed in another way than by torch's batch normalization"
            return None
        if is_saved:
            return output.grad_fn._saved_result2.detach()  # type: ignore[union-attr, no-any-return]
        variance = x.to(torch.promote_types(x.dtype, torch.float32)).var((0, *range(2, x.dim())), correction=0)
        return (variance + self.module.eps).rsqrt()  # type: ignore[operator]

    @torch.no_grad()
    def _backward(self, forward_pass: _Pass, gradient: Tensor) -> None:
        if forward_pass.used:  # a graph that was retained
            self.untraceable = "a graph was used for several backward passes"
            return
        forward_pass.used = True
        self._unfinished.discard(forward_pass)
        grad = self.reference.grad
        first = self._unaccumulated is None and self._alone is None
        light = forward_pass.inverse is not None and self.module.weight is self.reference
        if light and first and grad is None and not self._unfinished:
            self._alone = forward_pass.inverse
            return
        if first:
            self._base = None if grad is None else self.scaled(grad)
        if forward_pass.x is None or self._alone is not None:
            self.untraceable = _INPUT_NOT_SAVED
            return
        term = eps_term(self.module, self.op, forward_pass.x, gradient.detach(), self._axis)
        self._unaccumulated = term if self._unaccumulated is None else self._unaccumulated + term

    @torch.no_grad()
    def _accumulated(self, parameter: Tensor) -> None:
        if self._alone is not None:
            self.inverse, self.total, self.size = self._alone, None, None
            if self.closure and parameter.grad is not None:
                self.total, self.size = self.scaled(parameter.grad), torch.linalg.vector_norm(parameter.grad)
                self.inverse = None
        elif self._unaccumulated is not None and parameter.grad is not None:
            self.inverse = None
            self.total = self._unaccumulated if self._base is None else self._base + self._unaccumulated
            self.size = torch.linalg.vector_norm(parameter.grad)
        self._alone = self._unaccumulated = self._base = None

    def scaled(self, grad: Tensor) -> Tensor | None:
        """The term in the scale of the reference's gradient as it is now."""
        if self.inverse is not None:
            return self.inverse.square() * self.reference.detach() * grad * self.module.eps  # type: ignore[operator]
        if self.total is None or self.size is None:
            return None
        norm = torch.linalg.vector_norm(grad)
        # A gradient of zero is that of a step that was zeroed, or had none: nothing is left of the term.
        return torch.where(norm > 0, self.total * (norm / self.size), 0.0)

    def missing(self) -> str:
        """Why the term of the step to come is not known, if so."""
        if self.untraceable:
            return self.untraceable
        if self._unaccumulated is not None or self._alone is not None:
            return "its gradient did not reach the parameter that it is compared with"
        if self.reference.grad is not None and self.inverse is None and self.total is None:
            return "no pass through it was recorded (torch.compile, or a part of the model that is called otherwise)"
        return ""

    def end(self) -> None:
        """After a step: what went wrong before it is over."""
        self.untraceable = ""
        self._alone = self._unaccumulated = self._base = None


class NormTerms:
    """The eps terms of the normalizations behind some laws.

    `position`, `channel` and `sign` say which numbers of `terms` count for which channel of all laws, and how often. `problems`
    are laws whose terms cannot be determined at all.
    """

    def __init__(self, laws: Sequence[NamedLaw], model: nn.Module, parameters: Mapping[str, Tensor]):
        modules = {clean_path(path): module for path, module in model.named_modules()}
        self.problems: dict[int, Reason] = {}
        self._norms: dict[int, _Norm] = {}  # by module
        self._of_law: dict[int, list[tuple[str, _Norm]]] = {}
        count = 0
        position: list[int] = []
        channel: list[int] = []
        sign: list[float] = []
        several = rank_and_size()[1] > 1
        for number, law in enumerate(laws):
            for site in law.group.norm_sites:
                module: nn.Module | WrittenModule | None = modules.get(site.module)
                why = site.why
                key = id(module)
                if site.eps is not None:
                    module = WrittenModule.of(modules.get(site.module), site.op, site.eps) or module
                if not isinstance(module, WrittenModule) and type(module) not in _MODULES.get(site.op, ()):
                    described = "a function" if module is None else f"a {type(module).__name__}"
                    why = f"{site.module} normalizes by {site.op} in {described}, not as a module of torch.nn"
                    if site.eps is not None and module is not None:
                        why = f"{site.module} normalizes in {described}, not by weight · x / √(mean x² + ε), or in lower precision"
                elif several:
                    why = f"{site.module} normalizes on several processes, each with statistics of its own"
                if why or module is None:
                    self.problems[number] = Reason("normalization", why)
                    continue
                norm = self._norms.get(key)
                if norm is None:
                    reference = getattr(module, "weight", None)
                    if reference is None or not reference.requires_grad:
                        reference = parameters[law.group.producers[0].parameter]
                    norm = self._norms[key] = _Norm(module, site, reference, count)
                    count = norm.span.stop
                for k, positions in enumerate(site.index):
                    position += [norm.span.start + position for position in positions]
                    channel += [law.start + k] * len(positions)
                    sign += [float(site.sign)] * len(positions)
                self._of_law.setdefault(number, []).append((site.module, norm))
        device = next(iter(parameters.values())).device
        self.position = torch.tensor(position, dtype=torch.long).to(device)
        self.channel = torch.tensor(channel, dtype=torch.long).to(device)
        self.sign = torch.tensor(sign, dtype=torch.float64).to(device)
        self._device = device
        self._handles = [handle for norm in self._norms.values() for handle in norm.handles()]

    def expect(self, closure: bool) -> None:
        """Before a step."""
        for norm in self._norms.values():
            norm.closure = closure

    @torch.no_grad()
    def terms(self) -> Tensor:
        """(positions,): Σ ε / (v + ε) ⟨∂L/∂y, y⟩ of the gradients that the parameters hold now; zero where it is not known."""
        norms = list(self._norms.values())
        vectors = [torch.zeros(0, device=self._device)]
        # As `scaled`, for all at once of which one backward pass is known.
        alone = [
            (id(n), n.inverse, n.reference.detach(), n.reference.grad, float(n.module.eps))  # type: ignore[arg-type]
            for n in norms
            if n.inverse is not None and n.reference.grad is not None
        ]
        known: dict[int, Tensor] = {}
        if alone:
            keys, inverse, weights, grads, eps = (list(column) for column in zip(*alone))
            light = list(torch._foreach_mul(inverse, inverse))
            for factors in (weights, grads, eps):
                torch._foreach_mul_(light, factors)
            known = dict(zip(keys, light))
        for norm in norms:
            grad = norm.reference.grad
            term = known.get(id(norm)) if id(norm) in known else None if grad is None else norm.scaled(grad)
            size = norm.span.stop - norm.span.start
            vectors.append(torch.zeros(size, device=self._device) if term is None else term)
        wide = torch.float64 if any(vector.dtype == torch.float64 for vector in vectors) else torch.float32
        return torch.cat([vector.to(self._device, wide) for vector in vectors])

    def missing(self) -> dict[int, Reason]:
        """Laws whose term of this step is not known, by number."""
        result = dict(self.problems)
        if not any(norm.missing() for norm in self._norms.values()):
            return result
        for number, norms in self._of_law.items():
            for name, norm in norms:
                why = norm.missing()
                if why and number not in result:
                    result[number] = Reason("normalization", f"{name}: {why}")
        return result

    def end(self) -> None:
        """Drops what was kept for the step that has ended."""
        for norm in self._norms.values():
            norm.end()

    def close(self) -> None:
        """Removes all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
