"""Adversarial training: against projected gradient steps written out point by point, and exact values of linear models."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from excitation.literal import steepest
from excitation.refusing import refusing
from excite import AdversarialTraining, PersistentExcitation, Relative, Stages
from excite.excitation.codes import codes
from excite.excitation.perturbations import project, random_point
from excite.runs.checkpoints import path_of, read, write
from models import build, same_state, state_of, with_outputs

NORMS = ["inf", "2", "1"]
Y = torch.tensor([0, 1, 1, 0])


def literal(model, x, error, radius, norm, steps, length):
    """One point: steps up error(f(x + d)), each projected onto the ball."""
    d = torch.zeros_like(x)
    for _ in range(steps):
        d.requires_grad_()
        (gradient,) = torch.autograd.grad(error(model(x + d)), d)
        d = project((d.detach() + length * steepest(gradient, norm)).flatten(1), norm, radius).reshape(x.shape)
    return d


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", ["mlp", "convolutional", "resnet-identity", "transformer"])
def test_perturbations_equal_projected_steps_point_by_point(name, norm):
    model, x = build(name)
    at = AdversarialTraining(model.eval(), 0.3, norm, steps=5, random_start=False)
    found = at.perturbations(x, Y)
    losses = []
    for i, y in enumerate(Y):
        d = literal(model, x[i : i + 1], lambda f, y=y: (f.squeeze() - y) ** 2, 0.3, norm, 5, 2.5 * 0.3 / 5)
        assert torch.allclose(found[i], d[0], rtol=1e-9, atol=1e-12)
        losses.append((model(x[i : i + 1] + d).squeeze() - y) ** 2)
    assert torch.allclose(at.loss(x, Y), sum(losses) / 4, rtol=1e-10)


@pytest.mark.parametrize("loss", ["squared", "cross-entropy"])
def test_classes_equal_projected_steps_point_by_point(loss):
    model, x = build("mlp")
    model, y = with_outputs(model, 3), torch.tensor([0, 2, 1, 2])
    at = AdversarialTraining(model, 0.3, "2", steps=4, step_size=0.2, random_start=False, loss=loss, classes=3)
    found, points = at.perturbations(x, y), codes(3, 3)
    for i, c in enumerate(y):

        def error(f, c=c):
            return ((f[0] - points[c]) ** 2).sum() if loss == "squared" else -F.log_softmax(f[0], 0)[c]

        assert torch.allclose(found[i], literal(model, x[i : i + 1], error, 0.3, "2", 4, 0.2)[0], rtol=1e-9, atol=1e-12)
    assert torch.equal(at.predict(x), model(x).argmax(1))


@pytest.mark.parametrize("norm", NORMS)
def test_a_linear_model_loses_the_dual_norm_exactly(norm):
    model, x = build("linear")
    reach = 0.2 * model.weight.norm(p={"inf": 1, "2": 2, "1": torch.inf}[norm])
    expected = ((model(x).flatten() - Y).abs() + reach).square().mean()
    assert torch.allclose(AdversarialTraining(model, 0.2, norm, steps=1, random_start=False).loss(x, Y), expected)
    assert torch.allclose(AdversarialTraining(model, 0.2, norm, steps=200).loss(x, Y), expected, rtol=1e-2)


def test_at_most_the_loss_of_both_extremes_of_the_input():
    # The worst of the two extremes bounds the adversarial loss of a scalar model where both are exact.
    model, x = build("linear")
    low, high = PersistentExcitation(model, 0.2, layers="input").extremes(x)
    worst = torch.maximum((low - Y).square(), (high - Y).square()).mean()
    assert torch.allclose(AdversarialTraining(model, 0.2, steps=10, random_start=False).loss(x, Y), worst)


@pytest.mark.parametrize("name", ["mlp", "dropout", "batchnorm", "resnet-norm", "transformer-dropout"])
@pytest.mark.parametrize("steps", [1, 3])
def test_it_changes_nothing_and_counts_one_forward(name, steps):
    model, x = build(name)
    at = AdversarialTraining(model, 0.1, steps=steps, bounds=(-9, 9), random_start=False)
    before = state_of(model)
    at.perturbations(x, Y)
    at.predict(x)
    assert same_state(before, state_of(model))
    torch.manual_seed(11)
    at.loss(x, Y).backward()
    after = torch.get_rng_state()
    torch.manual_seed(11)
    twin = build(name)[0]
    twin(x)
    assert torch.equal(after, torch.get_rng_state())
    for (key, buffer), other in zip(model.named_buffers(), twin.buffers()):
        assert not key.endswith("num_batches_tracked") or buffer == other == 1


@pytest.mark.parametrize("norm", NORMS)
def test_balls_and_bounds_are_kept(norm):
    model, x = build("convolutional")
    x = x.clamp(-1, 1)
    at = AdversarialTraining(model, 0.5, norm, steps=1, bounds=(-1, 1))
    for _ in range(5):
        d = at.perturbations(x, Y)
        assert (x + d).abs().max() <= 1 + 1e-12
        assert (d.flatten(1).norm(p=float(norm), dim=1) <= 0.5 + 1e-12).all()


def test_stages_radius_zero_and_the_state(tmp_path):
    model, x = build("mlp")
    at = AdversarialTraining(model, Stages(0.3, 2), steps=1)
    assert torch.equal(at.loss(x, Y), (model(x).flatten() - Y).square().mean())
    at.advance(0.5)
    first = at.perturbations(x, Y)
    state, random = at.state_dict(), torch.get_rng_state()
    second = at.perturbations(x, Y)
    assert not torch.equal(first, second)
    write(tmp_path, 1, {"excitation": state}, final=False, keep=1, commits=0)  # through the file that runs keep
    state = read(path_of(tmp_path, 1, False))[1]["excitation"]
    twin = AdversarialTraining(model, Stages(0.3, 2), steps=1)
    twin.load_state_dict(state)
    torch.set_rng_state(random)  # starts are drawn from the global random state, which trainings keep
    assert torch.equal(twin.perturbations(x, Y), second)


def test_training_with_it_learns():
    torch.manual_seed(0)
    x = torch.randn(90, 2)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    model = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(), nn.Linear(32, 3))
    at = AdversarialTraining(model, 0.02, steps=1, loss="cross-entropy", classes=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for _ in range(150):
        optimizer.zero_grad()
        at.loss(x, y).backward()
        optimizer.step()
    assert (at.predict(x) == y).float().mean() > 0.85


@given(norm=st.sampled_from(NORMS), radius=st.floats(0.01, 3), seed=st.integers(0, 99))
@settings(max_examples=40)
def test_projection_is_the_nearest_point_of_the_ball(norm, radius, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(5, 7, generator=generator, dtype=torch.float64)
    near = project(rows, norm, radius)
    inside = random_point(rows, norm, radius, generator)
    for point in (near, inside):
        assert (point.norm(p=float(norm), dim=1) <= radius * (1 + 1e-12)).all()
    # The projection p of y onto a convex set is the point with (y − p)'(q − p) ≤ 0 for every q of the set.
    assert (((rows - near) * (inside - near)).sum(1) <= 1e-12).all()
    assert torch.allclose(project(inside, norm, radius), inside)


def loss(x=None, y=Y, **options):
    return AdversarialTraining(nn.Linear(5, 1), **{"radius": 0.1, **options}).loss(
        torch.zeros(4, 5) if x is None else x, y
    )


BAD = {
    "a relative radius": (lambda: loss(radius=Relative(0.1)), "expected a number or Stages"),
    "radii by layer": (lambda: loss(radius={"weight": 0.1}), "expected a number or Stages"),
    "no step": (lambda: loss(step_size=0), "step_size"),
    "steps": (lambda: loss(steps=0), "at least 1"),
    "token ids": (lambda: loss(torch.zeros(4, 5, dtype=torch.long)), "int64"),
    "labels": (lambda: loss(y=Y + 1), "expected 0 and 1; got 2"),
    "inputs outside bounds": (lambda: loss(bounds=(1, 2)), "within bounds"),
    "not a module": (lambda: AdversarialTraining(torch.relu, 0.1), "torch.nn.Module"),
}  # fmt: skip


test_bad_input_is_refused_with_the_reason = refusing(BAD)


@pytest.mark.parametrize("outputs", [3, 2])
def test_the_margin_loss_is_positive_iff_the_decision_is_wrong(outputs):
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, outputs)).double()
    x, y = torch.randn(60, 4, dtype=torch.float64), torch.randint(3, (60,))
    at = AdversarialTraining(model, 0.0, loss="margin", classes=3)
    wrong = at.predict(x) != y
    scores = model(x) @ codes(3, outputs).T
    others = [max(scores[i, j] for j in range(3) if j != y[i]) - scores[i, y[i]] for i in range(60)]
    assert torch.allclose(at.loss(x, y), torch.stack(others).mean())
    assert torch.equal(torch.stack(others) > 0, wrong)


def test_margin_loss_of_one_output_is_distance_past_threshold():
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.ones_(model.weight)
    at = AdversarialTraining(model, 0.25, steps=3, random_start=False, loss="margin")
    x, y = torch.tensor([[0.1], [0.9]], dtype=torch.float64), torch.tensor([0, 1])
    assert torch.allclose(at.perturbations(x, y), torch.tensor([[0.25], [-0.25]], dtype=torch.float64))
    assert at.loss(x, y).item() == pytest.approx(-0.15)
