"""How often a call switches from file to file of Excite: what a reader who follows it has to do."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import excite

SOURCE = str(Path(excite.__file__).parent)


@contextmanager
def walk() -> Iterator[list[str]]:
    """The files of the functions of Excite that are called inside, in order, by this thread; comprehensions are no functions."""
    files: list[str] = []

    def see(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(SOURCE) and not code.co_name.startswith("<"):
            files.append(code.co_filename)

    sys.setprofile(see)
    try:
        yield files
    finally:
        sys.setprofile(None)


def switches(files: list[str]) -> int:
    return sum(before != after for before, after in itertools.pairwise(files))


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 16), nn.ReLU(), nn.Linear(16, 1))


@pytest.fixture
def batch(model: nn.Sequential) -> tuple[Tensor, Tensor]:
    return torch.randn(8, 1, 8, 8), torch.tensor([0, 1] * 4)


def test_walk_of_a_batch_through_the_loss(model: nn.Sequential, batch: tuple[Tensor, Tensor]) -> None:
    pe = excite.PersistentExcitation(model, radius=0.05)
    pe.loss(*batch)
    with walk() as files:
        pe.loss(*batch).backward()
    assert 50 < switches(files) <= 160


@pytest.mark.slow
def test_walk_of_a_step_with_all_probes_due(
    model: nn.Sequential, batch: tuple[Tensor, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("excite.monitor.buffer.time", SimpleNamespace(monotonic=lambda: 0.0))  # it also writes by time
    x, y = batch
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = (model(x).reshape(-1) - y).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    with excite.watch(model, example=x, run=tmp_path / "run", optimizer=optimizer) as watch:
        for _ in range(49):
            watch.step(step())
        with walk() as files:
            watch.step(step())
    measured = {Path(file).parent.name for file in files}
    assert {"bias_trajectory", "activation_rank", "conserved", "layer_alignment"} <= measured
    assert switches(files) <= 150


@pytest.mark.slow
def test_walk_of_margins(model: nn.Sequential, batch: tuple[Tensor, Tensor]) -> None:
    excite.margins(model, *batch)
    with walk() as files:
        excite.margins(model, *batch)
    assert 500 < switches(files) <= 3000


def test_walks_count_changes_of_the_file(model: nn.Sequential) -> None:
    def seen(function: Callable[[], object]) -> list[str]:
        with walk() as files:
            function()
        return files

    assert seen(lambda: torch.zeros(2).sum()) == []
    assert len(set(seen(lambda: excite.trace(model, torch.zeros(2, 1, 8, 8))))) > 5
    assert switches(["a", "a", "b", "a", "c", "c"]) == 3
