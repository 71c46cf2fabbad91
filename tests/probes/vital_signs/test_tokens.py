"""Places at even distances in a sequence."""

import pytest
import torch

from excite.probes.vital_signs.tokens import PLACES, at_places, even_places, token_mask


@pytest.mark.parametrize(("count", "most"), [(257, 256), (1024, 256), (1000, 7), (130, 128), (3, 2)])
def test_places_are_spread_from_the_first_to_the_last(count, most):
    places = even_places(count, most).tolist()
    exact = [i * (count - 1) / (most - 1) for i in range(most)]
    assert (places[0], places[-1], len(set(places))) == (0, count - 1, most)
    assert all(abs(a - b) <= 0.5 for a, b in zip(places, exact))


def test_short_sequences_are_taken_whole():
    assert even_places(PLACES) is None
    x = torch.randn(2, 3)
    assert at_places(x, None, 1) is x
    assert at_places(x[:, :1], torch.tensor([0, 2]), 1).shape == (2, 1)  # expanded along this axis
    assert torch.equal(at_places(x, torch.tensor([0, 2]), 1), x[:, [0, 2]])


def test_masks_are_those_of_a_tokenizer():
    mask = torch.ones(2, 3)
    assert token_mask({"attention_mask": mask}) is mask
    assert token_mask({"attention_mask": torch.ones(2, 1, 3, 3)}) is None
    assert token_mask(mask) is None
