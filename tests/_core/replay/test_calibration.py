"""Where samples lie inside a model, found from batches whose samples are equal."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import excite
from models import build

FOLDED = ["folded", "folded-time-first", "transformer-time-first"]


class Net(nn.Module):
    """Two layers over (B, T, D), with time folded into the batch in one way or the other, or not at all (fold="")."""

    def __init__(self, fold, tokens=False, dropout=0.0, repeats=False):
        super().__init__()
        self.fold, self.repeats = fold, repeats
        self.embed = nn.Embedding(7, 4) if tokens else nn.Identity()
        self.enter, self.hidden, self.leave = nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(15, 1)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        x = self.embed(x)
        if self.repeats:  # all times are equal, whatever the data
            x = x[:, :1].expand(-1, 3, -1)
        batch, time = x.shape[:2]
        if self.fold == "TB":
            x = x.transpose(0, 1).reshape(time * batch, -1)
        elif self.fold == "BT":
            x = x.reshape(batch * time, -1)
        h = self.hidden(self.dropout(F.relu(self.enter(x))))
        if self.fold == "TB":
            h = h.view(time, batch, -1).transpose(0, 1)
        return self.leave(h.reshape(batch, -1))


def pair(fold, **more):
    """The model folded and unfolded, with the same weights."""
    torch.manual_seed(0)
    folded = Net(fold, **more).double()
    plain = copy.deepcopy(folded)
    plain.fold = ""
    return folded, plain


def extremes(model, x, **more):
    return torch.stack(excite.PersistentExcitation(model, radius=0.1, **more).extremes(x)).detach()


def constants(x):
    if not x.is_floating_point():
        return [torch.zeros_like(x), torch.full_like(x, 3)]
    return [torch.zeros_like(x), torch.ones_like(x), x[:1, :1].expand_as(x).clone()]


@pytest.mark.parametrize("norm", ["inf", "2"])
@pytest.mark.parametrize("name", FOLDED)
def test_a_constant_first_batch_does_not_change_the_next(name, norm):
    model, x = build(name)
    expected = extremes(model, x, norm=norm)
    for first in constants(x):
        pe = excite.PersistentExcitation(model, radius=0.1, norm=norm)
        pe.extremes(first)
        assert torch.equal(torch.stack(pe.extremes(x)).detach(), expected)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("fold", ["BT", "TB"])
def test_extremes_of_equal_samples_are_those_without_folding(fold, tokens, repeats, batch):
    folded, plain = pair(fold, tokens=tokens, repeats=repeats)
    x = torch.randint(7, (batch, 3)) if tokens else torch.randn(batch, 3, 4, dtype=torch.float64)
    for one in [*constants(x), x]:
        for norm in ("inf", "2"):
            expected = extremes(plain, one, norm=norm)
            torch.testing.assert_close(extremes(folded, one, norm=norm), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("fold", ["BT", "TB"])
def test_a_layer_with_all_units_off_does_not_judge_its_readers(fold):
    folded, plain = pair(fold)
    x = torch.randn(4, 3, 4, dtype=torch.float64)
    with torch.no_grad():
        for model in (folded, plain):
            model.enter.bias.fill_(-1e3)
    pe = excite.PersistentExcitation(folded, radius=0.1)
    torch.testing.assert_close(torch.stack(pe.extremes(x)), torch.stack(_plain(plain, x)), rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        for model in (folded, plain):
            model.enter.bias.fill_(0.1)
    torch.testing.assert_close(torch.stack(pe.extremes(x)), torch.stack(_plain(plain, x)), rtol=1e-12, atol=1e-12)


def _plain(model, x):
    return excite.PersistentExcitation(model, radius=0.1).extremes(x)


@pytest.mark.parametrize("layers", ["input", "all"])
@pytest.mark.parametrize("fold", ["BT", "TB"])
def test_dropout_masks_are_laid_out_like_the_samples(fold, layers):
    """The two passes of one perturbation, at radius 0, must have the masks of the clean pass: so both halves are equal."""
    folded, _ = pair(fold, dropout=0.5)
    x = torch.randn(4, 3, 4, dtype=torch.float64)
    folded.train()
    pe = excite.PersistentExcitation(folded, radius=1e-9, layers=layers)
    for one in (torch.zeros_like(x), x):
        low, high = pe.extremes(one)
        assert float((high - low).detach().abs().max()) < 1e-6
        assert float(low.detach().std()) > 1e-3 or not one.any()


def test_what_marks_show_is_cached_and_leaves_no_trace():
    folded, _ = pair("TB")
    x = torch.zeros(4, 3, 4, dtype=torch.float64)
    calls = []
    folded.register_forward_hook(lambda *_: calls.append(1))
    pe = excite.PersistentExcitation(folded, radius=0.1, steps=2)
    state = torch.get_rng_state()
    pe.extremes(x)
    assert torch.equal(state, torch.get_rng_state())
    first = len(calls)
    calls.clear()
    pe.extremes(x)
    assert len(calls) < first
    calls.clear()
    pe.extremes(torch.randn_like(x))
    again = len(calls)
    fresh = excite.PersistentExcitation(folded, radius=0.1, steps=2)
    fresh.extremes(torch.randn_like(x))
    calls.clear()
    fresh.extremes(torch.randn_like(x))
    assert again == len(calls)


def test_a_layout_that_marks_cannot_tell_is_looked_for_again():
    """The folded layer has no influence on the output yet."""
    folded, plain = pair("TB")
    x = torch.randn(4, 3, 4, dtype=torch.float64)

    class Sum(nn.Module):
        def __init__(self, part):
            super().__init__()
            self.part, self.side, self.scale = part, nn.Linear(12, 1, dtype=torch.float64), 0.0

        def forward(self, x):
            return self.side(x.flatten(1)) + self.scale * self.part(x)

    torch.manual_seed(1)
    models = Sum(folded), Sum(plain)
    models[1].load_state_dict(models[0].state_dict())
    pe = excite.PersistentExcitation(models[0], radius=0.1)
    pe.extremes(torch.zeros_like(x))
    for model in models:
        model.scale = 1.0
    torch.testing.assert_close(torch.stack(pe.extremes(x)), torch.stack(_plain(models[1], x)), rtol=1e-12, atol=1e-12)


def test_it_says_where_it_cannot_tell():
    """A model that mixes samples: marks never give twice what they give in the clean pass."""

    class Mixed(Net):
        def forward(self, x):
            return super().forward(x) + self.enter(x.transpose(0, 1).flatten(0, 1)).relu().sum()

    torch.manual_seed(0)
    model = Mixed("TB").double()
    pe = excite.PersistentExcitation(model, radius=0.1)
    with pytest.warns(UserWarning, match="cannot tell how samples lie in the input of enter"):
        pe.extremes(torch.zeros(4, 3, 4, dtype=torch.float64))
    assert not pe._known_layouts
