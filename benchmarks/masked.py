"""Does `trusted` earn its name? Networks with masked gradients must be flagged, or measured rightly; honest ones trusted.

    python -m benchmarks.masked [--points 48] [--norm inf] [--only NAME ...]

Seventeen networks for digits whose gradients mislead and fifteen whose do not; none of them was used to choose a setting of the
search or of its evidence. The second search learned to skip what follows the last linear layer, and the norm 2 to take outputs
of any size, after one-hot outputs and tiny logits had been tried. The reference is the margin of the same network without the mask where the mask keeps its decisions (or
nearly); "before" is the median of a search without evidence, "after" that of `excite.margins`, mended where it is flagged.
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.attackbench.networks import KWinners
from excite.data import load
from excite.excitation import AdversarialTraining
from excite.margin import SearchOptions, margins

BOUNDS = (-1.0, 1.0)


class Act(nn.Module):
    """An elementwise function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Residual(nn.Module):
    """x plus a network of x."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def mlp(activation: Callable[[], nn.Module] = nn.ReLU, width: int = 64) -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, width), activation(), nn.Linear(width, width), activation(), nn.Linear(width, 10)
    )


def cnn(
    activation: Callable[[], nn.Module] = nn.ReLU, pool: type[nn.Module] = nn.MaxPool2d, norm: bool = False
) -> nn.Sequential:
    between = [nn.BatchNorm2d(12)] if norm else []
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), *between, activation(), pool(2), nn.Conv2d(12, 24, 3, padding=1), activation(),
        nn.Flatten(), nn.Linear(24 * 16, 10),
    )  # fmt: skip


def quantised(levels: int) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.round(levels * x) / levels


def half_detached(x: Tensor) -> Tensor:
    """Every other column of the image passes without a gradient."""
    columns = torch.arange(x.shape[-1], device=x.device) % 2 == 0
    return torch.where(columns, x, x.detach())


def jpeg(x: Tensor) -> Tensor:
    """The cosine transform of the image, rounded to multiples of 0.35."""
    k = torch.arange(8)
    basis = torch.cos(math.pi * (k[None] + 0.5) * k[:, None] / 8) / 2
    basis[0] /= math.sqrt(2)
    return basis.T @ (torch.round(basis @ x @ basis.T / 0.35) * 0.35) @ basis


def straight_through(x: Tensor) -> Tensor:
    """Rounded down to thirds, with the gradient of the identity."""
    x = x.clamp(0, 2)
    return x + (torch.floor(3 * x) / 3 - x).detach()


class Reversed(torch.autograd.Function):
    """The identity, whose gradient has the wrong sign."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


def cropped(x: Tensor) -> Tensor:
    """A random crop of the images with a frame of one pixel."""
    down, across = torch.randint(0, 3, (2,)).tolist()
    return F.pad(x, (1, 1, 1, 1), value=-1.0)[..., down : down + 8, across : across + 8]


def steep_sigmoid(channels: int) -> nn.Module:
    """Batch normalization with a scale of 40 and hardly any eps, then a sigmoid."""
    norm = nn.BatchNorm2d(channels, eps=1e-12)
    nn.init.constant_(norm.weight, 40.0)
    return nn.Sequential(norm, nn.Sigmoid())


class Maxout(nn.Module):
    """The largest of three linear maps per unit."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, 3 * outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).unflatten(1, (-1, 3)).amax(2)


class VisionTransformer(nn.Module):
    """Two blocks over the sixteen 2×2 patches of a digit."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patches, self.positions = nn.Conv2d(1, width, 2, 2), nn.Parameter(0.1 * torch.randn(1, 16, width))
        layer = nn.TransformerEncoderLayer(width, 4, 64, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.blocks(tokens)).mean(1))


class Recurrent(nn.Module):
    """A GRU over the rows of a digit."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.head = nn.GRU(8, 48, batch_first=True), nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rows(x[:, 0])[0][:, -1])


def shifted(x: Tensor) -> Tensor:
    """The images moved by a random pixel to one side."""
    return x.roll(int(torch.randint(-1, 2, ())), dims=-1)


# name -> (network, mask in front, mask behind); trained as it is where the mask is part of the network
MASKED: dict[
    str, tuple[Callable[[], nn.Module], Callable[[Tensor], Tensor] | None, Callable[[Tensor], Tensor] | None]
] = {
    "k-winners-take-all": (lambda: mlp(lambda: KWinners(0.15), 128), None, None),
    "quantised activations": (lambda: cnn(lambda: Act(lambda h: quantised(4)(h.clamp(0, 3)) + 0 * h)), None, None),
    "inputs of 8 levels": (cnn, quantised(3.5), None),
    "saturated softmax": (cnn, None, lambda f: torch.softmax(60 * f, 1)),
    "saturated tanh": (mlp, None, lambda f: torch.tanh(20 * f)),
    "exploding logits": (cnn, None, lambda f: 1e25 * f),
    "half of the input detached": (mlp, half_detached, None),
    "ripples on the input": (mlp, lambda x: x + 0.004 * torch.sin(2000 * x), None),
    "noise on the input": (cnn, lambda x: x + 0.1 * torch.randn_like(x), None),
    "random shifts": (cnn, shifted, None),
    "random crops": (cnn, cropped, None),
    "rounded cosine transform": (cnn, jpeg, None),
    "floor, straight through": (lambda: cnn(lambda: Act(straight_through)), None, None),
    "steep sigmoids": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1),
            steep_sigmoid(12),
            nn.MaxPool2d(2),
            nn.Conv2d(12, 24, 3, padding=1),
            steep_sigmoid(24),
            nn.Flatten(),
            nn.Linear(24 * 16, 10),
        ),
        None,
        None,
    ),
    "reversed gradients": (cnn, Reversed.apply, None),
    "one-hot outputs": (cnn, None, lambda f: F.one_hot(f.argmax(1), 10) + 0 * f),
    "tiny logits": (cnn, None, lambda f: 1e-25 * f),
}
HONEST: dict[str, Callable[[], nn.Module]] = {
    "tanh": lambda: mlp(nn.Tanh),
    "GELU": lambda: mlp(nn.GELU, 96),
    "leaky ReLU": lambda: cnn(nn.LeakyReLU),
    "batch normalization": lambda: cnn(norm=True),
    "SiLU, mean pooling": lambda: cnn(nn.SiLU, nn.AvgPool2d),
    "residual": lambda: nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 48),
        Residual(nn.Sequential(nn.Linear(48, 48), nn.ReLU())),
        Residual(nn.Sequential(nn.Linear(48, 48), nn.ReLU())),
        nn.Linear(48, 10),
    ),
    "layer normalization": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 10)
    ),
    "PGD-trained": cnn,
    "wide": lambda: mlp(nn.ReLU, 256),
    "vision transformer": VisionTransformer,
    "recurrent": Recurrent,
    "maxout": lambda: nn.Sequential(nn.Flatten(), Maxout(64, 48), Maxout(48, 48), nn.Linear(48, 10)),
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)),
    "weight decay": mlp,
    "one hidden layer": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 10)),
}


class Masked(nn.Module):
    """A network behind a function of its input and before one of its output."""

    def __init__(
        self, model: nn.Module, before: Callable[[Tensor], Tensor] | None, after: Callable[[Tensor], Tensor] | None
    ) -> None:
        super().__init__()
        self.model, self.before, self.after = model, before, after

    def forward(self, x: Tensor) -> Tensor:
        f = self.model(x if self.before is None else self.before(x))
        return f if self.after is None else self.after(f)


def train(model: nn.Module, x: Tensor, y: Tensor, robust: bool, epochs: int = 15, decay: float = 0.0) -> nn.Module:
    """Adam on the cross-entropy, with decoupled weight decay; adversarially if `robust`."""
    torch.manual_seed(0)
    method = AdversarialTraining(model, 0.1, steps=4, classes=10, loss="cross-entropy", bounds=BOUNDS)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=decay)
    for _ in range(epochs):
        for index in torch.randperm(len(x)).split(64):
            loss = method.loss(x[index], y[index]) if robust else F.cross_entropy(model(x[index]), y[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


def measure(model: nn.Module, x: Tensor, y: Tensor, norm: str) -> tuple[float, object, float]:
    """Median of a search without evidence, margins with it, seconds of the latter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = margins(model, x, y, norm=norm, bounds=BOUNDS, options=SearchOptions(evidence=False, certify=False))
        start = time.perf_counter()
        result = margins(model, x, y, norm=norm, bounds=BOUNDS, options=SearchOptions(certify=False))
    return plain.median, result, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=48)
    parser.add_argument("--norm", default="inf")
    parser.add_argument("--only", nargs="+", default=[])
    options = parser.parse_args()
    data = load("digits")
    x, y = data.x_test[: options.points], data.y_test[: options.points]
    print(
        f"norm {options.norm}, {len(x)} test digits\n\n| network | verdict | before | after | unmasked | planted found | first reason | searched again with |"
    )
    print("|---|---|--:|--:|--:|--:|---|---|")
    good = {"masked": 0, "honest": 0}
    wanted = [*((name, True) for name in MASKED), *((name, False) for name in HONEST)]
    wanted = [(name, masked) for name, masked in wanted if not options.only or name in options.only]
    for name, masked in wanted:
        make, before, after = MASKED[name] if masked else (HONEST[name], None, None)
        torch.manual_seed(1)
        decay = 2.0 if name == "weight decay" else 0.0
        model = train(make(), data.x_train, data.y_train, name == "PGD-trained", decay=decay)
        reference = margins(
            model, x, y, norm=options.norm, bounds=BOUNDS, options=SearchOptions(evidence=False, certify=False)
        ).median
        naive, result, _ = measure(Masked(model, before, after) if masked else model, x, y, options.norm)
        wrapped = before is not None or after is not None
        right = wrapped and abs(result.median - reference) <= 0.02 * reference
        ok = result.trusted if not masked else (not result.trusted or right)
        good["masked" if masked else "honest"] += ok
        evidence = result.evidence
        found = "" if not evidence.planted else f"{evidence.planted - evidence.unfound} of {evidence.planted}"
        verdict = ("trusted" if result.trusted else "flagged") + ("" if ok else " (**wrong**)")
        print(
            f"| {name} | {verdict} | {naive:.4f} | {result.median:.4f} | {f'{reference:.4f}' if wrapped else ''} | {found} | "
            f"{result.flags[0] if result.flags else ''} | {evidence.mended or ''} |",
            flush=True,
        )
    print(f"\nmasked: {good['masked']} of {sum(m for _, m in wanted)} flagged or measured rightly; "
          f"honest: {good['honest']} of {sum(not m for _, m in wanted)} trusted")  # fmt: skip


if __name__ == "__main__":
    main()
