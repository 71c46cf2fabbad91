"""Training with persistent excitation (Algorithm 1 of *Persistency of Excitation for Robustness of Neural Networks*)."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from excite._core.background import DeferredChecks
from excite._core.calls import Batch, Pick, batch_size, call, tensors
from excite._core.checks import (
    Bounds,
    check_bounds,
    check_choice,
    check_count,
    check_flag,
    check_layers,
    check_output,
    model_errors,
    parse_norm,
)
from excite._core.distributed import gathered
from excite._core.intercept.affine import Names
from excite._core.preserve import device_of, preserve_state
from excite._core.wrappers import is_shared, unwrap
from excite.errors import InputError
from excite.excitation.checks import check_names, possible_layers
from excite.excitation.collapse import CollapseCheck, holding_fraction, move_ratio
from excite.excitation.hierarchy import Groups, Hierarchy, Nodes, choose_hierarchy
from excite.excitation.perturbations import check_mode
from excite.excitation.perturbed_loss import PerturbedLoss
from excite.excitation.radius import (
    Radius,
    Relative,
    base_radius,
    check_radius,
    common_root_mean_square,
    radius_names,
    radius_of,
    root_mean_square,
)
from excite.excitation.radius_control import FitController
from excite.excitation.search import INPUT, Perturbations, Read, SearchSettings, evaluate, search
from excite.excitation.targets.choose import TARGETS, choose_target, tokens_target, values_target
from excite.excitation.targets.target import Loss, Target
from excite.excitation.targets.tokens import Tokens
from excite.excitation.targets.values import Values


class PersistentExcitation(PerturbedLoss):
    """A loss that excites every layer, so that every weight receives a training signal (Algorithm 1).

    For each sample x the search finds d1 = argmax f(x; d) and d2 = argmin f(x; d), where d_k is added to the input of
    affine call k and lies in the ball of `radius` in `norm`: `steps` steepest steps of length radius/steps from zero.
    The loss is the batch **mean** of ½(f(x;d1) − y)² + ½(f(x;d2) − y)²; at radius 0 that is the mean of (f − y)².

    With `classes=m` the model has m outputs, or m − 1, and the labels are 0 … m − 1: the loss is the batch **mean** of
    ½‖f(x;d1) − z_y‖² + ½‖f(x;d2) − z_y‖² with equidistant codes z, and the extremes are those of v'f(x; d), where v is the
    unit direction in which the outputs of that sample can be moved most (section 7.1). For m = 2 and one output that is
    the binary loss with targets −½ and ½ for 0 and 1, and threshold 0 for 0.5.

    With `targets="values"` y are real numbers, one for each output: the same loss without classes.

    With `targets="tokens"` y has a label for each token of a sequence, (B, T): d1 and d2 make the log-likelihood of the labels of
    a sequence largest and smallest, and the loss is ½ of the cross-entropy at d1 plus ½ of that at d2, each the **mean** over all
    tokens of the batch whose label is not `ignore_index`. Each token has a ball of its own.

    Args:
        model: any module with one scalar output per sample, (B,) or (B, 1); with `classes`, (B, m) or (B, m − 1).
        radius: a number, a dict by layer name (layers that are not named are not perturbed), `Relative`, `Stages`, or
            "auto": relative to each layer's input, as large as two points of training accuracy allow (see
            `excite.excitation.radius_control`).
        steps: steps of the search.
        norm: "inf", "2" or "1"; the ball of each layer and sample separately.
        layers: "all" (the input of every affine call), "input" (the model's input) or a list of names: of layers, whose input is
            perturbed, or "PATH:output" for what a module returns, such as "transformer.wte:output" for embeddings and
            "transformer.h.3:output" for the residual stream after a block.
        threshold: class 1 where f > threshold; by default 0.5, for targets 0 and 1, and 0 for the cross-entropy.
        bounds: (low, high) of the model's input, numbers or tensors that broadcast to one sample.
        output: which part of what the model returns is f, if it returns a dict or a tuple.
        classes: the number of classes, for more than one output.
        hierarchy: binary classifiers in a tree instead of codes, one output per node, m − 1 in all: "balanced", nested
            groups of classes or a `Hierarchy`. The loss is the batch mean of the sum of the binary losses on the path.
        loss: "squared", or "cross-entropy" on logits: ½ of it at d1 and ½ at d2.
        kind: "additive", or "multiplicative": inputs h become h·(1 + d), for radii below 1.
        targets: "labels", or "values" for a regression (section 5.2): y are floating-point numbers, (B,) for one output or
            (B, k) for k, and the errors are ‖f − y‖². "tokens" for a label per token, (B, T), with logits (B, T, V) and
            loss="cross-entropy"; "next-token" where the label of the output at t stands at t + 1, as for the causal language
            models of Transformers.
        tokens: for token targets: "all", or "prompt" to perturb only tokens whose own label is `ignore_index`. Tokens that an
            `attention_mask` of the batch excludes are not perturbed.
        ignore_index: for token targets: label of tokens that the loss does not count.
        turns: how often the search for v alternates between d and v, at one forward and one backward pass of the batch
            each; with 0, v leads from the second nearest code to the nearest.
        starts: starts of the search for v, each at 1 + turns backward passes and turns forward passes of the batch; the v
            along which the linearised model moves most is kept for each sample. In the 1-norm the longest column of the
            Jacobian is one more start, for up to 32 outputs, which makes v exact where one layer is perturbed.
        random_start: begin both searches uniformly in the balls instead of at zero, from torch's global random state; steps
            are then 2.5·radius/steps long (1.25·radius for one step), and projected. One more pass of the doubled batch.
        keep_best: take the iterate with the largest, or smallest, v'f of each sample instead of the last one; one more
            forward pass of the doubled batch.
        on_collapse: when the loss has been that of the best constant output for 200 steps: "warn" with a radius that may hold,
            "stop" with a `ModelError`, or "ignore".

    Raises:
        InputError: if an argument is of the wrong kind or out of range, or names a layer that the model does not have.
        ModelError: if the model has no affine layer.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> pe = excite.PersistentExcitation(model, radius=0.02)
        >>> pe.loss(torch.randn(16, 2), torch.arange(16) % 2).backward()
    """

    def __init__(
        self,
        model: nn.Module,
        radius: Radius | Literal["auto"],
        norm: str | float = "inf",
        steps: int = 4,
        layers: str | Sequence[str] = "all",
        threshold: float | None = None,
        bounds: Bounds | None = None,
        output: Pick = None,
        *,
        classes: int | None = None,
        hierarchy: str | Groups | Hierarchy | None = None,
        loss: Loss = "squared",
        kind: str = "additive",
        targets: Literal["labels", "values", "tokens", "next-token"] = "labels",
        tokens: Literal["all", "prompt"] = "all",
        ignore_index: int = -100,
        turns: int = 1,
        starts: int = 1,
        random_start: bool = False,
        keep_best: bool = False,
        on_collapse: Literal["warn", "stop", "ignore"] = "warn",
    ):
        super().__init__(model)
        self.radius = check_radius(radius)
        self.kind = check_mode(kind, self.radius)
        self.norm = parse_norm(norm)
        self.steps = check_count(steps, "steps")
        self.turns = check_count(turns, "turns", minimum=0)
        self.starts = check_count(starts, "starts", maximum=1000)
        self.random_start = check_flag(random_start, "random_start")
        self.keep_best = check_flag(keep_best, "keep_best")
        self.layers = check_layers(layers)
        self._at_input = ("layers='input'", "choose layers='all'") if self.layers == "input" else None
        self.target: Target
        if check_choice(targets, "targets", TARGETS) == "values":
            self.target = values_target(classes, hierarchy, threshold, loss)
        elif targets != "labels":
            unused_settings = {"classes": classes, "hierarchy": hierarchy, "threshold": threshold}
            self.target = tokens_target(targets, tokens, ignore_index, loss, unused_settings)
        elif hierarchy is None:
            self.target = choose_target(classes, threshold, loss)
        else:
            self.target = Nodes(choose_hierarchy(hierarchy, classes), threshold, loss)
        self.bounds = check_bounds(bounds)
        self.output = output
        self._collapse = CollapseCheck(on_collapse, self._checks)
        self._radii: dict[str, float | Tensor] = {}
        if isinstance(self.radius, FitController) and isinstance(self.target, Values | Tokens):
            raise InputError(
                f"radius 'auto' holds the fraction of right decisions: give a number for targets={targets!r}"
            )
        if self.layers == "input" and radius_names(self.radius):
            raise InputError("layers='input' perturbs the model's input: give one radius instead of one per layer")
        # Names of layers and of outputs of modules that are chosen one by one.
        self._named = [*radius_names(self.radius), *([] if isinstance(self.layers, str) else self.layers)]
        check_names(self._named, possible_layers(unwrap(model)), unwrap(model))

    @model_errors
    def loss(self, x: Batch, y: Tensor) -> Tensor:
        """Batch mean of ½(f(x;d1) − y)² + ½(f(x;d2) − y)², or of the error that belongs to the target.

        Running statistics and the random state change as in one ordinary forward pass.

        Args:
            x: the batch: a tensor, a tuple of positional or a dict of keyword arguments of the model.
            y: labels (B,) or (B, 1), 0 and 1 or the classes; with targets="values" floating-point numbers (B,) or (B, k).

        Returns:
            Scalar tensor; call `.backward()` on it.

        Raises:
            InputError: if inputs or labels do not fit the settings. Values on a GPU are judged without waiting for it: an error
                comes from a later call, or from `state_dict`, and names the call it belongs to.
            ModelError: if the model cannot be excited: its outputs have another shape, or no gradient path leads to them.
        """
        return self._losses(x, y, mean=True)

    @model_errors
    def losses(self, x: Batch, y: Tensor) -> Tensor:
        """The loss of each sample; `loss` is their mean.

        Args:
            x: the batch, as in `loss`.
            y: labels, as in `loss`.

        Returns:
            Tensor (B,); for token targets the mean over the counted tokens of each sequence.
        """
        return self._losses(x, y, mean=False)

    def _losses(self, x: Batch, y: Tensor, mean: bool) -> Tensor:
        """The loss of each sample, or their mean."""
        perturbs = self._perturbs()
        deferred = self._checks.begin(x if isinstance(x, Tensor) else tensors(x)[0])
        self._check_input(x, deferred)
        labels = self.target.labels(y, batch_size(x), deferred)
        if not perturbs:
            output = self._forward(x)
            return self.target.mean_error(output, labels) if mean else self.target.errors(output, labels)
        # Algorithm 1 for the whole batch: d1 = argmax f(x; d), d2 = argmin f(x; d), then the loss at both.
        samples, direction = self.target.searches(x, labels)  # x and one direction per sample, but for a hierarchy
        low, high = self._extremes(samples, direction, labels)  # f(x; d2), f(x; d1)
        losses = self.target.losses(low, high, labels)  # ½ error(f(x; d1), y) + ½ error(f(x; d2), y)
        if torch.is_grad_enabled():
            if isinstance(self.radius, FitController):
                self._adapt_radius(self.radius, low, high, labels)
            self._check_collapse(losses.detach(), low.detach(), high.detach(), labels)
        return self.target.mean_loss(losses, low, high, labels) if mean else losses

    @model_errors
    def extremes(self, x: Batch, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The outputs at the two extreme perturbations, which the loss compares with y. Changes nothing in the model.

        Args:
            x: the batch, as in `loss`.
            y: labels, for token targets only.

        Returns:
            (f(x; argmin), f(x; argmax)), each (B,). With `classes`, the outputs (B, m) or (B, m − 1) at the two extremes along
            v; with a hierarchy, each node's own extremes, (B, m − 1); with token targets the logits (B, T, V). Differentiable in the weights where gradients are
            enabled, for losses of your own.
        """
        deferred = None
        if torch.is_grad_enabled():  # part of a training step, which does not wait
            deferred = self._checks.begin(x if isinstance(x, Tensor) else tensors(x)[0])
        self._check_input(x, deferred)
        with preserve_state(unwrap(self.model)):
            if not self._perturbs():
                low = high = self._read(call(self.model, x), batch_size(x))
            else:
                low, high = self.target.extremes(
                    *self._extremes(*self.target.searches(x, None), self._token_labels(x, y))
                )
        if not torch.is_grad_enabled():
            check_output(low), check_output(high)
        return low, high

    @model_errors
    def perturbations(self, x: Batch, y: Tensor | None = None) -> dict[str, tuple[Tensor, Tensor]]:
        """The extreme perturbations by layer.

        Args:
            x: the batch, as in `loss`.
            y: labels, for token targets only.

        Returns:
            (for the minimum, for the maximum) by layer name, shaped like the layer's input; the model's own input is "".

        Raises:
            InputError: for a hierarchy, each of whose nodes has its own perturbations.
        """
        if isinstance(self.target, Nodes):
            raise InputError(
                "perturbations: every node of a hierarchy has its own; pick one node's output with output="
            )
        self._check_input(x)
        with preserve_state(unwrap(self.model)):
            extremes = self._search(x, labels=self._token_labels(x, y)) if self._perturbs() else None
        return {} if extremes is None else {layer: extremes.halves(layer) for layer in extremes.values}

    def setting(self) -> tuple[float, ...]:
        """The numbers that a step depends on besides its tensors: a captured CUDA graph is invalid once they change."""
        if isinstance(self.radius, FitController):
            return (1.0,)  # a tensor, which changes inside the step
        if isinstance(self.radius, int | float):
            return (float(self.radius),)
        names = list(radius_names(self.radius)) or [INPUT]
        return tuple(float(radius_of(self.radius, name, self.progress)[0]) for name in names)

    def of(self, model: nn.Module) -> PersistentExcitation:
        """The same excitation, as far advanced, of another model."""
        other = copy.copy(self)
        other.model, other._known_layouts, other._checks = model, {}, DeferredChecks("loss")
        other._collapse = CollapseCheck("ignore", other._checks)
        return other

    def __repr__(self) -> str:
        return (
            f"PersistentExcitation(radius={self.radius!r}, norm={self.norm!r}, steps={self.steps}, layers={self.layers!r}, "
            f"kind={self.kind.name!r}, {self.target!r}, progress={self.progress})"
        )

    def radii(self) -> dict[str, float]:
        """The radius of each layer in the last search; the model's own input is ""."""
        return {layer: float(radius) for layer, radius in self._radii.items()}

    def measured(self) -> dict[str, float]:
        """Metrics for a run: with radius "auto" the controller's state and the current radius of each layer."""
        if not isinstance(self.radius, FitController):
            return {}
        return {**self.radius.measured(), **{f"radius/{layer or 'input'}": r for layer, r in self.radii().items()}}

    # -- inside --------------------------------------------------------------------------------------------------
    def _controller(self) -> FitController | None:
        return self.radius if isinstance(self.radius, FitController) else None

    def _extremes(self, x: Batch, direction: Tensor | None, labels: Tensor | None) -> tuple[Tensor, Tensor]:
        """The outputs at the extremes of v'f, (f(x; argmin), f(x; argmax)), differentiable in the weights."""
        perturbations = self._search(x, direction, together=torch.is_grad_enabled(), labels=labels)
        outputs = evaluate(self.model, x, perturbations, self._read)
        high, low = outputs.chunk(2)
        return low, high

    def _check_collapse(self, losses: Tensor, low: Tensor, high: Tensor, labels: Tensor) -> None:
        """Counts a step of a network that is constant, and keeps how far the first step moved the outputs."""
        trivial = self.target.trivial(labels)
        if self._collapse.first():
            self._collapse.ratio = move_ratio((low + high) / 2, (high - low) / 2)
        self._collapse.observe(losses.mean(), trivial, self._advice)

    def _advice(self, ratio: float) -> str:
        if isinstance(self.radius, FitController):
            return "radius 'auto' is at its smallest by now: lower the learning rate, or look at the data"
        factor = holding_fraction(ratio)
        full = base_radius(self.radius)
        suggested = ", ".join(
            f"{'' if name is None else repr(name) + ': '}{number * factor:.2g}"
            for name, number in (full.items() if isinstance(full, Mapping) else [(None, _number(full))])
        )
        return f"a radius of about {suggested} may hold; or use Stages, or radius='auto'"

    def _adapt_radius(self, radius: FitController, low: Tensor, high: Tensor, labels: Tensor) -> None:
        """Updates the controller of the radius. Every process has its own samples, and all must keep the same radius."""
        right = self.target.right(low.detach(), high.detach(), labels)
        radius.observe(gathered(right.float()) > 0, gathered(labels))

    def _perturbs(self) -> bool:
        """Whether anything is perturbed now: not at radius 0, nor in the first of `Stages`."""
        return any(self.setting())

    def _token_labels(self, x: Batch, y: Tensor | None) -> Tensor | None:
        """The labels that the search of token targets needs; None for other targets."""
        if not isinstance(self.target, Tokens):
            return None
        if y is None:
            raise InputError(
                f"expected labels y beside x: the extremes of {self.target!r} are those of their log-likelihood"
            )
        return self.target.labels(y, batch_size(x))

    def _likelihood(self, target: Tokens, labels: Tensor) -> Read:
        """Reads what the model returned as the mean log-likelihood of the labels of each sequence, (B,)."""

        def read(returned: Any, samples: int) -> Tensor:
            return -target.errors(self._read(returned, samples), labels.repeat(samples // len(labels), 1))

        return read

    def _search(
        self, x: Batch, direction: Tensor | None = None, together: bool = False, labels: Tensor | None = None
    ) -> Perturbations:
        """The perturbations at both extremes.

        `together`: all processes that train this model search at the same time, each for its part of the batch. `labels`: for token
        targets, whose log-likelihood is searched.
        """
        target = self.target
        sequences: dict[str, Any] = {"read": self._read}
        if isinstance(target, Tokens) and labels is not None:
            sequences = {
                "read": self._likelihood(target, labels),
                "tokens": labels.shape[1],
                "where": target.where(x, labels),
            }
        bounds, layers, model = self._bounds_at(x), self.layers, unwrap(self.model)
        settings = SearchSettings(
            radius=lambda name: radius_of(self.radius, name, self.progress),
            norm=self.norm,
            steps=self.steps,
            chosen=lambda name: (
                layers == "all" or (layers != "input" and (name in layers or name.split("#")[0] in layers))
            ),
            everything=layers == "all",
            at_input=layers == "input",
            bounds=bounds,
            mode=self.kind,
            **sequences,
            start=self.target.start,
            alternations=self.turns,
            starts=self.starts,
            random_start=self.random_start,
            keep_best=self.keep_best,
            size=common_root_mean_square if together and is_shared(self.model) else root_mean_square,
        )
        if isinstance(self.radius, FitController):
            self.radius.to(device_of(model))
        extremes = search(model, Names(model, self._named), x, settings, self._known_layouts, direction)
        self._radii = {name: layer.radius for name, layer in extremes.layers.items()}
        return extremes


def _number(radius: object) -> float:
    """The number of a radius that is one, or relative."""
    return radius.factor if isinstance(radius, Relative) else float(radius)  # type: ignore[arg-type]
