"""Transformers: a callback that watches, and a Trainer that trains with persistent excitation.

trainer = Trainer(model, args, train_dataset=data, callbacks=[ExciteCallback(run="runs/first")])
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

from excite._core.checks import need
from excite._core.preserve import probes_ignored
from excite._core.wrappers import unwrap
from excite.errors import InputError
from excite.excitation import PersistentExcitation
from excite.integrations.callback import Following, few
from excite.monitor.sinks import MLflow, TensorBoard, WandB
from excite.monitor.writer import Sink

_transformers: Any = need("transformers", "transformers")


class ExciteCallback(_transformers.TrainerCallback):  # type: ignore[misc]
    """`excite.watch` as a callback: attached before the first training pass, a step for every optimizer step.

    Args:
        run: folder of the run; by default `excite` in the trainer's output folder.
        options: those of `excite.watch`. `example` is the first training batch if not given, `output` "logits", `sinks`
            what `report_to` names.

    The loss is the one that the model returns, summed over the parts of an accumulated step.
    """

    def __init__(self, run: str | os.PathLike[str] | None = None, **options: Any):
        self._following = Following(run, {"output": "logits", **options})
        self._handles: list[Any] = []

    @property
    def watch(self) -> Any:
        """The `Watch`, while training goes on."""
        return self._following.watch

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.close()
        model = unwrap(given["model"])
        self._parts = max(1, args.gradient_accumulation_steps)
        where = args.output_dir

        def first(module: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
            """Before the first training pass, when there is a batch and no step is done."""
            if not (torch.is_grad_enabled() and module.training) or not (named or positional):
                return
            self._handles.pop(0).remove()
            batch = few(dict(named)) if named else few(tuple(positional))
            named_only = {k: v for k, v in batch.items() if isinstance(v, Tensor) and v.dim()} if named else batch
            sinks = _sinks(args) if state.is_world_process_zero else []
            self._following.start(module, named_only, given["optimizer"], where, sinks)

        def returned(module: nn.Module, positional: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
            loss = output.get("loss") if hasattr(output, "get") else None
            if isinstance(loss, Tensor) and module.training and torch.is_grad_enabled() and not probes_ignored():
                # With num_items_in_batch the parts are shares of the step's loss already.
                self._following.add(loss if "num_items_in_batch" in named else loss / self._parts)

        self._handles = [
            model.register_forward_pre_hook(first, with_kwargs=True),
            model.register_forward_hook(returned, with_kwargs=True),
        ]

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._following.step()

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.close()

    def close(self) -> None:
        """Detach and close the run. Trainer tells callbacks nothing of an exception: call this after one."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._following.end()


class ExcitedTrainer(_transformers.Trainer):  # type: ignore[misc]
    """A Trainer whose loss excites every layer.

        ExcitedTrainer(model, args, train_dataset=data, excitation={"radius": 0.02, "classes": 4})

    `excitation` are the arguments of `excite.PersistentExcitation`; `output` is "logits" if not given. Labels are those
    of the batch. A schedule of radii moves on with the epochs. Token ids cannot be perturbed: layers="all" starts at the
    first affine layer.
    """

    def __init__(self, *args: Any, excitation: dict[str, Any], **kwargs: Any):
        if not isinstance(excitation, dict) or "radius" not in excitation:
            raise InputError(f"ExcitedTrainer: expected excitation={{'radius': ...}}; got {excitation!r}")
        super().__init__(*args, **kwargs)
        self.excitation = PersistentExcitation(unwrap(self.model), **{"output": "logits", **excitation})

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if return_outputs or not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        labels = inputs.get("labels")
        if labels is None:
            raise InputError(f"ExcitedTrainer: expected 'labels' in the batch; got {', '.join(inputs)}")
        if self.state.epoch is not None and self.args.num_train_epochs > 0:
            self.excitation.advance(min(1.0, self.state.epoch / self.args.num_train_epochs))
        loss = self.excitation.loss({key: value for key, value in inputs.items() if key != "labels"}, labels)
        # Trainer divides by the accumulated parts only where it does not pass the number of items.
        return loss if num_items_in_batch is None else loss / self.args.gradient_accumulation_steps


def _sinks(args: Any) -> list[Sink]:
    """What the trainer reports to already."""
    asked = args.report_to if isinstance(args.report_to, list) else [args.report_to]
    found: list[Sink] = []
    for name in asked:
        if name == "tensorboard":
            found.append(TensorBoard(os.environ.get("TENSORBOARD_LOGGING_DIR") or getattr(args, "logging_dir", None)))
        elif name == "wandb":
            found.append(WandB())
        elif name == "mlflow":
            found.append(MLflow())
    return found
