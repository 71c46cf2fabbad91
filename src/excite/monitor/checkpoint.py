"""`watch(checkpoint=...)`: when the weights of the watched model are stored, and how they are built again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from excite._core.checks import check_count, is_flag, is_whole, shown
from excite._core.distributed import rank_and_size
from excite._core.warn import warn_user
from excite.errors import ExciteError, InputError, one_line
from excite.runs import Run
from excite.runs.import_paths import ModelSource, model_source
from excite.runs.weights import full_state, not_rebuilt

_KEYS = ("factory", "options", "every")


@dataclass(frozen=True)
class WeightSaver:
    """Stores the weights of a model in its run.

    Attributes:
        source: How the model is built again.
        every: Number of steps between two times; None for the end only.
    """

    source: ModelSource
    every: int | None = None

    def due(self, step: int) -> bool:
        """Whether to store the weights after a step."""
        return self.every is not None and step % self.every == 0

    def save(self, run: Run | None, model: nn.Module, step: int, strict: bool) -> None:
        """Stores the weights; every process calls this, the first one writes. An error is a warning unless `strict`."""
        try:
            state = full_state(model)
            if run is not None and rank_and_size()[0] == 0:
                run.save_weights(state, step, self.source)
        except ExciteError as error:
            if strict:
                raise
            warn_user(f"the weights of step {step} are not stored: {one_line(error)}")


def make_saver(checkpoint: Any, model: nn.Module, run: object) -> WeightSaver | None:
    """The saver that the argument `checkpoint` of `excite.watch` describes; None for None and False.

    Args:
        checkpoint: True: at the end. A number of steps: also that often. A factory, "module:function" or a callable: how to
            build the model again. A dict with any of "factory", "options" and "every".
        model: The model.
        run: The run, or its folder.

    Raises:
        InputError: If it is none of these, or there is no run.
    """
    if checkpoint is None or (is_flag(checkpoint) and not checkpoint):
        return None
    if run is None and rank_and_size()[0] == 0:
        raise InputError("checkpoint: expected a run to store the weights in: pass run=, or leave checkpoint out")
    if is_flag(checkpoint):
        passed: Mapping[str, Any] = {}
    elif is_whole(checkpoint):
        passed = {"every": checkpoint}
    elif isinstance(checkpoint, Mapping):
        passed = checkpoint
    elif isinstance(checkpoint, str) or (callable(checkpoint) and not isinstance(checkpoint, nn.Module)):
        passed = {"factory": checkpoint}
    else:
        raise InputError(
            f"checkpoint: expected True, a number of steps, a factory, or a dict with {', '.join(_KEYS)}; got {shown(checkpoint)}"
        )
    if unknown := [key for key in passed if key not in _KEYS]:
        raise InputError(f"checkpoint: expected the keys {', '.join(_KEYS)}; got {shown(unknown[0])}")
    every = passed.get("every")
    source = model_source(model, passed.get("factory"), passed.get("options"))
    if source.factory is None and rank_and_size()[0] == 0:
        advice = "pass checkpoint='module:function', or checkpoint={'factory': …, 'options': …}"
        warn_user(f"checkpoint: {not_rebuilt(source, advice)}")  # before the training, not after it
    return WeightSaver(source, None if every is None else check_count(every, "checkpoint: every"))
