"""A model of token ids as a function of its embeddings, which have margins and Lipschitz constants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from excite._core.checks import check_dense, check_model, model_errors, shown
from excite._core.intercept.names import OUTPUT, clean_path, module_outputs
from excite._core.preserve import eval_mode
from excite._core.wrappers import refuse_lazy
from excite.errors import InputError, ModelError


class FromEmbeddings(nn.Module):
    """g(e) = model(ids) with the output of the embedding module replaced by e (B, T, D). Positions are still the model's own.

    All sequences of a batch have the same length and no padding: group them by length.

    Args:
        model: A model that takes token ids (B, T) as its only required argument.
        embedding: Path of the embedding module.
        pick: What to return of what the model returns; all of it by default.

    Example:
        >>> from excite.train.models.gpt import GPT
        >>> g, e = excite.lipschitz.from_embeddings(GPT(9, 8, 1, 2, 5), torch.zeros(2, 5, dtype=torch.long))
        >>> excite.lipschitz.local(g, e, output=lambda logits: logits[:, -1]).shape
        torch.Size([2])
    """

    def __init__(self, model: nn.Module, embedding: str, pick: Callable[[Any], Any] | None = None):
        super().__init__()
        self.model, self.embedding, self.pick = model, embedding, pick

    def forward(self, embeddings: Tensor) -> Any:
        """What the model returns for these embeddings."""
        module = module_outputs(self.model, [self.embedding + OUTPUT])[self.embedding + OUTPUT]
        used = []

        def replaced(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            used.append(output.shape)
            return embeddings

        handle = module.register_forward_hook(replaced)
        try:
            returned = self.model(torch.zeros(embeddings.shape[:2], dtype=torch.long, device=embeddings.device))
        finally:
            handle.remove()
        if used != [embeddings.shape]:
            raise ModelError(
                f"{self.embedding}: expected one call that returns embeddings of shape {tuple(embeddings.shape)}; got shapes "
                f"{[tuple(shape) for shape in used]}"
            )
        return returned if self.pick is None else self.pick(returned)


@model_errors
def from_embeddings(
    model: nn.Module, ids: Tensor, embedding: str | None = None, pick: Callable[[Any], Any] | None = None
) -> tuple[FromEmbeddings, Tensor]:
    """The model as a function of its embeddings, and the embeddings of some sequences.

    Token ids have no distances; their embeddings have. ``excite.margins(g, e, y, norm="2")`` is the distance of the embeddings of
    each sequence to those that are classified otherwise, ``excite.lipschitz.local(g, e)`` the local Lipschitz constant of each sequence,
    and with ``output=lambda logits: logits[:, t]`` that of the output at token t.

    Args:
        model: A model that takes token ids (B, T) as its only required argument.
        ids: Sequences of the same length, (B, T), without padding.
        embedding: Path of the embedding module; by default the first `nn.Embedding` that reads the ids.
        pick: What to return of what the model returns, such as ``lambda out: out.logits``.

    Returns:
        (g, e): the function, a module that shares the model's weights, and the embeddings (B, T, D).

    Raises:
        InputError: If `ids` are not whole numbers (B, T), or there is no such module.
        ModelError: If no embedding module reads the ids.

    Example:
        >>> from excite.train.models.gpt import GPT
        >>> model, ids = GPT(9, 8, 1, 2, 5), torch.zeros(2, 5, dtype=torch.long)
        >>> g, e = excite.lipschitz.from_embeddings(model, ids)
        >>> torch.allclose(g(e), model(ids))
        True
    """
    check_model(model)
    refuse_lazy(model)
    if isinstance(ids, Tensor):
        check_dense(ids, "ids")
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32) or ids.dim() != 2 or not ids.numel():
        raise InputError(f"ids: expected whole numbers (int64) of shape (batch, tokens); got {shown(ids)}")
    paths = {clean_path(path): module for path, module in model.named_modules() if path}
    if embedding is not None and embedding not in paths:
        raise InputError(f"embedding: no module {embedding!r}; embeddings: {', '.join(_embeddings(model)) or 'none'}")
    names = [embedding] if embedding is not None else list(_embeddings(model))
    outputs: dict[str, Tensor] = {}

    def record_output(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if args and isinstance(args[0], Tensor) and torch.equal(args[0], ids) and name not in outputs:
                outputs[name] = output.detach().clone()

        return hook

    handles = [paths[name].register_forward_hook(record_output(name)) for name in names]
    try:
        with eval_mode(model), torch.no_grad():
            model(ids)
    finally:
        for handle in handles:
            handle.remove()
    if not outputs:
        raise ModelError(
            f"no embedding module reads the ids: give its path with embedding=; modules: {', '.join(names) or 'none'}"
        )
    name, embedded = next(iter(outputs.items()))
    return FromEmbeddings(model, name, pick), embedded


def _embeddings(model: nn.Module) -> dict[str, nn.Module]:
    return {clean_path(path): module for path, module in model.named_modules() if isinstance(module, nn.Embedding)}
