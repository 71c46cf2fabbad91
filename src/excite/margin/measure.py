"""`margins`: the distance of points to the decision boundary of a model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from excite._core.calls import Pick, pick_output
from excite._core.checks import (
    Bounds,
    Norm,
    check_count,
    check_dense,
    check_flag,
    check_model,
    check_number,
    check_weights,
    model_errors,
    parse_norm,
)
from excite._core.compatibility import moved_keywords
from excite._core.preserve import eval_mode
from excite.errors import ModelError
from excite.margin.batches import TARGETS, BatchedSearch, default_batch, default_restarts, has_few_elements
from excite.margin.budget import Effort, affordable, left_out, passes_in
from excite.margin.certificates.bounds import RANDOM_MODEL, certified, exact_margins
from excite.margin.evidence import Evidence, gather
from excite.margin.inputs import (
    SearchOptions,
    check_decisions,
    check_labels,
    check_margin_layers,
    check_options,
    check_outputs,
    check_points,
    points_within,
)
from excite.margin.layerwise import layer_search
from excite.margin.normalize import Normalize, in_pixels, unit_of
from excite.margin.problem import AdversarialPerturbations, Decision, MarginProblem, make_constraint
from excite.margin.reliability.surrogates import DRAWS, MeanOutputs, is_random
from excite.margin.result import Margins
from excite.margin.sites import find_sites

Progress = Callable[[int, int], None]


@model_errors
@moved_keywords(SearchOptions)
def margins(
    model: nn.Module, x: Tensor, y: Tensor, *, norm: object = "inf", bounds: Bounds | None = None, normalize:
    Normalize | None = None, threshold: float = 0.5, output: Pick = None, layers: str | Sequence[str] = "input",
    relative: bool = False, perturbations: bool = False, batch: int | None = None, progress: Progress | None =
    None, options: SearchOptions | None = None,
) -> Margins:  # fmt: skip
    """Distance of each point to the decision boundary: the size of the smallest adversarial perturbation that was found.

    Outputs (N,) or (N, 1) decide by f > threshold, outputs (N, m) by argmax. A misclassified point has margin 0; one without
    an adversarial example has +inf. The model, its mode, its gradients and the random state stay as they are.

    Args:
        model: the classifier; used in evaluation mode.
        x: points (N, ...), float32 or float64; integers only where later layers are perturbed.
        y: labels (N,), 0 and 1 or 0 to m − 1.
        norm: "inf", "2" or "1", over all elements of one input; at layers "inf" or "2".
        bounds: (lowest, highest) of the inputs, numbers or tensors that broadcast to x. They restrict x only.
        normalize: (mean, std), numbers or one per channel, if x is (pixel − mean)/std: margins, perturbations and bounds, by
            default (0, 1), are then those of the pixels.
        threshold: class 1 where a scalar output is larger.
        output: which part of what the model returns is the output: a key, an index or a function.
        layers: "input"; "all": perturbations d_k at the input of every affine call k; a list of names: of these layers. The
            margin is then the least ε with ‖d_k‖ ≤ ε at every layer ("inf") or √Σ‖d_k‖² ≤ ε ("2"); nothing is certified.
        relative: divide ‖d_k‖ by the root mean square of that layer's input at that point ("inf") or by its norm ("2").
        perturbations: whether to return the perturbations, for layers other than "input" as a dict by layer name.
        batch: points that are searched at a time.
        progress: called as progress(done, total).
        options: how hard to search, what to certify: see `SearchOptions`.

    Returns:
        `Margins`: the distances, certified lower bounds, and evidence of whether the search worked.

    Raises:
        InputError: if an argument is of the wrong kind or shape, or points lie outside of the bounds.
        ModelError: if the outputs do not fit the labels, or do not depend on the input through differentiable operations.

    Example:
        >>> model, x = torch.nn.Linear(2, 1), torch.randn(8, 2)
        >>> excite.margins(model, x, (model(x) > 0.5).long()).median
    """
    options = check_options(options)
    layers = check_margin_layers(layers, relative, options)
    check_flag(perturbations, "perturbations"), check_weights(check_model(model))
    with eval_mode(model), torch.inference_mode(False), torch.enable_grad():
        model, x, bounds = in_pixels(model, x, normalize, bounds, layers)
        decision = Decision(model, output, check_number(threshold, "threshold"), y, classes=1)
        allowed: tuple[Norm, ...] = ("inf", "2", "1") if layers == "input" else ("inf", "2")
        search, limits = _prepare(decision, x, parse_norm(norm, allowed), bounds, layers, batch, options)
        if layers == "input":
            measured = _input_margins(search, options, perturbations, progress)
            return replace(measured, unit=unit_of(x, bounds))
        return _layer_margins(search, layers, limits, relative, batch, options, perturbations, progress)


@model_errors
def tracked_margins(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    start: Tensor | None = None,
    *,
    norm: object = "inf",
    bounds: Bounds | None = None,
    normalize: Normalize | None = None,
    threshold: float = 0.5,
    output: Pick = None,
    batch: int | None = None,
    steps: int = 20,
) -> Margins:
    """Margins of a model that has changed a little: the search continues from the perturbations found before.

    Other arguments are those of `excite.margins`.

    Args:
        model: the classifier.
        x: points (N, ...).
        y: labels (N,).
        start: perturbations (N, ...), such as those of the last call; zero where there is none.
        norm: "inf", "2" or "1".
        bounds: (lowest, highest) of the inputs.
        normalize: (mean, std) if x is (pixel − mean)/std.
        threshold: class 1 where a scalar output is larger.
        output: which part of what the model returns is the output.
        batch: points that are searched at a time.
        steps: gradient steps of a search without a start; with one half as many, and a quarter from the start.

    Returns:
        `Margins` with perturbations; nothing is certified, and there is no evidence.
    """
    steps = steps if start is None else max(4, steps // 2)
    options = SearchOptions(steps=steps, restarts=1, evidence=False, certify=False)
    with eval_mode(model), torch.inference_mode(False), torch.enable_grad():
        model, x, bounds = in_pixels(model, x, normalize, bounds, "input")
        decision = Decision(model, output, check_number(threshold, "threshold"), y, classes=1)
        search, _ = _prepare(decision, x, parse_norm(norm), bounds, "input", batch, options)
        adversarial = search.run(1) if start is None else search.track(start.to(x))
        search.verify(adversarial)
        return replace(_result(search, adversarial, None, True), unit=unit_of(x, bounds))


def _prepare(
    decision: Decision,
    x: Tensor,
    norm: Norm,
    bounds: Bounds | None,
    layers: str | tuple[str, ...],
    batch: int | None,
    options: SearchOptions,
) -> tuple[BatchedSearch, tuple[Tensor, Tensor] | None]:
    """The search over inputs, and the bounds as tensors; `decision` has the labels as the user gave them."""
    x = check_points(x, integers=layers != "input")
    limits = points_within(bounds, x)
    size = default_batch(x) if batch is None else check_count(batch, "batch")
    decision = _mean_if_random(decision, x, options.certify) if layers == "input" else decision
    f = _outputs(decision.model, x, decision.output, size)
    classes = check_outputs(f, x)
    f = f.reshape(len(x)) if classes == 1 else f
    decision = replace(decision, labels=check_labels(decision.labels, x, classes), classes=classes)
    if layers == "input":
        decision = replace(decision, channels_last=_runs_channels_last(decision, x, f))
    if classes > 2:
        check_decisions(f, decision.labels)
    problem = MarginProblem(decision, x, make_constraint(x, norm, limits))
    return BatchedSearch(problem, f, size, options.steps, options.seed), limits


def _input_margins(
    search: BatchedSearch, options: SearchOptions, perturbations: bool, progress: Progress | None
) -> Margins:
    exact = options.certify == "exact"
    results, evidence = _run(search, options, _phase(progress, 0) if exact else progress)
    lower = exact_margins(search, results, options.seconds, _phase(progress, 1)) if exact else None
    result = _result(search, results, evidence, perturbations)
    if lower is not None:
        why = "mixed-integer programs, which are exact up to the tolerance of the solver"
        return replace(result, certified=torch.minimum(lower, result.values), certified_why=why)
    if options.certify or options.lipschitz is not None:
        return certified(result, search.problem, search.f, options)
    return result


def _layer_margins(
    search: BatchedSearch,
    layers: str | tuple[str, ...],
    limits: tuple[Tensor, Tensor] | None,
    relative: bool,
    batch: int | None,
    options: SearchOptions,
    perturbations: bool,
    progress: Progress | None,
) -> Margins:
    """Margins at layers. Where any change of x can be made at one of them, a search over inputs gives a first start."""
    decision = search.problem.decision
    sites = find_sites(decision.model, search.problem.x, layers, decision.output)
    first: AdversarialPerturbations | None = None
    if sites.entry is not None:
        first = _run(search, options, _phase(progress, 0))[0]
        progress = _phase(progress, 1)
    inside = layer_search(sites, search, limits, relative, batch, first)
    results, evidence = _run(inside, options, progress)
    why = "no constant is known for changes inside the network" if options.certify else "not requested"
    names = tuple(site.name for site in sites.places)
    result = _result(inside, results, evidence, perturbations)
    return replace(result, layers=names, relative=relative, certified_why=why)


def _run(
    search: BatchedSearch, options: SearchOptions, progress: Progress | None
) -> tuple[AdversarialPerturbations, tuple[Evidence, Tensor] | None]:
    full, effort = _efforts(search, options)
    search.steps, search.targets, search.retry = effort.steps, effort.targets, effort.retry
    result = search.run(effort.restarts, progress)
    evidence = gather(search, result) if options.evidence else None
    search.verify(result)
    if options.budget is not None:
        search.left_out = left_out(full, effort, options.budget, int(torch.isinf(result.radius).sum()))
    return result, evidence


def _efforts(search: BatchedSearch, options: SearchOptions) -> tuple[Effort, Effort]:
    """The searches that the options ask for, and those of them that the budget allows."""
    x = search.problem.x
    restarts = default_restarts(x) if options.restarts is None else options.restarts
    full = Effort(restarts, options.steps, TARGETS, search.problem.decision.classes, few=has_few_elements(x))
    if options.budget is None:
        return full, full
    limit, unit = options.budget
    if unit == "seconds":
        return full, affordable(full, passes_in(limit, search.problem, search.correct, search.batch), seconds=limit)
    return full, affordable(full, limit)


def _result(
    search: BatchedSearch,
    adversarial_perturbations: AdversarialPerturbations,
    evidence: tuple[Evidence, Tensor] | None,
    perturbations: bool,
) -> Margins:
    values = adversarial_perturbations.radius.double().cpu()
    result = Margins(
        values,
        search.problem.constraint.norm,
        perturbations=search.shaped(adversarial_perturbations.d) if perturbations else None,
        left_out=search.left_out,
    )
    return result if evidence is None else replace(result, evidence=evidence[0], suspect=evidence[1].cpu())


def _phase(progress: Progress | None, k: int) -> Progress | None:
    """The progress of the k-th of two searches, as half of the whole."""
    if progress is None:
        return None
    return lambda done, total: progress(done + k * total, 2 * total)


def _mean_if_random(decision: Decision, x: Tensor, certify: bool | str) -> Decision:
    """The decision, or that of the mean of several outputs where two passes of the model differ; warns then.

    Raises:
        ModelError: if they differ and a certificate was asked for by name.
    """
    output = decision.output

    def pick(returned: object) -> Tensor:
        return pick_output(returned, output)

    if not is_random(decision.model, pick, x[:16]):
        return decision
    if isinstance(certify, str):
        raise ModelError(f"certify={certify!r}: {RANDOM_MODEL}: fix its random draws, or leave certify out")
    warnings.warn(
        f"the model is not deterministic: two passes of the same points differ. Margins are those of the mean of {DRAWS} outputs, "
        "and not trusted; fix its random draws to measure it as it is",
        stacklevel=5,
    )
    return replace(decision, model=MeanOutputs(decision.model, pick), output=None)


def _runs_channels_last(decision: Decision, x: Tensor, f: Tensor) -> bool:
    """Whether the model takes images in the memory format in which CPUs are faster, and returns the outputs f of the points."""
    if x.dim() != 4 or x.shape[1] == 1 or x.dtype != torch.float32 or x.device.type != "cpu":
        return False
    if hasattr(decision.model, "_orig_mod"):  # torch.compile would compile again
        return False
    try:
        channels_last_outputs = replace(decision, channels_last=True).rows(torch.arange(1)).outputs(x[:1])
    except RuntimeError:  # a view of the activations, as a rule
        return False
    return torch.allclose(channels_last_outputs, f[:1], rtol=1e-4, atol=1e-5 * float(f.abs().amax()))


def _outputs(model: nn.Module, x: Tensor, output: Pick, size: int) -> Tensor:
    with torch.no_grad():
        return torch.cat([_rows(pick_output(model(batch), output), len(batch)) for batch in x.split(size)])


def _rows(f: Tensor, count: int) -> Tensor:
    if check_dense(f, "outputs").dim() == 0 or len(f) != count:
        raise ModelError(
            f"expected outputs with one row per input, ({count}, ...); got {tuple(f.shape)}: pick them with output="
        )
    return f
