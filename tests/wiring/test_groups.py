"""Groups of well-known models, written down by hand; and what breaks a law, by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from excite.wiring import Group, Site, trace
from models import build

from .zoo import zoo


def short(group: Group) -> tuple[str, str, str, int]:
    def side(sites: tuple[Site, ...]) -> str:
        return " ".join(dict.fromkeys(site.layer for site in sites))

    return side(group.producers), side(group.consumers), group.law, group.channels


BY_HAND: dict[str, list[tuple[str, str, str, int]]] = {
    "linear": [],
    "mlp": [("0", "2", "channel", 8), ("2", "4", "channel", 6)],
    "deep-linear": [("0", "1", "matrix", 6), ("1", "2", "matrix", 4)],
    "tanh": [("0", "2", "none", 8)],
    "functional": [("first", "second", "channel", 7)],
    "products": [("first bias", "second", "channel", 6)],
    "convolutional": [("0", "3", "channel", 4), ("3", "7", "channel", 5), ("7", "9", "channel", 6)],
    "papers": [("0", "3", "channel", 12), ("3", "7", "channel", 32), ("7", "9", "channel", 240), ("9", "11", "channel", 192)],
    "resnet-identity": [
        ("stem block1.conv2 block2.conv2", "block1.conv1 block2.conv1 head", "channel", 4),
        ("block1.conv1", "block1.conv2", "channel", 4),
        ("block2.conv1", "block2.conv2", "channel", 4),
    ],
    "resnet-diagonal": [
        ("stem", "block1.conv1 block1.scale", "channel", 4),
        ("block1.conv1", "block1.conv2", "channel", 4),
        ("block1.conv2 block1.scale", "block2.conv1 block2.scale", "channel", 4),
        ("block2.conv1", "block2.conv2", "channel", 4),
        ("block2.conv2 block2.scale", "head", "channel", 4),
    ],
    "resnet-free": [
        ("stem", "block1.conv1 block1.skip", "channel", 4),
        ("block1.conv1", "block1.conv2", "channel", 4),
        ("block1.conv2 block1.skip", "block2.conv1 block2.skip", "channel", 4),
        ("block2.conv1", "block2.conv2", "channel", 4),
        ("block2.conv2 block2.skip", "head", "channel", 4),
    ],
    "resnet-norm": [
        ("stem block1.bn2 block2.bn2", "block1.conv1 block2.conv1 head", "channel", 4),
        ("block1.conv1", "", "norm", 4),
        ("block1.bn1", "block1.conv2", "channel", 4),
        ("block1.conv2", "", "norm", 4),
        ("block2.conv1", "", "norm", 4),
        ("block2.bn1", "block2.conv2", "channel", 4),
        ("block2.conv2", "", "norm", 4),
    ],
    "dense": [
        ("first", "second third head", "channel", 3),
        ("second", "third head", "channel", 2),
        ("third", "head", "channel", 2),
    ],
    "grouped": [("0", "2", "channel", 4), ("2", "5", "channel", 6)],
    "depthwise": [("0", "2", "channel", 4), ("2", "4", "channel", 4), ("4", "6", "matrix", 3)],
    "transposed": [("0", "2", "channel", 3), ("2", "5", "channel", 2)],
    "conv1d": [("0", "4", "channel", 4)],
    "shared": [("enter again", "again leave", "channel", 6)],
    "dropout": [("0", "3", "channel", 16)],
    "layernorm": [("0", "", "norm", 1), ("1", "3", "channel", 8)],
    "batchnorm": [("0", "", "norm", 8), ("1", "3", "channel", 8)],
    "groupnorm": [("0", "", "norm", 2), ("1", "4", "channel", 4)],
    "weight-norm": [
        ("0.parametrizations.weight.original1", "", "norm", 8),
        ("0.parametrizations.weight.original0 0", "2", "channel", 8),
    ],
    "tokens": [("embed", "hidden", "matrix", 6), ("hidden", "head", "channel", 8)],
    "dict": [("body", "side head", "channel", 6)],
}  # fmt: skip


@pytest.mark.parametrize("name", BY_HAND)
@pytest.mark.parametrize("training", [True, False])
def test_groups_are_those_found_by_hand(name: str, training: bool) -> None:
    model, x = build(name)
    model.train(training)
    groups = trace(model, x, output="logits" if name == "dict" else None).groups
    assert [short(group) for group in groups] == BY_HAND[name]


@pytest.mark.parametrize("name", ["transformer", "transformer-dropout", "transformer-time-first"])
def test_groups_of_a_transformer(name: str) -> None:
    model, x = build(name)
    groups = [short(group) for group in trace(model, x).groups]
    a, b = "encoder.layers.0.", "encoder.layers.1."
    qkv, out = "self_attn.in_proj_weight", "self_attn.out_proj"
    assert groups.count((a + qkv, a + qkv, "matrix", 4)) == 2  # queries against keys, per head
    assert groups.count((a + qkv, a + out, "matrix", 4)) == 2  # values, per head
    assert (a + "linear1", a + "linear2", "channel", 16) in groups
    assert (f"{a}norm1 {a}linear2", a + "linear1", "norm", 1) in groups
    assert (f"{a}norm2 {b}{out}", b + qkv, "norm", 1) in groups
    assert (b + "norm2", "head", "channel", 8) in groups
    assert (a + out, "", "none", 1) in groups  # its output is added to the model's input
    assert len(groups) == 8 + 7  # the second layer adds to a normalized stream, not to the input


WHY = {
    "sigmoid": "sigmoid between fc1 and fc2 is not positively homogeneous",
    "gelu": "gelu between fc1 and fc2 is not positively homogeneous",
    "silu": "silu between fc1 and fc2 is not positively homogeneous",
    "softplus": "softplus between fc1 and fc2 is not positively homogeneous",
    "elu": "elu between fc1 and fc2 is not positively homogeneous",
    "softmax": "softmax between fc1 and fc2 is not positively homogeneous",
    "exp": "exp between fc1 and fc2 is not positively homogeneous",
    "pow": "pow between fc1 and fc2 is not positively homogeneous",
    "clamp": "clamp between fc1 and fc2 is not positively homogeneous",
    "sort": "sort between fc1 and fc2 is not positively homogeneous",
    "inplace-view": "tanh between fc1 and fc2 is not positively homogeneous",
    "square-by-product": "the product of two activations between fc1 and fc2 is not positively homogeneous",
    "bilinear": "the product of two activations between a, b and c is not positively homogeneous",
    "added-constant": "a constant is added",
    "detached": "it is detached from the gradient",
    "no-grad": "part of it runs without gradients",
    "input-skip": "the model's input is added",
    "shared-without-bias": "it shares a.weight with a layer that reads the model's input",
    "transposed-sharing": "w is used in several ways",
    "hidden-returned": "they reach the model's output",
}


@pytest.mark.parametrize("name", WHY)
def test_a_broken_law_names_what_breaks_it(name: str) -> None:
    model, x = zoo(name)
    groups = trace(model, x, output=0 if name == "hidden-returned" else None).groups
    assert [(group.law, group.why) for group in groups] == [("none", WHY[name])]


LAWS = {
    "relu-by-clamp": ["channel"],
    "relu-by-where": ["channel"],
    "relu-by-product": ["channel"],
    "maximum": ["channel"],
    "negated": ["matrix"],
    "half-tanh": ["channel", "none"],
    "chunks": ["channel", "matrix"],
    "inplace": ["channel"],
    "swiglu": ["none", "channel"],
    "rezero": ["channel"],
    "layer-scale": ["channel", "channel"],
    "einsum": ["matrix"],
    "einsum-relu": ["channel", "matrix", "matrix"],
    "linear-with-bias-add": ["matrix"],
    "positions-linear": ["matrix"],
    "addmm": ["channel"],
    "sliced-weight": ["channel"],
    "explicit-attention": ["none", "matrix", "matrix"],
    "fused-attention": ["matrix"] * 4,
    "vit": ["norm", "channel", "channel", "channel"],
    "linear-convolutions": ["matrix"] * 3,
    "linear-grouped": ["matrix"] * 4,
    "linear-depthwise": ["channel", *["matrix"] * 4],
    "one-channel-flipped": ["matrix", "matrix"],
    "upsample": ["matrix"],
    "mixing-reshape": ["channel"],
    "instance-norm": ["norm", "channel"],
    "batch-norm-plain": ["norm"],
    "query-key-norm": ["norm", "channel", "norm", "matrix"],
}


@pytest.mark.parametrize("name", LAWS)
def test_laws_that_hold_are_found(name: str) -> None:
    model, x = zoo(name)
    assert [group.law for group in trace(model, x).groups] == LAWS[name]


def test_sites_say_where_the_channels_stand() -> None:
    model, x = build("dense")
    first = trace(model, x).groups[0]
    third, head = first.consumers[1:]
    assert (third.parameter, third.axis, third.index) == ("third.weight", 1, ((0,), (1,), (2,)))
    assert head.index == tuple(tuple(range(9 * c, 9 * c + 9)) for c in range(3))
    weight, bias = first.producers
    assert (weight.axis, bias.parameter, bias.layer) == (0, "first.bias", "first")
    torch.testing.assert_close(head.rows(model.head.weight), model.head.weight[0, :27].view(3, 9))  # type: ignore[union-attr, operator, index]
    torch.testing.assert_close(third.rows(model.third.weight), model.third.weight[:, :3].transpose(0, 1).flatten(1))  # type: ignore[union-attr, operator, index]


def test_grouped_convolutions_count_input_channels_through_all_blocks() -> None:
    model, x = build("grouped")
    (site,) = trace(model, x).groups[0].consumers
    weight = model[2].weight.detach()  # type: ignore[index]
    assert weight.shape == (6, 2, 3, 3)
    by_hand = torch.stack([weight[3 * (c // 2) : 3 * (c // 2) + 3, c % 2].flatten() for c in range(4)])
    torch.testing.assert_close(site.rows(weight), by_hand)


@pytest.mark.parametrize("name", ["dense", "grouped", "transposed", "depthwise", "shared", "tokens", "products"])
def test_put_is_the_inverse_of_rows(name: str) -> None:
    model, x = build(name)
    parameters = dict(model.named_parameters())
    for group in trace(model, x).groups:
        for site in (*group.producers, *group.consumers):
            value = parameters[site.parameter]
            rows = torch.randn_like(site.rows(value))
            changed = site.put(value, rows)
            torch.testing.assert_close(site.rows(changed), rows)
            assert int((changed != value).sum()) == rows.numel()
            torch.testing.assert_close(site.put(changed, site.rows(value)), value.detach())


def test_a_parameter_that_does_not_train_has_no_law() -> None:
    model, x = build("mlp")
    model[0].weight.requires_grad_(False)  # type: ignore[index, union-attr]
    first, second = trace(model, x).groups
    assert (first.law, first.why) == ("none", "0.weight does not train")
    assert second.law == "channel"
    model.requires_grad_(False)  # nothing trains: the laws are those it would have
    assert [group.law for group in trace(model, x).groups] == ["channel", "channel"]


def test_frozen_batch_normalization_breaks_the_law_in_front_of_it() -> None:
    model, x = build("batchnorm")
    model[1].eval()  # type: ignore[index]
    first, second = trace(model, x).groups
    assert (first.law, first.why) == ("none", "1 shifts by frozen statistics")
    assert second.law == "channel"


def test_tied_modules_are_one_parameter() -> None:
    layer = nn.Linear(5, 5)
    model = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), layer, nn.ReLU(), layer, nn.ReLU(), nn.Linear(5, 2))
    (group,) = trace(model, torch.randn(3, 5)).groups
    assert short(group) == ("0 2", "2 6", "channel", 5)
