"""Labeled activations and the state that rules share."""

from __future__ import annotations

import torch

from excite.wiring.channels.signals import ChannelContext, ChannelSignal, view_shape
from excite.wiring.channels.slots import ParameterView, linear_slot


def test_a_parameter_becomes_an_activation_of_channels() -> None:
    ctx = ChannelContext({"bias": (3,)}, training=True)
    signal = ctx.signal(ParameterView("bias", (3,)))
    assert len(set(signal.labels.tolist())) == 3
    assert [use.layer for use in ctx.uses] == ["bias"]
    assert ctx.classes.channels(signal.labels) == signal.labels.tolist()


def test_constants_never_scale() -> None:
    ctx = ChannelContext({}, training=True)
    assert ctx.classes.all_fixed(ctx.signal(torch.ones(2, 3)).labels)
    assert not ctx.classes.channels(ctx.signal(1.0).labels)


def test_a_weight_produces_fresh_channels() -> None:
    ctx = ChannelContext({"w": (4, 2)}, training=True)
    view = ParameterView("w", (4, 2))
    out = ctx.produce("layer", linear_slot(view, 4, 2), torch.tensor([1, 2]), None)
    assert len(out) == 4
    assert view_shape(view.then(torch.ops.aten.t.default)) == (2, 4)


def test_labels_and_fingerprints_are_rearranged_alike() -> None:
    signal = ChannelSignal(torch.arange(6).view(2, 3), torch.arange(6.0).view(2, 3))
    moved = signal.map(lambda t: t.T)
    assert moved.shape == (3, 2)
    assert moved.prints is not None
    assert torch.equal(moved.labels.double(), moved.prints.double())
