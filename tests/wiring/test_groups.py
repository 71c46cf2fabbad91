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
    "gated": [("gate", "down", "channel", 6), ("up", "down", "channel", 6), ("down", "head", "channel", 4)],
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
    "root": "pow between fc1 and fc2 is not positively homogeneous",
    "clamp": "clamp between fc1 and fc2 is not positively homogeneous",
    "sort": "sort between fc1 and fc2 has no column 'channels' in the operator table",
    "inplace-view": "tanh between fc1 and fc2 is not positively homogeneous",
    "square-and-itself": "the product of two activations between fc1 and fc2 is not positively homogeneous",
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
    "geglu": ["none", "channel"],
    "glu": ["channel", "none"],
    "glu-convolution": ["channel", "none"],
    "divided": ["channel", "none"],
    "rezero": ["channel"],
    "layer-scale": ["channel", "channel"],
    "einsum": ["matrix"],
    "einsum-relu": ["channel", "matrix", "matrix"],
    "linear-with-bias-add": ["matrix"],
    "positions-linear": ["matrix"],
    "addmm": ["channel"],
    "sliced-weight": ["channel"],
    "explicit-attention": ["matrix"] * 4,
    "einsum-attention": ["matrix"] * 4,
    "grouped-attention": ["matrix"] * 4,
    "linear-attention": ["channel"] * 4,
    "written-rms-norm": ["norm", "channel", "channel"],
    "written-rms-norm-by-product": ["norm", "channel", "channel"],
    "written-layer-norm": ["norm", "channel", "channel"],
    "written-by-variance": ["norm", "channel", "channel"],
    "written-by-deviation": ["norm", "channel", "channel"],
    "unit-length": ["norm", "channel", "channel"],
    "statistic-read-twice": ["none"],
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


def counted(name: str) -> list[tuple[str, str, str]]:
    def side(sites: tuple[Site, ...]) -> str:
        return " ".join(
            dict.fromkeys(site.layer if site.times == 1 else f"{site.times}·{site.layer}" for site in sites)
        )

    return [(side(g.producers), side(g.consumers), g.why) for g in trace(*zoo(name)).groups if g.law == "channel"]


PRODUCTS = {
    "reglu": [("gate", "down", "through relu, a product"), ("up", "down", "through a product")],
    "bilinear": [("a", "c", "through a product"), ("b", "c", "through a product")],
    "bilinear-relu-after": [("gate", "down", "through a product, relu"), ("up", "down", "through a product, relu")],
    "gated-convolution": [("a", "c", "through relu, a product, max_pool2d"), ("b", "c", "through a product, max_pool2d")],
    "shared-gate": [
        ("gate", "down side", "through relu, a product"),
        ("up", "down", "through a product"),
        ("up2", "side", "through a product"),
    ],
    "one-gate-for-all": [("gate", "down", "through relu, a product"), ("up", "down", "through a product")],
    "product-chain": [
        ("a", "d", "through relu, a product"),
        ("b", "d", "through a product"),
        ("c", "d", "through a product"),
    ],
    "product-and-linear": [("a c", "d", "through a product"), ("b c", "d", "through a product")],
    "product-output": [("a", "b", "against each other, through relu, a product")],
    "product-tanh": [("gate", "up", "against each other, through relu, a product")],
    "square-by-product": [("fc1", "2·fc2", "through a product")],
    "pow": [("fc1", "2·fc2", "through pow")],
    "cube": [("fc1", "3·fc2", "through relu, pow")],
    "square-minus-product": [("a 2·b", "2·c", "through pow")],
    "glu": [("0", "2", "through glu")],
}  # fmt: skip


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_activations_have_a_law_for_each_factor(name: str) -> None:
    """relu(W₁x) · (W₂x), read by W₃: rows of W₁ against columns of W₃, rows of W₂ against columns of W₃. A factor that occurs twice
    counts its readers twice; where the product may not scale, its factors balance each other."""
    assert counted(name) == PRODUCTS[name]


def test_what_reads_a_product_without_a_law_is_named() -> None:
    groups = trace(*zoo("product-tanh")).groups
    assert [(short(g)[:3], g.why) for g in groups if g.law == "none"] == [
        (("gate up", "down", "none"), "tanh between gate, up and down is not positively homogeneous")
    ]
    (none,) = [g for g in trace(*zoo("divided")).groups if g.law == "none"]
    assert none.why == "a constant is added"


def test_laws_of_products_are_left_out_of_cuts() -> None:
    wiring = trace(*zoo("reglu"))
    assert wiring.cuts() == ()
    assert "gate → down" in str(wiring)
    assert "fc1 → 2·fc2" in str(trace(*zoo("square-by-product")))


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


def test_grouped_convolutions_count_inputs_through_all_blocks() -> None:
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


def test_frozen_batch_norm_breaks_the_law_in_front_of_it() -> None:
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
