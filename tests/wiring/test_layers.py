"""Layers in order of execution, with shapes that do not mention the batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from excite.wiring import Wiring, trace
from models import CASES, build, same_state, state_of


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("training", [True, False])
def test_layers_come_in_order_with_their_parameters(name: str, training: bool) -> None:
    model, x = build(name)
    model.train(training)
    before = state_of(model)
    wiring = trace(model, x, output=CASES[name].pick)
    assert same_state(before, state_of(model))
    assert len(wiring.layers) == CASES[name].layers
    parameters = dict(model.named_parameters())
    for layer in wiring.layers:
        if layer.weight_name is not None:
            assert (
                layer.weight.untyped_storage().data_ptr() == parameters[layer.weight_name].untyped_storage().data_ptr()
            )
        assert wiring[layer.name] is layer


def shapes(wiring: Wiring) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    return {layer.name: (layer.in_shape, layer.out_shape) for layer in wiring.layers}


@pytest.mark.parametrize("batch", [1, 2, 3, 5])
def test_shapes_do_not_depend_on_the_batch(batch: int) -> None:
    model, x = build("convolutional", batch=batch)
    assert shapes(trace(model, x)) == {
        "0": ((2, 4, 4), (4, 4, 4)), "3": ((4, 2, 2), (5, 2, 2)), "7": ((5,), (6,)), "9": ((6,), (1,)),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["transformer", "transformer-time-first"])
def test_the_batch_axis_is_found_wherever_it_stands(name: str) -> None:
    model, x = build(name)  # inside attention the inputs are (time, batch, 8) and (time · batch, 8)
    found = shapes(trace(model, x))
    assert found["encoder.layers.0.self_attn.in_proj_weight"] == ((3, 8), (3, 24))
    assert found["encoder.layers.0.self_attn.out_proj"] == ((3, 8), (3, 8))
    assert found["encoder.layers.1.linear1"] == ((3, 8), (3, 16))
    assert found["head"] == ((8,), (1,))


def test_kinds_and_second_calls() -> None:
    model, x = build("shared")
    assert [(layer.name, layer.kind) for layer in trace(model, x).layers] == [
        ("enter", "linear"), ("again", "linear"), ("again#2", "linear"), ("leave", "linear"),
    ]  # fmt: skip
    model, x = build("transposed")
    assert [layer.kind for layer in trace(model, x).layers] == ["conv", "conv", "linear"]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(5, 6, batch_first=True), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def test_recurrent_kernels_are_noted() -> None:
    model, x = Recurrent(), torch.randn(3, 4, 5)
    before = state_of(model)
    wiring = trace(model, x)
    assert same_state(before, state_of(model))
    assert [layer.name for layer in wiring.layers] == ["head"]
    assert "lstm" in wiring.notes[0]
    assert "lstm" in str(wiring)


class FixedBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x.view(2, 5))


def test_a_model_of_one_batch_size_is_traced_with_a_note() -> None:
    wiring = trace(FixedBatch(), torch.randn(2, 5))
    assert (wiring.layers[0].in_shape, wiring.layers[0].out_shape) == ((5,), (4,))
    assert "first axis" in wiring.notes[0]
