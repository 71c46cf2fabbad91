"""Adversarial training: the baseline that perturbs the input alone, up the loss (projected gradient steps).

The search is that of excitation: the same passes, steepest steps and bounds, on one copy of the batch instead of two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from excite._core.calls import Pick, batch_size, call, own_copy, pick_output
from excite._core.checks import (
    Bounds,
    check_bounds,
    check_count,
    check_flag,
    check_model,
    check_number,
    check_output,
    check_real,
    check_weights,
    model_errors,
    parse_norm,
)
from excite._core.intercept.affine import Names
from excite._core.layout import Layout
from excite._core.preserve import Buffers, eval_mode, preserve_state
from excite._core.replay import Tape
from excite._core.wrappers import eagerly, unwrap
from excite.errors import InputError
from excite.excitation.checks import check_fraction, check_input, possible_layers
from excite.excitation.perturbations import PerturbedInput, project, random_point
from excite.excitation.radius import Stages, check_radius, radius_of
from excite.excitation.search import (
    INPUT,
    Perturbations,
    SearchSettings,
    evaluate,
    find_layouts,
    gradients_of,
    record,
    repeat,
)
from excite.excitation.targets import Loss, choose_target


class AdversarialTraining:
    """Adversarial training: the batch **mean** of error(f(x + d), y) at the perturbation d of the input that makes it largest.

    `steps` steepest steps up the error of each sample, each followed by a projection onto the ball of `radius` in `norm`
    and onto `bounds`. One step with a random start is "fast" adversarial training. At radius 0 it is plain training, on
    the scale of `PersistentExcitation` at radius 0.

    Args:
        model: one scalar output per sample, or with `classes=m` m outputs (or m − 1 for the squared error).
        radius: a number, or `Stages` of a number.
        norm: "inf", "2" or "1".
        steps: steps of the search.
        step_size: by default 2.5·radius/steps; for one step 1.25·radius from a random start and the radius from zero.
        random_start: uniform in the ball, drawn from torch's global random state.
        loss: as in `PersistentExcitation`, or "margin" for an attack on a trained model: how far the largest other output is
            above that of the label, so that a positive error is a wrong decision.
        classes: as in `PersistentExcitation`.
        bounds: as in `PersistentExcitation`.
        threshold: as in `PersistentExcitation`.
        output: as in `PersistentExcitation`.

    Raises:
        InputError: if an argument is of the wrong kind or out of range.

    Example:
        >>> at = excite.AdversarialTraining(model, radius=8 / 255, classes=10, loss="cross-entropy", bounds=(0, 1))
        >>> at.loss(x, y).backward()
    """

    def __init__(
        self,
        model: nn.Module,
        radius: float | Stages,
        norm: str | float = "inf",
        steps: int = 7,
        step_size: float | None = None,
        random_start: bool = True,
        loss: Loss | Literal["margin"] = "squared",
        classes: int | None = None,
        bounds: Bounds | None = None,
        threshold: float | None = None,
        output: Pick = None,
    ):
        self.model = check_model(model)
        possible_layers(unwrap(model))
        self.radius = check_radius(radius)
        full = self.radius.radius if isinstance(self.radius, Stages) else self.radius
        if not isinstance(full, int | float):
            raise InputError(f"radius: expected a number or Stages of a number for the input; got {radius!r}")
        self.norm = parse_norm(norm)
        self.steps = check_count(steps, "steps")
        self.step_size = None if step_size is None else check_number(step_size, "step_size", 0, above=True)
        self.random_start = check_flag(random_start, "random_start")
        self.target = choose_target(classes, threshold, "squared" if loss == "margin" else loss)
        self._errors = self.target.confusion if loss == "margin" else self.target.errors
        self.bounds = check_bounds(bounds)
        self.output = output
        self.progress = 0.0
        self._known_layouts: dict[object, list[Layout | None]] = {}

    @model_errors
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Batch mean of the error at the perturbed inputs.

        Args:
            x: inputs (B, ...), floating-point.
            y: labels (B,) or (B, 1), 0 and 1 or the classes.

        Returns:
            Scalar tensor; call `.backward()` on it.

        Raises:
            InputError: if inputs or labels do not fit the settings.
        """
        check_input(x, True, self.bounds)
        labels = self.target.labels(y, batch_size(x))
        if self._radius() == 0:
            with eagerly(self.model):
                output = self._read(call(self.model, x), batch_size(x))
        else:
            worst = self._search(x, labels, self._start(x))
            output = evaluate(self.model, x, worst, self._read, copies=1)
        return self._errors(output, labels).mean()

    @model_errors
    def perturbations(self, x: Tensor, y: Tensor) -> Tensor:
        """The perturbation d of each input. Changes nothing in the model; a random start is drawn from the global state.

        Args:
            x: inputs, as in `loss`.
            y: labels, as in `loss`.

        Returns:
            Tensor of the shape of x.
        """
        check_input(x, True, self.bounds)
        labels = self.target.labels(y, batch_size(x))
        if self._radius() == 0:
            return torch.zeros_like(x)
        start = self._start(x)
        with preserve_state(unwrap(self.model)):
            return self._search(x, labels, start).values[INPUT]

    @model_errors
    @torch.no_grad()
    def predict(self, x: Tensor) -> Tensor:
        """Predicted labels, with the model in evaluation mode.

        Args:
            x: inputs, as in `loss`.

        Returns:
            Integer tensor (B,).
        """
        check_input(x, True, self.bounds)
        check_weights(unwrap(self.model))
        return self.decide(x, check_output)

    @torch.no_grad()
    def decide(self, x: Tensor, checked: Callable[[Tensor], Tensor] = lambda output: output) -> Tensor:
        """`predict` without checks of inputs and weights, also for a model that has diverged; `checked` checks outputs."""
        model = unwrap(self.model)
        with eval_mode(model):
            return self.target.decide(checked(self._read(call(model, x), batch_size(x))))

    def advance(self, fraction: float) -> None:
        """Sets the radius of `Stages` for the stage of training.

        Args:
            fraction: fraction of training that is done, 0 to 1.
        """
        self.progress = check_fraction(fraction)

    def setting(self) -> tuple[float, ...]:
        """The numbers that a step depends on besides its tensors: a captured CUDA graph is invalid once they change."""
        return (self._radius(),)

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        return {"progress": self.progress}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        self.advance(state["progress"])

    def __repr__(self) -> str:
        return (
            f"AdversarialTraining(radius={self.radius!r}, norm={self.norm!r}, steps={self.steps}, "
            f"random_start={self.random_start}, {self.target!r}, progress={self.progress})"
        )

    # -- inside --------------------------------------------------------------------------------------------------
    def _radius(self) -> float:
        return float(radius_of(self.radius, INPUT, self.progress)[0])

    def _length(self, radius: float) -> float:
        if self.step_size is not None:
            return self.step_size
        if self.steps > 1:
            return 2.5 * radius / self.steps
        return 1.25 * radius if self.random_start else radius

    def _read(self, returned: Any, samples: int) -> Tensor:
        output = self.target.outputs(check_real(pick_output(returned, self.output)), samples)
        return output.to(
            torch.promote_types(output.dtype, torch.float32)
        )  # errors of outputs in half precision would be rounded to three digits

    def _start(self, x: Tensor) -> Tensor:
        if not self.random_start:
            return torch.zeros_like(x)
        drawn: Tensor = random_point(x.detach().flatten(1), self.norm, self._radius()).reshape(x.shape)
        return drawn

    def _search(self, x: Tensor, labels: Tensor, d: Tensor) -> Perturbations:
        """Steps up the error, from the start that the recording pass runs at: its masks and statistics hold for all."""
        model = unwrap(self.model)
        names, radius, batch = Names(model), self._radius(), len(x)
        settings = SearchSettings(
            radius=lambda _: (radius, False),
            norm=self.norm,
            steps=self.steps,
            chosen=lambda _: False,
            read=self._read,
            at_input=True,
        )
        x = x.detach()
        allowed = PerturbedInput(Layout(), radius, self.bounds, x if self.bounds is not None else None)
        tape, buffers = Tape(batch), Buffers(model)

        def inside(d: Tensor) -> Tensor:
            return allowed.within_bounds(project(d.flatten(1), self.norm, radius).reshape(x.shape))

        def climb(d: Tensor, gradient: Tensor) -> Tensor:
            return inside(d + self._length(radius) * allowed.steepest(d, gradient, self.norm, batch))

        try:
            with torch.inference_mode(False), torch.enable_grad(), eagerly(model):
                d = allowed.within_bounds(d)
                start = allowed.moved(x, d)
                clean = record(model, names, start, settings, tape, buffers)
                errors = self._errors(clean.output, labels).sum()
                first = gradients_of(errors, clean.inputs)[INPUT]
                find_layouts(model, names, start, clean.made_by, self._known_layouts)
                buffers.restore(thorough=False)
                tape.sites.clear()
                d = d if first is None else climb(d, first)
                for _ in range(self.steps - 1):
                    at = Perturbations({INPUT: d.requires_grad_()}, {INPUT: allowed}, names, tape, frozenset())
                    output = repeat(model, own_copy(x), at, self._read, buffers, copies=1)
                    gradient = gradients_of(self._errors(output, labels).sum(), at.values)[INPUT]
                    d = d.detach() if gradient is None else climb(d.detach(), gradient)
        finally:
            buffers.restore(thorough=False)
            tape.rewind()
        return Perturbations({INPUT: d}, {INPUT: allowed}, names, tape, frozenset())
