"""A watch on a GPU, where the host runs ahead of the device and values are fetched by another thread."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import excite
from excite.probes import default_probes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 96, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(96 * 49, 10)
    ).cuda()  # fmt: skip


def largest(weight: Tensor) -> float:
    """σ₁ of the first convolution on images of 16×16."""
    basis = torch.eye(3 * 256, dtype=torch.float64, device=weight.device).reshape(-1, 3, 16, 16)
    rows = nn.functional.conv2d(basis, weight.double(), padding=1).flatten(1)
    return math.sqrt(float(torch.linalg.eigvalsh(rows @ rows.T)[-1]))


@pytest.mark.parametrize("every", [1, 5])
def test_what_is_written_is_what_was_there(tmp_path: Path, every: int) -> None:
    """Looks at every step reuse memory while the last one is still being fetched."""
    model = network()
    x = torch.randn(256, 3, 16, 16, device="cuda")
    y = torch.randint(10, (256,), device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    before, after, losses = {}, {}, {}
    with excite.watch(model, x[:64], tmp_path / "run", optimizer, default_probes(), every, strict=True) as watch:
        for step in range(1, 201):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            before[step] = model[0].weight.detach().clone()
            optimizer.step()
            watch.step(loss)
            after[step] = {name: p.detach().clone() for name, p in model.named_parameters()}
            losses[step] = loss.detach()
    run = excite.load_run(tmp_path / "run")
    found = {name: dict(zip(*(column.tolist() for column in run.series(name)))) for name in run.names()}
    looks = list(range(every, 201, every))
    for step in looks[:: max(1, len(looks) // 20)]:
        moved = sum(float((after[step][name].double() - start[name].double()).square().sum()) for name in start)
        assert found["loss/step"][step] == pytest.approx(float(losses[step]), rel=1e-6)
        assert found["distance/absolute"][step] == pytest.approx(math.sqrt(moved), rel=1e-4)
        assert found["trajectory/sigma/0"][step] == pytest.approx(largest(before[step]), rel=0.02)
        for layer in ("0", "2", "5"):
            squares = torch.linalg.svdvals(after[step][f"{layer}.weight"].double().flatten(1)).square()
            assert found[f"alignment/ratio/{layer}"][step] == pytest.approx(float(squares[0] / squares.sum()), rel=0.01)
            fourth = float(squares.sum() ** 2 / squares.square().sum())
            assert found[f"alignment/participation/{layer}"][step] == pytest.approx(fourth, rel=1e-4)
    for name, values in found.items():
        if name.split("/")[0] in ("alignment", "distance", "rank", "signs", "conservation"):
            assert set(looks) <= set(values), name
            assert all(map(math.isfinite, values.values())), name
