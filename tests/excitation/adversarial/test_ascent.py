"""The joint search over input and hidden layers: against steps written out by hand, and against brute force."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from excite import AdversarialTraining, Relative, Stages
from excite.errors import InputError
from excite.excitation import HiddenOptions
from models import build, same_state, state_of, with_outputs

Y = torch.tensor([0, 1, 1, 0])


def network(width=6):
    return nn.Sequential(
        nn.Linear(3, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
    ).double()


def forward(model, x, d):
    """The network with d[""] added to x, d["2"] and d["4"] to the inputs of the second and third affine layer."""
    h = torch.tanh(model[0](x + d[""]))
    h = torch.tanh(model[2](h + d["2"]))
    return model[4](h + d["4"]).squeeze(1)


def literal(model, x, y, radius, rho, steps, norm="inf", shared=False):
    """Projected steps of the input and `steps` equal steps of the hidden layers, all up the squared error of each sample."""
    signals = {"2": torch.tanh(model[0](x))}
    signals["4"] = torch.tanh(model[2](signals["2"]))
    balls = {name: rho * h.square().mean().sqrt().detach() for name, h in signals.items()}
    if norm == "2":
        balls = {name: r * math.sqrt(signals[name].shape[1]) for name, r in balls.items()}
    d = {"": torch.zeros_like(x), **{name: torch.zeros_like(h) for name, h in signals.items()}}
    for _ in range(steps):
        leaves = {name: value.detach().requires_grad_() for name, value in d.items()}
        error = (forward(model, x, leaves) - y).square().sum()
        g = dict(zip(leaves, torch.autograd.grad(error, list(leaves.values()))))
        d[""] = (d[""] + 2.5 * radius / steps * g[""].sign()).clamp(-radius, radius)
        total = sum((balls[k] * g[k]).square().sum(1, keepdim=True) for k in balls).sqrt()
        for name, r in balls.items():
            if shared:
                d[name] = d[name] + r * r * g[name] / (steps * total)
            elif norm == "inf":
                d[name] = d[name] + r / steps * g[name].sign()
            else:
                d[name] = d[name] + r / steps * g[name] / g[name].norm(dim=1, keepdim=True)
    return d


@pytest.mark.parametrize(("norm", "shared"), [("inf", False), ("2", False), ("2", True)])
def test_joint_steps_equal_those_written_out(norm, shared):
    model, x = network(), torch.randn(4, 3).double()
    options = HiddenOptions(norm, "shared" if shared else "layer")
    at = AdversarialTraining(model, 0.1, steps=4, random_start=False, hidden_radius=0.05, hidden=options)
    expected = literal(model, x, Y, 0.1, 0.05, 4, norm, shared)
    found = at.all_perturbations(x, Y)
    assert found.keys() == expected.keys()
    for name, d in expected.items():
        assert torch.allclose(found[name], d, rtol=1e-9, atol=1e-12), name
    assert torch.allclose(at.loss(x, Y), (forward(model, x, expected) - Y).square().mean(), rtol=1e-12)
    if shared:  # inside the common ball
        h2 = torch.tanh(model[0](x))
        sizes = {"2": h2, "4": torch.tanh(model[2](h2))}
        used = sum(
            (found[k].norm(dim=1) / (0.05 * h.square().mean().sqrt() * math.sqrt(h.shape[1]))) ** 2
            for k, h in sizes.items()
        )
        assert (used <= 1 + 1e-9).all()


@pytest.mark.parametrize("options", [{}, {"norm": "2"}, {"norm": "2", "budget": "shared"}])
def test_hidden_layers_move_once_where_the_input_has_arrived(options):
    model, x, steps = network(), torch.randn(4, 3).double(), 4
    common = {"random_start": False, "hidden_radius": 0.05}
    once = AdversarialTraining(model, 0.1, steps=steps, hidden=HiddenOptions(once=True, **options), **common)
    found = once.all_perturbations(x, Y)
    before = literal(model, x, Y, 0.1 * (steps - 1) / steps, 0.0, steps - 1)  # steps of 2.5·0.1/4
    reached = {"": before[""], **{name: torch.zeros_like(d) for name, d in found.items() if name}}
    leaves = {name: value.requires_grad_() for name, value in reached.items()}
    gradients = torch.autograd.grad((forward(model, x, leaves) - Y).square().sum(), list(leaves.values()))
    for (name, d), g in zip(found.items(), (gradients[list(leaves).index(name)] for name in found)):
        if name and not options:
            h = torch.tanh(model[0](x)) if name == "2" else torch.tanh(model[2](torch.tanh(model[0](x))))
            assert torch.allclose(d, 0.05 * h.square().mean().sqrt() * g.sign(), rtol=1e-9)
        elif name:
            assert torch.allclose(torch.cosine_similarity(d, g), torch.ones(4).double())


def test_once_without_an_input_takes_one_step():
    model, x = network(), torch.randn(4, 3).double()
    common = {"random_start": False, "hidden_radius": 0.05}
    once = AdversarialTraining(model, 0.0, steps=5, hidden=HiddenOptions(once=True), **common)
    one = AdversarialTraining(model, 0.0, steps=1, **common)
    assert torch.allclose(once.loss(x, Y), one.loss(x, Y))


@pytest.mark.parametrize("options", [{}, {"norm": "2"}, {"norm": "2", "budget": "shared"}, {"random_start": True}])
def test_only_samples_with_small_errors_are_perturbed(options):
    model, x = network(), torch.randn(4, 3).double()
    two = (model(x).squeeze(1) - Y).square().argsort()[:2].tolist()
    hidden = {"steps": 3, "random_start": False, "hidden_radius": 0.1}
    some = AdversarialTraining(model, 0.0, **hidden, hidden=HiddenOptions(fraction=0.5, **options)).all_perturbations(
        x, Y
    )
    torch.manual_seed(0)
    everywhere = AdversarialTraining(model, 0.0, **hidden, hidden=HiddenOptions(**options)).all_perturbations(x, Y)
    for name, d in some.items():
        if name:
            moved = d.abs().sum(1) > 0
            assert sorted(moved.nonzero().flatten().tolist()) == sorted(two), name
            if not options.get("random_start"):
                assert torch.equal(d[moved], everywhere[name][moved])


def test_one_step_reaches_the_corner_that_brute_force_finds():
    # Linear in each perturbation, a sigmoid-free chain with positive weights: the error grows along one corner of the box.
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False)).double()
    with torch.no_grad():
        for layer in model:
            layer.weight.abs_()
    x, y = torch.rand(3, 2).double(), torch.zeros(3)
    at = AdversarialTraining(model, 0.1, steps=3, random_start=False, hidden_radius=0.2)
    rms = model[0](x).square().mean().sqrt()
    best = torch.zeros(3).double()
    for corner in itertools.product([-1.0, 1.0], repeat=4):
        d = torch.tensor(corner).double()
        out = model[1](model[0](x + 0.1 * d[:2]) + 0.2 * rms * d[2:]).squeeze(1)
        best = torch.maximum(best, (out - y).square())
    assert torch.allclose(at.loss(x, y.long()), best.mean(), rtol=1e-9)


@pytest.mark.parametrize("name", ["mlp", "convolutional", "resnet-identity", "transformer"])
def test_hidden_radius_zero_changes_no_bit(name):
    model, x = build(name)
    plain = AdversarialTraining(model, 0.3, steps=3)
    joint = AdversarialTraining(model, 0.3, steps=3, hidden_radius=0.0, hidden=HiddenOptions("2"), layers="all")
    losses = []
    for at in (plain, joint):
        torch.manual_seed(0)
        losses.append(at.loss(x, Y))
    assert torch.equal(*losses)


@pytest.mark.parametrize("random_start", [False, True])
@pytest.mark.parametrize("norm", ["inf", "2"])
@pytest.mark.parametrize("name", ["mlp", "convolutional", "resnet-identity", "batchnorm-conv", "transformer"])
def test_any_model(name, norm, random_start):
    model, x = build(name)
    before = state_of(model)
    options = HiddenOptions(norm, random_start=random_start)
    at = AdversarialTraining(model.train(), 0.1, steps=3, random_start=False, hidden_radius=0.01, hidden=options)
    found = at.all_perturbations(x, Y)
    assert same_state(before, state_of(model))
    assert len(found) > 1
    for layer, d in found.items():
        assert 0 < d.abs().max() < torch.inf, layer
    at.loss(x, Y).backward()
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in model.parameters())


def test_hidden_perturbations_raise_the_loss():
    model, x = build("convolutional")
    losses = []
    for rho in (0.0, 0.01, 0.1):
        at = AdversarialTraining(model.eval(), 0.05, steps=5, random_start=False, hidden_radius=rho)
        losses.append(at.loss(x, Y).item())
    assert losses[0] < losses[1] < losses[2]


def test_the_layer_that_reads_the_input_is_left_out():
    model, x = network(), torch.randn(4, 3).double()
    assert set(AdversarialTraining(model, 0.1, hidden_radius=0.1).all_perturbations(x, Y)) == {"", "2", "4"}
    chosen = AdversarialTraining(model, 0.1, hidden_radius=0.1, layers=["0", "4"])
    assert set(chosen.all_perturbations(x, Y)) == {"", "0", "4"}
    by_name = AdversarialTraining(model, 0.1, hidden_radius={"2": 0.1})
    assert set(by_name.all_perturbations(x, Y)) == {"", "2"}


class TwoInputs(nn.Module):
    """A layer for each of two inputs, and one for their sum."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(3, 5), nn.Linear(2, 5), nn.Linear(5, 1)

    def forward(self, x, z):
        return self.last(torch.relu(self.first(x) + self.second(z)))


@pytest.mark.parametrize("order", [("x", "z"), ("z", "x")])
def test_layers_that_read_one_of_several_inputs_are_left_out(order):
    inputs = {"x": torch.randn(4, 3), "z": torch.randn(4, 2)}
    batch = {name: inputs[name] for name in order}
    at = AdversarialTraining(TwoInputs(), 0.0, hidden_radius=0.1)
    assert set(at.all_perturbations(batch, Y)) == {"last"}
    at = AdversarialTraining(TwoInputs(), 0.0, hidden_radius=0.1, layers=["first", "second"])
    assert set(at.all_perturbations(batch, Y)) == {"first", "second"}
    with pytest.raises(InputError, match=r"radius perturbs the model's input: .* got a dict: .* give radius=0"):
        AdversarialTraining(TwoInputs(), 0.1).loss(batch, Y)


def test_hidden_layers_alone():
    model, x = network(), torch.randn(4, 3).double()
    found = AdversarialTraining(model, 0.0, hidden_radius=0.1).all_perturbations(x, Y)
    assert {name: bool(d.any()) for name, d in found.items()} == {"": False, "2": True, "4": True}


@pytest.mark.parametrize("radius", [0.05, {"2": 0.05}, {"1:output": 0.05}])
def test_stages_of_the_hidden_radius(radius):
    model, x = build("mlp")
    staged = AdversarialTraining(model, 0.3, steps=3, random_start=False, hidden_radius=Stages(radius, 2))
    for fraction, now in ((0.0, 0.0), (0.49, 0.0), (0.5, radius), (1.0, radius)):
        staged.advance(fraction)
        fixed = AdversarialTraining(model, 0.3, steps=3, random_start=False, hidden_radius=now)
        assert torch.equal(staged.loss(x, Y), fixed.loss(x, Y))
    settings = {staged.advance(fraction) or staged.setting() for fraction in (0.0, 0.3, 0.6, 1.0)}
    assert len(settings) == 2
    with pytest.raises(InputError, match="relative already"):
        AdversarialTraining(model, 0.3, hidden_radius=Stages(Relative(0.1), 2))
    with pytest.raises(InputError, match="two"):
        AdversarialTraining(model, 0.3, hidden_radius=Stages({"two": 0.1}, 2))


@pytest.mark.parametrize("hidden_radius", [0.0, 0.05])
def test_best_iterate(hidden_radius):
    # Steps far longer than the ball jump from side to side: the last iterate is not the best.
    model, x = network(20), torch.randn(4, 3).double()
    settings = {"radius": 2.0, "steps": 6, "step_size": 3.7, "random_start": False, "hidden_radius": hidden_radius}
    last = AdversarialTraining(model, **settings).all_perturbations(x, Y)
    best = AdversarialTraining(model, **settings, keep_best=True).all_perturbations(x, Y)
    iterates = [
        AdversarialTraining(model, **{**settings, "steps": k}).perturbations(x, Y) for k in range(1, 7)
    ]  # with hidden layers their steps depend on the number of steps

    def errors(d):
        zero = {"2": torch.zeros(4, 20).double(), "4": torch.zeros(4, 20).double()}
        return (forward(model, x, zero | d) - Y).square().detach()

    assert (errors(best) >= errors(last) - 1e-12).all()
    assert (errors(best) >= errors({"": torch.zeros_like(x)}) - 1e-12).all()
    if not hidden_radius:
        every = torch.stack([errors({"": d}) for d in [torch.zeros_like(x), *iterates]])
        assert torch.allclose(errors(best), every.amax(0), rtol=1e-12)
        assert not torch.allclose(errors(best), errors(last))


def test_trades_by_its_formula():
    model, x = build("mlp")
    model, y = with_outputs(model, 3), torch.tensor([0, 2, 1, 2])
    at = AdversarialTraining(model, 0.3, steps=5, loss="cross-entropy", classes=3, trades=6.0)
    torch.manual_seed(3)
    d = at.perturbations(x, y)
    torch.manual_seed(3)
    value = at.loss(x, y)
    clean, moved = model(x), model(x + d)
    divergence = F.kl_div(moved.log_softmax(1), clean.softmax(1), reduction="batchmean")
    assert torch.allclose(value, F.cross_entropy(clean, y) + 6 * divergence, rtol=1e-10)

    torch.manual_seed(3)
    start = (2 * torch.rand(x.flatten(1).shape, dtype=x.dtype) - 1).mul(0.3).reshape(x.shape)
    for _ in range(5):
        start.requires_grad_()
        kl = F.kl_div(model(x + start).log_softmax(1), clean.detach().softmax(1), reduction="sum")
        (g,) = torch.autograd.grad(kl, start)
        start = (start.detach() + 2.5 * 0.3 / 5 * g.sign()).clamp(-0.3, 0.3)
    assert torch.allclose(d, start, rtol=1e-9, atol=1e-12)


def test_trades_with_one_logit_is_that_of_two():
    model, x = build("mlp")
    one = AdversarialTraining(model, 0.3, steps=2, loss="cross-entropy", trades=2.0)

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = model

        def forward(self, x):
            f = self.net(x).reshape(-1)
            return torch.stack([torch.zeros_like(f), f], 1)

    two = AdversarialTraining(Two(), 0.3, steps=2, loss="cross-entropy", classes=2, trades=2.0)
    losses = []
    for at in (one, two):
        torch.manual_seed(0)
        losses.append(at.loss(x, Y))
    assert torch.allclose(*losses, rtol=1e-10)


def test_refusals():
    model = network()
    with pytest.raises(InputError, match="hidden_radius"):
        AdversarialTraining(model, 0.1, hidden_radius="0.1")
    with pytest.raises(InputError, match="unknown layer 'two'"):
        AdversarialTraining(model, 0.1, hidden_radius={"two": 0.1})
    with pytest.raises(InputError, match="unknown layer 'two'"):
        AdversarialTraining(model, 0.1, hidden_radius=0.1, layers=["two"])
    with pytest.raises(InputError, match="leave hidden_radius at 0"):
        AdversarialTraining(model, 0.1, hidden_radius=0.1, layers="input")
    with pytest.raises(InputError, match="HiddenOptions"):
        AdversarialTraining(model, 0.1, hidden_radius=0.1, hidden="2")
    with pytest.raises(InputError, match="shared budget needs norm='2'"):
        HiddenOptions("inf", "shared")
    with pytest.raises(InputError, match="'layer'"):
        HiddenOptions("inf", "global")
    with pytest.raises(InputError, match="once"):
        HiddenOptions(random_start=True, once=True)
    with pytest.raises(InputError, match="fraction"):
        HiddenOptions(fraction=0.0)
    with pytest.raises(InputError, match="trades"):
        options = {"classes": 3, "loss": "cross-entropy", "trades": 6.0, "hidden_radius": 0.1}
        AdversarialTraining(nn.Linear(3, 3), 0.1, hidden=HiddenOptions(fraction=0.5), **options)
    with pytest.raises(InputError, match="loss='cross-entropy'"):
        AdversarialTraining(model, 0.1, trades=6)
    with pytest.raises(InputError, match="random_start=True"):
        AdversarialTraining(model, 0.1, loss="cross-entropy", random_start=False, trades=6)
    with pytest.raises(InputError, match="awp"):
        AdversarialTraining(model, 0.1, awp=-1)
