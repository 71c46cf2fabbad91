"""Where the attention modules and the blocks of a transformer are, from its modules alone."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from excite._core.intercept.affine import clean_path

_ATTENTION = ("attention", "attn", "multihead")
_SHORT = ("mha", "mqa", "gqa", "mla")  # multi-head, multi-query, grouped-query, multi-head latent attention


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Modules whose class is named after attention ("CausalSelfAttention", "GPT2Attention", "MHA", ...), by path."""
    return {clean_path(path): module for path, module in model.named_modules() if _is_attention(module)}


def _is_attention(module: nn.Module) -> bool:
    name = type(module).__name__.lower()
    return any(word in name for word in _ATTENTION) or name in _SHORT


def has_attention(model: nn.Module) -> bool:
    """Whether `excite.watch` measures vital signs by default: a module's class is named after attention."""
    return bool(attention_modules(model))


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The repeated blocks of a transformer by path: items of a list of modules that hold attention.

    An item counts where a module below it (or itself) is named after attention; of nested lists the outer one counts.
    """
    modules = {clean_path(path): module for path, module in model.named_modules()}
    attention_paths = [path for path, module in modules.items() if _is_attention(module)]
    by_name: dict[str, nn.Module] = {}
    for path, module in modules.items():
        if not isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict) or _below(path, by_name):
            continue
        items = {f"{path}.{name}" if path else name: item for name, item in module.named_children()}
        # An attention module may itself be a list; its parts are no blocks.
        by_name |= {
            name: item for name, item in items.items() if any(_below(path, (name,)) for path in attention_paths)
        }
    return by_name


def _below(path: str, parents: Any) -> bool:
    return any(path == parent or path.startswith(f"{parent}.") for parent in parents)


def stream(output: Any) -> Tensor | None:
    """The residual stream (..., tokens, width) that a block returns: its output, or the first part of it."""
    while isinstance(output, tuple | list) and output:
        output = output[0]
    if not isinstance(output, Tensor):
        output = getattr(output, "last_hidden_state", None)
    return output if isinstance(output, Tensor) and output.is_floating_point() and output.dim() >= 2 else None
