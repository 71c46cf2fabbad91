"""Rank within and over sequences, from eigenvalues by numpy."""

import numpy as np
import pytest
import torch

import excite
from excite.probes import TokenRank
from excite.probes.base import StepContext
from transformer_zoo import NAMES, captured, make


def slow(rows):
    eigenvalues = np.linalg.svd(rows - rows.mean(0), compute_uv=False) ** 2
    p = eigenvalues / eigenvalues.sum()
    p = p[p > 1e-15]
    return float(np.exp(-(p * np.log(p)).sum()))


@pytest.mark.parametrize("name", NAMES)
def test_ranks_are_those_of_a_slow_version(name):
    zoo = make(name)
    _, outputs, _ = captured(zoo.model, zoo.blocks, zoo.example)
    expected = {}
    for path in zoo.blocks:
        x = outputs[path].detach().numpy()
        expected[f"within/{path}"] = np.mean([slow(one) for one in x])
        expected[f"between/{path}"] = slow(x.mean(1))
    found = TokenRank().measure(StepContext(zoo.model, 0, example=zoo.example))
    assert {key: float(value) for key, value in found.items()} == pytest.approx(expected, rel=1e-9)


def test_padding_does_not_count():
    zoo = make("gpt2")
    mask = torch.ones_like(zoo.example)
    mask[1, :3] = 0
    example = {"input_ids": zoo.example, "attention_mask": mask}
    _, outputs, _ = captured(zoo.model, zoo.blocks, example)
    found = TokenRank().measure(StepContext(zoo.model, 0, example=example))
    x = outputs[zoo.blocks[0]].detach().numpy()
    kept = [one[row.numpy().astype(bool)] for one, row in zip(x, mask)]
    assert float(found["within/transformer.h.0"]) == pytest.approx(np.mean([slow(one) for one in kept]), rel=1e-9)
    assert float(found["between/transformer.h.0"]) == pytest.approx(
        slow(np.stack([one.mean(0) for one in kept])), rel=1e-9
    )


def test_ranks_tell_equal_tokens_from_equal_sequences():
    from excite.probes.vital_signs.token_rank import sequence_means, without_padding

    vectors = torch.randn(6, 5).double()
    tokens_alike = vectors[:, None, :].expand(6, 9, 5)  # every sequence is one vector
    sequences_alike = torch.randn(9, 5).double().expand(6, 9, 5)
    assert float(without_padding(tokens_alike)[0].var(0).sum()) == pytest.approx(0, abs=1e-20)
    assert excite.probes.effective_rank(sequence_means(tokens_alike)) > 2
    assert float(sequence_means(sequences_alike).var(0).sum()) == pytest.approx(0, abs=1e-20)
    assert excite.probes.effective_rank(without_padding(sequences_alike)[0]) > 2


@pytest.mark.parametrize("sequences", [0, -1, 2.5, "all"])
def test_sequences_that_are_no_count_are_refused(sequences):
    with pytest.raises(excite.InputError, match="TokenRank: sequences"):
        TokenRank(sequences=sequences)


def test_a_model_without_blocks_is_refused():
    with pytest.raises(excite.ModelError, match="expected blocks"):
        TokenRank().attach(StepContext(torch.nn.Linear(3, 2), 0, example=torch.randn(4, 3)))
