"""Settings of an optimizer as plain numbers."""

from __future__ import annotations

import pytest
import torch

from excite.probes.conserved.hyperparameters import Hyperparameters


def test_tensors_become_numbers_with_their_rounding() -> None:
    group = {
        "params": [],
        "lr": torch.tensor(0.25),
        "betas": (0.5, torch.tensor(0.75)),
        "weight_decay": 1,
        "fused": None,
    }
    plain = Hyperparameters().plain(group)
    assert "params" not in plain
    assert (plain["lr"], plain["betas"], plain["weight_decay"]) == (0.25, (0.5, 0.75), 1.0)
    assert plain["coarse"] == torch.finfo(torch.float32).eps
    assert Hyperparameters().plain({"params": [], "lr": 0.1})["coarse"] == 0


@pytest.mark.parametrize("capturable", [False, True])
def test_settings_of_adam_follow_its_param_group(capturable: bool) -> None:
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.Adam([weight], lr=torch.tensor(0.5), capturable=False)
    optimizer.param_groups[0]["capturable"] = capturable
    settings = Hyperparameters()
    assert settings.plain(optimizer.param_groups[0])["lr"] == 0.5
    optimizer.param_groups[0]["lr"].mul_(0.5)
    plain = settings.plain(optimizer.param_groups[0])
    assert plain["lr"] == 0.25
    assert plain["counted"] == (torch.finfo(torch.float32).eps if capturable else 0.0)


def test_steps_are_those_that_the_optimizer_counted() -> None:
    weight = torch.ones(2, requires_grad=True)
    optimizer, settings = torch.optim.Adam([weight]), Hyperparameters()
    for count in range(1, 4):
        weight.grad = torch.ones(2)
        optimizer.step()
        assert settings.steps(0, optimizer.state[weight]) == count
