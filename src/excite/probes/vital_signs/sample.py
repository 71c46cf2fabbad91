"""One forward pass over a few sequences of the example, shared by the probes that measure activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from excite._core.calls import Batch, Pick, batch_size, call, own_copy, pick_output
from excite._core.checks import first_line
from excite._core.intercept.affine import clean_path
from excite._core.intercept.cast_linears import cast_linears
from excite._core.intercept.padded_rows import padded_weights
from excite.errors import ExciteError, InputError, ModelError
from excite.probes.base import StepContext
from excite.probes.vital_signs.attention_calls import AttentionCall, AttentionMode
from excite.probes.vital_signs.blocks import attention_modules, blocks, stream
from excite.probes.vital_signs.stream_signs import StreamSigns, several_stream_signs
from excite.probes.vital_signs.tokens import token_mask
from excite.wiring.activations import ActivationCall
from excite.wiring.normalization import as_trained

T = TypeVar("T")
Activated = Callable[[ActivationCall], None]  # called with what enters an activation
SEQUENCES = 2  # of the example, in the pass that most vital signs share
SHARED = "sample"  # key of that pass in `StepContext.shared`


@dataclass
class SamplePass:
    """What one pass over a few sequences shows.

    Attributes:
        attention: Every call of attention, in the order of execution.
        streams: Size of the output of each block, by path.
        output: What the model returned.
        tokens: (sequences, tokens), 1 for tokens and 0 for padding; None if there is no padding.
    """

    attention: list[AttentionCall] = field(default_factory=list)
    streams: dict[str, StreamSigns] = field(default_factory=dict)
    output: Any = None
    tokens: Tensor | None = None


def few_sequences(example: Batch, count: int) -> Batch:
    """The first `count` sequences: of every tensor whose first axis is the batch."""
    size = batch_size(example)

    def shorten(leaf: Any) -> Any:
        return leaf[:count] if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == size else leaf

    return tree_map(shorten, example)  # type: ignore[no-any-return]


@contextmanager
def running(count: int) -> Iterator[None]:
    """Errors of the user's model on a part of the example, in one line."""
    try:
        yield
    except ExciteError:
        raise
    except Exception as error:
        raise ModelError(f"the model does not run on {count} sequences of the example: {first_line(error)}") from error


def sample_tokens(ctx: StepContext) -> Tensor | None:
    """(sequences, tokens) of the pass over two sequences, 0 for padding; None if the example has no mask."""
    return None if ctx.example is None else token_mask(few_sequences(ctx.example, SEQUENCES))


def sample_pass(ctx: StepContext, *modes: TorchFunctionMode, activated: Activated | None = None) -> SamplePass:
    """The pass over two sequences of the example as in training, without dropout; once per step for all probes.

    `modes` are active while the model runs, and `activated` is called before its activations: the pass is then one that later
    probes share, or one more.
    """
    if ctx.example is None:
        raise InputError("this probe needs an example batch: excite.watch(model, example=x, ...)")
    if SHARED not in ctx.shared or modes or activated is not None:
        with running(SEQUENCES):
            ctx.shared[SHARED] = run_sample(ctx.model, few_sequences(ctx.example, SEQUENCES), modes, activated)
    result: SamplePass = ctx.shared[SHARED]
    return result


@torch.no_grad()
def run_sample(
    model: nn.Module, batch: Batch, modes: Sequence[TorchFunctionMode] = (), activated: Activated | None = None
) -> SamplePass:
    """Runs the model eagerly on a batch and records attention, blocks and the output. The model is left as it was."""
    tokens = token_mask(batch)
    attention = AttentionMode(batch_size(batch), tokens, attention_modules(model))
    attention.activated = activated
    result = SamplePass(tokens=tokens)
    with ExitStack() as stack:
        stack.enter_context(as_trained(model, batch))
        stack.enter_context(_paths(model, attention.stack))
        streams = stack.enter_context(block_outputs(model, torch.clone))  # the next block may change them in place
        if not modes:  # they identify weights by their id
            stack.enter_context(padded_weights(model))
            stack.enter_context(cast_linears(model))
        for mode in (attention, *modes):
            stack.enter_context(mode)
        result.output = call(model, own_copy(batch))
    result.attention = attention.finish()
    result.streams = several_stream_signs(streams, tokens)
    return result


@torch.no_grad()
def heads_in_front(model: nn.Module, same: Batch) -> list[str]:
    """Modules whose attention merges heads and sequences into one axis with the heads in front, from a batch of equal sequences."""
    attention = AttentionMode(batch_size(same), None, attention_modules(model))
    attention.headed = []
    with as_trained(model, same), _paths(model, attention.stack), attention:
        call(model, own_copy(same))
    return list(dict.fromkeys(attention.headed))


@contextmanager
def _paths(model: nn.Module, stack: list[str]) -> Iterator[None]:
    """Keeps the paths of the modules that run on a stack; hooks are removed at the end."""
    handles: list[RemovableHandle] = []

    def pop(module: nn.Module, args: Any, output: Any) -> None:
        stack.pop()

    try:
        for path, module in model.named_modules():
            if module._modules or _has_matrices(module):
                handles.append(module.register_forward_pre_hook(_push(stack, clean_path(path))))
                handles.append(module.register_forward_hook(pop, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def block_outputs(model: nn.Module, transform: Callable[[Tensor], T]) -> Iterator[dict[str, T]]:
    """A dict that is filled with what `transform` makes of the output (..., tokens, width) of each block, by path."""
    outputs: dict[str, T] = {}
    handles: list[RemovableHandle] = []
    try:
        for path, module in blocks(model).items():
            handles.append(module.register_forward_hook(_store_output(outputs, path, transform)))
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _has_matrices(module: nn.Module) -> bool:
    """Whether a module has several matrices of its own: attention may be written in it."""
    return sum(p is not None and p.dim() > 1 for p in module._parameters.values()) > 1


def _push(stack: list[str], path: str) -> Callable[..., None]:
    return lambda module, args: stack.append(path)


def _store_output(outputs: dict[str, T], path: str, transform: Callable[[Tensor], T]) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        x = stream(output)
        if x is not None:
            with torch._C.DisableTorchFunction():  # not intercepted by modes around the model
                outputs[path] = transform(x.detach())  # now: it may be changed in place by the next block

    return hook


def logits_of(returned: Any, output: Pick = None) -> Tensor:
    """Class or token logits (..., classes): the output that is picked, else `logits` of what the model returned.

    One logit f is that of the second of two classes, with logits 0 and f, as in binary cross-entropy.
    """
    if output is None and not isinstance(returned, Tensor):
        own_logits = returned.get("logits") if isinstance(returned, dict) else getattr(returned, "logits", None)
        returned = own_logits if own_logits is not None else returned
    logits = pick_output(returned, output)
    if logits.dim() < 2 or not logits.shape[-1] or not logits.is_floating_point():
        raise ModelError(f"expected logits with one number per class; got an output of shape {tuple(logits.shape)}")
    return torch.cat([torch.zeros_like(logits), logits], -1) if logits.shape[-1] == 1 else logits
