"""σ₁ of W_Q W_Kᵀ, from the whole matrix of the size of the model."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import excite
from excite.probes import AttentionSpectrum
from excite.probes.base import StepContext
from excite.probes.vital_signs.attention_spectrum import _Rows
from transformer_zoo import NAMES, make


def weights_of(module):
    """(heads, channels, width) of queries and of the key of every query head."""
    kind = type(module).__name__
    if kind == "GPT2Attention":
        q, k, _ = module.c_attn.weight.T.split(module.embed_dim)
        heads, groups = module.num_heads, module.num_heads
    elif kind == "HandAttention":
        q, k, _ = module.qkv.weight.chunk(3)
        heads, groups = module.heads, module.heads
    else:
        q, k = (
            (getattr(module, a) if hasattr(module, a) else getattr(module, b)).weight
            for a, b in (("query", "q_proj"), ("key", "k_proj"))
        )
        config = module.config
        heads, groups = config.num_attention_heads, getattr(config, "num_key_value_heads", config.num_attention_heads)
    q, k = q.detach().unflatten(0, (heads, -1)), k.detach().unflatten(0, (groups, -1))
    return q.numpy(), np.stack([k[i * groups // heads].numpy() for i in range(heads)])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_norms_are_those_of_the_whole_matrix(name):
    zoo = make(name)
    probe = AttentionSpectrum()
    probe.attach(StepContext(zoo.model, 0, example=zoo.example))
    found = probe.measure(StepContext(zoo.model, 0, example=zoo.example))
    modules = dict(zoo.model.named_modules())
    expected = {}
    for path in zoo.attention:
        for head, (q, k) in enumerate(zip(*weights_of(modules[path]))):
            expected[f"sigma/{path}/head{head}"] = np.linalg.svd(q.T @ k, compute_uv=False)[0]
    expected["sigma"] = max(expected.values())
    assert dict(found) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_those_of_the_index(name):
    zoo = make(name)
    weights = dict(zoo.model.named_parameters())
    for one in excite.trace(
        zoo.model, zoo.example, output="logits" if hasattr(zoo.model, "config") else None
    ).attentions:
        for projection in (one.query, one.key):
            weight = weights[projection.parameter]
            rows = _Rows(weight, projection, range(len(projection.index)))
            assert rows._view is not None
            assert torch.equal(rows.rows(), projection.heads(weight))
            with torch.no_grad():
                weight.add_(1)  # as by a step
            assert torch.equal(rows.rows(), projection.heads(weight))


def test_rows_that_are_not_evenly_spaced_are_indexed():
    (one,) = excite.trace(
        nn.MultiheadAttention(8, 2, batch_first=True), (torch.randn(2, 3, 8),) * 3, output=0
    ).attentions
    weight = torch.randn(24, 8)
    projection = replace(one.query, index=((0, 1, 2, 3), (5, 4, 6, 7)))
    rows = _Rows(weight, projection, (1, 0))
    assert rows._view is None
    assert torch.equal(rows.rows(), projection.heads(weight).flip(0))


class LowRank(nn.Module):
    """A projection with an adapter whose weight is computed on the fly."""

    def __init__(self, linear):
        super().__init__()
        self.linear, self.down, self.up = linear, nn.Linear(8, 2, bias=False), nn.Linear(2, 24, bias=False)

    def forward(self, x):
        return self.linear(x) + self.up(self.down(x))


def test_weights_that_cannot_be_told_are_named_once():
    zoo = make("kernel")
    zoo.model.blocks[1].attention.qkv = LowRank(zoo.model.blocks[1].attention.qkv).double()
    probe = AttentionSpectrum()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        probe.attach(StepContext(zoo.model, 0, example=zoo.example))
    (said,) = [str(one.message) for one in caught if "cannot be determined" in str(one.message)]
    assert "blocks.1.attention" in said
    assert {name.split("/")[1] for name in probe.measure(StepContext(zoo.model, 0)) if "/" in name} == {
        "blocks.0.attention"
    }


class Quantized(nn.Module):
    """Whole numbers with one scale per row, multiplied out in the forward pass."""

    def __init__(self, linear):
        super().__init__()
        weight = linear.weight.detach()
        self.register_buffer("scale", weight.abs().amax(1, keepdim=True) / 127)
        self.rounded = nn.Parameter((weight / self.scale).round().to(torch.int8), requires_grad=False)
        self.bias = linear.bias

    def forward(self, x):
        return nn.functional.linear(x, self.rounded.to(x.dtype) * self.scale, self.bias)


def test_quantized_weights_are_named_and_not_measured():
    zoo = make("kernel")
    zoo.model.blocks[1].attention.qkv = Quantized(zoo.model.blocks[1].attention.qkv)
    probe = AttentionSpectrum()
    with pytest.warns(UserWarning, match=r"of blocks\.1\.attention cannot be determined"):
        probe.attach(StepContext(zoo.model, 0, example=zoo.example))
    assert not any("blocks.1" in name for name in probe.measure(StepContext(zoo.model, 0)))


def test_a_model_without_attention_is_refused():
    with pytest.raises(excite.ModelError, match="no weights of queries and keys"):
        AttentionSpectrum().attach(StepContext(nn.Sequential(nn.Linear(3, 2)), 0, example=torch.randn(4, 3)))
