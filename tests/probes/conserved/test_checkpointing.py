"""Activation checkpointing: laws are those of the function, and what cannot be measured says so by its name."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction, checkpoint

import excite
from excite._core.wrappers import without_reentrant_checkpointing
from excite.errors import ModelError
from excite.probes import Conservation, Every, Trajectory, conservation, trajectory
from excite.wiring import trace


class Checkpointed(nn.Module):
    """Three layers, of which `part` is recomputed in the backward pass."""

    def __init__(self, part: str, reentrant: bool | None) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 1)
        self.part, self.reentrant = part, reentrant

    def forward(self, x: Tensor) -> Tensor:
        h = self.run("a", lambda x: torch.relu(self.a(x)), x)
        return self.c(self.run("b", lambda h: torch.relu(self.b(h)), h))  # type: ignore[no-any-return]

    def run(self, part: str, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if self.reentrant is None or part != self.part:
            return function(x)
        return checkpoint(function, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


def model(part: str, reentrant: bool | None) -> tuple[Checkpointed, Tensor]:
    torch.manual_seed(0)
    return Checkpointed(part, reentrant).double(), torch.randn(8, 4).double().requires_grad_()


def steps(net: nn.Module, x: Tensor, probe: Any, run: Any = None) -> Any:
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with excite.watch(net, x.detach(), run, optimizer, [probe], strict=True) as watch:
        for _ in range(2):
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            watch.step(loss)
    return probe


@pytest.mark.parametrize("part", ["a", "b"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_laws_are_those_of_the_function(part: str, reentrant: bool) -> None:
    net, x = model(part, reentrant)
    assert [(g.law, g.why) for g in trace(net, x.detach()).groups] == [("channel", "through relu")] * 2
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with conservation(net, optimizer, x.detach()) as ledger:
        for penalty in (0.0, 0.0, 0.01):
            optimizer.zero_grad()
            (net(x).square().mean() + penalty * net.a.weight.square().sum()).backward()
            optimizer.step()
            assert ledger.read().holds == (penalty == 0)


def test_a_layer_under_reentrant_checkpointing_is_refused() -> None:
    for layers, part in (("first", "a"), ("all", "b"), (["b"], "b")):
        net, x = model(part, True)
        with pytest.raises(
            ModelError, match=rf"layer '{part}' runs under activation checkpointing with use_reentrant=True"
        ) as error:
            steps(net, x, Trajectory(Every(1), layers=layers))
        assert "use_reentrant=False" in str(error.value)


def test_checkpointing_that_is_switched_on_later_is_named_too() -> None:
    net, x = model("a", None)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with (
        pytest.raises(ModelError, match="activation checkpointing with use_reentrant=True"),
        excite.watch(net, x.detach(), None, optimizer, [Trajectory(Every(1))], strict=True) as watch,
    ):
        for reentrant in (None, True):
            net.reentrant = reentrant
            loss = net(x).square().mean()
            loss.backward()
            watch.step(loss)


@pytest.mark.parametrize(("part", "reentrant"), [("b", True), ("a", False), ("b", False)])
def test_layers_outside_and_other_checkpointing_are_measured(part: str, reentrant: bool, tmp_path: Any) -> None:
    found = []
    for way in (None, reentrant):
        net, x = model(part, way)
        steps(net, x, Trajectory(Every(1), clean=Every(1)), run=tmp_path / str(way))
        with excite.load_run(tmp_path / str(way)) as run:
            values = {(row.step, row.name): row.value for row in run.frame().itertuples(index=False)}
        (once,) = trajectory(net, x.detach()).values()
        found.append(values | {(0, "lipschitz"): float(once.lipschitz.sum())})
    assert (2, "trajectory/mean/a") in found[0]
    assert found[0] == pytest.approx(found[1], rel=1e-12, nan_ok=True)


def test_checkpointing_is_restored_in_any_order_of_threads() -> None:
    first, second = without_reentrant_checkpointing(), without_reentrant_checkpointing()
    first.__enter__()
    other = threading.Thread(target=second.__enter__)
    other.start()
    other.join()
    first.__exit__(None, None, None)
    assert torch.utils.checkpoint.CheckpointFunction is not CheckpointFunction
    second.__exit__(None, None, None)
    assert torch.utils.checkpoint.CheckpointFunction is CheckpointFunction


def test_the_probe_of_laws_needs_no_gradient_at_layers() -> None:
    net, x = model("a", True)
    ledger = steps(net, x, Conservation(Every(1))).ledger
    assert [entry.state for entry in ledger.read().entries] == ["holds", "holds"]
