"""Labels on values of the trajectory: what keeps a hook ratio from being the constant of the theory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from excite._core.calls import Batch, Pick, call, own_copy, pick_output, tensors
from excite._core.checks import check_real
from excite._core.intercept.affine import AffineCall, AffineMode, Names, clean_path
from excite._core.preserve import RandomState, device_of, preserve_state
from excite._core.wrappers import eagerly, without_reentrant_checkpointing
from excite.errors import ModelError
from excite.probes.bias_trajectory.sites import TracedLayers
from excite.wiring.export import resized

LABELS = {
    "coupled": "samples influence each other (batch normalization in training mode): the ratio is not the sample's own; "
    "a clean pass gives the exact one",
    "random": "random layers are active (dropout, noise): values are those of the sub-network that was drawn, not of the network "
    "in evaluation mode; a clean pass measures that one",
    "bypass": "the input also reaches the output around the first layer: the bounds on the ratio cover the part through it only",
    "vector": "vector outputs: ‖J'u‖ for the unit gradient u of the loss, at most the operator norm of J; no upper half",
    "logits": "the loss applies a sigmoid or softmax to the output: measured is the function before it; link='sigmoid' "
    "measures probabilities",
    "pointwise": "smooth activations: the slope is that at the point, not in a region around it (Lemma 5)",
    "preprocessed": "the first layer does not see the input itself: slopes are with respect to what it sees",
    "side": "another output of the model is in the loss too: its gradient is in the numerator",
    "repeated": "several backward passes went through one forward pass (a gradient penalty, retain_graph=True): its samples "
    "count once, with the gradients of the first",
    "estimated": "the largest singular value comes from a few Lanczos steps: an estimate from below",
}


class _Cut(AffineMode):
    """Cuts the graph at the first affine call: what still depends on the input goes around it."""

    def __init__(self, names: Names):
        super().__init__(names)
        self.z: Tensor | None = None
        self.recorded_input: Tensor | None = None

    def visit(self, call: AffineCall) -> Tensor:
        output = call.run(call.input)
        if self.z is not None:
            return output
        self.recorded_input = call.input.detach().clone()
        self.z = output.detach().requires_grad_()
        return self.z.clone()


def labels(model: nn.Module, example: Batch, sites: TracedLayers, output: Pick = None) -> tuple[str, ...]:
    """Labels that follow from the model in the mode it is in, tried out on a few samples; it is left as it was.

    Raises ModelError where the first layer's output does not influence the model's.
    """
    cut, axis = _Cut(Names(model)), sites.first.axis
    leaves = []

    def leaf(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            value = value.requires_grad_()
            leaves.append(value)
        return value

    batch = tree_map(leaf, own_copy(resized(example, 4)))
    # What the model makes of the leaves may be changed in place; the leaves themselves may not.
    inputs = tree_map(lambda v: v.clone() if isinstance(v, Tensor) and v.requires_grad else v, batch)
    with preserve_state(model), torch.enable_grad(), eagerly(model), without_reentrant_checkpointing():
        state = RandomState(device_of(model))
        with cut:
            f = pick_output(call(model, inputs), output)
        drawn = state.moved()
        if f.dim() == 0 or len(f) != 4:
            raise ModelError(
                f"expected an output with one row per sample, (4, ...); got {tuple(f.shape)}: pick it with output="
            )
        f = check_real(f).reshape(4, -1)
        if cut.z is None or not f.requires_grad:
            raise ModelError(_unreachable(sites))
        weights = torch.linspace(1, 2, f.numel(), dtype=f.dtype, device=f.device).view_as(f)
        first, *around = torch.autograd.grad(
            (f * weights).sum(), [cut.z, *leaves], retain_graph=True, allow_unused=True
        )
        if first is None:
            raise ModelError(_unreachable(sites))
        (gradient,) = torch.autograd.grad((f[0] * weights[0]).sum(), cut.z)
    result = []
    if bool(sites.first.separated(gradient, 4).movedim(axis, 0)[1:].count_nonzero()):
        result.append("coupled")
    if drawn:
        result.append("random")
    if any(g is not None and bool(g.count_nonzero()) for g in around):
        result.append("bypass")
    if f.shape[1] > 1:
        result.append("vector")
    if sites.smooth:
        result.append("pointwise")
    if not _same(batch, cut.recorded_input):
        result.append("preprocessed")
    return tuple(result)


def random_layers(model: nn.Module) -> list[str]:
    """Paths of the modules in training mode that have dropout, as far as their attributes say."""
    return [
        clean_path(path) or type(model).__name__
        for path, module in model.named_modules()
        if module.training
        and any(isinstance(p := getattr(module, name, None), float) and p > 0 for name in ("p", "dropout", "drop_prob"))
    ]


def _unreachable(sites: TracedLayers) -> str:
    return f"the first affine layer, {sites.first.name!r}, cannot be reached from the output: something detaches or rounds between them"


def _same(batch: Batch, recorded: Tensor | None) -> bool:
    """Whether the first layer sees the numbers of the input, in any order."""
    inputs = tensors(batch)
    if (
        len(inputs) != 1
        or recorded is None
        or not inputs[0].is_floating_point()
        or inputs[0].numel() != recorded.numel()
    ):
        return False
    return torch.equal(inputs[0].detach().to(recorded).flatten().sort().values, recorded.flatten().sort().values)


_LINKS = ("BinaryCrossEntropyWithLogits", "LogSoftmax", "Softmax", "Sigmoid", "LogSigmoid", "Softplus", "CrossEntropy")


def applies_link(node: Any, after: int) -> bool:
    """Whether the loss puts a sigmoid or softmax on top of the model's output.

    The loss is given by its node in the autograd graph: such a node is made later than `after`, the number of the output's own node.
    """
    waiting: list[Any] = [node]
    visited: set[Any] = set()
    while waiting and len(visited) < 1000:
        item = waiting.pop()
        if item is None or item in visited or not _is_later(item, after):
            continue
        visited.add(item)
        if item.name().startswith(_LINKS):
            return True
        waiting += [following for following, _ in item.next_functions]
    return False


def _is_later(node: Any, after: int) -> bool:
    number: Callable[[], int] | None = getattr(node, "_sequence_nr", None)
    return number is not None and number() > after and "AccumulateGrad" not in node.name()
