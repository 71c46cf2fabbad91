"""Sums over classes in the ledger: conserved under softmax cross-entropy, and under SGD known in advance.

The gradient of cross-entropy sums to zero over the classes (`excite.wiring.translations`). So the sums P of a last layer, and V of its
momentum buffer, follow from where they began: V' = μ V + (1 − d) λ P, P' = P − η V' (with Nesterov's momentum P' = P − η(λ P + μ V')).
Nothing of the training enters: with decay they shrink as an oscillator without a driving force.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from excite.wiring.translations import Translation

# Of the sum of absolute values: below it a gradient sums to zero over the classes.
_GRADIENT = {torch.float64: 1e-9, torch.float32: 1e-3}
_COARSE = 0.1  # the same in half precision, and under autocast
_ROUNDED = 8.0  # eps of the passes by which the sum of a gradient may differ from zero, over its sum of absolute values


@dataclass(frozen=True)
class TranslationEntry:
    """Sums of a last layer over its classes, one per input and one for the bias.

    Attributes:
        name: The layer, with "/translation".
        value: Current sums.
        start: Sums at the start.
        predicted: Sums that follow from the start.
        scale: Largest sum of absolute values over the classes.
        tolerance: Largest residual, over the scale, that counts as rounding.
        why: Why the law is not checked, or None.

    Example:
        >>> with excite.probes.conservation(model, optimizer, x) as ledger:
        ...     pass
        >>> ledger.read().translations
        ()
    """

    name: str
    value: Tensor
    start: Tensor
    predicted: Tensor
    scale: float
    tolerance: float
    why: str | None = None

    @property
    def relative(self) -> float:
        """The largest |value − predicted|, over the scale."""
        return float((self.value - self.predicted).abs().max()) / (self.scale or 1.0)

    @property
    def moved(self) -> float:
        """The largest |value − start|, over the scale."""
        return float((self.value - self.start).abs().max()) / (self.scale or 1.0)

    @property
    def state(self) -> str:
        """As for the other laws: "holds", "flagged" or "not checked"."""
        if self.why is not None:
            return "not checked"
        return "holds" if self.relative <= self.tolerance else "flagged"


class _Piece:
    """The sums of one parameter, with those of its momentum buffer."""

    def __init__(self, parameter: Tensor, sums: Callable[[Tensor], Tensor], state: Mapping[str, Any]):
        self.parameter, self.sums = parameter, sums
        self.start = self.value()
        self.predicted = self.start.clone()
        buffer = state.get("momentum_buffer")
        self.velocity = None if buffer is None else sums(buffer).double()
        self.worst = self.start.new_zeros(())  # of the gradients' sums over their sums of absolute values
        self.size = sums(parameter.detach().abs()).double().amax()
        self.allowed = self.start.new_zeros(())  # what rounding of gradients and weights can change

    def value(self) -> Tensor:
        return self.sums(self.parameter.detach()).double()

    def step(self, setting: Mapping[str, Any], eps: float) -> None:
        grad = self.parameter.grad
        if grad is None:
            return
        grad = grad.detach().to_dense() if grad.is_sparse else grad.detach()
        size = self.sums(grad.abs()).double().amax()
        relative = self.sums(grad).double().abs().amax() / torch.where(size > 0, size, 1.0)
        self.worst = torch.maximum(self.worst, relative)
        rate, decay, momentum = (float(setting[name]) for name in ("lr", "weight_decay", "momentum"))
        own = torch.finfo(self.parameter.dtype).eps
        of_gradient = rate / max(1 - momentum, 1e-3) * _ROUNDED * max(eps, own)
        self.allowed = self.allowed + of_gradient * size + own * self.size
        move = decay * self.predicted
        if momentum:
            gain = 1 - float(setting["dampening"])
            self.velocity = move if self.velocity is None else momentum * self.velocity + gain * move
            move = move + momentum * self.velocity if setting["nesterov"] else self.velocity
        self.predicted = self.predicted - rate * move


class TranslationSums:
    """Follows the sums over classes of a model's last layer through its optimizer steps.

    Args:
        translations: Layers whose rows sum to a constant under cross-entropy.
        parameters: The parameters of the model by path.
        state: The optimizer's state by parameter.
        predicted: Whether the optimizer is SGD.
    """

    def __init__(
        self,
        translations: Sequence[Translation],
        parameters: Mapping[str, Tensor],
        state: Mapping[Tensor, Mapping[str, Any]],
        predicted: bool,
    ):
        self._predicted = predicted
        self._autocast = False
        self.pieces: dict[str, dict[str, _Piece]] = {}  # by law and path
        for translation in translations:
            pieces = {
                translation.parameter: _Piece(
                    parameters[translation.parameter],
                    _rows(translation),
                    state.get(parameters[translation.parameter], {}),
                )
            }
            if translation.bias is not None:
                bias = parameters[translation.bias]
                pieces[translation.bias] = _Piece(bias, lambda tensor: tensor.sum().reshape(1), state.get(bias, {}))
            self.pieces[f"{translation.layer}/translation"] = pieces

    @torch.no_grad()
    def after(self, settings: Mapping[int, Mapping[str, Any]], eps: float) -> None:
        """After an optimizer step. `settings`: those of every parameter, by its id; `eps`: that of autocast, or 0."""
        self._autocast = self._autocast or eps > 0
        for pieces in self.pieces.values() if self._predicted else ():
            for piece in pieces.values():
                if id(piece.parameter) in settings:
                    piece.step(settings[id(piece.parameter)], eps)

    @torch.no_grad()
    def read(self, tolerance: float) -> tuple[TranslationEntry, ...]:
        """The sums as of now; waits for the device."""
        return tuple(entry() for entry in self.snapshot(tolerance))

    @torch.no_grad()
    def snapshot(self, tolerance: float) -> list[Callable[[], TranslationEntry]]:
        """The sums as of now, left on the device; calling one of the results waits for it."""
        result: list[Callable[[], TranslationEntry]] = []
        for name, pieces in self.pieces.items():
            several = list(pieces.values())
            value, start, predicted = (
                torch.cat(column).clone() for column in zip(*((p.value(), p.start, p.predicted) for p in several))
            )
            scale = torch.stack(
                [piece.sums(piece.parameter.detach().abs()).double().amax() for piece in several]
            ).amax()
            worst, allowed = (
                torch.stack(columns).amax() for columns in ([p.worst for p in several], [p.allowed for p in several])
            )
            dtype = torch.float16 if self._autocast else several[0].parameter.dtype
            result.append(
                partial(self._entry, name, (value, start, predicted), scale, worst, allowed, dtype, tolerance)
            )
        return result

    def _entry(
        self,
        name: str,
        columns: tuple[Tensor, ...],
        scale: Tensor,
        worst: Tensor,
        allowed: Tensor,
        dtype: torch.dtype,
        tolerance: float,
    ) -> TranslationEntry:
        value, start, predicted = (column.cpu() for column in columns)
        why = self._why(float(worst), dtype)
        size = float(scale)
        return TranslationEntry(name, value, start, predicted, size, tolerance + float(allowed) / (size or 1.0), why)

    def _why(self, worst: float, dtype: torch.dtype) -> str | None:
        if not self._predicted:
            return "no formula predicts the sums over classes under this optimizer"
        if not worst <= _GRADIENT.get(dtype, _COARSE):
            return "the gradient does not sum to zero over the classes: the loss is not softmax cross-entropy of the outputs"
        return None

    def state_dict(self) -> dict[str, Any]:
        """Returns the state, for a checkpoint."""
        names = ("start", "predicted", "velocity", "worst", "allowed")
        return {
            law: {path: {name: getattr(piece, name) for name in names} for path, piece in pieces.items()}
            for law, pieces in self.pieces.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state; sums that it does not hold, as of earlier versions, begin with the present weights."""
        for law, pieces in self.pieces.items():
            for path, piece in pieces.items():
                for name, stored in state.get(law, {}).get(path, {}).items():
                    setattr(piece, name, None if stored is None else stored.to(piece.start).clone())


def _rows(translation: Translation) -> Callable[[Tensor], Tensor]:
    return lambda tensor: translation.slot.out_rows(tensor).sum(0)
