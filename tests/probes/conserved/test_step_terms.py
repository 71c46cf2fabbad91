"""The terms of one optimizer step."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from excite.probes import conservation
from models import build
from probes.conserved.trainings import OPTIMIZERS, squared, train


def test_a_step_without_gradients_changes_nothing() -> None:
    for make in OPTIMIZERS.values():
        model, x = build("mlp")
        optimizer = make(model.parameters())
        with conservation(model, optimizer, x) as ledger:
            optimizer.step()
            train(model, optimizer, x, 2)
            optimizer.zero_grad()
            optimizer.step()
            assert ledger.read().holds


def test_a_closure_is_understood() -> None:
    for name, make in OPTIMIZERS.items():
        model, x = build("mlp")
        optimizer = make(model.parameters())

        def closure(model: nn.Module = model, optimizer: Any = optimizer, x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss = squared(model, x)
            loss.backward()
            return loss

        with conservation(model, optimizer, x) as ledger:
            for _ in range(4):
                optimizer.step(closure)
            reading = ledger.read()
        # Nesterov's momentum may be added to the gradient in place: then it cannot be read after the step.
        assert {entry.state for entry in reading.entries} == {"not checked" if name == "nesterov" else "holds"}
