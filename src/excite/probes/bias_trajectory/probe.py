"""The trajectory probe: local Lipschitz constants of the function that is being learned, from the user's own backward passes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from excite._core.calls import Batch, Pick, own_copy
from excite._core.checks import check_count
from excite._core.compatibility import renamed_attribute, renamed_keywords
from excite._core.intercept.affine import clean_path
from excite._core.warn import warn_user
from excite._core.wrappers import refuse_lazy
from excite.errors import InputError, ModelError
from excite.probes.base import Deferred, Every, Measurement, Probe, Reduction, Schedule, StepContext, Values
from excite.probes.bias_trajectory.exactness import LABELS, applies_link, labels, random_layers
from excite.probes.bias_trajectory.hooks import Hooks, row_norms
from excite.probes.bias_trajectory.layer_operators import LayerOperator
from excite.probes.bias_trajectory.ratio_bounds import RatioBounds, largest
from excite.probes.bias_trajectory.sites import TracedLayer, TracedLayers, find
from excite.probes.bias_trajectory.steady import Steady
from excite.probes.bias_trajectory.updates import gradients_of
from excite.probes.bias_trajectory.windows import BiasPath, Sums
from excite.probes.findings import (
    LARGE,
    MAX_NAMED,
    Finding,
    MetricSeries,
    Panel,
    binned_median,
    fall,
    first_nonfinite,
    learned,
    number,
    rise,
    since,
    since_step,
)
from excite.probes.schedules import as_schedule
from excite.wiring.normalization import as_trained

_FLAT = 0.1  # relative change of a loss below which it stands still
_OF_EVERY_STEP = ("length", "total", "raw", "variance")


class Trajectory(Probe):
    """Normalized updates ‖dL/dz‖ / ‖dL/df‖ of the first layer's bias, of every sample that training sees.

    Over the samples since the last measurement, for each layer: `trajectory/mean/layer`, `max`, `length` (the sum),
    `total` (the sum since the start), `samples`, `zero` (without a loss gradient: left out), `nonfinite` (left out). Of the
    bias itself, if the layer has one: `raw` (length of its path), `variance`, `distance` (from its start).

    Of the run so far: `phi`, the largest normalized update in its last half, and `tau`, the first step (counted from 0) from
    which none exceeded it (Definition 1; how exact for long runs: `excite.probes.bias_trajectory.steady.Steady`). NaN if there was no update.

    Every `bounds_every` training passes, for the first `max_samples` samples of that pass: `sigma`, the largest singular value of the layer as an
    operator, and the means `lower` ≤ `lipschitz` ≤ `upper` of Lemma 1, with `lipschitz_max` and the count of `violations`.
    With `clean`, on that schedule, `clean` and `clean_max`: the same ratio from an extra pass over the last batch without
    dropout and with the batch's normalization statistics as constants, exact also with batch normalization. `trajectory/label/...` is 1 where a label of
    `excite.probes.bias_trajectory.exactness.LABELS` applies. Several processes: sums and maxima over
    all of their samples; means over processes, which is the mean over samples where each has as many. `tau` is then the last
    of theirs: no update of any process exceeded `phi` from there on.

    Args:
        schedule: When to measure. Default: every 10 steps.
        layers: "first", "all", or names of layers.
        passes: "all", or "measured" to use only the passes of a step that is measured. Then nothing is done in between, and
            what needs every step (`length`, `total`, `raw`, `variance`) is not written; `phi` and `tau` are about the updates of
            these passes.
        output: Which part of the model's return value is f, if it returns several.
        link: "sigmoid" if the model returns one logit and its probability is meant.
        bounds_every: Number of training passes between two computations of the bounds on the ratio; None for none.
        max_samples: Largest number of samples of a pass for which these are computed. Default: all.
        clean: When to measure without dropout, on the last batch. Default: never.

    Raises:
        InputError: If an argument is not what is expected.

    Example:
        >>> from excite.probes import Every, Trajectory
        >>> watch = excite.watch(model, example=x, probes=[Trajectory(Every(50))])
    """

    name = "trajectory"
    requires = ("example",)
    panel = Panel(
        "steepness",
        "Steepness of the function",
        "How strongly the output responds to the input at the points being trained on. A function that keeps getting steeper "
        "while the loss stands still fits details, which costs margin.",
        (
            ("mean", "steepness at training points"),
            ("lipschitz", "local Lipschitz constant"),
            ("max", "steepest training point"),
            ("phi", "φ: steepest in the last half"),
            ("tau", "τ: none above φ since step"),
            ("lower", "lower bound"),
            ("upper", "upper bound"),
            ("clean", "steepness, one sample at a time"),
            ("total", "length of the path so far"),
            ("sigma", "norm of the first layer"),
        ),
        order=30,
        hidden=("label",),
        probes=("lipschitz",),
        docs="trajectory.md#metrics",
    )
    reduction = "mean"
    reductions: ClassVar[Mapping[str, Reduction]] = {
        "length": "sum", "total": "sum", "samples": "sum", "zero": "sum", "nonfinite": "sum", "violations": "sum",
        "max": "max", "lipschitz_max": "max", "clean_max": "max", "phi": "max", "tau": "max",
    }  # fmt: skip

    @renamed_keywords(sandwich="bounds_every", most="max_samples")
    def __init__(
        self,
        schedule: Schedule | None = None,
        *,
        layers: str | Sequence[str] = "first",
        output: Pick = None,
        link: Literal["identity", "sigmoid"] = "identity",
        passes: Literal["all", "measured"] = "all",
        bounds_every: int | None = 100,
        max_samples: int | None = None,
        clean: Schedule | None = None,
    ):
        super().__init__(Every(10) if schedule is None else schedule)
        if link not in ("identity", "sigmoid"):
            raise InputError(f"link: expected 'identity' or 'sigmoid'; got {link!r}")
        if passes not in ("all", "measured"):
            raise InputError(f"passes: expected 'all' or 'measured'; got {passes!r}")
        for name, count in (("bounds_every", bounds_every), ("max_samples", max_samples)):
            if count is not None:
                check_count(count, name, also="or None")
        self.layers, self.output, self.link, self.bounds_every = layers, output, link, bounds_every
        self.clean = None if clean is None else as_schedule(clean, "clean")
        self.passes, self.max_samples = passes, max_samples
        self.labels: tuple[str, ...] = ()
        self._hooks: Hooks | None = None
        self._passes = 0
        self._due = False  # whether the next pass is inspected
        self._warned = False
        self._loaded_state: dict[str, Any] = {}  # from a checkpoint, until the model is known

    sandwich = renamed_attribute("sandwich", "bounds_every")
    most = renamed_attribute("most", "max_samples")

    def attach(self, ctx: StepContext) -> None:
        """Finds the layers and registers hooks on the model; called by `excite.watch`."""
        if ctx.example is None:
            raise InputError("the trajectory probe needs an example batch: excite.watch(model, example=x, ...)")
        model = ctx.model
        refuse_lazy(model)
        self._model, self._example = model, own_copy(ctx.example)
        self._sites: TracedLayers = find(model, self._example, self.layers)
        for site in self._sites.chosen:
            if site.checkpointed and self.clean is None:
                raise ModelError(_recomputed(site.name))
            if not site.trained and self.clean is None:
                raise ModelError(
                    f"layer {site.name!r} and all before it are frozen, so training computes no gradient there: train "
                    "its bias, choose layers=, or give clean= for a pass of its own"
                )
        self._modules = list(model.modules())
        self._modes: dict[tuple[bool, ...], tuple[str, ...]] = {}
        self._static = self._labels_now()
        if self.link == "sigmoid" and "vector" in self._static:
            raise InputError("link='sigmoid' needs a model with one output")
        self._link_applies: bool | None = None
        device = self._sites.first.call.weight.device
        self._sums = {site.name: Sums(device) for site in self._sites.chosen}
        self._steady = {name: Steady(device, plain=device.type == "cpu") for name in self._sums}
        self._operators = {site.name: LayerOperator(site) for site in self._sites.chosen}
        parameters = {clean_path(path): p for path, p in model.named_parameters()}
        self._paths = {
            site.name: BiasPath(parameters[site.bias]) for site in self._sites.chosen if site.bias in parameters
        }
        self._ratio_bounds: dict[str, RatioBounds] = {}
        self._loaded_bounds: dict[str, tuple[dict[str, Any], bool]] = {}  # what was in them, from a checkpoint
        self._batch: Batch | None = None
        self._last_step = ctx.step
        self._hooks = Hooks(
            model,
            [site for site in self._sites.chosen if site.trained and not site.checkpointed],
            self.output,
            sigmoid=self.link == "sigmoid",
            pair=lambda name, norms, errors: self._sums[name].add(norms, errors),
            before=self._before,
            inspect=self._inspect,
            directions=self.clean is not None,
        )
        if self._loaded_state:
            self.load_state_dict(self._loaded_state)

    def announce(self, due: bool) -> None:
        """Called before each step with whether it will be measured."""
        if self._hooks is not None and self.passes == "measured":
            self._hooks.resting = not due

    def detach(self) -> None:
        """Removes hooks and releases memory; called when the watch is closed."""
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None
        self._batch = None

    # -- inside the user's passes --------------------------------------------------------------------------------
    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Before every training pass; returns whether to inspect it."""
        if self.clean is not None:
            self._batch = dict(kwargs) if kwargs and not args else tuple(args)
        if self.passes == "all":
            for path in self._paths.values():
                path.measure_updates()
        self._passes += 1
        # A pass need not be trained on (that of a penalty is not): the next one then.
        self._due |= self.bounds_every is not None and (self._passes - 1) % self.bounds_every == 0
        return self._due

    def _inspect(self, site: TracedLayer, gradient: Tensor, errors: Tensor) -> None:
        """Lemma 1 for the samples of one pass, with the weights they met; a pass of samples of another size is passed over."""
        operator = self._operators[site.name]
        if gradient.movedim(site.axis, 0).shape[1:] != site.out_shape:
            return
        self._due = False
        if self.max_samples is not None:
            gradient, errors = (
                gradient.narrow(site.axis, 0, min(self.max_samples, len(errors))),
                errors[: self.max_samples],
            )
        if not site.live:  # the weight is computed again in every pass
            operator.site = find(self._model, self._example, [site.name])[site.name]
        self._ratio_bounds[site.name] = RatioBounds.of(site, gradient, errors, operator)

    # -- at a measurement ----------------------------------------------------------------------------------------
    def measure(self, ctx: StepContext) -> Measurement:
        """Measures normalized bias updates and bounds on the input gradient since the last measurement."""
        hooks = self._hooks
        if hooks is None or hooks.resting or ctx.step == 0:
            return {}
        if ctx.final and not hooks.forwards:  # the last step was not announced, and cannot be measured afterwards
            return {}
        if hooks.failure is not None:
            raise hooks.failure
        steps, self._last_step = ctx.step - self._last_step, ctx.step
        values: dict[str, Tensor | float] = {}
        if hooks.by_name and steps > 0:
            self._check(hooks)
            for name in hooks.by_name:
                result = self._sums[name].read()
                result |= self._steady[name].add(ctx.step, result["max"])
                values |= {f"{key}/{name}": value for key, value in result.items()}
        for name, path in self._paths.items():
            values |= {f"{key}/{name}": value for key, value in path.read().items()}
        if self.passes == "measured":
            values = {key: value for key, value in values.items() if key.partition("/")[0] not in _OF_EVERY_STEP}
        if self.clean is not None and self.clean.due(ctx.step):
            values |= self._clean_pass(hooks)
        if self._link_applies is None and ctx.loss_node is not None and hooks.number:
            self._link_applies = self.link == "identity" and applies_link(ctx.loss_node, hooks.number)
        known = [*self._labels_now()]
        known += ["logits"] if self._link_applies else []
        known += ["side"] if hooks.side else []
        known += ["repeated"] if hooks.repeated else []
        self._warn(known)
        loaded, ratio_bounds = self._loaded_bounds, self._ratio_bounds
        self._loaded_bounds, self._ratio_bounds = {}, {}

        def finish() -> Values:
            result = loaded | self._read(ratio_bounds)
            self.labels = (*known, *(["estimated"] if any(estimated for _, estimated in result.values()) else []))
            more = {f"{key}/{name}": value for name, (numbers, _) in result.items() for key, value in numbers.items()}
            return values | more | {f"label/{label}": 1.0 for label in self.labels}

        return (
            Deferred(finish)
            if any(ratio_bound.gradient_norms.is_cuda for ratio_bound in ratio_bounds.values())
            else finish()
        )

    def _warn(self, known: Sequence[str]) -> None:
        if "random" in known and not self._warned:
            self._warned = True
            layers = random_layers(self._model)
            named = f"{', '.join(map(repr, layers[:3]))}{f' and {len(layers) - 3} more' if len(layers) > 3 else ''}"
            warn_user(
                f"the trajectory probe measures the network with dropout or other noise (in {named or type(self._model).__name__}), "
                "not the network in evaluation mode: for that one give Trajectory(clean=Every(100))",
            )

    def _read(self, ratio_bounds: Mapping[str, RatioBounds]) -> dict[str, tuple[dict[str, Any], bool]]:
        return {name: ratio_bound.result("vector" in self._static) for name, ratio_bound in ratio_bounds.items()}

    def _check(self, hooks: Hooks) -> None:
        """Warns, once, about updates that may be missing since the last measurement."""
        first = next(iter(hooks.by_name))
        if not hooks.forwards:
            raise ModelError(
                "no forward pass with gradients was seen since the last measurement: call the watched model itself; with "
                "torch.compile start to watch before its first call, and do not replay a captured graph"
            )
        if not hooks.outputs:
            raise ModelError(
                "the model's output is not connected to the loss, or backward was not called before watch.step"
            )
        if not hooks.reaches[first] and hooks.by_name[first].module in hooks.recomputed:
            raise ModelError(_recomputed(first))
        if not hooks.reaches[first]:
            raise ModelError(
                f"layer {first!r} cannot be reached from the loss: something detaches between it and the output"
            )
        hooks.forwards = hooks.outputs = 0
        hooks.reaches = dict.fromkeys(hooks.reaches, 0)

    def _clean_pass(self, hooks: Hooks) -> dict[str, Tensor]:
        """‖J'u‖ on the last batch without noise and coupling, u the unit gradient of the loss at the output."""
        if hooks.arguments is not None:  # the pass that the direction is from
            args, kwargs = hooks.arguments
            self._batch = dict(kwargs) if kwargs and not args else tuple(args)
        if self._batch is None:
            return {}
        batch = own_copy(self._batch)
        batch = batch[0] if isinstance(batch, tuple) and len(batch) == 1 else batch
        names = [site.name for site in self._sites.chosen]
        direction = hooks.direction if "vector" in self._static else None
        if "vector" in self._static and direction is None:
            return {}
        with torch.enable_grad(), as_trained(self._model, batch):
            errors, gradients, _ = gradients_of(self._model, batch, None, direction, names, self.output)
        values: dict[str, Tensor] = {}
        for site in self._sites.chosen:
            gradient = site.separated(gradients[site.name], len(errors))
            ratio = row_norms(gradient, site.axis) / torch.where(errors > 0, errors, torch.nan)
            values[f"clean/{site.name}"] = ratio.nanmean()
            values[f"clean_max/{site.name}"] = largest(ratio)
        return values

    def _labels_now(self) -> tuple[str, ...]:
        """Labels of the model in the modes its modules are in."""
        modes = tuple([module.training for module in self._modules])
        if modes not in self._modes:
            self._modes[modes] = labels(self._model, self._example, self._sites, self.output)
        return self._modes[modes]

    def explain(self) -> list[str]:
        """The labels of the last measurement in words."""
        return [f"{label}: {LABELS[label]}" for label in self.labels]

    def state_dict(self) -> dict[str, Any]:
        """Returns the state, for a checkpoint."""
        if self._hooks is None:
            return self._loaded_state
        sums = {name: sums.state_dict() for name, sums in self._sums.items()}
        paths = {k: p.state_dict() for k, p in self._paths.items()}
        bounds = self._loaded_bounds | self._read(self._ratio_bounds)  # taken, but not measured yet
        steady = {name: steady.state_dict() for name, steady in self._steady.items()}
        operators = {name: operator.state_dict() for name, operator in self._operators.items()}
        return {
            "passes": self._passes, "sums": sums, "paths": paths, "looks": bounds, "steady": steady, "operators": operators
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state from a checkpoint."""
        if self._hooks is None:
            self._loaded_state = dict(state)
            return
        self._loaded_state = {}
        self._passes = int(state["passes"])
        for name, sums in state["sums"].items():
            self._sums[name].load_state_dict(sums)
        for name, path in state["paths"].items():
            self._paths[name].load_state_dict(path)
        for name, steady in state.get("steady", {}).items():
            self._steady[name].load_state_dict(steady)
        for name, operator in state.get("operators", {}).items():
            self._operators[name].load_state_dict(operator)
        self._loaded_bounds = {
            name: (dict(result), bool(estimated)) for name, (result, estimated) in state.get("looks", {}).items()
        }

    @classmethod
    def default(cls, output: Pick = None) -> Trajectory:
        """Returns the probe as `default_probes` uses it."""
        return cls(Every(50), output=output, passes="measured", bounds_every=1, max_samples=16)

    @classmethod
    def findings(cls, history: MetricSeries) -> list[Finding]:
        """Returns what a report says about these metrics."""
        return [*_lipschitz_findings(history), *_steady(history), *_labels(history)]


def _recomputed(layer: str) -> str:
    return (
        f"layer {layer!r} runs under activation checkpointing with use_reentrant=True, without a gradient at its output: call "
        "torch.utils.checkpoint.checkpoint(..., use_reentrant=False), choose layers= outside it, or give clean= for a pass of its own"
    )


_LABEL_TEXTS = {
    "random": "The trajectory's values are those of the sub-networks that dropout, or other random layers, drew.",
    "coupled": "The trajectory's values are not those of single samples: batch normalization couples the batch.",
    "repeated": "Several backward passes went through one forward pass: the trajectory counts the first.",
}


def _lipschitz_findings(history: MetricSeries) -> list[Finding]:
    result = []
    for key in ("trajectory/mean", "lipschitz/mean", "trajectory/lipschitz"):
        for layer, series in history.of(key).items():
            series = since_step(series, learned(history))  # slopes of an untrained network are no baseline
            up, down = rise(series), fall(series)
            if up is not None and up.before > 0 and up.large:
                loss = binned_median(since_step(history["loss/step"], up.since))[1]
                flat = len(loss) >= 2 and abs(loss[-1] - loss[0]) <= _FLAT * abs(loss[0])
                text = f"The function became {number(up.ratio)} times steeper at the training points {since(up)}"
                text += f" (seen at {layer})" if layer else ""
                if flat:
                    result.append(
                        Finding(
                            "warning",
                            f"{text} while the loss hardly moved: it fits details, which costs margin.",
                            "Stop earlier, or train with perturbations.",
                        )
                    )
                else:
                    result.append(Finding("note", f"{text}, while the loss moved too."))
            elif down is not None and down.now > 0 and down.large:
                result.append(
                    Finding(
                        "good",
                        f"The function became {number(1 / down.ratio)} times flatter at the training points {since(down)}.",
                    )
                )
        if result:
            return result[:MAX_NAMED]
    return result


def _steady(history: MetricSeries) -> list[Finding]:
    """(τ, φ)-steady, unless φ still grows: then the last update is always the largest, and that is no news."""
    if first_nonfinite(history["loss/step"]) is not None:
        return []
    listed = []
    for layer, series in history.layers("trajectory/phi").items():
        tau = history[f"trajectory/tau/{layer}"][1]
        up = rise(since_step(series, series[0][-1] // 2)) if len(tau) else None
        if up is None or up.fraction > LARGE:
            continue
        if math.isfinite(series[1][-1]) and math.isfinite(tau[-1]):
            since = f"since step {tau[-1]:,.0f}" if tau[-1] > 0 else "since the start"
            listed.append(f"{number(float(series[1][-1]))} at layer {layer} {since}")
    if not listed:
        return []
    more = f", and {len(listed) - MAX_NAMED} more" if len(listed) > MAX_NAMED else ""
    return [Finding("note", f"Updates are steady: none was seen above {'; '.join(listed[:MAX_NAMED])}{more}.")]


_LABEL_TEXTS = {
    "random": "The trajectory's values are those of the sub-networks that dropout, or other random layers, drew.",
    "coupled": "The trajectory's values are not those of single samples: batch normalization couples the batch.",
    "repeated": "Several backward passes went through one forward pass: the trajectory counts the first.",
}


def _labels(history: MetricSeries) -> list[Finding]:
    """Limits of the trajectory's values."""
    return [
        Finding("note", text) for label, text in _LABEL_TEXTS.items() if len(history[f"trajectory/label/{label}"][1])
    ]
