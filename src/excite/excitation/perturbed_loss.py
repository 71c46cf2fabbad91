"""The base class of the training losses: reading outputs, checking inputs, predicting, progress and state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from excite._core.background import DeferredChecks
from excite._core.calls import Batch, Pick, batch_size, call, pick_output
from excite._core.checks import Bounds, check_model, check_output, check_real, check_weights, model_errors, shown
from excite._core.layout import Layout
from excite._core.preserve import eval_mode
from excite._core.wrappers import eagerly, unwrap
from excite.errors import InputError
from excite.excitation.checks import check_fraction, check_input, place_bounds
from excite.excitation.collapse import CollapseCheck
from excite.excitation.radius_control import RadiusController
from excite.excitation.targets.target import Target


class PerturbedLoss(ABC):
    """A training loss of a model at perturbed inputs.

    A subclass sets `target`, `bounds` and `output`, and `_at_input` (see `check_input`) if the model's own input is perturbed.

    Args:
        model: The model, perhaps wrapped.

    Attributes:
        progress: Fraction of training that is done.
    """

    target: Target
    bounds: Bounds | None
    output: Pick
    _collapse: CollapseCheck

    def __init__(self, model: nn.Module):
        self.model = check_model(model)
        self.progress = 0.0
        self._at_input: tuple[str, str] | None = None
        self._known_layouts: dict[object, list[Layout | None]] = {}
        self._placed_bounds: dict[object, tuple[Bounds, Bounds]] = {}
        self._checks = DeferredChecks("loss")

    @abstractmethod
    def loss(self, x: Batch, y: Tensor) -> Tensor:
        """The loss of a batch, a scalar."""

    @abstractmethod
    def setting(self) -> tuple[float, ...]:
        """The numbers that a step depends on besides its tensors: a captured CUDA graph is invalid once they change."""

    @model_errors
    @torch.no_grad()
    def predict(self, x: Batch) -> Tensor:
        """Predicted labels, with the model in evaluation mode.

        Args:
            x: the batch, as in `loss`.

        Returns:
            Integer tensor (B,): 1 where f > threshold, the class of the nearest code, or the leaf of the hierarchy; for token
            targets (B, T). With targets="values" the outputs.
        """
        self._check_input(x)
        check_weights(unwrap(self.model))
        return self.decide(x, check_output)

    @torch.no_grad()
    def decide(self, x: Batch, checked: Callable[[Tensor], Tensor] = lambda output: output) -> Tensor:
        """`predict` without checks of inputs and weights, also for a model that has diverged.

        Args:
            x: Batch of inputs.
            checked: Receives the model's outputs and returns them, or raises.

        Returns:
            Decisions as `predict` returns them.
        """
        model = unwrap(self.model)
        with eval_mode(model):
            return self.target.decide(checked(self._read(call(model, x), batch_size(x))))

    def advance(self, fraction: float) -> None:
        """Sets the radius of `Stages` for the stage of training.

        Args:
            fraction: fraction of training that is done, 0 to 1.
        """
        self.progress = check_fraction(fraction)

    def check_collapse(self) -> None:
        """Warns, or stops, as `on_collapse` says, if the loss has been that of a constant output for 200 steps.

        `loss` does so every 200 calls, and Excite's trainer after every epoch; call it in a loop that replays a captured step.

        Raises:
            ModelError: if the training has collapsed and on_collapse is "stop".
        """
        self._collapse.read(self._advice)
        self._checks.finish()

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint: progress, and the state of the controller of an automatic radius.

        Raises:
            InputError: if inputs or labels of an earlier `loss` did not fit the settings, which was not known yet (on a GPU).
        """
        self._checks.finish()
        state: dict[str, Any] = {"progress": self.progress}
        controller = self._controller()
        return state if controller is None else {**state, "auto": controller.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned.

        Raises:
            InputError: if `state` is something else.
        """
        if not isinstance(state, Mapping) or "progress" not in state:
            raise InputError(f"load_state_dict: expected what state_dict returned; got {shown(state)}")
        self.advance(state["progress"])
        controller = self._controller()
        if controller is not None and "auto" in state:
            controller.load_state_dict(state["auto"])

    @abstractmethod
    def _controller(self) -> RadiusController | None:
        """The controller of a radius "auto"."""

    @abstractmethod
    def _advice(self, ratio: float) -> str:
        """Advice after a collapse, for `CollapseCheck.ratio`."""

    def _forward(self, x: Batch) -> Tensor:
        """The outputs without perturbations."""
        with eagerly(self.model):
            return self._read(call(self.model, x), batch_size(x))

    def _read(self, returned: Any, samples: int) -> Tensor:
        """The outputs of `samples` samples in what the model returned, at least in float32."""
        output = self.target.outputs(check_real(pick_output(returned, self.output)), samples)
        # Errors of outputs in half precision would be rounded to three digits.
        return output.to(torch.promote_types(output.dtype, torch.float32))

    def _check_input(self, x: Batch, deferred: DeferredChecks | None = None) -> None:
        check_input(x, self._at_input, self._bounds_at(x), deferred)

    def _bounds_at(self, x: Batch) -> Bounds | None:
        """The bounds on the device of x, in its precision."""
        return None if self.bounds is None else place_bounds(self.bounds, x, self._placed_bounds)
