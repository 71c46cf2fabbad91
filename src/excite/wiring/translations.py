"""Translations: under softmax cross-entropy the last layer's sums over the classes are conserved.

The softmax does not see a number that is added to all logits. So the gradient of cross-entropy sums to zero over the classes,
in every entry of the last layer's input and in the bias, and gradient flow conserves Σ_c W_c and Σ_c b_c. SGD conserves them at every
step size, also with momentum (a buffer of such gradients sums to zero, too). Decay λ shrinks them: by 1 − ηλ at every step of SGD
without momentum, whatever the loss does (Kunin et al. 2021).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from excite.wiring.channels.signals import ChannelContext
from excite.wiring.channels.slots import Slot
from excite.wiring.export import Exported
from excite.wiring.operators.movement import SAME
from excite.wiring.propagation.schema import name_of


@dataclass(frozen=True)
class Translation:
    """A last layer whose rows sum to a constant under gradient flow, if the loss is softmax cross-entropy of the outputs.

    Attributes:
        layer: The layer's name.
        parameter: Path of its weight.
        bias: Path of its bias, or None.
        classes: Number of outputs that are summed over.
        slot: The layout of the weight, for `sums`.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> (translation,) = excite.trace(model, torch.zeros(2, 4)).translations
        >>> translation.layer, translation.sums(dict(model.named_parameters())).shape
        ('2', torch.Size([9]))
    """

    layer: str
    parameter: str
    bias: str | None
    classes: int
    slot: Slot = field(repr=False, compare=False)

    def sums(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Returns the sums over the classes, one per input of the layer and one for the bias.

        Args:
            tensors: By path, the parameters, or their gradients.
        """
        total = self.slot.out_rows(tensors[self.parameter]).sum(0)
        return total if self.bias is None else torch.cat([total, tensors[self.bias].sum().reshape(1)])


def find_translations(exported: Exported, ctx: ChannelContext) -> tuple[Translation, ...]:
    """Returns the layer that makes the first output directly, unless its weight is used elsewhere or does not train.

    Args:
        exported: The graph.
        ctx: Its channels.
    """
    output = next(node for node in exported.graph.nodes if node.op == "output")
    first = next(
        (leaf for leaf in torch.utils._pytree.tree_leaves(output.args) if isinstance(leaf, torch.fx.Node)), None
    )
    while first is not None and first.op == "call_function" and name_of(first.target) in (*SAME, "view", "reshape"):
        first = first.args[0] if isinstance(first.args[0], torch.fx.Node) else None
    made = None if first is None else ctx.made.get(first)
    if made is None or made[0].inp is None:
        return ()
    use, labels = made
    path = use.slot.source.path
    own = [use for use in ctx.uses if use.slot.source.path == path]
    across = labels.flatten()[: labels.shape[-1]]
    if len(own) > 1 or use.slot.blocks > 1 or use.slot.source.steps or len(across) < 2:
        return ()
    if use.out is None or not torch.equal(across, use.out):
        return ()
    biases = [
        other.slot.source.path
        for other in ctx.uses
        if other.layer == use.layer and other is not use and other.inp is None
    ]
    return (Translation(use.layer, path, biases[0] if biases else None, len(across), use.slot),)
