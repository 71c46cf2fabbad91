"""`margins`: the distance of points to the decision boundary of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from excite._core.calls import Pick, pick_output
from excite._core.checks import (
    Bounds,
    check_dense,
    check_flag,
    check_model,
    check_number,
    check_seed,
    check_weights,
    model_errors,
    parse_norm,
)
from excite._core.preserve import eval_mode
from excite.errors import InputError, ModelError
from excite.margin.batches import Task, batch_size, default_restarts
from excite.margin.certify import certified_radii, check_against, known_constant
from excite.margin.constraints import make_room
from excite.margin.problem import Decision
from excite.margin.evidence import Evidence, gather
from excite.margin.inputs import (
    checked_bounds,
    checked_count,
    checked_labels,
    checked_layers,
    checked_outputs,
    checked_points,
    checked_threshold,
)
from excite.margin.layerwise import layer_task
from excite.margin.result import Margins
from excite.margin.search import Found
from excite.margin.sites import find_sites


@model_errors
def margins(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    norm: object = "inf",
    bounds: Bounds | None = None,
    threshold: float = 0.5,
    output: Pick = None,
    steps: int = 40,
    restarts: int | None = None,
    evidence: bool = True,
    certify: bool = True,
    lipschitz: float | None = None,
    perturbations: bool = False,
    batch: int | None = None,
    seed: int = 0,
    layers: str | Sequence[str] = "input",
    relative: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Margins:
    """For each point the size of the smallest perturbation found that changes the model's decision.

    x (N, ...) in float32 or float64, y (N,). Outputs (N,) or (N, 1) decide by f > threshold, labels 0 and 1; outputs
    (N, m) by argmax, labels 0 to m − 1. norm is "inf" or "2", over all elements of one input. With bounds=(lowest,
    highest), numbers or tensors that broadcast to x, inputs stay between them. A misclassified point has margin 0; one
    that nothing broke has +inf.

    `restarts` independent searches of `steps` gradient steps each look at every point, and the smallest perturbation
    counts; by default three, or twelve for inputs of fewer than 1024 elements, where local minima matter more.
    `evidence=False` leaves out the checks of whether that worked. `certify` adds lower bounds where a Lipschitz constant
    is known, or from `lipschitz` if given (same norm for inputs and outputs). `batch` points are searched at a time;
    `progress(done, total)` is called as it goes. The model, its mode, its gradients and the random state stay as they
    are.

    layers="all" lets perturbations enter at the input of every affine call as well, a list of names at those of these
    layers only: the margin is then the least ε at which the decision changes with ‖d_k‖ ≤ ε at every layer k ("inf"),
    or with √Σ‖d_k‖² ≤ ε ("2"); with `relative`, ‖d_k‖ is divided by the root mean square of that layer's input at that
    point ("inf") or by its norm ("2"). `bounds` still restrict x only. For "all" no margin is larger than the input's.
    Perturbations are then a dict by layer, "" for x itself where it has one of its own; nothing is certified.
    """
    check_weights(check_model(model))
    for flag, label in ((evidence, "evidence"), (certify, "certify"), (perturbations, "perturbations")):
        check_flag(flag, label)
    wanted = checked_layers(layers, relative)
    seed = check_seed(seed)
    restarts = None if restarts is None else checked_count("restarts", restarts, 1)
    kind = parse_norm(norm, ("inf", "2"))
    steps = checked_count("steps", steps, 2)
    threshold = checked_threshold(threshold)
    lipschitz = None if lipschitz is None else check_number(lipschitz, "lipschitz", 0)
    if lipschitz is not None and wanted != "input":
        raise InputError(
            f"lipschitz={lipschitz:g} bounds changes of the input only: leave it out, or choose layers='input'"
        )
    with eval_mode(model), torch.inference_mode(False), torch.enable_grad():
        x = checked_points(x, integers=wanted != "input")
        limits = checked_bounds(bounds, x)
        size = batch_size(x) if batch is None else checked_count("batch", batch, 1)
        f = _outputs(model, x, output, size)
        classes = checked_outputs(f, x)
        f = f.reshape(len(x)) if classes == 1 else f
        decision = Decision(model, output, threshold, checked_labels(y, x, classes), classes)
        if wanted == "input":
            task = Task(decision, x, make_room(x, kind, limits), f, size, steps, seed)
            found, gathered = _carried_out(task, restarts, evidence, progress)
        else:
            sites = find_sites(model, x, wanted, output)
            first: Found | None = None
            if sites.entry is not None:
                only = Task(decision, x, make_room(x, kind, limits), f, size, steps, seed)
                first = _carried_out(only, restarts, evidence, _phase(progress, 0))[0]
                progress = _phase(progress, 1)
            task = layer_task(sites, decision, x, f, kind, limits, relative, steps, seed, batch, first)
            found, gathered = _carried_out(task, restarts, evidence, progress)
        kept = task.shaped(found.d) if perturbations else None
    result = Margins(found.radius.double().cpu(), kind, perturbations=kept)
    if gathered is not None:
        result = replace(result, evidence=gathered[0], suspect=gathered[1].cpu())
    if wanted != "input":
        why = "no constant is known for changes inside the network" if certify else "not asked for"
        names = tuple(site.name for site in sites.places)
        return replace(result, layers=names, relative=relative, certified_why=why)
    return _certified(result, decision, f, x, lipschitz) if certify or lipschitz is not None else result


def _carried_out(
    task: Task, restarts: int | None, evidence: bool, progress: Callable[[int, int], None] | None
) -> tuple[Found, tuple[Evidence, Tensor] | None]:
    count = default_restarts(task.x) if restarts is None else restarts
    found = task.run(count, progress)
    gathered = gather(task, found) if evidence else None
    task.firm(found)
    return found, gathered


def _phase(progress: Callable[[int, int], None] | None, k: int) -> Callable[[int, int], None] | None:
    """The progress of the k-th of two searches, as half of the whole."""
    if progress is None:
        return None
    return lambda done, total: progress(done + k * total, 2 * total)


def _outputs(model: nn.Module, x: Tensor, output: Pick, size: int) -> Tensor:
    with torch.no_grad():
        return torch.cat([_rows(pick_output(model(part), output), len(part)) for part in x.split(size)])


def _rows(f: Tensor, count: int) -> Tensor:
    if check_dense(f, "outputs").dim() == 0 or len(f) != count:
        raise ModelError(
            f"expected outputs with one row per input, ({count}, ...); got {tuple(f.shape)}: pick them with output="
        )
    return f


def _certified(result: Margins, decision: Decision, f: Tensor, x: Tensor, lipschitz: float | None) -> Margins:
    if lipschitz is None:
        constant, why = known_constant(decision.model, x[:2], result.norm, decision.output)
    else:
        constant, why = float(lipschitz), f"Lipschitz constant {float(lipschitz):.4g} given"
    if constant is None:
        return replace(result, certified_why=why)
    radii = certified_radii(f.double(), decision.labels, decision.threshold, constant, result.norm).cpu()
    if lipschitz is not None:
        check_against(radii, result.values, constant)
    # Both sides are computed in floating point: where the bound is tight they may cross by rounding.
    return replace(result, certified=torch.minimum(radii, result.values), certified_why=why)
