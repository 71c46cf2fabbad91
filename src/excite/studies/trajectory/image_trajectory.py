"""One convolutional network, trained image by image, with the trajectory of its first bias: task 2 of *What training reveals*.

The first layer is an identity that is not trained with a bias that is, one number a pixel, so that a normalized update of it
is the Lipschitz constant of f at the image that is seen (Lemma 1). A step at batch size one is a few hundred operations of
some microseconds: on a GPU many steps are one CUDA graph, measurement included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save
from torch import Tensor, nn

from excite._core.files import write_bytes, writing

STEPS = 50  # that are one CUDA graph
CURVES = ("loss", "length", "theirs", "largest", "raw", "test", "distance", "spread")


class Shift(nn.Module):
    """x + b, a number for each pixel and colour: an identity layer with a bias."""

    def __init__(self, shape: Sequence[int]):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(*shape))

    def forward(self, x: Tensor) -> Tensor:
        """Applies the module."""
        return x + self.bias


def network(seed: int, widths: Sequence[int] = (96, 384, 384)) -> nn.Sequential:
    """Images (B, 3, 32, 32) to logits (B, 1); f is their sigmoid."""
    first, second, hidden = widths
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            Shift((3, 32, 32)), nn.ReLU(),
            nn.Conv2d(3, first, 5), nn.ReLU(), nn.MaxPool2d(3),
            nn.Conv2d(first, second, 5), nn.ReLU(), nn.MaxPool2d(3),
            nn.Flatten(), nn.Linear(second, hidden), nn.ReLU(), nn.Linear(hidden, 1),
        )  # fmt: skip


class Learner:
    """SGD at batch size one on binary cross-entropy, and sums over the steps since `begin`.

    For y in {0, 1} let c = |1 − y − f| be the probability given to the label. The derivative of the loss by f is 1/c in size, so
    the normalized update ‖Δb‖ / (lr · |dL/df|) is ‖dL/db‖ · c.
    """

    def __init__(self, model: nn.Sequential, device: torch.device):
        self.model = model.to(device)
        self.device = device
        self.weights: list[Tensor] = list(self.model.parameters())
        shift = self.model[0]
        assert isinstance(shift, Shift)
        self.bias = shift.bias
        dtype = self.bias.dtype
        self.rate = torch.zeros((), dtype=dtype, device=device)
        self.sums = torch.zeros(5, dtype=torch.float64, device=device)  # loss, length, theirs, raw, ‖b − start‖²
        self.largest = torch.zeros((), dtype=torch.float64, device=device)
        self.start = self.bias.detach().double().clone()
        self.moved = torch.zeros_like(self.start)  # Σ (b − start)
        self._x = torch.zeros(STEPS, 1, *self.bias.shape, dtype=dtype, device=device)
        self._y = torch.zeros(STEPS, 1, dtype=dtype, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._stream = torch.cuda.Stream() if device.type == "cuda" else None

    def begin(self, rate: float) -> None:
        """A new epoch: the learning rate, and sums from zero."""
        self.rate.fill_(rate)
        for total in (self.sums, self.largest, self.moved):
            total.zero_()
        self.start.copy_(self.bias.detach())

    def learn(self, x: Tensor, y: Tensor) -> None:
        """One step an image, in order: x (K, 3, 32, 32), y (K,)."""
        for images, labels in zip(x.split(STEPS), y.split(STEPS)):
            self._x[: len(images), 0].copy_(images)
            self._y[: len(images), 0].copy_(labels)
            if self._stream is None or len(images) < STEPS:
                self._run(len(images))
            elif self._graph is None:
                # Plainly once, as a capture needs it; then captured for the next time.
                self._stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(self._stream):
                    self._run(STEPS)
                torch.cuda.current_stream().wait_stream(self._stream)
                self._graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self._graph, stream=self._stream):
                    self._run(STEPS)
            else:
                self._graph.replay()

    def _run(self, count: int) -> None:
        for at in range(count):
            self._step(self._x[at], self._y[at])

    def _step(self, x: Tensor, y: Tensor) -> None:
        logit = self.model(x).reshape(1)
        loss = F.binary_cross_entropy_with_logits(logit, y)
        slopes = list(torch.autograd.grad(loss, self.weights))
        with torch.no_grad():
            passed = torch.sigmoid((2 * y - 1) * logit.detach())[0].double()
            size = slopes[0].double().norm()
            ratio = size * passed
            offset = self.bias.double() - self.start
            self.moved += offset
            self.sums += torch.stack(
                [loss.detach().double(), ratio, size / passed, size * self.rate, offset.square().sum()]
            )
            torch.maximum(self.largest, ratio, out=self.largest)
            torch._foreach_mul_(slopes, -self.rate)
            torch._foreach_add_(self.weights, slopes)


@dataclass(frozen=True)
class TrainingLength:
    """Number of epochs, learning rate of the first one, and the factor by which it changes from epoch to epoch."""

    epochs: int
    rate: float
    decay: float = 1.0


def train(
    model: nn.Sequential,
    data: tuple[Tensor, Tensor, Tensor, Tensor],
    settings: TrainingLength,
    *,
    seed: int,
    device: torch.device,
    checkpoint: Path | None = None,
    on_progress: Callable[[float], None] = lambda fraction: None,
) -> dict[str, Tensor]:
    """Curves by name, (epochs,) each in float64; continued from the file `checkpoint` if it exists; it is written after every epoch.

    `spread` is the variance of the bias over an epoch, "means" (epochs, n) its mean: see `variance`.
    """
    x, y, x_test, y_test = (tensor.to(device) for tensor in data)
    epochs = settings.epochs
    learner = Learner(model, device)
    initial = learner.bias.detach().double().flatten().clone()
    curves = {name: torch.full((epochs,), torch.nan, dtype=torch.float64) for name in CURVES}
    means = torch.zeros(epochs, initial.numel(), dtype=torch.float64)
    done = 0
    if checkpoint is not None and checkpoint.exists():
        stored = load_file(checkpoint)
        done = int(stored["done"])
        for name in CURVES:
            curves[name][:done] = stored[f"curve/{name}"][:done]
        means[:done] = stored["means"][:done]
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.copy_(stored[f"weight/{name}"])
    for epoch in range(done, epochs):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed * 100_003 + epoch)).to(device)
        learner.begin(settings.rate * settings.decay**epoch)
        learner.learn(x[order], y[order])
        sums = (learner.sums / len(x)).cpu()
        mean = (learner.moved / len(x)).cpu()
        with torch.no_grad():
            logits = torch.cat([model(batch_of_x).reshape(-1) for batch_of_x in x_test.split(500)])
            test = F.binary_cross_entropy_with_logits(logits.double(), y_test.double())
        result = {
            "loss": sums[0], "length": sums[1] * len(x), "theirs": sums[2] * len(x), "raw": sums[3] * len(x),
            "largest": learner.largest, "test": test, "spread": sums[4] - mean.square().sum(),
            "distance": (learner.bias.detach().double().flatten() - initial).norm(),
        }  # fmt: skip
        for name, value in result.items():
            curves[name][epoch] = float(value)
        means[epoch] = (learner.start.cpu() + mean).flatten()
        if checkpoint is not None:
            write(checkpoint, epoch + 1, curves, means, model)
        on_progress((epoch + 1) / epochs)
    return {**curves, "means": means}


def write(checkpoint: Path, done: int, curves: dict[str, Tensor], means: Tensor, model: nn.Module) -> None:
    """Writes the progress after an epoch."""
    with writing(checkpoint.parent):
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
    weights = {f"weight/{name}": weight.detach().cpu().contiguous() for name, weight in model.named_parameters()}
    named = {f"curve/{name}": curve for name, curve in curves.items()}
    write_bytes(checkpoint, save({"done": torch.tensor(done), "means": means, **named, **weights}))


def variance(result: dict[str, Tensor], last: int) -> float:
    """avg ‖b(t) − avg b‖² over the steps of the last epochs (Corollary 2): within epochs, and between their means."""
    means = result["means"][-last:]
    return float(result["spread"][-last:].mean() + (means - means.mean(0)).square().sum(1).mean())
