"""Models on the meta device: shapes without values."""

import pytest
import torch
from torch import nn

import excite
from transformer_zoo import make

NAMES = ["gpt2", "llama", "bert", "vit", "kernel", "softmax"]


def same(first, second):
    """Whether two traces agree, but for notes and the memory of weights."""
    return (
        first.rows() == second.rows()
        and first.attentions == second.attentions
        and first.translations == second.translations
        and first.parameters == second.parameters
    )


def on_meta(model):
    """The model on the meta device, with tied parameters still tied, which `.to("meta")` separates."""
    replaced = {}
    for module in model.modules():
        for entries in (module._parameters, module._buffers):
            for name, value in entries.items():
                if value is None:
                    continue
                if id(value) not in replaced:
                    empty = value.detach().to("meta")
                    trained = isinstance(value, nn.Parameter)
                    replaced[id(value)] = nn.Parameter(empty, value.requires_grad) if trained else empty
                entries[name] = replaced[id(value)]
    return model


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_transformers_have_the_wiring_of_those_with_values(name):
    zoo = make(name)
    output = "logits" if hasattr(zoo.model, "config") else None
    expected = excite.trace(zoo.model, zoo.example, output=output)
    buffers = [path for path, _ in zoo.model.named_buffers()]
    found = excite.trace(on_meta(zoo.model), zoo.example, output=output)
    assert same(found, expected)
    assert all(layer.weight.is_meta for layer in found.layers)
    assert [path for path in buffers if path not in str(found.notes)] == []


def test_views_of_weights_are_told_apart():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Parameter(torch.empty(8, 4)), nn.Parameter(torch.empty(8, 4))

        def forward(self, x):
            return torch.relu(x @ self.first[:4].T) @ self.second[4:].T

    with torch.device("meta"):
        model = Net()
    found = excite.trace(model, torch.zeros(2, 4))
    assert [layer.weight_name for layer in found.layers] == ["first", "second"]


def test_an_example_on_meta_needs_a_model_on_meta():
    with pytest.raises(excite.InputError, match="the example is on the meta device and the model is not"):
        excite.trace(nn.Linear(3, 2), torch.zeros(2, 3, device="meta"))


def test_other_functions_still_need_values():
    model = nn.Linear(3, 2, device="meta")
    excite.trace(model, torch.zeros(2, 3))
    with pytest.raises(excite.ModelError, match="expected weights with values"):
        excite.margins(model, torch.zeros(2, 3, device="meta"), torch.zeros(2, dtype=torch.long))


@pytest.mark.slow
def test_the_width_of_llama_8b_is_traced_without_memory():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=1, hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    found = excite.trace(model, torch.zeros(1, 8, dtype=torch.long), output="logits")
    (attention,) = found.attentions
    assert (attention.heads, len(set(attention.groups))) == (32, 8)
    assert {group.law for group in found.groups} >= {"matrix", "channel"}
