"""Critical sharpness: how much longer the last update could have been before the loss rises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from excite._core.calls import Batch, arguments, own_copy, tensors
from excite._core.checks import shown
from excite._core.distributed import gathered, local_shard
from excite._core.intercept.cast_linears import cast_linears
from excite._core.intercept.other_weights import OtherWeights
from excite._core.intercept.padded_rows import padded
from excite._core.preserve import eval_mode
from excite._core.wrappers import is_sharded, resharded
from excite.errors import InputError, ModelError
from excite.probes.base import Deferred, Every, Measurement, Probe, Schedule, StepContext, Values
from excite.probes.findings import Finding, MetricSeries, Panel, finite, number
from excite.probes.update_ratio import StepCopy, copies
from excite.probes.vital_signs.sample import SEQUENCES, few_sequences, logits_of, running
from excite.probes.vital_signs.tokens import token_mask, wide

LossFunction = Callable[[Any, Batch], Tensor]  # of the outputs of the model and the batch
_GRID = (0.25, 0.625, 1.5625, 3.90625)  # times the last factor: with the loss at zero five forward passes


def critical_factor(multiples: Sequence[float], rises: Sequence[float]) -> float | None:
    """The smallest multiple c of an update at which the loss is as high as before it.

    [L(θ + cu) − L(θ)] / c is interpolated linearly in c between the last multiple that lowers the loss and the next, which is
    exact for a quadratic loss.

    Args:
        multiples: c, positive and ascending.
        rises: L(θ + cu) − L(θ) for each.

    Returns:
        The factor, or None if the loss is not lower at the first multiple or not higher at a later one.

    Example:
        >>> from excite.probes.vital_signs.critical_sharpness import critical_factor
        >>> critical_factor([1.0, 2.0, 4.0], [c * c - 3 * c for c in (1.0, 2.0, 4.0)])
        3.0
    """
    for (low, below), (high, above) in zip(zip(multiples, rises), zip(multiples[1:], rises[1:])):
        if not below <= 0:
            return None
        if above > 0:
            before, after = below / low, above / high
            return low - before * (high - low) / (after - before)
    return None


class CriticalSharpness(Probe):
    """Sharpness along the update, from five forward passes on two sequences of the example (Kalra et al. 2026).

    With u the last update and c the smallest factor at which L(θ + cu) > L(θ), the critical learning rate is η_c = cη and the critical
    sharpness λ_c = 2/η_c: for a quadratic loss uᵀHu/(η |∇L·u|). Training becomes unstable where λ_c reaches 2/η. The losses are
    evaluated at four multiples around the last factor, each 2.5 times the one before; where none brackets it, nothing is recorded
    and the multiples move.

    Records:
        ``sharpness/critical``: λ_c.
        ``sharpness/factor``: c; updates are stable while it is above 1.
        ``sharpness/limit``: 2/η, with η the learning rate of the first parameter group.
        ``sharpness/adam_limit``: 2(1 + β₁)/((1 − β₁)η), which is 38/η for β₁ = 0.9: the limit of the preconditioned sharpness
        (Cohen et al. 2022). Only for optimizers with betas.

    The weights are copied when ``optimizer.step`` of a step that is measured begins. The model runs in evaluation mode with other tensors
    in place of its weights, as by ``torch.func.functional_call``; its own are not changed.

    Args:
        schedule: When to measure. Default: every 250 steps.
        loss: Function of what the model returns and the batch, returning the loss as a tensor with one element. Default: the
            model's own ``loss`` if it returns one (the example holds labels), or the cross-entropy of the next token if the
            example holds token ids and the model is causal.

    Raises:
        InputError: If `loss` is not a function; when attached, if there is none and no default applies.

    Example:
        >>> from excite.probes import CriticalSharpness, Every
        >>> probe = CriticalSharpness(Every(100), loss=lambda output, batch: output.square().mean())
    """

    name = "sharpness"
    reduction = "mean"
    requires = ("example", "optimizer")
    panel = Panel(
        "sharpness",
        "Critical sharpness",
        "2/η of the learning rate at which the loss would rise along the last update, next to 2/η of the one that is used. Where "
        "they are equal, training is at the edge of stability.",
        (
            ("critical", "critical sharpness"),
            ("limit", "2/η"),
            ("factor", "factor by which the update could be longer"),
            ("adam_limit", "2(1+β₁)/((1−β₁)η)"),
        ),
        order=37,
        log=True,
        docs="language-models.md#vital-signs",
    )

    def __init__(self, schedule: Schedule | None = None, loss: LossFunction | None = None):
        super().__init__(Every(250) if schedule is None else schedule)
        if loss is not None and not callable(loss):
            raise InputError(f"CriticalSharpness: loss: expected a function of output and batch; got {shown(loss)}")
        self.loss = loss
        self._chosen: LossFunction | None = None
        self._parameters: dict[str, Tensor] = {}
        self._before = StepCopy()
        self._factor = 2.0  # around which losses are evaluated

    def attach(self, ctx: StepContext) -> None:
        """Finds the parameters and the loss."""
        # Before the model runs: afterwards FSDP's root has gathered parameters, whose memory it frees.
        self._parameters = {path: p for path, p in ctx.model.named_parameters() if p.requires_grad}
        with running(SEQUENCES):
            self._chosen = self.loss or default_loss(ctx.model, few_sequences(_example(ctx), SEQUENCES))
        self._before.attach(self._parameters, ctx.optimizer)

    def detach(self) -> None:
        """Releases memory; called when the watch is closed."""
        self._parameters = {}
        self._before.detach()

    def announce(self, due: bool) -> None:
        """Copies the weights if the coming step will be measured."""
        self._before.announce(due)

    @torch.no_grad()
    def measure(self, ctx: StepContext) -> Measurement:
        """Measures the losses along the last update."""
        before = self._before.pop()
        if not before or ctx.optimizer is None or self._chosen is None:
            return {}
        batch = few_sequences(_example(ctx), SEQUENCES)
        multiples = [self._factor * multiple for multiple in _GRID]
        evaluate = self._losses_sharded if is_sharded(ctx.model) else self._losses
        losses = evaluate(ctx.model, batch, before, multiples)
        compute = partial(self._values, multiples, losses, dict(ctx.optimizer.param_groups[0]))
        return Deferred(compute) if losses[0].device.type != "cpu" else compute()

    def _losses(self, model: nn.Module, batch: Batch, before: dict[str, Tensor], multiples: list[float]) -> Tensor:
        """The loss before the update and after each multiple of it, (1 + multiples,)."""
        old, new = list(before.values()), [self._parameters[path] for path in before]
        start = dict(zip(before, map(padded, old)))
        losses: list[Tensor] = []
        weights = OtherWeights(model, {path: self._parameters[path] for path in before})
        with eval_mode(model), weights.swapped_in(start), cast_linears(model) as cast:
            for c in (0.0, *multiples):
                if c:
                    weights.put(start)  # lets go of the last ones: one more set of weights at a time
                    # (1 − c) old + c new, in the order of lerp
                    weights.put(dict(zip(before, map(padded, torch._foreach_lerp(old, new, c)))))
                    cast()
                losses.append(self._loss_of(model, batch))
        return torch.stack(losses)

    def _losses_sharded(
        self, model: nn.Module, batch: Batch, before: dict[str, Tensor], multiples: list[float]
    ) -> Tensor:
        """The same where each process has a part of the weights: they are changed in place and restored; the mean over processes."""
        weights = [local_shard(self._parameters[path]) for path in before]
        old, new = [local_shard(p) for p in before.values()], copies(weights)
        losses: list[Tensor] = []
        try:
            for c in (0.0, *multiples):
                torch._foreach_copy_(weights, torch._foreach_lerp(old, new, c))
                with eval_mode(model), resharded(model):
                    losses.append(self._loss_of(model, batch))
        finally:
            torch._foreach_copy_(weights, new)
        return gathered(torch.stack(losses)[None]).mean(0)

    def _loss_of(self, model: nn.Module, batch: Batch) -> Tensor:
        assert self._chosen is not None
        args, kwargs = arguments(model, own_copy(batch))
        return wide(self._chosen(model(*args, **kwargs), batch)).reshape(())

    def _values(self, multiples: list[float], losses: Tensor, group: dict[str, Any]) -> Values:
        start, *moved_losses = losses.double().tolist()
        rate, betas = float(group["lr"]), group.get("betas")
        rises = [loss - start for loss in moved_losses]
        factor = critical_factor(multiples, rises)
        if factor is None:
            self._factor *= 16.0 if rises[0] <= 0 else 1 / 16.0
            self._factor = min(max(self._factor, 1e-6), 1e6)
        else:
            self._factor = factor
        if rate <= 0:
            return {}
        values = {"limit": 2 / rate}
        if betas is not None and float(betas[0]) < 1:
            values["adam_limit"] = 2 * (1 + float(betas[0])) / ((1 - float(betas[0])) * rate)
        return values if factor is None else {"critical": 2 / (factor * rate), "factor": factor, **values}

    @classmethod
    def findings(cls, history: MetricSeries) -> list[Finding]:
        """Returns what a report says about these metrics."""
        values = finite(history["sharpness/factor"])[1]
        if not len(values):
            return []
        if values[-1] < 1:
            return [Finding("warning", f"The last update that was measured raises the loss on the sample: {number(values[-1])} of it would be critical.",
                            "Lower the learning rate.")]  # fmt: skip
        return [
            Finding("note", f"Updates could be {number(values[-1])} times as long before the loss on the sample rises.")
        ]


def _example(ctx: StepContext) -> Batch:
    if ctx.example is None:
        raise InputError("this probe needs an example batch: excite.watch(model, example=x, ...)")
    return ctx.example


def default_loss(model: nn.Module, batch: Batch) -> LossFunction:
    """The model's own loss if it returns one, else the cross-entropy of the next token; an InputError if neither applies."""
    missing = InputError(
        "CriticalSharpness: expected a loss=function(output, batch), labels in the example, or a causal language model"
    )
    ids = _token_ids(batch)
    with eval_mode(model), torch.no_grad():
        output = _call(model, batch)
        if _own_loss(output) is not None:
            return lambda returned, passed: _own_loss(returned)  # type: ignore[return-value]
        if ids is None:
            raise missing
        try:
            logits = logits_of(output)
        except ModelError:
            raise missing from None
        if logits.shape[:-1] != ids.shape or ids.shape[1] < 2 or int(ids.max()) >= logits.shape[-1]:
            raise missing
        other = torch.cat([ids[:, :-1], (ids[:, -1:] + 1) % logits.shape[-1]], 1)
        changed = logits_of(_call(model, tree_map(lambda leaf: other if leaf is ids else leaf, batch)))
        moved = (changed - logits).abs()
        if moved[:, :-1].max() > 1e-3 * moved[:, -1].max():
            raise missing  # a token sees those after it
    return _next_token


def _call(model: nn.Module, batch: Batch) -> Any:
    args, kwargs = arguments(model, own_copy(batch))
    return model(*args, **kwargs)


def _own_loss(output: Any) -> Tensor | None:
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    return loss if isinstance(loss, Tensor) and loss.numel() == 1 else None


def _token_ids(batch: Batch) -> Tensor | None:
    named = batch.get("input_ids") if isinstance(batch, dict) else None
    candidates = [named] if isinstance(named, Tensor) else tensors(batch)
    return next((t for t in candidates if t.dim() == 2 and t.dtype in (torch.int64, torch.int32)), None)


def _next_token(output: Any, batch: Batch) -> Tensor:
    ids, mask, logits = _token_ids(batch), token_mask(batch), logits_of(output)
    assert ids is not None
    targets = ids.long() if mask is None else ids.long().masked_fill(mask == 0, -100)
    targets = F.pad(targets[:, 1:], (0, 1), value=-100)  # rather than logits without the last, which would be a copy
    with torch.autocast(logits.device.type, enabled=False):
        log_p = F.log_softmax(logits.flatten(0, 1), -1, dtype=torch.promote_types(logits.dtype, torch.float32))
        return F.nll_loss(log_p, targets.flatten())
