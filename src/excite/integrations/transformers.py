"""Transformers: a callback for monitoring, and a Trainer with persistent excitation.

trainer = Trainer(model, args, train_dataset=data, callbacks=[TransformersCallback(run="runs/first")])
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from excite._core.checks import need
from excite._core.compatibility import renamed_names
from excite._core.preserve import probes_ignored
from excite._core.wrappers import unwrap
from excite.errors import InputError
from excite.excitation import PersistentExcitation
from excite.integrations.callback import DeferredWatch, first_samples
from excite.monitor.sinks import MLflow, TensorBoard, WandB
from excite.monitor.writer import Sink

_transformers: Any = need("transformers", "transformers")
_COMPARED = (
    "learning_rate", "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps", "weight_decay",
    "optim", "lr_scheduler_type", "seed",
)  # fmt: skip
_PLACES = (
    "hub_",
    "report_to",
    "run_name",
    "local_rank",
    "disable_tqdm",
    "log",
    "debug",
    "accelerator_config",
    "include_for_metrics",
)


__getattr__ = renamed_names(__name__, {"ExciteCallback": "TransformersCallback"})


class TransformersCallback(_transformers.TrainerCallback):  # type: ignore[misc]
    """`excite.watch` as a callback: attached before the first training pass, one step per optimizer step.

    The loss is the one that the model returns, summed over the micro-batches of an accumulated step. What the trainer logs is
    recorded too, as "train/learning_rate", "eval/loss" and so on. The config of the run is that of `TrainingArguments`: what differs
    from the defaults, and the learning rate, batch size, epochs and the like in any case.

    Args:
        run: Folder of the run; by default `excite` in the trainer's output folder.
        **options: Keyword arguments of `excite.watch`. Defaults: `example` is the first training batch, `output` "logits", `train` and
            `test` are the trainer's training and evaluation data, `sinks` those that `report_to` names. `train=None` measures no
            margins. Token ids have none: a warning says so.

    Example:
        >>> callback = TransformersCallback("runs/first")
        >>> Trainer(model, args, train_dataset=data, callbacks=[callback]).train()  # doctest: +SKIP
    """

    def __init__(self, run: str | os.PathLike[str] | None = None, **options: Any):
        self._deferred = DeferredWatch(run, {"output": "logits", **options})
        self._handles: list[Any] = []
        self._begin: Callable[[dict[str, Any]], None] | None = None

    def begin(self, inputs: dict[str, Any]) -> None:
        """Starts the watch before the first training pass, where that pass is one of `ExcitedTrainer`."""
        if self._begin is not None:
            self._begin(inputs)

    @property
    def watch(self) -> Any:
        """The `Watch`, or None outside training."""
        return self._deferred.watch

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Registers the hooks that start the watch at the first training pass and read the loss."""
        self.close()
        model = unwrap(kwargs["model"])
        self._micro_batches = max(1, args.gradient_accumulation_steps)
        where, config = args.output_dir, _settings(args)
        evaluated = kwargs.get("eval_dataloader")  # of an evaluation before this training
        data = _data(kwargs.get("train_dataloader"), self._evaluation_data() if evaluated is None else evaluated)

        def first(module: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
            """Before the first training pass, when there is a batch and no step is done.

            Not inside the search of an excited loss: the passes that a watch begins with would become part of it.
            """
            if not (torch.is_grad_enabled() and module.training) or not (named or positional) or probes_ignored():
                return
            self._begin = None
            self._handles.pop(0).remove()
            batch = first_samples(dict(named)) if named else first_samples(tuple(positional))
            named_only = {k: v for k, v in batch.items() if isinstance(v, Tensor) and v.dim()} if named else batch
            sinks = _sinks(args) if state.is_world_process_zero else []
            self._deferred.start(module, named_only, kwargs["optimizer"], where, sinks, data, config)

        def returned(module: nn.Module, positional: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
            loss = output.get("loss") if hasattr(output, "get") else None
            if isinstance(loss, Tensor) and module.training and torch.is_grad_enabled() and not probes_ignored():
                # With num_items_in_batch the losses of micro-batches are fractions of the loss of the step already.
                self._deferred.add(loss if "num_items_in_batch" in named else loss / self._micro_batches)

        self._begin = partial(first, model, ())
        self._handles = [
            model.register_forward_pre_hook(first, with_kwargs=True),
            model.register_forward_hook(returned, with_kwargs=True),
        ]

    def _evaluation_data(self) -> Any:
        """The evaluation data of the trainer that calls this callback; None if it has none.

        Trainer passes a callback its training loader, but the evaluation loader only once it has evaluated, and itself never:
        margins at the start need the data before. The trainer is the one among the callers that holds this callback. Where a
        future version calls callbacks otherwise none is found, and `test=` has to be passed.
        """
        frame: Any = sys._getframe(1)
        while frame is not None:
            caller = frame.f_locals.get("self")
            if isinstance(caller, _transformers.Trainer) and self in caller.callback_handler.callbacks:
                return caller.eval_dataset
            frame = frame.f_back
        return None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Records one optimizer step."""
        self._deferred.step()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Records what the trainer logs: "loss" as "train/loss", "eval_loss" as "eval/loss", as it does for TensorBoard."""
        self._deferred.log({_grouped(name): value for name, value in (logs or {}).items()}, "transformers")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Closes the run."""
        self.close()

    def close(self) -> None:
        """Detaches and closes the run. Trainer does not notify callbacks of exceptions: call this after one."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._deferred.end()


class ExcitedTrainer(_transformers.Trainer):  # type: ignore[misc]
    """A Trainer whose loss is that of `excite.PersistentExcitation`.

    Labels are those of the batch. A schedule of radii advances with the epochs. Token ids cannot be perturbed:
    layers="all" starts at the first affine layer.

    Args:
        *args: Arguments of `transformers.Trainer`.
        excitation: Keyword arguments of `excite.PersistentExcitation`, "radius" among them; `output` defaults to "logits".
        **kwargs: Keyword arguments of `transformers.Trainer`.

    Raises:
        InputError: If `excitation` has no "radius", or a batch has no "labels".

    Example:
        >>> excitation = {"radius": 0.02, "classes": 4}
        >>> ExcitedTrainer(model, args, train_dataset=data, excitation=excitation).train()  # doctest: +SKIP
    """

    def __init__(self, *args: Any, excitation: dict[str, Any], **kwargs: Any):
        if not isinstance(excitation, dict) or "radius" not in excitation:
            raise InputError(f"ExcitedTrainer: expected excitation={{'radius': ...}}; got {excitation!r}")
        super().__init__(*args, **kwargs)
        self.excitation = PersistentExcitation(unwrap(self.model), **{"output": "logits", **excitation})

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Loss of the batch: excited in training, the model's own in evaluation."""
        if return_outputs or not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        labels = inputs.get("labels")
        if labels is None:
            raise InputError(f"ExcitedTrainer: expected 'labels' in the batch; got {', '.join(inputs)}")
        if self.state.epoch is not None and self.args.num_train_epochs > 0:
            self.excitation.advance(min(1.0, self.state.epoch / self.args.num_train_epochs))
        batch = {key: value for key, value in inputs.items() if key != "labels"}
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, TransformersCallback):
                callback.begin(batch)
        loss = self.excitation.loss(batch, labels)
        # Trainer divides by the accumulated parts only where it does not pass the number of items.
        return loss if num_items_in_batch is None else loss / self.args.gradient_accumulation_steps


def _grouped(name: str) -> str:
    for prefix in ("eval", "test"):
        if name.startswith(f"{prefix}_"):
            return f"{prefix}/{name.removeprefix(f'{prefix}_')}"
    return f"train/{name}"


def _data(loader: Any, evaluation: Any) -> dict[str, Any]:
    """The training loader, and a loader of the evaluation data, a loader or a dataset, if there are any."""
    several = evaluation
    test = next(iter(several.values()), None) if isinstance(several, dict) else several
    if test is None or loader is None:
        return {"train": loader}
    # Not trainer.get_eval_dataloader, which would leave a loader with the accelerator.
    return {
        "train": loader,
        "test": test if hasattr(test, "collate_fn") else DataLoader(test, 64, collate_fn=loader.collate_fn),
    }


def _settings(args: Any) -> dict[str, Any]:
    """The arguments that a user chose, and the few that everybody compares; not those that say where things are written."""
    passed = args.to_dict()
    defaults = {field.name: field.default for field in fields(args) if field.default is not MISSING}
    return {
        name: value
        for name, value in passed.items()
        if not name.startswith(_PLACES)
        and not name.endswith(("_dir", "_token"))
        and (name in _COMPARED or value != defaults.get(name, MISSING))
    }


def _sinks(args: Any) -> list[Sink]:
    """Sinks for what the trainer reports to."""
    names = args.report_to if isinstance(args.report_to, list) else [args.report_to]
    sinks: list[Sink] = []
    for name in names:
        if name == "tensorboard":
            sinks.append(TensorBoard(os.environ.get("TENSORBOARD_LOGGING_DIR") or getattr(args, "logging_dir", None)))
        elif name == "wandb":
            sinks.append(WandB())
        elif name == "mlflow":
            sinks.append(MLflow())
    return sinks
