"""A watch on a GPU, where the host runs ahead of the device and values are fetched by another thread."""

from __future__ import annotations

import math
import threading
import traceback
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import excite
from excite._core.background import drain
from excite.probes import Conservation, Every, Loss, Probe, StepContext, default_probes

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


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_ledger_of_every_step_is_that_of_a_cpu(tmp_path: Path, momentum: float) -> None:
    """Steps wait to be booked together, and are digested by another thread while training goes on."""
    found = []
    x = torch.randn(64, 3, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for device in ("cpu", "cuda"):
        model, data = network().double().to(device), x.to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum, weight_decay=0.01 * momentum)
        probes = [Loss(), Conservation(Every(1))]
        with excite.watch(model, data[:8], tmp_path / device, optimizer, probes, strict=True) as watch:
            for _ in range(70):
                optimizer.zero_grad()
                loss = model(data).square().mean()
                loss.backward()
                optimizer.step()
                watch.step(loss)
        run = excite.load_run(tmp_path / device)
        found.append({name: run.series(name) for name in run.names()})
    here, there = found
    assert here.keys() == there.keys()
    assert any(name.startswith("conservation/momentum") for name in here) == bool(momentum)
    for name, (steps, values) in here.items():
        assert steps.tolist() == there[name][0].tolist()
        tolerance = {"abs": 1e-10} if name.startswith("conservation/rest") else {"rel": 1e-6, "abs": 1e-9}
        assert there[name][1].tolist() == pytest.approx(values.tolist(), **tolerance), name


def test_deterministic_algorithms_are_no_obstacle(tmp_path: Path) -> None:
    """A user who asks torch for them gets an error from an operation that has none."""
    model, x = network(), torch.randn(32, 3, 16, 16, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with excite.watch(
                model, x[:8], tmp_path / "run", optimizer, [Conservation(Every(1))], strict=True
            ) as watch:
                for _ in range(20):
                    optimizer.zero_grad()
                    model(x).square().mean().backward()
                    optimizer.step()
                    watch.step()
    finally:
        torch.use_deterministic_algorithms(False)
    said = [str(one.message) for one in caught if "deterministic" in str(one.message)]
    assert [
        one for one in said if "CuBLAS" not in one
    ] == []  # a setting of the environment, as for the model's own products


@pytest.mark.parametrize("every", [1, 7])
def test_the_training_thread_never_waits_for_the_device(
    tmp_path: Path, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where CUDA is told to report waiting, only the background thread does so, once the probes have found their way.

    A measurement that starts from the last one waits for it: the last ones are finished before each step, however slow they are.
    """
    model, x = network(), torch.randn(64, 3, 16, 16, device="cuda")
    y = torch.randint(10, (64,), device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    waits: list[str] = []

    def note(message: object, *_: object) -> None:
        if "synchronizing CUDA" in str(message) and threading.current_thread() is threading.main_thread():
            waits.append("".join(traceback.format_stack(limit=12)))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", note)
        with excite.watch(model, x[:32], tmp_path / "run", optimizer, default_probes(), every, strict=True) as watch:
            for step in range(60):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                drain()
                torch.cuda.set_sync_debug_mode("warn" if step >= 30 else "default")
                watch.step(loss)
                torch.cuda.set_sync_debug_mode("default")
    assert not waits, f"{len(waits)} times; first at\n{waits[0]}"


def test_share_is_the_slow_down_of_a_busy_device(tmp_path: Path) -> None:
    """The host that waits for room in the launch queue does not count; kernels of a probe do."""
    big = torch.randn(4096, 4096, device="cuda")
    model, x = network(), torch.randn(8, 3, 16, 16, device="cuda")

    class Product(Probe):
        name = "product"

        def __init__(self, times: int):
            super().__init__(Every(1))
            self.times = times

        def measure(self, ctx: StepContext) -> dict[str, Tensor]:
            for _ in range(self.times):
                found = big @ big
            return {"corner": found[0, 0]}

    shares = []
    for times in (1, 20):
        with excite.watch(model, x, tmp_path / f"run{times}", probes=[Product(times)], alerts=[]) as watch:
            torch.cuda.synchronize()
            for _ in range(30):
                for _ in range(20):  # a training step of twenty such products
                    big @ big
                watch.step()
            torch.cuda.synchronize()
            shares.append(watch.share)
    assert 0.01 < shares[0] < 0.15  # 1 of 21
    assert 0.35 < shares[1] < 0.65  # 20 of 40
