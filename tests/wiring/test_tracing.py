"""What `trace` lists, what it says when it cannot, and that it leaves no trace itself."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from excite.errors import InputError, ModelError
from excite.wiring import Layer, Wiring, trace
from models import CASES, build, same_state, state_of

from .zoo import ZOO, zoo


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


@pytest.mark.parametrize("name", [*ZOO])
def test_the_model_is_untouched(name: str) -> None:
    model, x = zoo(name)
    before = state_of(model)
    trace(model, x, output=0 if name == "hidden-returned" else None)
    assert same_state(before, state_of(model))


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


class Branching(nn.Module):
    """Torch.export cannot follow it: the branch depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h.relu() if bool(h.sum() > 0) else h)


def test_where_export_fails_layers_remain_and_groups_say_why(capfd: pytest.CaptureFixture[str]) -> None:
    model, x = Branching(), torch.randn(3, 5)
    before = state_of(model)
    wiring = trace(model, x)
    assert same_state(before, state_of(model))
    assert [layer.name for layer in wiring.layers] == ["a", "b"]
    assert [(group.law, group.channels) for group in wiring.groups] == [("none", 4), ("none", 2)]
    assert all(group.why.startswith("torch.export failed: ") and "\n" not in group.why for group in wiring.groups)
    assert capfd.readouterr() == ("", "")


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


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.BatchNorm1d(5)
        self.b = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.b(self.a(x) + torch.rand(5))
        raise ZeroDivisionError("the reason\nand details")


def test_bad_models_and_examples_are_refused_in_one_line() -> None:
    model, x = build("mlp")
    with pytest.raises(ModelError, match="no affine layer"):
        trace(nn.ReLU(), x)
    with pytest.raises(ModelError, match=r"no affine layer.*lstm"):
        trace(nn.LSTM(5, 6), torch.randn(2, 3, 5), output=0)
    with pytest.raises(
        ModelError, match=r"does not run on the example \(shapes \(2, 3\)\): RuntimeError: .*one batch"
    ) as caught:
        trace(model, torch.randn(2, 3, dtype=torch.float64))
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value.__cause__, RuntimeError)
    for wrong in (torch.tensor(1.0), x * float("nan"), "text"):
        with pytest.raises(InputError):
            trace(model, wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="Module"):
        trace(lambda x: x, x)  # type: ignore[arg-type]
    dictionary, x = build("dict")
    with pytest.raises(ModelError, match="output="):
        trace(dictionary, x)
    with pytest.raises(InputError, match="'nothing'"):
        trace(dictionary, x, output="nothing")
    with pytest.raises(InputError, match="no layer"):
        trace(dictionary, x, output="logits")["nothing"]


def test_an_exception_of_the_model_leaves_it_as_it_was() -> None:
    model, x = Broken(), torch.randn(3, 5)
    before = state_of(model)
    with pytest.raises(ModelError, match="ZeroDivisionError: the reason;") as caught:
        trace(model, x)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert same_state(before, state_of(model))


def test_batches_of_several_tensors() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return self.b(self.a(x).relu() * scale)

    model, x, scale = Two(), torch.randn(3, 5), torch.rand(3, 1)
    for batch in ((x, scale), {"x": x, "scale": scale}):
        wiring = trace(model, batch)
        assert [(g.law, g.channels) for g in wiring.groups] == [("channel", 4)]
        assert wiring.layers[1].in_shape == (4,)


def test_compiled_and_wrapped_models_have_the_same_wiring() -> None:
    model, x = build("mlp")
    plain = str(trace(model, x))
    assert str(trace(torch.compile(model, backend="eager"), x)) == plain  # type: ignore[arg-type]
    wrapped = nn.DataParallel(model)  # moves the model to a GPU where there is one
    assert str(trace(wrapped, x.to(next(wrapped.parameters()).device))) == plain
    model.cpu()
    model[0] = torch.compile(model[0], backend="eager")  # type: ignore[index, operator]
    assert str(trace(model, x)) == plain
    in_place, x = build("mlp")
    in_place.compile(backend="eager")
    assert str(trace(in_place, x)) == plain


@pytest.mark.parametrize("name", ["mlp", "transformer", "resnet-norm", "tanh", "weight-norm", "dense"])
def test_the_table_fits_a_terminal_and_names_everything(name: str) -> None:
    model, x = build(name)
    wiring = trace(model, x)
    text = str(wiring)
    assert max(map(len, text.splitlines())) <= 100
    assert all(layer.name in text for layer in wiring.layers)
    assert all(group.law in text for group in wiring.groups)
    rows = wiring.rows()
    assert len(rows["layers"]) == len(wiring.layers)
    assert len(rows["groups"]) == len(wiring.groups)
    assert sum(row["parameters"] for row in rows["layers"]) == sum(layer.parameters for layer in wiring.layers)


def test_the_graph_connects_producers_to_consumers() -> None:
    model, x = build("resnet-norm")
    graph = trace(model, x).graph()
    assert graph.has_edge("block1.conv1", "block1.bn1")
    assert graph.edges["block1.bn1", "block1.conv2"]["law"] == "channel"
    assert graph.nodes["stem"]["kind"] == "conv"


def test_results_are_values() -> None:
    model, x = build("mlp")
    wiring = trace(model, x)
    for value in (wiring, wiring.layers[0], wiring.groups[0], wiring.groups[0].producers[0]):
        with pytest.raises(dataclasses.FrozenInstanceError):
            value.name = "other"  # type: ignore[union-attr, misc]
    assert isinstance(wiring.layers[0], Layer)


class Routed(nn.Module):
    """A mixture of experts: how many samples an expert gets depends on the data."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 2), nn.ModuleList(nn.Linear(4, 3) for _ in range(2))

    def forward(self, x):
        chosen = self.gate(x).argmax(1)
        out = x.new_zeros(len(x), 3)
        for k, expert in enumerate(self.experts):
            rows = torch.where(chosen == k)[0]
            out = out.index_add(0, rows, expert(x[rows]))
        return out


def test_shapes_that_depend_on_the_data_are_a_reason():
    wiring = trace(Routed(), torch.randn(6, 4))
    assert {layer.name for layer in wiring.layers} == {"gate", "experts.0", "experts.1"}
    assert all(group.law == "none" and "depends on the values in the batch" in group.why for group in wiring.groups)


class LearnedQuery(nn.Module):
    """Pools by attention with one query for all samples."""

    def __init__(self):
        super().__init__()
        self.query = nn.Parameter(torch.randn(1, 8))
        self.attention, self.out = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 1)

    def forward(self, x):
        return self.out(self.attention(self.query.expand(len(x), -1, -1), x, x)[0][:, 0])


def test_the_sites_of_an_expanded_parameter_can_be_keys():
    groups = trace(LearnedQuery(), torch.randn(3, 5, 8)).groups
    assert all(hash(site.slot) is not None for group in groups for site in (*group.producers, *group.consumers))
