"""Many classes: the direction, the extremes along it and the loss, against the slow version point by point in float64."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from excitation.literal import direction, extreme, fixed, layers_of, longest_column, reach, two_nearest
from excitation.refusing import refusing
from excite import PersistentExcitation, Relative, Stages
from excite.excitation.codes import codes
from models import build, papers_network, same_state, state_of, with_outputs

NORMS = ["inf", "2", "1"]
# The direction of the 1-norm jumps between coordinates, as steepest steps do: the same jumps on both sides.
NETS = ["linear", "mlp", "convolutional", "resnet-identity", "dense", "layernorm", "grouped"]
Y = torch.tensor([0, 3, 1, 2])


def classifier(name, outputs=4, batch=4):
    model, x = build(name, batch=batch)
    return (nn.Linear(5, outputs).double() if name == "linear" else with_outputs(model, outputs)), x


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("outputs", [4, 3])
def test_extremes_equal_the_literal_algorithm(name, norm, outputs):
    model, x = classifier(name, outputs)
    model.eval()
    low, high = PersistentExcitation(model, 0.1, norm=norm, classes=4, turns=3).extremes(x)
    points = codes(4, outputs)
    for i in range(len(x)):
        one = x[i : i + 1]
        v = direction(model, one, 0.1, norm, 3, two_nearest(model(one)[0].detach(), points))
        if norm == "1":
            other = direction(model, one, 0.1, norm, 3, longest_column(model, one, 0.1))
            v = max(v, other, key=lambda v: reach(model, one, norm, v))
            v = v if (high[i] - low[i]) @ v > 0 else -v  # both starts may lead to the same column, up to its sign
        assert torch.allclose(high[i], extreme(model, one, 0.1, norm, 4, 1, v)[0], rtol=1e-8, atol=1e-10)
        assert torch.allclose(low[i], extreme(model, one, 0.1, norm, 4, -1, v)[0], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", ["dropout", "batchnorm", "resnet-norm"])
def test_the_search_uses_the_clean_pass_in_training_mode(name):
    model, x = classifier(name, batch=5)
    torch.manual_seed(7)
    twins = fixed(copy.deepcopy(model), x)
    torch.manual_seed(7)
    found = PersistentExcitation(model, 0.1, norm="2", classes=4, turns=2).perturbations(x)
    wanted = {id(m) for m in layers_of(model)}
    names = [n for n, m in model.named_modules() if id(m) in wanted]
    for i, twin in enumerate(twins):
        one = x[i : i + 1]
        v = direction(twin, one, 0.1, "2", 2, two_nearest(twin(one)[0].detach(), codes(4, 4)))
        for half, sign in enumerate((-1, 1)):
            for layer, d in zip(names, extreme(twin, one, 0.1, "2", 4, sign, v)[1]):
                assert torch.allclose(found[layer][half][i], d[0], rtol=1e-7, atol=1e-10), (layer, i, sign)


@pytest.mark.parametrize("outputs", [4, 3])
def test_without_turns_the_direction_joins_the_two_nearest_codes(outputs):
    model, x = classifier("linear", outputs)
    low, high = PersistentExcitation(model, 0.1, classes=4, turns=0).extremes(x)
    for i in range(len(x)):
        v = two_nearest(model(x[i]).detach(), codes(4, outputs))
        d = 0.1 * (model.weight.T @ v).sign()
        assert torch.allclose(high[i], model(x[i] + d))
        assert torch.allclose(low[i], model(x[i] - d))


@pytest.mark.parametrize("name", ["transformer", "transformer-time-first", "convolutional"])
def test_a_batch_equals_its_points_one_by_one(name):
    model, x = classifier(name, batch=3)
    pe = PersistentExcitation(model.eval(), 0.1, classes=4)
    together = torch.stack(pe.extremes(x))
    alone = torch.cat([torch.stack(pe.extremes(x[i : i + 1])) for i in range(3)], 1)
    assert torch.allclose(together, alone, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("outputs", [4, 3])
@pytest.mark.parametrize("steps", [1, 3])
def test_a_linear_model_is_moved_along_its_top_singular_vector(outputs, steps):
    # Corollary 3 with p1 = p2 = 2: d = ε times the top right singular vector, f moves by ε σ1 along the left one.
    model, x = classifier("linear", outputs)
    pe = PersistentExcitation(model, 0.3, norm="2", steps=steps, classes=4, turns=200)
    u, s, vh = torch.linalg.svd(model.weight.detach())
    low, high = pe.extremes(x)
    d_low, d_high = pe.perturbations(x)["weight"]
    sign = (d_high @ vh[0]).sign()[:, None]
    assert torch.allclose(d_high, 0.3 * sign * vh[0], atol=1e-6)
    assert torch.allclose(d_low, -d_high)
    assert torch.allclose(high - model(x), 0.3 * s[0] * sign * u[:, 0], atol=1e-6)
    assert torch.allclose(low - model(x), model(x) - high, atol=1e-10)


def test_two_turns_come_near_the_best_corner():
    # ‖W d‖ over the cube is largest at a corner: 2⁶ of them. NP-hard in general, so near is what can be asked.
    corners = 0.1 * torch.tensor(list(itertools.product([-1.0, 1.0], repeat=6)), dtype=torch.float64)
    ratios = []
    for seed in range(20):
        torch.manual_seed(seed)
        model, x = nn.Linear(6, 5).double(), torch.randn(8, 6, dtype=torch.float64)
        low, high = PersistentExcitation(model, 0.1, classes=5, turns=2).extremes(x)
        best = (corners @ model.weight.T).norm(dim=1).max()
        ratios.append(((high - low).norm(dim=1) / 2 / best).detach())
    ratios = torch.cat(ratios)
    assert (ratios <= 1 + 1e-12).all()
    assert ratios.median() > 0.95
    assert ratios.quantile(0.1) > 0.7


@pytest.mark.parametrize("outputs", [4, 3])
@pytest.mark.parametrize("name", ["mlp", "dropout", "batchnorm", "transformer-dropout"])
def test_the_loss_is_half_the_squared_distance_to_the_code(name, outputs):
    losses = []
    for way in ("loss", "extremes"):
        model, x = classifier(name, outputs)
        pe = PersistentExcitation(model, 0.05, classes=4)
        torch.manual_seed(5)
        if way == "loss":
            loss = pe.loss(x, Y[:, None])
        else:
            low, high = pe.extremes(x)
            z = codes(4, outputs)[Y]
            loss = ((high - z).norm(dim=1) ** 2 / 2 + (low - z).norm(dim=1) ** 2 / 2).mean()
        loss.backward()
        losses.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(*losses))


def test_radius_zero_is_the_plain_squared_distance():
    model, x = classifier("mlp")
    pe = PersistentExcitation(model, 0, classes=4)
    z = (F.one_hot(Y, 4).double() - 1 / 4) / 2**0.5
    assert torch.allclose(pe.loss(x, Y), (model(x) - z).square().sum(1).mean(), rtol=1e-14)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", ["mlp", "convolutional", "dropout"])
def test_two_classes_on_one_output_are_a_shifted_binary_problem(name, norm):
    labels = torch.tensor([0, 1, 1, 0])
    model, x = build(name)
    shifted = copy.deepcopy(model)
    with torch.no_grad():
        [m for m in shifted.modules() if isinstance(m, nn.Linear)][-1].bias += 0.5
    torch.manual_seed(3)
    ours = PersistentExcitation(model, 0.1, norm=norm, classes=2)
    loss = ours.loss(x, labels)
    torch.manual_seed(3)
    binary = PersistentExcitation(shifted, 0.1, norm=norm)
    assert torch.allclose(loss, binary.loss(x, labels), rtol=1e-12)
    assert torch.equal(ours.predict(x), binary.predict(x))


@pytest.mark.parametrize("outputs", [4, 3])
def test_predict_is_the_nearest_code(outputs):
    model, x = classifier("dropout", outputs, batch=50)
    labels = PersistentExcitation(model, 0.1, classes=4).predict(x)
    assert torch.equal(labels, torch.cdist(model.eval()(x), codes(4, outputs)).argmin(1))


@pytest.mark.parametrize("loss", ["squared", "cross-entropy"])
@pytest.mark.parametrize("name", ["mlp", "dropout", "resnet-norm", "transformer-dropout"])
def test_the_search_changes_nothing_and_the_loss_counts_once(name, loss):
    model, x = classifier(name)
    pe = PersistentExcitation(model, 0.05, classes=4, loss=loss)
    before = state_of(model)
    pe.extremes(x)
    pe.perturbations(x)
    pe.predict(x)
    assert same_state(before, state_of(model))
    torch.manual_seed(11)
    pe.loss(x, Y)
    after = torch.get_rng_state()
    torch.manual_seed(11)
    classifier(name)[0](x)
    assert torch.equal(after, torch.get_rng_state())


def test_bounds_radii_and_stages_work_with_classes():
    model, x = classifier("mlp")
    x = x.clamp(-1, 1)
    pe = PersistentExcitation(model, Stages({"0": 0.5, "4": 0.1}, 2), classes=4, bounds=(-1, 1))
    assert pe.perturbations(x) == {}
    pe.advance(1)
    found = pe.perturbations(x)
    assert set(found) == {"0", "4"}
    assert all((x + d).abs().max() <= 1 + 1e-12 for d in found["0"])
    assert PersistentExcitation(model, Relative(0.1), classes=4).loss(x, Y) > 0


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", ["dropout", "transformer-dropout"])
def test_the_input_of_a_random_model_can_be_perturbed_alone(name, norm):
    for outputs, options in ((4, {"classes": 4}), (1, {})):
        model, x = classifier(name, outputs)
        found = PersistentExcitation(model, 0.1, norm=norm, layers="input", **options).perturbations(x)
        for d in found[""]:
            assert torch.allclose(d.flatten(1).norm(p=float(norm), dim=1), torch.tensor(0.1).double(), atol=0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_works_under_autocast(dtype):
    torch.manual_seed(0)
    model, x = papers_network(10), torch.rand(6, 3, 32, 32) * 2 - 1
    pe, y = PersistentExcitation(model, 0.05, classes=10), torch.arange(6)
    full = pe.loss(x, y)
    with torch.autocast("cpu", dtype=dtype):
        loss = pe.loss(x, y)
    loss.backward()
    assert torch.allclose(loss.float(), full, rtol=0.1)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_outputs_not_moved_at_first_are_moved_in_the_next_turn():
    # The two nearest codes differ in outputs that do not depend on x; the third does.
    model = nn.Linear(5, 3).double()
    with torch.no_grad():
        model.weight[:2], model.bias[:] = 0, torch.tensor([3.0, 2.0, -9.0])
    low, high = PersistentExcitation(model, 0.1, classes=3).extremes(torch.zeros(2, 5, dtype=torch.float64))
    assert torch.allclose((high - low).abs()[:, 2], 0.2 * model.weight[2].abs().sum())


def test_cross_entropy_is_the_mean_of_both_extremes():
    model, x = classifier("mlp")
    pe = PersistentExcitation(model, 0.1, classes=4, loss="cross-entropy")
    low, high = pe.extremes(x)
    assert torch.allclose(pe.loss(x, Y), (F.cross_entropy(low, Y) + F.cross_entropy(high, Y)) / 2, rtol=1e-12)
    assert torch.equal(pe.predict(x), model(x).argmax(1))
    model, x = build("mlp")
    y = torch.tensor([0, 1, 1, 0])
    pe = PersistentExcitation(model, 0.1, loss="cross-entropy")
    low, high = (f.sigmoid() for f in pe.extremes(x))
    expected = -torch.where(y == 1, low.log() + high.log(), (1 - low).log() + (1 - high).log()).mean() / 2
    assert torch.allclose(pe.loss(x, y), expected, rtol=1e-12)
    assert torch.equal(pe.predict(x), (model(x).flatten() > 0).long())


@pytest.mark.slow
def test_training_with_classes_learns():
    torch.manual_seed(0)
    x = torch.randn(90, 2)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    for loss, outputs in (("squared", 3), ("squared", 2), ("cross-entropy", 3)):
        model = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(), nn.Linear(32, outputs))
        pe = PersistentExcitation(model, 0.02, steps=2, classes=3, loss=loss)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        for _ in range(150):
            optimizer.zero_grad()
            pe.loss(x, y).backward()
            optimizer.step()
        assert (pe.predict(x) == y).float().mean() > 0.85


def loss(outputs=3, y=Y, **options):
    return PersistentExcitation(nn.Linear(5, outputs), 0.1, **options).loss(torch.zeros(4, 5), y)


BAD = {
    "a vector output without classes": (lambda: loss(y=Y.clamp(max=1)), "give classes="),
    "too many outputs": (lambda: loss(5, Y.clamp(max=2), classes=3), r"\(4, 3\) or \(4, 2\).*returned \(4, 5\)"),
    "one output for three classes": (lambda: loss(1, Y.clamp(max=2), classes=3), r"returned \(4, 1\)"),
    "a label too large": (lambda: loss(y=Y, classes=3), "expects 0 to 2; got 3"),
    "a negative label": (lambda: loss(y=-Y, classes=3), "expects 0 to 2; got -3"),
    "floating-point labels": (lambda: loss(y=Y.float(), classes=4), "torch.float32"),
    "labels of the wrong length": (lambda: loss(y=Y[:3], classes=4), r"got \(3,\)"),
    "one class": (lambda: loss(classes=1), "at least 2; got 1"),
    "classes in words": (lambda: loss(classes="ten"), "got 'ten'"),
    "a threshold for classes": (lambda: loss(classes=3, threshold=0.5), "nearest code"),
    "a negative number of turns": (lambda: loss(classes=3, turns=-1), "turns.*at least 0"),
    "an unknown loss": (lambda: loss(loss="hinge"), "'squared' or 'cross-entropy'; got 'hinge'"),
    "a simplex of logits": (lambda: loss(2, classes=3, loss="cross-entropy", y=Y.clamp(max=2)), r"shape \(4, 3\); the model"),
    "a threshold for logits": (lambda: loss(1, loss="cross-entropy", threshold=0.5), "decide at 0; got 0.5"),
}  # fmt: skip


test_bad_input_is_refused_with_the_reason = refusing(BAD)
