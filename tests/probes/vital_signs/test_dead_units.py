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
    found = DeadUnits().measure(StepContext(zoo.model, 0, example=example))
    assert {key: float(value) for key, value in found.items()} == pytest.approx(expected, abs=1e-12)
    assert name == "llama" or max(expected.values()) > 0


def test_a_model_without_activations_is_refused():
    with pytest.raises(excite.ModelError, match="leave DeadUnits out"):
        DeadUnits().attach(StepContext(torch.nn.Linear(3, 2), 0, example=torch.randn(4, 3)))
