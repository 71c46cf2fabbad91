"""Losses with a label for each token, at embeddings, residual stream and affine layers: against cross-entropy and brute force."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import excite
from excite.errors import InputError, ModelError
from excite.excitation.adversarial.ascent import HiddenOptions
from excite.train.models.gpt import GPT

EMBEDDED, STREAM = "tokens:output", "mix:output"


class TinyDecoder(nn.Module):
    """Tokens (B, T) to logits (B, T, 3) over a stream of width 2, in which a token sees those before it."""

    def __init__(self, fold: bool = False):
        super().__init__()
        self.fold = fold
        self.tokens = nn.Embedding(3, 2)
        self.mix = nn.Linear(2, 2)
        self.head = nn.Linear(2, 3)

    def forward(self, ids, attention_mask=None):
        x = self.tokens(ids)
        seen = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        hidden = torch.tanh(self.mix(seen.reshape(-1, 2) if self.fold else seen))
        return self.head(hidden).reshape(*ids.shape, 3)


def tiny(fold=False, seed=0):
    torch.manual_seed(seed)
    return TinyDecoder(fold).double()


IDS, LABELS = torch.tensor([[0, 1], [2, 1], [1, 1]]), torch.tensor([[1, 2], [-100, 0], [2, -100]])


def adversarial(model, **options):
    return excite.AdversarialTraining(
        model,
        0.0,
        targets="tokens",
        loss="cross-entropy",
        **{"hidden": HiddenOptions(norm="2"), "layers": [EMBEDDED], **options},
    )


@pytest.mark.parametrize("targets", ["tokens", "next-token"])
@pytest.mark.parametrize("kind", ["excitation", "adversarial"])
def test_at_radius_0_it_is_cross_entropy_bit_by_bit(targets, kind):
    torch.manual_seed(1)
    model, ids = GPT(17, 8, 2, 2, 12), torch.randint(17, (5, 12))
    labels = torch.where(torch.rand(5, 12) < 0.3, -100, torch.randint(17, (5, 12)))
    make = excite.PersistentExcitation if kind == "excitation" else excite.AdversarialTraining
    loss = make(model, 0.0, targets=targets, loss="cross-entropy").loss(ids, labels)
    logits = model(ids)
    output, wanted = (logits, labels) if targets == "tokens" else (logits[:, :-1], labels[:, 1:])
    expected = F.cross_entropy(output.flatten(0, 1), wanted.flatten(), ignore_index=-100)
    assert loss.item() == expected.item()
    for own, other in zip(*(torch.autograd.grad(one, list(model.parameters())) for one in (loss, expected))):
        assert torch.equal(own, other)


def at(model, moves, ids):
    """Logits with the outputs of modules moved, by hooks."""
    handles = [
        getattr(model, name.split(":")[0]).register_forward_hook(lambda m, a, out, d=d: out + d)
        for name, d in moves.items()
    ]
    try:
        return model(ids)
    finally:
        for handle in handles:
            handle.remove()


def worst_by_brute_force(model, ids, labels, radii, angles):
    """The largest mean loss of one sequence over perturbations of the given length for each token and site."""
    turns = torch.linspace(0, 2 * math.pi, angles + 1, dtype=torch.float64)[:-1]
    unit = torch.stack([turns.cos(), turns.sin()], 1)
    places = list(itertools.product(radii, range(ids.shape[1])))
    choices = torch.cartesian_prod(*[torch.arange(angles)] * len(places)).reshape(-1, len(places))
    moves = {name: torch.zeros(len(choices), ids.shape[1], 2, dtype=torch.float64) for name in radii}
    for column, (name, token) in enumerate(places):
        moves[name][:, token] = radii[name] * unit[choices[:, column]]
    with torch.no_grad():
        logits = at(model, moves, ids.expand(len(choices), -1))
    losses = F.cross_entropy(
        logits.transpose(1, 2), labels.expand(len(choices), -1), reduction="none", ignore_index=-100
    )
    return float((losses.sum(1) / (labels != -100).sum()).max())


@pytest.mark.parametrize(("sites", "angles"), [((EMBEDDED,), 60), ((EMBEDDED, STREAM), 12)])
def test_the_joint_search_finds_what_brute_force_finds(sites, angles):
    model = tiny()
    torch.manual_seed(3)
    steps, hidden = 100, HiddenOptions(norm="2", random_start=True)
    found = adversarial(model, layers=list(sites), hidden_radius=0.3, steps=steps, keep_best=True, hidden=hidden)
    with torch.no_grad():
        worst = found.all_perturbations(IDS, LABELS)
        logits = at(model, worst, IDS)
    assert set(worst) == set(sites)
    losses = F.cross_entropy(logits.transpose(1, 2), LABELS, reduction="none", ignore_index=-100).sum(1)
    losses = losses / (LABELS != -100).sum(1)
    for row in range(len(IDS)):
        radii = {name: float(found_radius(model, name, 0.3)) for name in sites}
        best = worst_by_brute_force(model, IDS[row : row + 1], LABELS[row : row + 1], radii, angles)
        # Where the gain is nearly linear, an angle off by θ costs θ²/2 of it. The grid is off by half a cell. Steps of 2.5/n along the
        # circle turn the angle that is left by a factor of 1 − 2.5/n each: from at most π to π e^{-2.5} after n of them.
        clean = F.cross_entropy(model(IDS[row][None])[0], LABELS[row], ignore_index=-100).item()
        missed = [(best - clean) * angle**2 / 2 for angle in (math.pi / angles, math.pi * math.exp(-2.5))]
        assert best - missed[1] <= float(losses[row]) <= best + missed[0]


def found_radius(model, name, relative):
    """ρ times the root mean square of ‖h‖₂ over the tokens of the batch."""
    kept = []
    handle = getattr(model, name.split(":")[0]).register_forward_hook(lambda m, a, out: kept.append(out.detach()))
    model(IDS)
    handle.remove()
    return relative * kept[0].square().sum(-1).mean().sqrt()


@pytest.mark.parametrize("fold", [False, True])
def test_every_token_has_a_ball_of_its_own(fold):
    model = tiny(fold)
    found = adversarial(model, layers=[EMBEDDED, "mix"], hidden_radius=0.1, steps=5).all_perturbations(
        IDS, LABELS[:1].expand(3, 2)
    )
    lengths = found[EMBEDDED].norm(dim=-1)
    radius = found_radius(model, EMBEDDED, 0.1)
    assert bool((lengths <= radius * (1 + 1e-12)).all())
    assert bool((lengths > 0.9 * radius).all())  # each of them uses its own
    assert found["mix"].shape == ((6, 2) if fold else (3, 2, 2))


def test_a_folded_layer_is_perturbed_as_one_that_is_not():
    losses = [
        adversarial(tiny(fold), layers=["mix", "head", EMBEDDED], hidden_radius=0.2, steps=3).loss(IDS, LABELS).item()
        for fold in (False, True)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


@pytest.mark.parametrize("random", [False, True])
def test_only_prompt_tokens_are_perturbed_and_no_padding(random):
    labels = torch.tensor([[-100, 2], [-100, 0], [-100, 1]])
    mask = torch.tensor([[1, 1], [1, 1], [0, 1]])
    hidden = HiddenOptions(norm="2", random_start=random)
    attack = adversarial(tiny(), tokens="prompt", hidden_radius=0.2, steps=2, hidden=hidden)
    found = attack.all_perturbations({"ids": IDS, "attention_mask": mask}, labels)[EMBEDDED]
    lengths = found.norm(dim=-1)
    assert lengths[:2, 0].gt(0).all()
    assert not lengths[:, 1].any()
    assert lengths[2, 0] == 0


def test_excitation_brackets_the_likelihood_of_the_labels():
    model = tiny()
    pe = excite.PersistentExcitation(
        model, 0.1, norm="2", layers=[EMBEDDED, "head"], steps=8, targets="tokens", loss="cross-entropy"
    )
    low, high = pe.extremes(IDS, LABELS)
    target = pe.target
    clean = target.errors(model(IDS), LABELS)
    assert bool((target.errors(low, LABELS) > clean).all())
    assert bool((target.errors(high, LABELS) < clean).all())
    expected = 0.5 * (target.mean_error(low, LABELS) + target.mean_error(high, LABELS))
    assert pe.loss(IDS, LABELS).item() == pytest.approx(expected.item(), rel=1e-12)
    assert torch.allclose(pe.losses(IDS, LABELS), 0.5 * (target.errors(low, LABELS) + target.errors(high, LABELS)))
    down, _ = pe.perturbations(IDS, LABELS)[EMBEDDED]
    assert bool((down.norm(dim=-1) <= 0.1 + 1e-12).all())
    with pytest.raises(InputError, match="expected labels y"):
        pe.extremes(IDS)
    assert pe.predict(IDS).shape == (3, 2)


def test_no_hook_stays_behind():
    model = tiny()
    attack = adversarial(model, layers=[EMBEDDED, STREAM], hidden_radius=0.1)
    attack.loss(IDS, LABELS).backward()
    assert not model.tokens._forward_hooks

    def stop(*given):
        raise ValueError("stopped")

    handle = model.head.register_forward_pre_hook(stop)
    with pytest.raises(ModelError, match="stopped"):
        attack.loss(IDS, LABELS)
    handle.remove()
    assert not model.tokens._forward_hooks
    assert not model.mix._forward_hooks


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": ["token:output"]}, "did you mean 'tokens:output'"),
        ({"loss": "squared"}, "cross-entropy only"),
        ({"classes": 3}, "leave one of the two out"),
        ({"tokens": "answer"}, "tokens: expected"),
        ({"trades": 6.0}, "trades"),
        ({"loss": "margin"}, "cross-entropy only"),
    ],
)
def test_settings_that_do_not_fit_are_refused(options, message):
    settings = {"targets": "tokens", "loss": "cross-entropy", **options}
    with pytest.raises(InputError, match=message):
        excite.AdversarialTraining(tiny(), 0.0, hidden_radius=0.1, **settings)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.full((3, 2), -100), "at least one token"),
        (torch.full((3, 2), 3), "below 3"),
        (torch.full((3, 2), -1), "from 0 on"),
        (torch.zeros(3, dtype=torch.long), "expected shape"),
        (torch.zeros(3, 2), "whole numbers"),
        (torch.zeros(3, 5, dtype=torch.long), "one for each token"),
    ],
)
def test_labels_that_do_not_fit_are_refused(labels, message):
    with pytest.raises(InputError, match=message):
        adversarial(tiny(), hidden_radius=0.1).loss(IDS, labels)


def test_tokens_on_another_axis_are_refused():
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.mix = nn.Embedding(3, 5), nn.Conv1d(5, 3, 1)

        def forward(self, ids):
            return self.mix(self.tokens(ids).transpose(1, 2)).transpose(1, 2)

    with pytest.raises(ModelError, match="mix: cannot determine where its 2 tokens lie"):
        adversarial(Turned(), layers=["mix"], hidden_radius=0.1).loss(IDS, LABELS)


def test_outputs_of_modules_are_sites_of_classifiers_too():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    x, y = torch.randn(5, 4, dtype=torch.float64), torch.arange(5) % 3
    options = {"classes": 3, "loss": "cross-entropy", "steps": 3, "random_start": False}
    after = excite.AdversarialTraining(model, 0.1, layers=["1:output"], hidden_radius=0.1, **options)
    before = excite.AdversarialTraining(model, 0.1, layers=["2"], hidden_radius=0.1, **options)
    assert after.loss(x, y).item() == before.loss(x, y).item()  # the same signal by another name
