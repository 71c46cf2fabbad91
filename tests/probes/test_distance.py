import pytest
import torch

from excite.probes import Distance
from excite.probes.base import StepContext
from models import build


def test_distance_is_the_norm_of_what_was_added():
    model, _ = build("mlp")
    start = {k: p.detach().clone() for k, p in model.named_parameters()}
    probe = Distance()
    probe.attach(StepContext(model, 0))
    assert probe.measure(StepContext(model, 0))["absolute"] == 0
    with torch.no_grad():
        for p in model.parameters():
            p += torch.randn_like(p)
    values = probe.measure(StepContext(model, 1))
    flat = torch.cat([(p - start[k]).flatten() for k, p in model.named_parameters()])
    assert float(values["absolute"]) == pytest.approx(float(flat.detach().norm()))
    first = torch.cat([(model[0].weight - start["0.weight"]).flatten(), model[0].bias - start["0.bias"]]).norm()
    whole = torch.cat([start["0.weight"].flatten(), start["0.bias"]]).norm()
    assert float(values["absolute/0"]) == pytest.approx(float(first.detach()))
    assert float(values["relative/0"]) == pytest.approx(float(first / whole))


def test_the_start_survives_a_restart_without_frozen_weights():
    model, _ = build("mlp")
    model[0].requires_grad_(False)
    probe = Distance()
    probe.attach(StepContext(model, 0))
    with torch.no_grad():
        model[2].weight += 1
    again = Distance()
    again.load_state_dict(probe.state_dict())
    again.attach(StepContext(model, 5))
    expected = probe.measure(StepContext(model, 5))
    assert again.measure(StepContext(model, 5)) == expected
    assert not any(key.endswith("/0") for key in expected)
    assert float(expected["absolute"]) == pytest.approx(model[2].weight.numel() ** 0.5)
