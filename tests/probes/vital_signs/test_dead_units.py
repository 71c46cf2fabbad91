"""Units that no token activates, unit by unit."""

import pytest
import torch

import excite
from excite.probes import DeadUnits
from excite.probes.base import StepContext
from transformer_zoo import captured, make

LAYERS = {
    "gpt2": ["transformer.h.0.mlp.c_fc", "transformer.h.1.mlp.c_fc"],
    "llama": ["model.layers.0.mlp.gate_proj", "model.layers.1.mlp.gate_proj"],
    "bert": ["bert.encoder.layer.0.intermediate.dense", "bert.encoder.layer.1.intermediate.dense", "cls.predictions.transform.dense"],
    "softmax": ["blocks.0.up", "blocks.1.up"],
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("padded", [False, True])
def test_dead_units_are_those_of_a_slow_version(name, padded):
    zoo = make(name)
    modules = dict(zoo.model.named_modules())
    with torch.no_grad():
        for path in LAYERS[name]:
            modules[path].bias.sub_(6.0) if modules[path].bias is not None else modules[path].weight.mul_(0.3)
    example = zoo.example
    mask = torch.ones_like(zoo.example[:2])
    if padded and name != "softmax":
        example = {"input_ids": zoo.example, "attention_mask": torch.ones_like(zoo.example)}
        example["attention_mask"][0, :4] = mask[0, :4] = 0
    _, outputs, _ = captured(zoo.model, LAYERS[name], example)
    expected = {}
    for path in LAYERS[name]:
        rows = outputs[path][:2][mask.bool()].tolist()
        expected[f"fraction/{path}"] = sum(all(row[unit] <= 0 for row in rows) for unit in range(len(rows[0]))) / len(
            rows[0]
        )
    probe = DeadUnits()
    for step in range(2):  # by following every layer, then from the inputs of activations
        found = probe.measure(StepContext(zoo.model, step, example=example))
        assert {key: float(value) for key, value in found.items()} == pytest.approx(expected, abs=1e-12)
        assert probe._plan is not None
    assert name == "llama" or max(expected.values()) > 0


def test_units_that_share_a_layer_with_others_are_followed():
    class Gated(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = torch.nn.Linear(4, 6), torch.nn.Linear(3, 4)

        def forward(self, x):
            value, gate = self.up(x).chunk(2, -1)
            return self.down(value * torch.relu(gate))

    torch.manual_seed(0)
    model, x = Gated(), torch.randn(2, 5, 4)
    probe = DeadUnits()
    with torch.no_grad():
        model.up.bias[3] += 9
        model.up.bias[4:] -= 9
    for step in range(2):
        assert float(probe.measure(StepContext(model, step, example=x))["fraction/up"]) == pytest.approx(2 / 3)
    assert probe._plan is None


def test_a_pass_with_other_activations_is_followed_again():
    class Changing(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.more = torch.nn.Linear(4, 6), torch.nn.Linear(6, 2), False

        def forward(self, x):
            x = torch.tanh(x) if self.more else x
            return self.second(torch.relu(self.first(x)))

    torch.manual_seed(0)
    model, x = Changing(), torch.randn(2, 4)
    probe = DeadUnits()
    for model.more in (False, False, True, True):
        found = probe.measure(StepContext(model, 0, example=x))
        inputs = torch.tanh(x) if model.more else x
        assert float(found["fraction/first"]) == float((model.first(inputs) <= 0).all(0).double().mean())


def test_a_model_without_activations_is_refused():
    with pytest.raises(excite.ModelError, match="leave DeadUnits out"):
        DeadUnits().attach(StepContext(torch.nn.Linear(3, 2), 0, example=torch.randn(4, 3)))
