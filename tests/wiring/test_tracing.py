"""`excite.trace` as a whole: the model is left unchanged, bad input is refused, results are values."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from excite.errors import InputError, ModelError
from excite.wiring import Layer, trace
from models import build, same_state, state_of

from .zoo import ZOO, zoo


@pytest.mark.parametrize("name", [*ZOO])
def test_the_model_is_untouched(name: str) -> None:
    model, x = zoo(name)
    before = state_of(model)
    trace(model, x, output=0 if name == "hidden-returned" else None)
    assert same_state(before, state_of(model))


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
        ModelError, match=r"does not run on a few samples of the example \(shapes \(2, 3\)\): RuntimeError: .*one batch"
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
