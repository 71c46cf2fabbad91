"""One forward pass over a few sequences of the example, shared by the probes that look at activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from excite._core.calls import Batch, Pick, batch_size, call, own_copy, pick_output
from excite._core.checks import first_line
from excite._core.intercept.affine import clean_path
from excite.errors import ExciteError, InputError, ModelError
from excite.probes.base import StepContext
from excite.probes.vital_signs.attention_calls import AttentionCall, AttentionMode
from excite.probes.vital_signs.blocks import blocks, stream
from excite.wiring.normalization import as_trained

SEQUENCES = 2  # of the example, in the pass that most vital signs share


@dataclass
class SamplePass:
    """What one pass over a few sequences shows.

    Attributes:
        attention: Every call of attention, in the order of execution.
        streams: Outputs (..., tokens, width) of the blocks, by path.
        output: What the model returned.
        tokens: (sequences, tokens), 1 for tokens and 0 for padding; None if there is no padding.
    """

    attention: list[AttentionCall] = field(default_factory=list)
    streams: dict[str, Tensor] = field(default_factory=dict)
    output: Any = None
    tokens: Tensor | None = None


def few_sequences(example: Batch, count: int) -> Batch:
    """The first `count` sequences: of every tensor whose first axis is the batch."""
    size = batch_size(example)
    if any(hasattr(leaf, "get_seq_length") for leaf in tree_leaves(example)):
        raise InputError("the example holds a key-value cache: expected whole sequences without past_key_values")

    def shorten(leaf: Any) -> Any:
        return leaf[:count] if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == size else leaf

    return tree_map(shorten, example)  # type: ignore[no-any-return]


def token_mask(example: Batch) -> Tensor | None:
    """The attention mask (sequences, tokens) of a tokenizer, if the example is a dict that has one."""
    mask = example.get("attention_mask") if isinstance(example, dict) else None
    return mask if isinstance(mask, Tensor) and mask.dim() == 2 else None


@contextmanager
def running(count: int) -> Iterator[None]:
    """Errors of the user's model on a part of the example, in one line."""
    try:
        yield
    except ExciteError:
        raise
    except Exception as error:
        raise ModelError(f"the model does not run on {count} sequences of the example: {first_line(error)}") from error


def sample_pass(ctx: StepContext, count: int = SEQUENCES) -> SamplePass:
    """The pass over the first sequences of the example as in training, without dropout; once per step for all probes."""
    if ctx.example is None:
        raise InputError("this probe needs an example batch: excite.watch(model, example=x, ...)")
    key = f"sample {count}"
    if key not in ctx.shared:
        with running(count):
            ctx.shared[key] = run_sample(ctx.model, few_sequences(ctx.example, count))
    found: SamplePass = ctx.shared[key]
    return found


@torch.no_grad()
def run_sample(model: nn.Module, batch: Batch) -> SamplePass:
    """Runs the model eagerly on a batch and records attention, blocks and the output. The model is left as it was."""
    found = SamplePass(tokens=token_mask(batch))
    mode = AttentionMode(batch_size(batch), found.tokens)
    with as_trained(model, batch), _hooks(model, mode.stack, found.streams), mode:
        found.output = call(model, own_copy(batch))
    found.attention = mode.calls
    return found


@contextmanager
def _hooks(model: nn.Module, stack: list[str], streams: dict[str, Tensor]) -> Iterator[None]:
    """Keeps the paths of the modules that run on a stack, and the outputs of blocks; hooks are removed at the end."""
    paths = {clean_path(path): module for path, module in model.named_modules() if next(module.children(), None)}
    handles: list[RemovableHandle] = []

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        stack.pop()

    try:
        for path, module in paths.items():
            handles.append(module.register_forward_pre_hook(_enter(stack, path)))
            handles.append(module.register_forward_hook(leave, always_call=True))
        for path, module in blocks(model).items():
            handles.append(module.register_forward_hook(_keep(streams, path)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _enter(stack: list[str], path: str) -> Callable[..., None]:
    return lambda module, args: stack.append(path)


def _keep(streams: dict[str, Tensor], path: str) -> Callable[..., None]:
    def keep(module: nn.Module, args: Any, output: Any) -> None:
        x = stream(output)
        if x is not None:
            streams[path] = x.detach().clone()  # it may be changed in place by the next block

    return keep


def logits_of(returned: Any, output: Pick = None) -> Tensor:
    """Class or token logits (..., classes): the output that is picked, else `logits` of what the model returned.

    One logit f is that of the second of two classes, with logits 0 and f, as in binary cross-entropy.
    """
    if output is None and not isinstance(returned, Tensor):
        found = returned.get("logits") if isinstance(returned, dict) else getattr(returned, "logits", None)
        returned = found if found is not None else returned
    logits = pick_output(returned, output)
    if logits.dim() < 2 or not logits.shape[-1] or not logits.is_floating_point():
        raise ModelError(f"expected logits with one number per class; got an output of shape {tuple(logits.shape)}")
    return torch.cat([torch.zeros_like(logits), logits], -1) if logits.shape[-1] == 1 else logits


def wide(x: Tensor) -> Tensor:
    """In float32 or better."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
