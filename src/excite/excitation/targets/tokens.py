"""A class for each token of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from excite._core.background import DeferredChecks
from excite._core.calls import Batch
from excite._core.checks import check_dense
from excite._core.preserve import capturing
from excite.errors import InputError, ModelError
from excite.excitation.targets.target import Target


class Tokens(Target):
    """A class for each token: outputs (B, T, V) are logits, labels (B, T) are tokens, or `ignore_index` where none is counted.

    The loss is the mean of −log p over all counted tokens of the batch, as in `F.cross_entropy`. `errors` has the mean over the
    counted tokens of each sequence. With `shift` the output at position t is compared with the label at t + 1, as the causal
    language models of Transformers do.
    """

    def __init__(self, shift: bool = False, ignore_index: int = -100, perturbed: Literal["all", "prompt"] = "all"):
        self.shift, self.ignore_index, self.perturbed = shift, ignore_index, perturbed

    def outputs(self, returned: Tensor, batch: int) -> Tensor:
        """Returns the logits, (B, T, V)."""
        if returned.dim() == 3 and len(returned) == batch:
            return returned
        raise ModelError(
            f"targets={self._name!r} needs logits of shape ({batch}, tokens, vocabulary); the model returned {tuple(returned.shape)}: "
            "pick them with output="
        )

    def labels(self, y: object, batch: int, deferred: DeferredChecks | None = None) -> Tensor:
        """Returns the labels, (B, T)."""
        if not isinstance(y, Tensor) or y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
            dtype = y.dtype if isinstance(y, Tensor) else type(y).__name__
            raise InputError(f"labels: targets={self._name!r} expects a tensor of whole numbers; got {dtype}")
        if y.dim() != 2 or len(y) != batch or y.shape[1] <= self.shift:
            raise InputError(f"labels: expected shape ({batch}, tokens) for {batch} sequences; got {tuple(y.shape)}")
        y = check_dense(y, "labels").detach().long()
        if not (y.is_cuda and capturing()):
            counted = (y[:, int(self.shift) :] != self.ignore_index).any()
            lowest = torch.where(y == self.ignore_index, 0, y).amin()
            (deferred or DeferredChecks("loss")).add(torch.stack([counted.long(), lowest]), self._judge)
        return y

    def errors(self, output: Tensor, labels: Tensor) -> Tensor:
        """Mean over the counted tokens of each sequence, (B,); 0 where none is."""
        output, labels = self._paired(output, labels)
        losses = F.cross_entropy(
            output.flatten(0, 1), labels.flatten(), ignore_index=self.ignore_index, reduction="none"
        )
        counted = (labels != self.ignore_index).sum(1)
        return losses.reshape(labels.shape).sum(1) / counted.clamp(min=1)

    def mean_error(self, output: Tensor, labels: Tensor) -> Tensor:
        """Mean over all counted tokens of the batch, a scalar."""
        output, labels = self._paired(output, labels)
        return F.cross_entropy(output.flatten(0, 1), labels.flatten(), ignore_index=self.ignore_index)

    def mean_loss(self, losses: Tensor, low: Tensor, high: Tensor, labels: Tensor) -> Tensor:
        """½ of the mean over all counted tokens at each extreme, a scalar."""
        return 0.5 * (self.mean_error(high, labels) + self.mean_error(low, labels))

    def decide(self, output: Tensor) -> Tensor:
        """Returns the most probable token of each position, (B, T)."""
        return output.argmax(2)

    def trivial(self, labels: Tensor) -> Tensor:
        """0: the few tokens of a batch do not tell the loss of the best constant output."""
        return torch.zeros((), device=labels.device)

    def where(self, x: Batch, labels: Tensor) -> Tensor | None:
        """Which tokens may be perturbed, (B, T); None: all. Prompt tokens are those without a label; padding is never perturbed."""
        allowed = labels == self.ignore_index if self.perturbed == "prompt" else None
        mask = x.get("attention_mask") if isinstance(x, dict) else None
        if isinstance(mask, Tensor) and mask.shape == labels.shape:
            allowed = mask.bool() if allowed is None else allowed & mask.bool()
        return allowed

    def _paired(self, output: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and the labels they are compared with."""
        if output.shape[:2] != labels.shape:
            raise InputError(
                f"labels: expected one for each token of the output, {tuple(output.shape[:2])}; got {tuple(labels.shape)}"
            )
        if not labels.is_cuda and int(labels.max()) >= output.shape[2]:
            raise InputError(
                f"labels: expected tokens below {output.shape[2]}, the number of logits; got {int(labels.max())}"
            )
        return (output[:, :-1], labels[:, 1:]) if self.shift else (output, labels)

    def _judge(self, numbers: Sequence[float]) -> str | None:
        counted, lowest = numbers
        if not counted:
            return f"labels: expected at least one token with a label; all are {self.ignore_index} (ignore_index)"
        return None if lowest >= 0 else f"labels: expected tokens from 0 on, or {self.ignore_index}; got {int(lowest)}"

    @property
    def _name(self) -> str:
        return "next-token" if self.shift else "tokens"

    def __repr__(self) -> str:
        return f"targets={self._name!r}, loss='cross-entropy', tokens={self.perturbed!r}"
