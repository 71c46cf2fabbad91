"""Adversarial training: the input, and if wanted every hidden layer, perturbed up the loss (projected gradient steps)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from excite._core.background import DeferredChecks
from excite._core.calls import Batch, Pick, batch_size, call, pick_output, tensors
from excite._core.checks import (
    Bounds,
    check_bounds,
    check_choice,
    check_count,
    check_flag,
    check_layers,
    check_model,
    check_number,
    check_output,
    check_real,
    check_weights,
    model_errors,
    parse_norm,
)
from excite._core.distributed import gathered
from excite._core.intercept.affine import Names
from excite._core.layout import Layout
from excite._core.preserve import capturing, eval_mode, preserve_state
from excite._core.wrappers import eagerly, is_shared, unwrap
from excite.errors import InputError
from excite.excitation.ascent import AscentSettings, HiddenOptions, ascend
from excite.excitation.checks import check_fraction, check_input, check_names, place_bounds, possible_layers
from excite.excitation.collapse import CollapseCheck
from excite.excitation.perturbations import random_point
from excite.excitation.radius import (
    Relative,
    Stages,
    check_radius,
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
from excite.excitation.weight_perturbation import moved_weights, perturbed_weights, weight_perturbations


class AdversarialTraining:
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
        self.model = check_model(model)
        known = possible_layers(unwrap(model))
        self.radius = _check_input_radius(radius)
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
        self._errors = _confusion(self.target) if loss == "margin" else self.target.errors
        self.bounds = check_bounds(bounds)
        self.output = output
        self.hidden_radius = (
            GapController(held_out, gap_target, gap_every)
            if isinstance(hidden_radius, str) and hidden_radius == "auto"
            else _check_hidden_radius(hidden_radius, known, held_out, unwrap(model))
        )
        self.layers = _check_hidden_layers(layers, known, unwrap(model))
        self.hidden = _check_hidden(hidden)
        self.awp = _check_awp(awp, model)
        self.trades = _check_trades(trades, loss, self.random_start)
        self.keep_best = check_flag(keep_best, "keep_best")
        self.progress = 0.0
        self._known_layouts: dict[object, list[Layout | None]] = {}
        self._placed_bounds: dict[object, tuple[Bounds, Bounds]] = {}
        self._checks = DeferredChecks("loss")
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
        later = None if capturing() else self._checks.begin(x if isinstance(x, Tensor) else tensors(x)[0])
        self._check_input(x, later)
        labels = self.target.labels(y, batch_size(x), later)
        if torch.is_grad_enabled() and not capturing():
            self.adapt(x, labels)
        loss = self._training_loss(x, labels)
        if torch.is_grad_enabled() and self._perturbs() and not self._margin:
            self._collapse.observe(loss.detach(), self.target.trivial(labels), self._advice)
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

    @model_errors
    @torch.no_grad()
    def predict(self, x: Batch) -> Tensor:
        """Predicted labels, with the model in evaluation mode.

        Args:
            x: inputs, as in `loss`.

        Returns:
            Integer tensor (B,); for token targets (B, T).
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

    def setting(self) -> tuple[float, ...]:
        """The numbers that a step depends on besides its tensors: a captured CUDA graph is invalid once they change."""
        if isinstance(self.hidden_radius, GapController):
            return (self._radius(), -1.0)  # a tensor, which changes between steps
        hidden, fraction = self._hidden_stage()
        return (
            self._radius(),
            *(fraction * rho for rho in (hidden.values() if isinstance(hidden, Mapping) else [hidden])),
        )

    def measured(self) -> dict[str, float]:
        """Metrics for a run: with hidden_radius "auto" the radius, both robust accuracies and their gap."""
        return self.hidden_radius.measured() if isinstance(self.hidden_radius, GapController) else {}

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint.

        Raises:
            InputError: if inputs or labels of an earlier `loss` did not fit the settings, which was not known yet (on a GPU).
        """
        self._checks.finish()
        state: dict[str, Any] = {"progress": self.progress}
        control = self.hidden_radius
        return {**state, "auto": control.state_dict()} if isinstance(control, GapController) else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        self.advance(state["progress"])
        if isinstance(self.hidden_radius, GapController) and "auto" in state:
            self.hidden_radius.load_state_dict(state["auto"])

    def __repr__(self) -> str:
        return (
            f"AdversarialTraining(radius={self.radius!r}, norm={self.norm!r}, steps={self.steps}, "
            f"random_start={self.random_start}, {self.target!r}, hidden_radius={self.hidden_radius!r}, awp={self.awp}, "
            f"trades={self.trades}, progress={self.progress})"
        )

    # -- inside --------------------------------------------------------------------------------------------------
    def _check_input(self, x: Batch, later: DeferredChecks | None = None) -> None:
        check_input(x, self._full_radius() > 0, place_bounds(self.bounds, x, self._placed_bounds), later)

    def _full_radius(self) -> float:
        """The radius of the input at the end of training."""
        full = self.radius.radius if isinstance(self.radius, Stages) else self.radius
        return float(full)  # type: ignore[arg-type]

    def _radius(self) -> float:
        return float(radius_of(self.radius, INPUT, self.progress)[0])

    def _hidden_radius_of(self, layer: str) -> float | Tensor:
        """ρ of one layer; 0 where it is not perturbed. A second call of a weight, `name#2`, has that of `name`."""
        first = layer.split("#")[0]
        if self.layers != "all" and layer not in self.layers and first not in self.layers:
            return 0.0
        if isinstance(self.hidden_radius, GapController):
            return self.hidden_radius.factor
        hidden, fraction = self._hidden_stage()
        return fraction * (hidden.get(layer, hidden.get(first, 0.0)) if isinstance(hidden, Mapping) else hidden)

    def _hidden_stage(self) -> tuple[float | Mapping[str, float], float]:
        """The full hidden radius, and the share of it at this stage of training; not for "auto"."""
        hidden = self.hidden_radius
        assert not isinstance(hidden, GapController)
        if not isinstance(hidden, Stages):
            return hidden, 1.0
        assert isinstance(hidden.radius, int | float | Mapping)
        return hidden.radius, hidden.share(self.progress)

    def _perturbs_hidden(self) -> bool:
        if isinstance(self.hidden_radius, GapController):
            return True
        hidden, fraction = self._hidden_stage()
        return fraction > 0 and (isinstance(hidden, Mapping) or hidden > 0)

    def _named(self) -> list[str]:
        """Names in a hidden radius by layer."""
        hidden = self.hidden_radius.radius if isinstance(self.hidden_radius, Stages) else self.hidden_radius
        return list(hidden) if isinstance(hidden, Mapping) else []

    def _perturbs(self) -> bool:
        return self._radius() > 0 or self._perturbs_hidden()

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
        if not self.awp or not torch.is_grad_enabled():
            return self._loss_at(x, labels, worst)
        moves = weight_perturbations(self.model, self.awp, lambda: self._loss_at(x, labels, worst))
        with moved_weights(self.model, moves):
            at = None if worst is None else replace(worst, names=Names(unwrap(self.model), self._sites()))
            return self._loss_at(x, labels, at)

    def _advice(self, ratio: float) -> str:
        hidden = self.hidden_radius
        hidden = hidden if isinstance(hidden, GapController) else self._hidden_stage()[0]
        if isinstance(hidden, GapController) or hidden == 0:
            return f"a radius of about {self._radius() / 4:.2g} may hold, or Stages that begin at 0"
        suggested = (
            {name: rho / 4 for name, rho in hidden.items()} if isinstance(hidden, Mapping) else f"{hidden / 4:.2g}"
        )
        return f"a hidden_radius of about {suggested} may hold; or hidden_radius='auto' with held_out="

    def _loss_at(self, x: Batch, labels: Tensor, worst: Perturbations | None) -> Tensor:
        """The loss at the perturbations, from ordinary forward passes: one, and one of the clean batch for TRADES."""
        if worst is None:
            with eagerly(self.model):
                output = self._read(call(self.model, x), batch_size(x))
            return self._mean_error(output, labels)
        if not self.trades:
            return self._mean_error(evaluate(self.model, x, worst, self._read, copies=1), labels)
        clean = evaluate(self.model, x, replace(worst, values={}), self._read, copies=1)
        moved = evaluate(self.model, x, worst, self._read, copies=1)
        return (self._errors(clean, labels) + self.trades * self._divergence(clean, moved)).mean()

    def _mean_error(self, output: Tensor, labels: Tensor) -> Tensor:
        return self._errors(output, labels).mean() if self._margin else self.target.mean_error(output, labels)

    def _divergence(self, clean: Tensor, moved: Tensor) -> Tensor:
        """KL(p(x) ‖ p(x + d)) of each sample, (B,)."""
        if isinstance(self.target, Binary):  # one logit f stands for the logits 0 and f
            clean, moved = (torch.stack([torch.zeros_like(f), f], 1) for f in (clean, moved))
        p, q = clean.log_softmax(1), moved.log_softmax(1)
        return F.kl_div(q, p, reduction="none", log_target=True).sum(1)

    def _robust_accuracy(self, x: Tensor, y: Tensor) -> Tensor:
        """Fraction right at the perturbations of the input alone, in evaluation mode, over all processes."""
        later = self._checks if self._checks.defers(y) else None
        labels, model = self.target.labels(y, batch_size(x), later), unwrap(self.model)
        with eval_mode(model):
            worst = self._search(x, labels, self._start(x), hidden=False)
            right = self.target.decide(evaluate(model, x, worst, self._read, copies=1)) == labels
        right = gathered(right.float()) if is_shared(self.model) else right.float()
        return right.mean()

    def _sites(self) -> list[str]:
        """Names of layers and of outputs of modules that are chosen one by one."""
        return [*self._named(), *([] if isinstance(self.layers, str) else self.layers)]

    def _search(self, x: Batch, labels: Tensor, start: Tensor | None, hidden: bool = True) -> Perturbations:
        together = torch.is_grad_enabled() and is_shared(self.model)
        hidden = hidden and self._perturbs_hidden()
        settings = AscentSettings(
            radius=self._radius(),
            norm=self.norm,
            steps=self.steps,
            step_size=self._length(self._radius()),
            bounds=place_bounds(self.bounds, x, self._placed_bounds),
            read=self._read,
            hidden_radius=self._hidden_radius_of if hidden else lambda layer: 0.0,
            hidden=self.hidden if hidden else HiddenOptions(),
            skip_input=self.layers == "all" and not self._named(),
            record_clean=self.trades > 0,
            keep_best=self.keep_best,
            size=common_root_mean_square if together else root_mean_square,
            outputs=self._sites(),
            tokens=labels.shape[1] if isinstance(self.target, Tokens) else 1,
            where=self.target.where(x, labels) if isinstance(self.target, Tokens) else None,
        )

        def objective(clean: Tensor) -> Callable[[Tensor], Tensor]:
            return lambda output: self._divergence(clean, output) if self.trades else self._errors(output, labels)

        return ascend(unwrap(self.model), x, start, objective, settings, self._known_layouts)


def _confusion(target: Binary | Codes | Tokens) -> Callable[[Tensor, Tensor], Tensor]:
    if isinstance(target, Tokens):
        raise InputError("loss: token targets have the cross-entropy only; got 'margin'")
    return target.confusion


def _check_input_radius(radius: object) -> float | Stages:
    """A number, or stages of a number."""
    checked = check_radius(radius)
    full = checked.radius if isinstance(checked, Stages) else checked
    if not isinstance(full, int | float):
        raise InputError(f"radius: expected a number or Stages of a number for the input; got {radius!r}")
    return checked  # type: ignore[return-value]


def _check_hidden(hidden: object) -> HiddenOptions:
    """The options of hidden layers."""
    if hidden is not None and not isinstance(hidden, HiddenOptions):
        raise InputError(f"hidden: expected HiddenOptions; got {hidden!r}")
    return HiddenOptions() if hidden is None else hidden


def _check_awp(awp: object, model: nn.Module) -> float:
    """The size of weight perturbations, 0 for none."""
    size = check_number(awp, "awp", 0, 1)
    if size:
        perturbed_weights(model)  # refuses sharded ones
    return size


def _check_trades(trades: object, loss: str, random_start: bool) -> float:
    """The weight of the divergence in TRADES, 0 for none."""
    weight = check_number(trades, "trades", 0)
    if weight and (loss != "cross-entropy" or not random_start):
        raise InputError(
            "trades: expected loss='cross-entropy' and random_start=True, since the divergence of equal outputs has no gradient"
        )
    return weight


def _check_hidden_radius(
    radius: object, known: Sequence[str], held_out: object, model: nn.Module
) -> float | Mapping[str, float] | Stages:
    if held_out is not None:
        raise InputError("held_out: expected with hidden_radius='auto' only")
    if isinstance(radius, Stages):
        if isinstance(radius.radius, Relative):
            raise InputError(
                "hidden_radius is relative already: expected Stages of a number or of a dict by layer name"
            )
        _check_hidden_radius(radius.radius, known, None, model)
        return radius
    description = "hidden_radius (relative to the root mean square of a layer's input)"
    if not isinstance(radius, Mapping):
        return check_number(radius, description, 0, 1e6)
    check_names(map(str, radius), known, model)
    return {name: check_number(value, f"{description} of {name!r}", 0, 1e6) for name, value in radius.items()}


def _check_hidden_layers(layers: str | Sequence[str], known: Sequence[str], model: nn.Module) -> str | Sequence[str]:
    checked = check_layers(layers)
    if checked == "input":
        raise InputError(
            "layers: expected 'all' or names of hidden layers; for the input alone leave hidden_radius at 0"
        )
    check_names(() if checked == "all" else checked, known, model)
    return checked
