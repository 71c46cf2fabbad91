"""Adversarial training: the input, and if wanted every hidden layer, perturbed up the loss (projected gradient steps)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from excite._core.calls import Batch, Pick, batch_size, tensors
from excite._core.checks import (
    Bounds,
    check_bounds,
    check_choice,
    check_count,
    check_flag,
    check_number,
    model_errors,
    parse_norm,
)
from excite._core.distributed import gathered
from excite._core.intercept.affine import Names
from excite._core.preserve import capturing, eval_mode, preserve_state
from excite._core.wrappers import is_shared, unwrap
from excite.errors import InputError
from excite.excitation.adversarial.ascent import Ascent, AscentSettings, HiddenOptions, ascend
from excite.excitation.adversarial.checks import (
    check_awp,
    check_free,
    check_held_out,
    check_hidden,
    check_hidden_layers,
    check_input_radius,
    check_trades,
    full_radius,
)
from excite.excitation.adversarial.free import free_passes
from excite.excitation.adversarial.hidden_radius import (
    check_hidden_radius,
    hidden_radius_of,
    named_layers,
    named_sites,
    stage_of,
)
from excite.excitation.adversarial.objective import confusion, divergence
from excite.excitation.adversarial.weight_perturbation import moved_weights, weight_perturbations
from excite.excitation.checks import possible_layers
from excite.excitation.collapse import CollapseCheck, holding_fraction, move_ratio
from excite.excitation.perturbations import random_point
from excite.excitation.perturbed_loss import PerturbedLoss
from excite.excitation.radius import (
    Stages,
    common_root_mean_square,
    radius_of,
    root_mean_square,
)
from excite.excitation.radius_control import GapController
from excite.excitation.search import INPUT, Perturbations, evaluate
from excite.excitation.targets.binary import Binary
from excite.excitation.targets.choose import choose_target, tokens_target
from excite.excitation.targets.codes import Codes
from excite.excitation.targets.target import Loss
from excite.excitation.targets.tokens import Tokens


class AdversarialTraining(PerturbedLoss):
    """Adversarial training: the batch **mean** of error(f(x + d), y) at the perturbation d of the input that makes it largest.

    `steps` steepest steps up the error of each sample, each followed by a projection onto the ball of `radius` in `norm`
    and onto `bounds`. One step with a random start is "fast" adversarial training. At radius 0 it is plain training, on
    the scale of `PersistentExcitation` at radius 0.

    With `hidden_radius` the inputs of hidden affine layers are perturbed in the same search, up the same error: layer k by
    at most hidden_radius times the root mean square of its input, in `steps` equal steps from zero. This counters robust
    overfitting: robust accuracy on training data that test data do not show.

    With token targets (a label for each token, as for language models) this is latent adversarial training: radius 0, since token
    ids cannot be perturbed, and a hidden radius at embeddings, at the residual stream or at affine layers, each token in a ball of
    its own. The loss is then the **mean** over all tokens of the batch whose label is not `ignore_index`.

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
        layers: hidden layers to perturb: "all" (every affine call but those that read the model's own input) or a list of
            names: of layers, whose input is perturbed, or "PATH:output" for what a module returns, such as
            "transformer.wte:output" for embeddings and "transformer.h.3:output" for the residual stream after a block.
        hidden_radius: size of their perturbations relative to the root mean square of each layer's input: a number, or a dict
            by layer name (layers that are not named are not perturbed), `Stages` of either, or "auto". 0.002 to 0.005 for
            ResNets; 0 for none.
        hidden: norm, budget and start of the hidden perturbations (`HiddenOptions`).
        held_out: for hidden_radius "auto": points and labels (x, y) that are not trained on. The robust
            accuracy on the batch is compared with that on as many of them.
        gap_target: for hidden_radius "auto": the difference of the two that the hidden radius is to hold.
        gap_every: for hidden_radius "auto": steps between two measurements, each of which costs two searches.
        awp: γ of adversarial weight perturbation, such as 0.005; 0 for none.
        trades: β of TRADES, such as 6: the loss is error(f(x), y) + β·KL(p(x) ‖ p(x + d)) and the search makes the second term
            largest; for the cross-entropy. 0 for plain adversarial training.
        keep_best: take the iterate with the largest error of each sample instead of the last one; costs one more forward
            pass.
        on_collapse: as in `PersistentExcitation`.
        targets: "labels", or "tokens" or "next-token" as in `PersistentExcitation`.
        tokens: for token targets: "all", or "prompt" to perturb only tokens whose own label is `ignore_index`.
        ignore_index: for token targets: label of tokens that the loss does not count.

    Raises:
        InputError: if an argument is of the wrong kind or out of range.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 10))
        >>> at = excite.AdversarialTraining(
        ...     model, radius=8 / 255, classes=10, loss="cross-entropy", bounds=(0, 1), hidden_radius=0.003
        ... )
        >>> at.loss(torch.rand(6, 4), torch.arange(6)).backward()
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
        *,
        layers: str | Sequence[str] = "all",
        hidden_radius: float | Mapping[str, float] | Stages | Literal["auto"] = 0.0,
        hidden: HiddenOptions | None = None,
        held_out: tuple[Tensor, Tensor] | None = None,
        gap_target: float = 0.08,
        gap_every: int = 25,
        awp: float = 0.0,
        trades: float = 0.0,
        keep_best: bool = False,
        on_collapse: Literal["warn", "stop", "ignore"] = "warn",
        targets: Literal["labels", "tokens", "next-token"] = "labels",
        tokens: Literal["all", "prompt"] = "all",
        ignore_index: int = -100,
    ):
        super().__init__(model)
        known = possible_layers(unwrap(model))
        self.radius = check_input_radius(radius)
        self._at_input = (
            ("radius", "scale images to such numbers; for token ids give radius=0 and a hidden_radius")
            if full_radius(self.radius) > 0
            else None
        )
        self.norm = parse_norm(norm)
        self.steps = check_count(steps, "steps")
        self.step_size = None if step_size is None else check_number(step_size, "step_size", 0, above=True)
        self.random_start = check_flag(random_start, "random_start")
        self._margin = loss == "margin"
        self.target: Binary | Codes | Tokens
        if check_choice(targets, "targets", ("labels", "tokens", "next-token")) == "labels":
            self.target = choose_target(classes, threshold, "squared" if loss == "margin" else loss)
        else:
            unused_settings = {"classes": classes, "threshold": threshold, "trades": trades or None}
            self.target = tokens_target(targets, tokens, ignore_index, loss, unused_settings)
        self._errors = confusion(self.target) if loss == "margin" else self.target.errors
        self.bounds = check_bounds(bounds)
        self.output = output
        self.hidden_radius = (
            GapController(check_held_out(held_out, self.bounds), gap_target, gap_every)
            if isinstance(hidden_radius, str) and hidden_radius == "auto"
            else check_hidden_radius(hidden_radius, known, held_out, unwrap(model))
        )
        self.layers = check_hidden_layers(layers, known, unwrap(model))
        self.awp = check_awp(awp, model)
        self.trades = check_trades(trades, loss, self.random_start)
        self.hidden = check_hidden(hidden, self.trades)
        self.keep_best = check_flag(keep_best, "keep_best")
        self._collapse = CollapseCheck(on_collapse, self._checks)

    @model_errors
    def loss(self, x: Batch, y: Tensor) -> Tensor:
        """Batch mean of the error at the perturbed inputs.

        Args:
            x: inputs (B, ...), floating-point; at radius 0 any batch, such as token ids or a dict of keyword arguments.
            y: labels (B,) or (B, 1), 0 and 1 or the classes; for token targets (B, T).

        Returns:
            Scalar tensor; call `.backward()` on it.

        Raises:
            InputError: if inputs or labels do not fit the settings. Values on a GPU are judged without waiting for it: an error
                comes from a later call, or from `state_dict`, and names the call it belongs to.
        """
        labels = self._begin_step(x, y)
        loss = self._training_loss(x, labels)
        self._end_step(loss, labels)
        return loss

    @model_errors
    def free_loss(self, x: Batch, y: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
        """The loss with an update of the weights after every step of the search: adversarial training for free.

        Each step's backward pass gives the gradients of the perturbations and of the weights (Shafahi et al., 2019), so that
        `steps` steps are `steps` updates: train for fewer epochs. All updates but the last happen inside.

        Args:
            x: inputs, as in `loss`.
            y: labels, as in `loss`.
            optimizer: updates the weights after all steps but the last.

        Returns:
            Scalar tensor, the loss at the perturbations after the last step; call `.backward()` on it, then `optimizer.step()`.

        Raises:
            InputError: as in `loss`; if `awp`, `keep_best` or `HiddenOptions(once=True)` is set, which need a search; if the
                optimizer's `step` needs a closure.

        Example:
            >>> model = torch.nn.Linear(4, 1)
            >>> at = excite.AdversarialTraining(model, radius=0.1, steps=4)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> at.free_loss(torch.rand(6, 4), torch.arange(6) % 2, optimizer).backward()
            >>> optimizer.step()
        """
        check_free(self.awp, self.keep_best, self.hidden, optimizer)
        labels = self._begin_step(x, y)
        worst, ascent = None, None
        if self._perturbs():
            settings = replace(self._settings(x, labels), taken=1)
            worst = self._search(x, labels, self._start(x), settings)
            ascent = Ascent(settings, worst.layers, batch_size(x))
        worst = free_passes(lambda at: self._loss_at(x, labels, at), worst, ascent, self.steps - 1, optimizer)
        loss = self._loss_at(x, labels, worst)
        self._end_step(loss, labels)
        return loss

    def adapt(self, x: Batch, y: Tensor) -> None:
        """With hidden_radius "auto": counts a training step, and every few steps measures the gap and moves the radius.

        `loss` calls it, so that a training loop has nothing to do.

        Args:
            x: inputs, as in `loss`.
            y: labels, as in `loss`.
        """
        control = self.hidden_radius
        if not isinstance(control, GapController):
            return
        if not isinstance(x, Tensor):
            raise InputError(
                f"hidden_radius='auto' measures robust accuracy at the input: expected a tensor; got {type(x).__name__}"
            )
        control.to(x.device)
        if control.due():
            with torch.no_grad():
                train = self._robust_accuracy(x, y)
                control.observe(train, self._robust_accuracy(*control.batch(len(x))), len(x))

    @model_errors
    def perturbations(self, x: Batch, y: Tensor) -> Tensor:
        """The perturbation d of each input. Changes nothing in the model; a random start is drawn from the global state.

        Args:
            x: inputs, as in `loss`.
            y: labels, as in `loss`.

        Returns:
            Tensor of the shape of x.

        Raises:
            InputError: if the input is not perturbed, as token ids: see `all_perturbations`.
        """
        by_layer = self.all_perturbations(x, y)
        if INPUT not in by_layer:
            raise InputError(
                "perturbations: the input itself is not perturbed; all_perturbations has those of hidden layers"
            )
        return by_layer[INPUT]

    @model_errors
    def all_perturbations(self, x: Batch, y: Tensor) -> dict[str, Tensor]:
        """The perturbations of the input and of hidden layers. Changes nothing in the model.

        Args:
            x: inputs, as in `loss`.
            y: labels, as in `loss`.

        Returns:
            By layer name, shaped like the layer's input; the model's own input is "".
        """
        self._check_input(x)
        labels = self.target.labels(y, batch_size(x))
        start = self._start(x)
        if not self._perturbs():
            return {} if start is None else {INPUT: torch.zeros_like(start)}
        with preserve_state(unwrap(self.model)):
            return self._search(x, labels, start).values

    def setting(self) -> tuple[float, ...]:
        """The numbers that a step depends on besides its tensors: a captured CUDA graph is invalid once they change."""
        if isinstance(self.hidden_radius, GapController):
            return (self._radius(), -1.0)  # a tensor, which changes between steps
        hidden, fraction = stage_of(self.hidden_radius, self.progress)
        return (
            self._radius(),
            *(fraction * rho for rho in (hidden.values() if isinstance(hidden, Mapping) else [hidden])),
        )

    def measured(self) -> dict[str, float]:
        """Metrics for a run: with hidden_radius "auto" the radius, both robust accuracies and their gap."""
        return self.hidden_radius.measured() if isinstance(self.hidden_radius, GapController) else {}

    def __repr__(self) -> str:
        return (
            f"AdversarialTraining(radius={self.radius!r}, norm={self.norm!r}, steps={self.steps}, "
            f"random_start={self.random_start}, {self.target!r}, hidden_radius={self.hidden_radius!r}, awp={self.awp}, "
            f"trades={self.trades}, progress={self.progress})"
        )

    # -- inside --------------------------------------------------------------------------------------------------
    def _begin_step(self, x: Batch, y: Tensor) -> Tensor:
        """Checks a batch, counts a training step for the controller, and returns the labels."""
        deferred = self._checks.begin(x if isinstance(x, Tensor) else tensors(x)[0])
        self._check_input(x, deferred)
        labels = self.target.labels(y, batch_size(x), deferred)
        if torch.is_grad_enabled() and not capturing():
            self.adapt(x, labels)
        return labels

    def _end_step(self, loss: Tensor, labels: Tensor) -> None:
        """Counts steps of a network that is constant."""
        if torch.is_grad_enabled() and self._perturbs() and not self._margin:
            self._collapse.observe(loss.detach(), self.target.trivial(labels), self._advice)

    def _controller(self) -> GapController | None:
        return self.hidden_radius if isinstance(self.hidden_radius, GapController) else None

    def _radius(self) -> float:
        return float(radius_of(self.radius, INPUT, self.progress)[0])

    def _perturbs_hidden(self) -> bool:
        if isinstance(self.hidden_radius, GapController):
            return True
        hidden, fraction = stage_of(self.hidden_radius, self.progress)
        return fraction > 0 and (isinstance(hidden, Mapping) or hidden > 0)

    def _perturbs(self) -> bool:
        return self._radius() > 0 or self._perturbs_hidden()

    def _length(self, radius: float) -> float:
        if self.step_size is not None:
            return self.step_size
        if self.steps > 1:
            return 2.5 * radius / self.steps
        return 1.25 * radius if self.random_start else radius

    def _start(self, x: Batch) -> Tensor | None:
        """Where the search begins at the input; None for inputs that cannot be perturbed, as token ids."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return None
        if not self.random_start or self._radius() == 0:
            return torch.zeros_like(x)
        drawn: Tensor = random_point(x.detach().flatten(1), self.norm, self._radius()).reshape(x.shape)
        return drawn

    def _training_loss(self, x: Batch, labels: Tensor) -> Tensor:
        worst = self._search(x, labels, self._start(x)) if self._perturbs() else None
        if worst is not None and torch.is_grad_enabled() and self._collapse.first():
            self._measure_moves(x, worst)
        if not self.awp or not torch.is_grad_enabled():
            return self._loss_at(x, labels, worst)
        moves = weight_perturbations(self.model, self.awp, lambda: self._loss_at(x, labels, worst))
        with moved_weights(self.model, moves):
            if worst is not None:
                worst = replace(worst, names=Names(unwrap(self.model), named_sites(self.hidden_radius, self.layers)))
            return self._loss_at(x, labels, worst)

    @torch.no_grad()
    def _measure_moves(self, x: Batch, worst: Perturbations) -> None:
        """Keeps how far the perturbations of the first step move the outputs: those of hidden layers, if there are any."""
        model, hidden = unwrap(self.model), {name: d for name, d in worst.values.items() if name != INPUT}
        with preserve_state(model):
            clean = evaluate(model, x, replace(worst, values={}), self._read, copies=1)
            moved = evaluate(model, x, replace(worst, values=hidden or worst.values), self._read, copies=1)
        self._collapse.ratio = move_ratio(clean, moved - clean)

    def _advice(self, ratio: float) -> str:
        automatic = isinstance(self.hidden_radius, GapController)
        hidden = 0.0 if automatic else stage_of(self.hidden_radius, self.progress)[0]
        fraction = holding_fraction(ratio)
        if hidden == 0:
            return f"a radius of about {self._radius() * fraction:.2g} may hold, or Stages that begin at 0"
        suggested = (
            {name: float(f"{rho * fraction:.2g}") for name, rho in hidden.items()}
            if isinstance(hidden, Mapping)
            else f"{hidden * fraction:.2g}"
        )
        return f"a hidden_radius of about {suggested} may hold; or hidden_radius='auto' with held_out="

    def _loss_at(self, x: Batch, labels: Tensor, worst: Perturbations | None) -> Tensor:
        """The loss at the perturbations, from ordinary forward passes: one, and one of the clean batch for TRADES."""
        if worst is None:
            return self._mean_error(self._forward(x), labels)
        if not self.trades:
            return self._mean_error(evaluate(self.model, x, worst, self._read, copies=1), labels)
        clean = evaluate(self.model, x, replace(worst, values={}), self._read, copies=1)
        moved = evaluate(self.model, x, worst, self._read, copies=1)
        return (self._errors(clean, labels) + self.trades * divergence(clean, moved)).mean()

    def _mean_error(self, output: Tensor, labels: Tensor) -> Tensor:
        return self._errors(output, labels).mean() if self._margin else self.target.mean_error(output, labels)

    def _robust_accuracy(self, x: Tensor, y: Tensor) -> Tensor:
        """Fraction right at the perturbations of the input alone, if there are any, in evaluation mode, over all processes."""
        deferred = self._checks if self._checks.defers(y) else None
        labels, model = self.target.labels(y, batch_size(x), deferred), unwrap(self.model)
        with eval_mode(model):
            if self._radius() > 0:
                worst = self._search(x, labels, self._start(x), self._settings(x, labels, hidden=False))
                output = evaluate(model, x, worst, self._read, copies=1)
            else:
                output = self._forward(x)
            right = self.target.decide(output) == labels
        right = gathered(right.float()) if is_shared(self.model) else right.float()
        return right.mean()

    def _search(
        self, x: Batch, labels: Tensor, start: Tensor | None, settings: AscentSettings | None = None
    ) -> Perturbations:
        def objective(clean: Tensor) -> Callable[[Tensor], Tensor]:
            return lambda output: divergence(clean, output) if self.trades else self._errors(output, labels)

        settings = settings or self._settings(x, labels)
        return ascend(unwrap(self.model), x, start, objective, settings, self._known_layouts)

    def _settings(self, x: Batch, labels: Tensor, hidden: bool = True) -> AscentSettings:
        together = torch.is_grad_enabled() and is_shared(self.model)
        hidden = hidden and self._perturbs_hidden()

        def rho_of_layer(layer: str) -> float | Tensor:
            return hidden_radius_of(self.hidden_radius, self.layers, layer, self.progress)

        return AscentSettings(
            radius=self._radius(),
            norm=self.norm,
            steps=self.steps,
            step_size=self._length(self._radius()),
            bounds=self._bounds_at(x),
            read=self._read,
            hidden_radius=rho_of_layer if hidden else lambda layer: 0.0,
            hidden=self.hidden if hidden else HiddenOptions(),
            skip_input=self.layers == "all" and not named_layers(self.hidden_radius),
            record_clean=self.trades > 0,
            keep_best=self.keep_best,
            size=common_root_mean_square if together else root_mean_square,
            outputs=named_sites(self.hidden_radius, self.layers),
            tokens=labels.shape[1] if isinstance(self.target, Tokens) else 1,
            where=self.target.where(x, labels) if isinstance(self.target, Tokens) else None,
        )
