"""Lightning: a callback for monitoring, and a mix-in for training with persistent excitation.

    trainer = Trainer(callbacks=[LightningCallback(run="runs/first")])

Works with `lightning.pytorch` and with `pytorch_lightning`, whichever the program has imported.
"""

from __future__ import annotations

import os
import sys
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from excite._core.calls import Batch
from excite._core.checks import MissingPackage, need
from excite._core.compatibility import renamed_names
from excite.errors import InputError
from excite.excitation import PersistentExcitation
from excite.integrations.callback import DeferredWatch, first_samples
from excite.monitor.sinks import MLflow, TensorBoard, WandB
from excite.monitor.writer import Sink


def _lightning() -> Any:
    names = ["lightning.pytorch", "pytorch_lightning"]
    names.sort(key=lambda name: name not in sys.modules)
    try:
        return need(names[0], "lightning")
    except MissingPackage:
        try:
            return need(names[1], "lightning")
        except MissingPackage:
            raise MissingPackage("lightning is not installed: pip install 'excite[lightning]'") from None


_Callback: Any = _lightning().Callback


__getattr__ = renamed_names(__name__, {"ExciteCallback": "LightningCallback"})


class LightningCallback(_Callback):  # type: ignore[misc]
    """`excite.watch` as a callback: attached before the first training batch, one step per optimizer step.

    Values that the module logs with `self.log` are recorded too, every `log_every_n_steps` steps, and at the end of epochs and
    validations, with or without a logger. A name that belongs to a probe, such as "loss", becomes "lightning/loss". The config of the
    run is what `save_hyperparameters` recorded.

    Args:
        run: Folder of the run; by default `excite` in the trainer's log folder.
        module: Path of the module to monitor inside the LightningModule, such as "net"; by default the LightningModule
            itself if it defines `forward`, else its only child.
        **options: Keyword arguments of `excite.watch`. Defaults: `example` is the input of the first training batch, `train` and
            `test` are the training and the first validation loader, `sinks` are the trainer's loggers. `train=None` measures
            no margins.

    Raises:
        InputError: If the module to monitor cannot be determined or does not exist.

    Example:
        >>> Trainer(callbacks=[LightningCallback("runs/first")]).fit(module, data)  # doctest: +SKIP
    """

    def __init__(self, run: str | os.PathLike[str] | None = None, module: str | None = None, **options: Any):
        self._module = module
        self._deferred = DeferredWatch(run, options)

    @property
    def watch(self) -> Any:
        """The `Watch`, or None outside training."""
        return self._deferred.watch

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Attaches before the first batch."""
        if self._deferred.watch is None:
            optimizer = trainer.optimizers[0] if len(trainer.optimizers) == 1 else None
            where = trainer.log_dir or trainer.default_root_dir
            example, data = first_samples(input_of(batch)), _data(trainer)
            config = _hyperparameters(trainer, pl_module)
            self._deferred.start(self._watched(pl_module), example, optimizer, where, _sinks(trainer), data, config)
            self._steps = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Adds the loss of the batch; records a step if the optimizer has stepped."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor):
            self._deferred.add(loss)
        if trainer.global_step > self._steps:
            self._steps = trainer.global_step
            self._deferred.step()
            if self._steps % trainer.log_every_n_steps == 0 or trainer.should_stop:
                self._deferred.log(_logged(trainer), "lightning")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Records what the module logged for the epoch."""
        self._deferred.log(_logged(trainer), "lightning")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Records what the module logged in validation."""
        if not trainer.sanity_checking:
            self._deferred.log(_logged(trainer), "lightning")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Closes the run."""
        self._deferred.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Closes the run as failed."""
        self._deferred.end(exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Closes the run if it is still open."""
        self._deferred.end()

    @property
    def state_key(self) -> str:
        """Key of the state in Lightning's checkpoints: the earlier name of the class, so that earlier checkpoints resume."""
        return "ExciteCallback"

    def state_dict(self) -> dict[str, Any]:
        """State of the probes for Lightning's checkpoint."""
        return self._deferred.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from a checkpoint of Lightning."""
        self._deferred.load_state_dict(state_dict)

    def _watched(self, pl_module: Any) -> nn.Module:
        if self._module is not None:
            try:
                module: nn.Module = attrgetter(self._module)(pl_module)
            except AttributeError as error:
                raise InputError(
                    f"LightningCallback: {type(pl_module).__name__} has no module {self._module!r}"
                ) from error
            return module
        if type(pl_module).forward is not _lightning().LightningModule.forward:
            return pl_module  # type: ignore[no-any-return]
        children = [child for child in pl_module.children() if any(True for _ in child.parameters())]
        if len(children) != 1:
            raise InputError(
                f"LightningCallback: {type(pl_module).__name__} has no forward and {len(children)} children with weights: "
                "pass the module to monitor, as in module='net'"
            )
        return children[0]  # type: ignore[no-any-return]


class PersistentlyExcited:
    """Mix-in for a LightningModule whose training loss is that of `excite.PersistentExcitation`.

    Batches are (x, y). A schedule of radii advances with the epochs. `train_loss` is logged.

    Attributes:
        excitation: The `excite.PersistentExcitation` that `excite` made.

    Example:
        >>> class Robust(PersistentlyExcited, LightningModule):  # doctest: +SKIP
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.net = make_network()
        ...         self.excite(self.net, radius=0.02)
    """

    def excite(self, model: nn.Module, radius: Any, **settings: Any) -> None:
        """Sets the model to excite.

        Args:
            model: The network, an attribute of this module.
            radius: Radius of the perturbations, as of `excite.PersistentExcitation`.
            **settings: Further keywords of `excite.PersistentExcitation`.
        """
        # Not as an attribute that nn.Module would register: the model is one of the module's children already.
        object.__setattr__(self, "excitation", PersistentExcitation(model, radius, **settings))

    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        """Excited loss of a batch; Lightning calls it.

        Args:
            batch: Inputs and labels (x, y).
            batch_idx: Number of the batch in the epoch; not used.

        Returns:
            The loss, also logged as `train_loss`.
        """
        if getattr(self, "excitation", None) is None:
            raise InputError("PersistentlyExcited: call self.excite(self.net, radius=...) in __init__")
        x, y = batch
        loss: Tensor = self.excitation.loss(x, y)
        self.log("train_loss", loss.detach())
        return loss

    def on_train_epoch_start(self: Any) -> None:
        """Advances a schedule of radii."""
        epochs = self.trainer.max_epochs
        if epochs and epochs > 0:
            self.excitation.advance(self.current_epoch / epochs)


def input_of(batch: Any) -> Batch:
    """The model's input in a batch: x of (x, y), or a dict unchanged.

    Args:
        batch: A batch of the training data loader.

    Returns:
        The input of the model.

    Raises:
        InputError: If the batch is empty.

    Example:
        >>> input_of((x, y)) is x
        True
    """
    if isinstance(batch, list | tuple):
        if not batch:
            raise InputError("LightningCallback: the first batch is empty: pass example=")
        return input_of(batch[0]) if isinstance(batch[0], list) else batch[0]
    return batch  # type: ignore[no-any-return]


def _logged(trainer: Any) -> dict[str, Any]:
    """Values that `self.log` recorded since the step, epoch or validation began, by name; tensors stay on their device.

    `trainer.logged_metrics` also holds what was logged long ago, and is empty for a trainer without loggers.
    """
    connector = getattr(trainer, "_logger_connector", None)
    if connector is None or not getattr(trainer, "_results", None):
        return {}
    return dict(connector.metrics["log"])


def _hyperparameters(trainer: Any, pl_module: Any) -> dict[str, Any]:
    """Hyperparameters that `save_hyperparameters` recorded of the module and of the data module."""
    both = (getattr(trainer, "datamodule", None), pl_module)
    return {
        name: value for module in both for name, value in dict(getattr(module, "hparams_initial", None) or {}).items()
    }


def _data(trainer: Any) -> dict[str, Any]:
    """The training loader and the first validation loader."""
    return {"train": _first(trainer.train_dataloader), "test": _first(trainer.val_dataloaders)}


def _first(loaders: Any) -> Any:
    """The first of several loaders: a list, a dict or a CombinedLoader, as a LightningModule may return them."""
    loaders = getattr(loaders, "iterables", loaders)
    if not isinstance(loaders, dict | list | tuple):
        return loaders
    several = list(loaders.values() if isinstance(loaders, dict) else loaders)
    return _first(several[0]) if several else None


def _sinks(trainer: Any) -> list[Sink]:
    """Sinks for the loggers of the trainer."""
    sinks: list[Sink] = []
    if not trainer.is_global_zero:
        return sinks
    for logger in trainer.loggers:
        logger_types = {base.__name__ for base in type(logger).__mro__}
        if "TensorBoardLogger" in logger_types:
            sinks.append(TensorBoard(writer=logger.experiment))
        elif "WandbLogger" in logger_types:
            sinks.append(WandB(run=logger.experiment))
        elif "MLFlowLogger" in logger_types:
            sinks.append(MLflow(run_id=logger.run_id, client=logger.experiment))
    return sinks
