"""Logits of the attention kernel, against the kernel itself."""

import math

import pytest
import torch
import torch.nn.functional as F

from excite.probes.vital_signs.attention_calls import attention_logits, attention_signs


@pytest.mark.parametrize("mask", ["none", "bool", "float"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("groups", "scale"), [(4, None), (2, 0.3), (1, None)])
def test_logits_reproduce_the_kernel(mask, causal, groups, scale):
    if causal and mask != "none":
        pytest.skip("the kernel takes one of them")
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(2, 4, 5, 3).double(),
        torch.randn(2, groups, 6, 3).double(),
        torch.randn(2, groups, 6, 3).double(),
    )
    given = {"none": None, "bool": torch.rand(5, 6) < 0.8, "float": torch.randn(5, 6).double()}[mask]
    logits = attention_logits(q, k, given, causal, scale)
    expected = F.scaled_dot_product_attention(q, k, v, given, is_causal=causal, scale=scale, enable_gqa=True)
    assert torch.allclose(logits.softmax(-1) @ v.repeat_interleave(4 // groups, 1), expected, rtol=1e-12, atol=1e-12)


def test_queries_that_attend_to_nothing_do_not_count():
    logits = torch.tensor([[[[0.0, 0.0], [-math.inf, -math.inf], [3.0, -3.4e38]]]]).double()
    largest, entropy = attention_signs(logits)
    assert float(largest) == 3.0
    assert float(entropy) == pytest.approx(math.log(2) / 2, rel=1e-12)
    largest, entropy = attention_signs(logits, torch.tensor([[1, 1, 0]]))
    assert (float(largest), float(entropy)) == (0.0, pytest.approx(math.log(2), rel=1e-12))
