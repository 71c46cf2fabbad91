"""Does `trusted` earn its name? Networks with masked gradients must be flagged, or measured rightly; honest ones trusted.

    python -m benchmarks.masked [--points 48] [--norm inf] [--only NAME ...]

Ten networks for digits whose gradients mislead and ten whose do not; none of them was used to choose a setting of the search
or of its evidence. The reference is the margin of the same network without the mask where the mask keeps its decisions (or
nearly); "before" is the median of a search without evidence, "after" that of `excite.margins`, mended where it is flagged.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable

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


def train(model: nn.Module, x: Tensor, y: Tensor, robust: bool, epochs: int = 15) -> nn.Module:
    """Adam on the cross-entropy; adversarially if `robust`."""
    torch.manual_seed(0)
    method = AdversarialTraining(model, 0.1, steps=4, classes=10, loss="cross-entropy", bounds=BOUNDS)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
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
        model = train(make(), data.x_train, data.y_train, name == "PGD-trained")
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
