"""Many small networks trained at once: other seeds, data, targets and learning rates, in one vectorized step.

Each ends with the weights that it would have alone, as an nn.Module with torch.optim.SGD. The trajectory of the first
layer's bias is measured along the way.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from excite._core.checks import check_count
from excite._core.progress import Progress
from excite.train.batches import Shuffle
from excite.train.dynamics.trajectories import BiasTrajectory, Piece, TrajectoryRecord
from excite.train.vectorized.inputs import check, check_memory, check_seeds, take_points, take_rates
from excite.train.vectorized.perceptrons import Perceptrons
from excite.train.vectorized.sgd import CapturedWindow, Loss, SGDSettings, Steps, few_threads


@dataclass(frozen=True)
class Ensemble:
    """Result of `ensemble` for S networks and T windows of steps. Tensors are float64 on the CPU.

    Attributes:
        models: The trained networks.
        steps: Number of steps.
        window: Steps per window.
        loss: Mean over the window's points, each before its update, (S, T).
        test_loss: Mean over the test points at the end of each window, (S, T).
        trajectories: Trajectory of the first layer's bias, or one per layer.
        seconds: Duration of the training.
        why_not_captured: Why steps were not run as a CUDA graph; None if they were.

    Example:
        >>> models = [build("mlp", inputs=4, seed=seed) for seed in range(2)]
        >>> result = ensemble(models, x, y, epochs=2, lr=0.01)
        >>> result.steps, result.loss.shape
        (12, torch.Size([2, 2]))
    """

    models: tuple[nn.Module, ...]
    steps: int
    window: int
    loss: Tensor
    test_loss: Tensor | None
    trajectories: tuple[BiasTrajectory, ...]
    seconds: float
    why_not_captured: str | None

    @property
    def trajectory(self) -> BiasTrajectory:
        """Trajectory of the first layer's bias."""
        return self.trajectories[0]

    @property
    def diverged(self) -> list[int]:
        """Indices of the networks whose loss did not stay finite."""
        return [i for i, fine in enumerate(self.loss.isfinite().all(1)) if not fine]

    def __str__(self) -> str:
        diverged = f"; not finite: {', '.join(map(str, self.diverged))}" if self.diverged else ""
        ends = self.loss[:, -1]
        return (
            f"{len(self.models)} networks, {self.steps} steps each in {self.seconds:.1f} s; loss in the last window "
            f"{ends.min():.3g} to {ends.max():.3g}; length of the normalized trajectory "
            f"{self.trajectory.length.sum(1).min():.4g} to {self.trajectory.length.sum(1).max():.4g}{diverged}"
        )


@torch.no_grad()
def ensemble(
    models: Sequence[nn.Module],
    x: Tensor,
    y: Tensor,
    *,
    epochs: int,
    batch: int = 1,
    lr: float | Sequence[float] | Tensor = 1e-3,
    loss: Loss = "half-squared",
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    seeds: Sequence[int] | None = None,
    test: tuple[Tensor, Tensor] | None = None,
    window: int | None = None,
    layers: Literal["first", "all"] = "first",
    progress: Progress | None = None,
    capture: bool = True,
) -> Ensemble:
    """Trains S small networks of one architecture by SGD at once, and measures the trajectories of their biases.

    A network is an nn.Sequential of nn.Linear and activations with one output; the first layer's weight may be frozen
    (requires_grad=False), such as an identity with a trained bias. Each network ends as if it had been trained alone. The models
    are trained in place, on their device and in their dtype; if training fails they are left unchanged.

    Args:
        models: The networks.
        x: Points (N, d) for all networks, or (S, N, d), one set per network.
        y: Targets (N,) or (S, N).
        epochs: Number of passes over the points.
        batch: Batch size.
        lr: Learning rate, or one per network.
        loss: Mean over the batch of ½(f − y)² ("half-squared"), or binary cross-entropy ("bce") of the probability if the
            networks end in nn.Sigmoid, else of the logit, with y between 0 and 1.
        momentum: As in torch.optim.SGD.
        weight_decay: As in torch.optim.SGD.
        seeds: Seeds of the order of the points, as in `fit`. Default: 0 to S − 1.
        test: Points and targets, like x and y, whose mean loss is measured at the end of each window.
        window: Steps per window of the trajectory. Default: one epoch.
        layers: Whose biases' trajectories are measured, "first" or "all".
        progress: Called after each window as `progress("training", steps_done, steps_total)`.
        capture: On a GPU, run the steps of a window as one CUDA graph where possible.

    Returns:
        Losses and trajectories.

    Raises:
        InputError: If an argument is invalid.
        ModelError: If the networks are not of one such architecture, share weights or have hooks.

    Example:
        >>> models = [build("mlp", inputs=4, seed=seed) for seed in range(10)]
        >>> print(ensemble(models, x, y, epochs=10, lr=0.01))
    """
    networks = Perceptrons(models)
    check(networks, epochs, batch, loss, momentum, weight_decay, layers)
    points, targets = take_points(networks, x, y, loss)
    test_points = take_points(networks, *test, loss) if test is not None else None
    rule = SGDSettings(loss, take_rates(networks, lr), momentum, weight_decay)
    orders = [Shuffle(points.shape[1], batch, seed) for seed in check_seeds(networks, seeds)]
    steps = _steps(networks, rule, batch, epochs, points.shape[1], window, layers)
    return _train(models, steps, (points, targets), test_points, orders, epochs, progress, capture)


def _steps(
    networks: Perceptrons, rule: SGDSettings, batch: int, epochs: int, points: int, window: int | None, layers: str
) -> Steps:
    """Memory of the steps of one window, if it fits."""
    per_epoch = -(-points // batch)
    width = per_epoch if window is None else min(check_count(window, "window"), epochs * per_epoch)
    watched = len(networks.weights) if layers == "all" else 1
    check_memory(networks, batch, width, watched)
    return Steps(networks, rule, batch, width, watched)


def _train(
    models: Sequence[nn.Module],
    steps: Steps,
    data: tuple[Tensor, Tensor],
    test_points: tuple[Tensor, Tensor] | None,
    orders: Sequence[Shuffle],
    epochs: int,
    progress: Progress | None,
    capture: bool,
) -> Ensemble:
    """Trains window by window and writes the weights back; `test_points`: test points and targets."""
    networks, (points, targets) = steps.networks, data
    batch, width = steps.targets.shape[2], steps.steps
    total = epochs * -(-points.shape[1] // batch)  # steps
    run, recorder = CapturedWindow(steps, capture), _Measurements(steps, -(-total // width), test_points)
    began = time.perf_counter()
    with few_threads(networks, batch):
        for at in _windows(orders, epochs, batch, width):
            at = at.to(networks.form.device)
            real = at[:, 0] >= 0
            _fill(steps, points, targets, at.clamp_min(0), real)
            run(len(at))
            recorder.measure(real)
            if progress is not None:
                progress("training", sum(recorder.counts), total)
    result = Ensemble(
        models=tuple(models),
        steps=total,
        window=width,
        loss=recorder.losses.cpu(),
        test_loss=recorder.test_losses.cpu() if test_points is not None else None,
        trajectories=tuple(record.trajectory(recorder.counts) for record in recorder.records),
        seconds=time.perf_counter() - began,
        why_not_captured=run.why_not,
    )
    networks.write_back()
    return result


class _Measurements:
    """Measurements at the end of each window; `test_points`: test points and targets."""

    def __init__(self, steps: Steps, windows: int, test_points: tuple[Tensor, Tensor] | None):
        networks = steps.networks
        storage = torch.zeros(2, networks.count, windows, dtype=torch.float64, device=networks.form.device)
        self.losses, self.test_losses = storage
        self.records = [TrajectoryRecord(w[:, :, -1], windows) for w in networks.weights[: steps.watched]]
        self.counts: list[int] = []  # steps of each window
        self._steps, self._test = steps, test_points

    def measure(self, real: Tensor) -> None:
        """After the steps of a window; real (K, B): points that are not there to fill up a batch."""
        steps, window, k = self._steps, len(self.counts), len(real)
        loss = steps.rule.loss
        self.losses[:, window] = _mean_loss(loss, steps.outputs[:k, :, :, 0], steps.targets[:k, :, :, 0], real)
        slope = _slope(steps, k)
        for layer, record in enumerate(self.records):
            record.put(window, Piece.of(steps.d[layer][:k], slope, real, steps.biases[layer][: k + 1]))
        if self._test is not None:
            outputs = steps.networks.outputs(self._test[0])
            self.test_losses[:, window] = _loss(loss, outputs, self._test[1]).double().mean(1)
        self.counts.append(k)


def _windows(orders: Sequence[Shuffle], epochs: int, batch: int, width: int) -> Iterator[Tensor]:
    """Indices of the points of the next `width` steps, (K, S, B); −1 fills up smaller batches."""
    left: list[Tensor] = []  # (S, B) a step
    for _ in range(epochs):
        order = torch.stack([shuffle.order() for shuffle in orders])  # (S, N)
        order = functional.pad(order, (0, -order.shape[1] % batch), value=-1)
        left += order.split(batch, 1)
        while len(left) >= width:
            yield torch.stack(left[:width])
            left = left[width:]
    if left:
        yield torch.stack(left)


def _fill(steps: Steps, points: Tensor, targets: Tensor, at: Tensor, real: Tensor) -> None:
    """Put the points at (K, S, B) into the memory of the steps."""
    k = len(at)
    own = torch.arange(at.shape[1], device=at.device)[:, None]  # (S, 1)
    steps.inputs[:k] = points[own if len(points) > 1 else 0, at]
    steps.targets[:k] = targets[own if len(targets) > 1 else 0, at].unsqueeze(3)
    weights = real.to(steps.factors)
    factors = (weights / weights.sum(1, keepdim=True))[:, None, :, None]  # (K, 1, B, 1)
    steps.factors[:k] = factors * steps.rule.lr[:, None, None] if steps.rule.plain else factors


def _slope(steps: Steps, k: int) -> Tensor:
    """|dL/df| (K, S, B), times the factor that d has too; f is the probability where networks end in a sigmoid."""
    out = steps.outputs[:k, :, :, 0]
    f = torch.sigmoid(out) if steps.rule.loss == "bce" else out
    slope = (f - steps.targets[:k, :, :, 0]).abs() * steps.factors[:k, :, :, 0]
    return slope.double() / (f.double() * (1 - f.double())) if steps.networks.form.sigmoid else slope.double()


def _loss(loss: Loss, out: Tensor, y: Tensor) -> Tensor:
    """Of each point, from the outputs before a sigmoid."""
    if loss == "bce":
        return functional.binary_cross_entropy_with_logits(out, y.expand_as(out), reduction="none")
    return (out - y).square() / 2


def _mean_loss(loss: Loss, out: Tensor, y: Tensor, real: Tensor) -> Tensor:
    """Mean over the points of a window (S,): out, y (K, S, B), real (K, B)."""
    return (_loss(loss, out, y).double() * real[:, None]).sum((0, 2)) / real.sum()
