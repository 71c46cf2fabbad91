"""log Z of the output, token by token."""

import math

import pytest
import torch

import excite
from excite.probes import LogNormalizer
from excite.probes.base import StepContext
from excite.probes.vital_signs.log_normalizer import log_normalizer
from transformer_zoo import NAMES, captured, make


@pytest.mark.parametrize("name", NAMES)
def test_log_z_is_that_of_a_slow_version(name):
    zoo = make(name)
    _, _, returned = captured(zoo.model, [], zoo.example)
    logits = (returned if isinstance(returned, torch.Tensor) else returned.logits)[:2]
    each = [math.log(sum(map(math.exp, row))) for row in logits.flatten(0, -2).tolist()]
    found = LogNormalizer().measure(StepContext(zoo.model, 0, example=zoo.example))
    expected = {"mean": sum(each) / len(each), "largest": max(map(abs, each))}
    assert {key: float(value) for key, value in found.items()} == pytest.approx(expected, rel=1e-10)


def test_padding_does_not_count():
    logits, tokens = torch.randn(2, 3, 4).double(), torch.tensor([[0, 1, 1], [1, 1, 1]])
    mean, largest = log_normalizer(logits, tokens)
    each = torch.logsumexp(logits[tokens.bool()], -1)
    assert (float(mean), float(largest)) == pytest.approx((float(each.mean()), float(each.abs().max())), rel=1e-12)


def test_a_model_without_logits_is_refused():
    from transformers import BertConfig, BertModel

    model = BertModel(
        BertConfig(num_hidden_layers=1, num_attention_heads=2, hidden_size=8, intermediate_size=8, vocab_size=9)
    )
    with pytest.raises(excite.ModelError, match="not a tensor"):
        LogNormalizer().attach(StepContext(model, 0, example=torch.randint(9, (2, 4))))
