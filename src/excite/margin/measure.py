"""`margins`: the distance of points to the decision boundary of a model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from excite.errors import InputError
from excite.margin.certify import certified_radii, check_against, known_constant
from excite.margin.decision import Decision
from excite.margin.evidence import gather
from excite.margin.inputs import (
    Bounds,
    checked_bounds,
    checked_count,
    checked_labels,
    checked_outputs,
    checked_points,
    checked_threshold,
)
from excite.margin.result import Margins
from excite.margin.room import make_room
from excite.margin.task import Task, batch_size, default_restarts
from excite.norms import parse_norm
from excite.wiring.calling import Pick, pick_output
from excite.wiring.untouched import evaluating


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
    """
    kind = parse_norm(norm, ("inf", "2"))
    steps = checked_count("steps", steps, 2)
    threshold = checked_threshold(threshold)
    if lipschitz is not None and not (isinstance(lipschitz, int | float) and 0 <= lipschitz < math.inf):
        raise InputError(f"expected lipschitz as a finite number of at least 0; got {lipschitz!r}")
    with evaluating(model), torch.inference_mode(False), torch.enable_grad():
        x = checked_points(x)
        room = make_room(x, kind, checked_bounds(bounds, x))
        size = batch_size(x) if batch is None else checked_count("batch", batch, 1)
        f = _outputs(model, x, output, size)
        classes = checked_outputs(f, x)
        f = f.reshape(len(x)) if classes == 1 else f
        decision = Decision(model, output, threshold, checked_labels(y, x, classes), classes)
        task = Task(decision, x, room, f, size, steps, seed)
        found = task.run(default_restarts(x) if restarts is None else checked_count("restarts", restarts, 1), progress)
        gathered = gather(task, found) if evidence else None
        task.firm(found)
    values = found.radius.double().cpu()
    result = Margins(values, kind, perturbations=found.d if perturbations else None)
    if gathered is not None:
        result = replace(result, evidence=gathered[0], suspect=gathered[1].cpu())
    return _certified(result, decision, f, x, lipschitz) if certify or lipschitz is not None else result


def _outputs(model: nn.Module, x: Tensor, output: Pick, size: int) -> Tensor:
    with torch.no_grad():
        return torch.cat([pick_output(model(part), output) for part in x.split(size)])


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
