"""The GPT of the studies: causal, and with QK-norm independent of the size of queries and keys."""

import pytest
import torch

from excite.train.models.gpt import GPT


@pytest.mark.parametrize("qk_norm", [False, True])
def test_logits_depend_on_earlier_tokens_only(qk_norm):
    torch.manual_seed(0)
    model = GPT(11, 8, 2, 2, 6, qk_norm).double()
    ids = torch.randint(11, (2, 6))
    changed = ids.clone()
    changed[:, 4] = (ids[:, 4] + 1) % 11
    same, moved = model(ids) - model(changed), slice(4, None)
    assert not same[:, :4].any()
    assert same[:, moved].abs().amin(-1).gt(0).all()


@pytest.mark.parametrize("qk_norm", [False, True])
def test_with_qk_norm_the_size_of_queries_does_not_matter(qk_norm):
    torch.manual_seed(0)
    model = GPT(11, 8, 1, 2, 6, qk_norm).double()
    ids = torch.randint(11, (2, 6))
    before = model(ids)
    model.blocks[0].attention.qkv.weight.data[:8] *= 50.0
    change = (model(ids) - before).abs().max()
    assert (change < 1e-9) == qk_norm


def test_it_has_about_ten_million_weights_at_scale_paper():
    with torch.device("meta"):
        model = GPT(256, 384, 6, 6, 128)
    blocks = 6 * (12 * 384**2 + 4 * 384)  # four matrices, and weight and bias of two normalizations
    assert sum(p.numel() for p in model.parameters()) == (256 + 128 + 256) * 384 + blocks + 2 * 384
