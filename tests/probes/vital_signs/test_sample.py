"""The pass over a few sequences that vital signs share."""

import pytest
import torch
from torch import nn

import excite
from excite.probes.base import StepContext
from excite.probes.vital_signs.sample import few_sequences, logits_of, sample_pass
from models import same_state, state_of
from transformer_zoo import NAMES, make


@pytest.mark.parametrize("name", NAMES)
def test_the_model_is_left_as_it_was(name):
    zoo = make(name)
    before, random = state_of(zoo.model), torch.get_rng_state()
    sample_pass(StepContext(zoo.model, 0, example=zoo.example))
    assert same_state(before, state_of(zoo.model))
    assert torch.equal(random, torch.get_rng_state())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in zoo.model.modules())


def test_one_pass_serves_all_probes():
    zoo = make("kernel")
    calls = []
    zoo.model.register_forward_hook(lambda *given: calls.append(1))
    ctx = StepContext(zoo.model, 0, example=zoo.example)
    assert sample_pass(ctx) is sample_pass(ctx)
    assert len(calls) == 1


def test_only_tensors_with_the_batch_in_front_are_shortened():
    batch = {"ids": torch.zeros(5, 3), "positions": torch.zeros(1, 3), "flag": True}
    few = few_sequences(batch, 2)
    assert (few["ids"].shape, few["positions"].shape, few["flag"]) == ((2, 3), (1, 3), True)


def test_a_model_that_fails_on_few_sequences_is_named():
    class Fixed(nn.Module):
        def forward(self, x):
            return x.view(5, 3)

    with pytest.raises(excite.ModelError, match="does not run on 2 sequences of the example: RuntimeError"):
        sample_pass(StepContext(Fixed(), 0, example=torch.zeros(5, 3)))


def test_logits_need_classes():
    assert logits_of({"logits": torch.zeros(2, 3)}).shape == (2, 3)
    one = torch.tensor([[1.5], [-2.0]])
    log_z = logits_of(one).logsumexp(-1)  # two classes: −log of the probability of the first
    assert torch.allclose(log_z, -torch.log(1 - one.sigmoid())[:, 0])
    with pytest.raises(excite.ModelError, match="one number per class"):
        logits_of(torch.zeros(2, 0))
