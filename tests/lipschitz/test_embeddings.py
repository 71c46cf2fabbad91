"""Models of token ids as functions of their embeddings: Jacobians, margins of a closed form, and what is refused."""

import pytest
import torch
from torch import nn

import excite
from excite.errors import InputError, ModelError
from excite.lipschitz import from_embeddings
from excite.train.models.gpt import GPT


def decoder():
    torch.manual_seed(0)
    return GPT(11, 8, 2, 2, 5).double(), torch.randint(11, (3, 5))


def test_it_is_the_model_at_the_embeddings_of_the_ids():
    model, ids = decoder()
    g, e = from_embeddings(model, ids)
    assert g.embedding == "tokens"
    assert torch.equal(g(e), model(ids))
    assert not model.tokens._forward_hooks
    other = torch.randint(11, (3, 5))
    assert torch.equal(g(model.tokens(other)), model(other))


def test_constants_are_those_of_explicit_jacobians():
    model, ids = decoder()
    g, e = from_embeddings(model, ids)
    found = excite.lipschitz.local(g, e)
    last = excite.lipschitz.local(g, e, output=lambda logits: logits[:, -1])
    for row in range(3):
        whole = torch.autograd.functional.jacobian(lambda one: g(one[None])[0], e[row]).reshape(55, 40)
        assert found[row].item() == pytest.approx(torch.linalg.matrix_norm(whole, 2).item(), rel=1e-10)
        assert last[row].item() == pytest.approx(torch.linalg.matrix_norm(whole[-11:], 2).item(), rel=1e-10)


def test_the_first_token_depends_on_the_first_embedding_alone():
    model, ids = decoder()
    g, e = from_embeddings(model, ids)
    moved = e.clone()
    moved[:, 1:] += 1.0
    assert torch.equal(g(moved)[:, 0], g(e)[:, 0])


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(9, 4), nn.Linear(4, 2)

    def forward(self, ids):
        return {"logits": self.head(self.tokens(ids).mean(1))}


@pytest.mark.slow
def test_margins_of_a_linear_text_classifier_have_a_closed_form():
    torch.manual_seed(0)
    model, ids = Bag().double(), torch.randint(9, (6, 5))
    g, e = from_embeddings(model, ids, pick=lambda out: out["logits"])
    logits = g(e)
    y = logits.argmax(1)
    # The difference of logits is w·mean(e_t): its gradient in all embeddings has the norm ‖w‖/√T.
    weight = (model.head.weight[0] - model.head.weight[1]).norm() / 5**0.5
    expected = (logits[:, 0] - logits[:, 1]).abs() / weight
    found = excite.margins(g, e, y, norm="2").values
    assert found.tolist() == pytest.approx(expected.tolist(), rel=1e-3)


def test_what_has_no_embeddings_is_refused():
    model, ids = decoder()
    with pytest.raises(InputError, match="no module 'words'; embeddings: tokens, positions"):
        from_embeddings(model, ids, "words")
    with pytest.raises(InputError, match="expected whole numbers"):
        from_embeddings(model, ids.double())
    with pytest.raises(ModelError, match="no embedding module reads the ids"):
        from_embeddings(model, ids, "positions")
