"""Beside an independent attack: on at least 95 % of points no larger by more than 1 %, and no larger in the median."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

from excite.excitation import PersistentExcitation
from excite.margin import Margins, SearchOptions, margins
from margin.networks import BOUNDS, trained
from models import papers_network


class TwoLogits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        f = self.model(x)
        return f if f.shape[1] > 1 else torch.cat([0.5 - f, f - 0.5], 1)


def foolbox_margins(model: nn.Module, x: Tensor, y: Tensor, norm: str) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import foolbox

        two = TwoLogits(model).eval()
        wrapped = foolbox.PyTorchModel(two, bounds=BOUNDS, device="cpu")
        attack = {"inf": foolbox.attacks.LInfFMNAttack, "2": foolbox.attacks.L2FMNAttack}[norm](steps=300)
        _, found, _ = attack(wrapped, x, y, epsilons=None)
    with torch.no_grad():
        wrong, broken = two(x).argmax(1) != y, two(found).argmax(1) != y
    size = torch.linalg.vector_norm((found - x).flatten(1), float(norm), dim=1)
    return torch.where(wrong, 0.0, torch.where(broken, size, torch.inf)).double()


def check_no_larger(model: nn.Module, x: Tensor, y: Tensor, norm: str) -> tuple[Margins, Tensor]:
    theirs = foolbox_margins(model, x, y, norm)
    found = margins(model, x, y, norm=norm, bounds=BOUNDS, options=SearchOptions(evidence=False, certify=False))
    assert torch.equal(found.values == 0, theirs == 0)
    assert (found.values <= 1.01 * theirs).double().mean() >= 0.95
    return found, theirs


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["inf", "2"])
@pytest.mark.parametrize(
    "kind",
    [
        "mlp",
        "convolutional",
        pytest.param("excited", marks=pytest.mark.slow),
        "classes",
        pytest.param("robust classes", marks=pytest.mark.slow),
    ],
)
def test_small_networks(kind: str, norm: str) -> None:
    model, x, y = trained(kind)
    found, theirs = check_no_larger(model, x, y, norm)
    # A hundred points: their median is one or two of them, so compare the points, not the medians.
    attacked = theirs > 0
    assert (found.values / theirs)[attacked].median() <= 1 + 1e-3


def blobs(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images (n, 3, 32, 32) in [-1, 1]: smooth random colours, and a bright or dark blob at a random place as the class."""
    y = torch.arange(n) % 2
    base = torch.nn.functional.interpolate(torch.randn(n, 3, 5, 5, generator=generator), size=32, mode="bicubic")
    at = torch.linspace(-1, 1, 32)
    centre = torch.rand(n, 2, generator=generator) - 0.5
    far = (at[None, :, None] - centre[:, 0, None, None]) ** 2 + (at[None, None, :] - centre[:, 1, None, None]) ** 2
    blob = torch.exp(-far / 0.08) * (2.0 * y - 1)[:, None, None]
    x = 0.4 * base + 0.8 * blob[:, None] + 0.2 * torch.randn(n, 3, 32, 32, generator=generator)
    return x.clamp(-1, 1), y


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["inf", "2"])
@pytest.mark.parametrize("excited", [False, True])
def test_the_papers_network_plain_and_excited(excited: bool, norm: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = blobs(1500, generator)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = papers_network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.9)
    for epoch in range(12):
        pe = PersistentExcitation(model, radius=0.01 if excited and epoch >= 6 else 0.0)
        for index in torch.randperm(len(x), generator=generator).split(50):
            optimizer.zero_grad()
            pe.loss(x[index], y[index]).backward()
            optimizer.step()
    x, y = blobs(150, generator)
    found, theirs = check_no_larger(model.eval(), x, y, norm)
    assert found.median <= Margins(theirs, norm).median * (1 + 1e-3)
    assert (found.values > 0).double().mean() > 0.8
