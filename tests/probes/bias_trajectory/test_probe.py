"""The trajectory probe inside the user's own training: same numbers as the function on data, and nothing left behind."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import excite
from excite.errors import InputError, ModelError
from excite.probes import Every, Trajectory, trajectory
from models import CASES, build, state_of
from probes.bias_trajectory.trainings import Training, squared

# Samples of one pass neither influence each other nor meet chance, and have an axis of their own.
PLAIN = [
    *(name for name in CASES if not any(word in name for word in ("norm", "dropout", "folded"))),
    "layernorm",
    "weight-norm",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", PLAIN)
def test_each_step_equals_the_function_at_the_weights_before_it(name):
    model, x = build(name)
    case = CASES[name]
    y = torch.randn(4, case.outputs, dtype=torch.float64)
    before = state_of(model)
    with Training(model, x, Trajectory(Every(1), output=case.pick, bounds_every=1)) as t:
        for _ in range(3):
            (expected,) = trajectory(model, x, y, squared, output=case.pick, tolerance=1e-4).values()
            values = t.step(x, y, case.pick)
            layer = expected.layer
            assert values[f"mean/{layer}"] == pytest.approx(expected.mean, rel=1e-10)
            assert values[f"max/{layer}"] == pytest.approx(expected.max, rel=1e-10)
            assert values[f"length/{layer}"] == pytest.approx(float(expected.values.sum()), rel=1e-10)
            assert values[f"lipschitz/{layer}"] == pytest.approx(float(expected.lipschitz.mean()), rel=1e-10)
            assert values[f"sigma/{layer}"] == pytest.approx(expected.sigma, rel=1e-3)
            assert values[f"violations/{layer}"] == 0
            assert set(t.probe.labels) == set(expected.labels)
            assert {k for k in values if k.startswith("label/")} == {f"label/{name}" for name in expected.labels}
    after = state_of(model)
    assert after["hooks"] == before["hooks"]
    assert after["attributes"] == before["attributes"]


def test_between_measurements_the_probe_can_rest():
    """Only passes of measured steps are looked at, and they give what looking at all of them gives."""
    found = {}
    for passes in ("all", "measured"):
        torch.manual_seed(0)
        model, x = build("mlp")
        probe = Trajectory(Every(3), passes=passes, bounds_every=1, max_samples=2)
        with Training(model, x, probe) as t:
            for step in range(1, 7):
                resting = passes == "measured" and step % 3 != 0
                assert probe._hooks.resting is resting
                values = t.step(x, torch.ones(len(x), CASES["mlp"].outputs, dtype=torch.float64))
        found[passes] = values
    (layer,) = (key.partition("/")[2] for key in found["all"] if key.startswith("mean/"))
    kept, all_of_them = found["measured"], found["all"]
    for gone in ("length", "total", "raw", "variance"):
        assert f"{gone}/{layer}" in all_of_them
        assert f"{gone}/{layer}" not in kept
    for same in ("distance", "lipschitz", "lipschitz_max", "sigma", "lower"):
        assert kept[f"{same}/{layer}"] == pytest.approx(all_of_them[f"{same}/{layer}"], rel=1e-3)
    assert kept[f"samples/{layer}"] == len(x)  # of the last step alone
    assert all_of_them[f"samples/{layer}"] == 3 * len(x)
    for bad in ({"passes": "some"}, {"max_samples": 0}, {"max_samples": True}):
        with pytest.raises(InputError, match="expected"):
            Trajectory(**bad)


def test_windows_add_up_and_the_bias_is_followed():
    model, x = build("mlp", batch=12)
    y = torch.randn(12, 1, dtype=torch.float64)
    start = model[0].bias.detach().clone()
    lengths, iterates = [], [start]
    with Training(model, x, Trajectory(Every(3), bounds_every=None)) as t:
        for i in range(6):
            part = slice(2 * i, 2 * i + 2)
            lengths.append(float(trajectory(model, x[part])["0"].values.sum()))
            values = t.step(x[part], y[part])
            iterates.append(model[0].bias.detach().clone())
            if i == 2:
                early = dict(values)
    assert early["length/0"] == pytest.approx(sum(lengths[:3]), rel=1e-12)
    assert values["length/0"] == pytest.approx(sum(lengths[3:]), rel=1e-12)
    assert values["total/0"] == pytest.approx(sum(lengths), rel=1e-12)
    assert values["mean/0"] == pytest.approx(sum(lengths[3:]) / 6, rel=1e-12)
    assert values["samples/0"] == 6
    assert values["zero/0"] == 0
    path = torch.stack(iterates[3:])
    assert values["raw/0"] == pytest.approx(float((path[1:] - path[:-1]).norm(dim=1).sum()), rel=1e-6)
    assert values["variance/0"] == pytest.approx(float((path - path.mean(0)).square().sum(1).mean()), rel=1e-6)
    assert values["distance/0"] == pytest.approx(float((path[-1] - start).norm()), rel=1e-12)


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW"])
@pytest.mark.parametrize("scale", [1.0, 2.0**16])
def test_neither_optimizer_nor_loss_scale_nor_reduction_matter(optimizer, scale):
    model, x = build("convolutional")
    y = torch.randn(4, 1, dtype=torch.float64)
    chosen = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-2)

    def loss(f, y):
        return scale * (f - y).square().sum()

    expected = trajectory(model, x)["0"]
    with Training(model, x, Trajectory(Every(1)), chosen, loss) as t:
        assert t.step(x, y)["mean/0"] == pytest.approx(expected.mean, rel=1e-12)


def test_gradient_accumulation_counts_every_sample_once():
    model, x = build("mlp", batch=6)
    y = torch.randn(6, 1, dtype=torch.float64)
    expected = trajectory(model, x)["0"]
    with Training(model, x, Trajectory(Every(1))) as t:
        for part in (slice(0, 2), slice(2, 6)):
            squared(model(x[part]), y[part]).backward()
        t.optimizer.step()
        t.watch.step()
        assert t.values["samples/0"] == 6
        assert t.values["mean/0"] == pytest.approx(expected.mean, rel=1e-12)
        # two forward passes, one backward: each z finds its own f
        loss = squared(model(x[:2]), y[:2]) + 7 * squared(model(x[2:]), y[2:])
        expected = trajectory(model, x)["0"]
        loss.backward()
        t.watch.step()
        assert t.values["mean/0"] == pytest.approx(expected.mean, rel=1e-12)


def test_samples_without_a_loss_gradient_are_left_out():
    model, x = build("mlp")
    y = model(x).detach()
    y[2:] += 1
    expected = trajectory(model, x[2:])["0"]
    with Training(model, x, Trajectory(Every(1))) as t:
        values = t.step(x, y)
        assert values["zero/0"] == 2
        assert values["samples/0"] == 2
        assert values["nonfinite/0"] == 0
        assert values["mean/0"] == pytest.approx(expected.mean, rel=1e-12)


def test_without_any_loss_gradient_nothing_is_infinite():
    """A hinge that every sample satisfies: all are counted as `zero`, and what has no sample is NaN."""
    model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 1)).double()
    x, y = torch.randn(8, 3, dtype=torch.float64), torch.zeros(8, 1, dtype=torch.float64)
    hinge = lambda f, y: (f - 100).clamp(min=0).sum()  # noqa: E731
    with Training(model, x, Trajectory(Every(1), bounds_every=1), loss=hinge) as t:
        values = t.step(x, y)
    assert (values["zero/0"], values["samples/0"], values["length/0"], values["violations/0"]) == (8, 0, 0, 0)
    assert all(math.isnan(values[f"{name}/0"]) for name in ("mean", "max", "lipschitz", "lipschitz_max", "upper"))


@pytest.mark.parametrize("first", ["linear", "convolution"])
def test_a_training_that_diverged_is_counted_and_goes_on(first):
    """Weights that are not finite have no singular values: NaN, and samples as `nonfinite`; the probe stays."""
    layer = nn.Linear(16, 6) if first == "linear" else nn.Conv2d(1, 2, 3, stride=2, padding=1)
    rest = [nn.Flatten(), nn.Linear(6 if first == "linear" else 8, 1)]
    model = nn.Sequential(layer, nn.ReLU(), *rest).double()
    x = torch.randn(4, *((16,) if first == "linear" else (1, 4, 4)), dtype=torch.float64)
    y = torch.randn(4, 1, dtype=torch.float64)
    with Training(model, x, Trajectory(Every(1), bounds_every=1)) as t:
        assert t.step(x, y)["nonfinite/0"] == 0
        with torch.no_grad():
            layer.weight.fill_(torch.nan)
        values = t.step(x, y)
    assert values["nonfinite/0"] + values["zero/0"] == 4
    assert math.isnan(values["sigma/0"])
    assert values["samples/0"] == 0


def test_validation_passes_do_not_count():
    model, x = build("mlp")
    y = torch.zeros(4, 1, dtype=torch.float64)
    with Training(model, x, Trajectory(Every(1))) as t:
        with torch.no_grad():
            model(x)
        assert t.step(x, y)["samples/0"] == 4
        with torch.inference_mode():
            model(x)
        assert t.step(x, y)["samples/0"] == 4


def test_batch_norm_is_labelled_and_a_clean_pass_is_exact():
    model, x = build("batchnorm", batch=8)
    y = torch.randn(8, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with Training(model, x, Trajectory(Every(1), clean=Every(2))) as t:
        first = t.step(x, y)
        assert "coupled" in t.probe.labels
        assert "clean/0" not in first
        values = t.step(x, y)
        fixed = copy.deepcopy(model)  # the weights after the step, the statistics of the batch
        with torch.no_grad():
            z = model[0](x)
        fixed[1].running_mean, fixed[1].running_var = z.mean(0), z.var(0, correction=0)
        exact = trajectory(fixed, x)["0"]
        assert values["clean/0"] == pytest.approx(exact.mean, rel=1e-10)
        assert values["clean_max/0"] == pytest.approx(exact.max, rel=1e-10)
        assert abs(values["mean/0"] / exact.mean - 1) > 0.01  # the coupled one differs by far more than rounding
        model.eval()
        t.step(x, y)
        assert "coupled" not in t.probe.labels
        assert t.values["mean/0"] != values["mean/0"]


def test_a_clean_pass_with_vector_outputs_uses_the_loss_gradient():
    model, x = build("convolutional-classes")
    y = torch.arange(4)
    with Training(model, x, Trajectory(Every(1), clean=Every(1)), loss=F.cross_entropy) as t:
        t.optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        values = t.step(x, y)
        assert values["clean/0"] == pytest.approx(values["mean/0"], rel=1e-12)
        assert "logits" in t.probe.labels
        assert "vector" in t.probe.labels
        assert "upper/0" not in values
        assert "lower/0" in values
        assert len(t.probe.explain()) == len(t.probe.labels)


def test_the_link_gives_the_function_with_the_sigmoid():
    model, x = build("mlp")
    y = torch.tensor([[0.0], [1], [1], [0]], dtype=torch.float64)
    expected = trajectory(nn.Sequential(model, nn.Sigmoid()), x)["0.0"]
    loss = F.binary_cross_entropy_with_logits
    with Training(model, x, Trajectory(Every(1), link="sigmoid", bounds_every=1), loss=loss) as t:
        values = t.step(x, y)
        assert values["mean/0"] == pytest.approx(expected.mean, rel=1e-12)
        assert values["lipschitz/0"] == pytest.approx(float(expected.lipschitz.mean()), rel=1e-12)
        assert "logits" not in t.probe.labels
    with Training(model, x, Trajectory(Every(1)), loss=loss) as t:
        t.step(x, y)
        assert t.probe.labels == ("logits",)


def test_another_output_in_the_loss_is_labelled():
    model, x = build("dict")
    with excite.watch(model, example=x, probes=[probe := Trajectory(Every(1), output="logits")], strict=True) as watch:
        returned = model(x)
        returned["logits"].square().mean().backward()
        watch.step()
        assert probe.labels == ()
        returned = model(x)
        (returned["logits"].square().mean() + returned["side"].square().mean()).backward()
        watch.step()
        assert probe.labels == ("side",)


def test_half_precision_under_autocast():
    model, x = build("mlp")
    model, x = model.float(), x.float()
    expected = trajectory(model, x)["0"]

    def loss(f, y):
        return 1024 * (f.float() - y).square().mean()

    with Training(model, x, Trajectory(Every(1)), loss=loss) as t, torch.autocast("cpu", torch.bfloat16):
        values = t.step(x, torch.ones(4, 1))
    assert values["mean/0"] == pytest.approx(expected.mean, rel=0.05)


def test_several_models_each_have_their_own():
    one, x = build("mlp")
    two, _ = build("mlp", seed=5)
    y = torch.zeros(4, 1, dtype=torch.float64)
    with Training(one, x, Trajectory(Every(1))) as a, Training(two, x, Trajectory(Every(1))) as b:
        expected = trajectory(one, x)["0"].mean, trajectory(two, x)["0"].mean
        assert (a.step(x, y)["mean/0"], b.step(x, y)["mean/0"]) == pytest.approx(expected, rel=1e-12)


def test_a_compiled_model_must_be_watched_from_the_start():
    model, x = build("mlp")
    y = torch.zeros(4, 1, dtype=torch.float64)
    expected = trajectory(model, x)["0"].mean
    compiled = torch.compile(model, backend="eager")
    with Training(model, x, Trajectory(Every(1))) as t:
        t.model = compiled
        assert t.step(x, y)["mean/0"] == pytest.approx(expected, rel=1e-12)
    torch._dynamo.reset()
    late = torch.compile(model, backend="eager")
    late(x)
    with Training(model, x, Trajectory(Every(1))) as t:
        t.model = late
        with pytest.raises(ModelError, match="before its first call"):
            t.step(x, y)
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["mlp", "convolutional"])  # σ₁ from the matrix, and followed from look to look
def test_it_survives_a_restart(name):
    model, x = build(name)
    y = torch.zeros(len(x), 1, dtype=torch.float64)
    with Training(model, x, Trajectory(Every(4), bounds_every=3)) as whole:
        for _ in range(4):
            whole.step(x, y)
    model, x = build(name)
    with Training(model, x, Trajectory(Every(4), bounds_every=3)) as t:
        t.step(x, y)
        t.step(x, y)
        state = t.watch.state_dict()
    with Training(model, x, Trajectory(Every(4), bounds_every=3)) as t:
        t.watch.load_state_dict(state)
        t.step(x, y)
        values = t.step(x, y)
    assert values == pytest.approx(whole.values, rel=1e-10)


def test_bad_input():
    model, x = build("mlp")
    with pytest.raises(InputError, match="example"):
        excite.watch(model, probes=[Trajectory()])
    with pytest.raises(InputError, match="bounds_every"):
        Trajectory(bounds_every=0)
    with pytest.raises(InputError, match="link"):
        Trajectory(link="softmax")
    with pytest.raises(InputError, match="one output"):
        classes, images = build("convolutional-classes")
        excite.watch(classes, example=images, probes=[Trajectory(link="sigmoid")])
    with pytest.raises(ModelError, match="output="):
        excite.watch(build("dict")[0], example=x, probes=[Trajectory()])
    assert state_of(model)["hooks"] == state_of(build("mlp")[0])["hooks"]
    model[0].requires_grad_(False)
    with pytest.raises(ModelError, match="frozen"):
        excite.watch(model, example=x, probes=[Trajectory()])
    with Training(model, x, Trajectory(Every(1), clean=Every(1))) as t:
        values = t.step(x, torch.zeros(4, 1, dtype=torch.float64))
        assert values["clean/0"] == pytest.approx(trajectory(model, x)["0"].mean, rel=1e-12)


def test_what_is_not_connected_is_said():
    model, x = build("mlp")
    with excite.watch(model, example=x, probes=[Trajectory(Every(1))], strict=True) as watch:
        with pytest.raises(ModelError, match="no forward pass"):
            watch.step()
        model(x)
        with pytest.raises(ModelError, match="not connected to the loss"):
            watch.step()

    class Switch(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.cut = nn.Linear(5, 4), nn.Linear(4, 1), False

        def forward(self, x):
            h = self.one(x)
            return self.two(h.detach() if self.cut else h)

    model = Switch().double()
    with excite.watch(model, example=x, probes=[Trajectory(Every(1))], strict=True) as watch:
        model.cut = True
        model(x).sum().backward()
        with pytest.raises(ModelError, match="'one' cannot be reached"):
            watch.step()


def test_the_search_of_an_excitation_is_no_training_pass():
    model, x = build("mlp")
    pe = excite.PersistentExcitation(model, radius=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with excite.watch(model, example=x, probes=[probe := Trajectory(Every(1), bounds_every=1)], strict=True) as watch:
        found = []
        measure = probe.measure
        probe.measure = lambda now: found.append(values := measure(now)) or values
        for _ in range(2):
            optimizer.zero_grad()
            loss = pe.loss(x, torch.tensor([0, 1, 1, 0]))
            loss.backward()
            optimizer.step()
            watch.step(loss)
    assert [values["samples/0"] for values in found] == [8, 8]  # the doubled batch of the loss
    assert all(float(values["violations/0"]) == 0 for values in found)


def smooth():
    """One output and smooth activations: a penalty on gradients has terms of second order in dL/dz."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    return model, torch.randn(8, 5, dtype=torch.float64), torch.randn(8, 1, dtype=torch.float64)


def penalty(f, x):
    (gradient,) = torch.autograd.grad(f.sum(), x, create_graph=True)
    return 10 * (gradient.norm(dim=1) - 1).square().mean()


def _same_pass(model, x, y):
    x = x.clone().requires_grad_()
    f = model(x)
    ((f - y).square().mean() + penalty(f, x)).backward()


def _own_pass(model, x, y):
    moved = (x + 0.3).requires_grad_()
    ((model(x) - y).square().mean() + penalty(model(moved), moved)).backward()


def _own_pass_first(model, x, y):
    moved = (x + 0.3).requires_grad_()
    term = penalty(model(moved), moved)
    ((model(x) - y).square().mean() + term).backward()


def _gradient_of_the_loss(model, x, y):
    x = x.clone().requires_grad_()
    loss = (model(x) - y).square().mean()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + gradient.square().sum()).backward()


def _gradient_of_the_weights(model, x, y):
    loss = (model(x) - y).square().mean()
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    (loss + sum(g.square().sum() for g in gradients)).backward()


def _retained(model, x, y):
    loss = (model(x) - y).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def _second_order(model, x, y):
    (model(x) - y).square().mean().backward(create_graph=True)
    curvature = sum(p.grad.square().sum() for p in model.parameters())
    torch.autograd.grad(curvature, list(model.parameters()))


def _attack(model, x, y):
    moved = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad((model(moved) - y).square().mean(), moved)
    assert gradient.abs().max() > 0
    (model(x) - y).square().mean().backward()


def _saliency(model, x, y):
    x = x.clone().requires_grad_()
    f = model(x)
    torch.autograd.grad(f.sum(), x, retain_graph=True)
    (f - y).square().mean().backward()


def _functional(model, x, y):
    weights = {k: p.detach().clone().requires_grad_() for k, p in model.named_parameters()}
    (torch.func.functional_call(model, weights, (x,)) - y).square().mean().backward()


def _accumulated(model, x, y):
    for part, goal in zip(x.split(2), y.split(2)):
        ((model(part) - goal).square().mean() / 4).backward()


@pytest.mark.parametrize(
    ("how", "repeated"),
    [(_same_pass, True), (_own_pass, False), (_own_pass_first, False), (_gradient_of_the_loss, True),
     (_gradient_of_the_weights, True), (_retained, True), (_second_order, True), (_attack, False), (_saliency, False),
     (_functional, False), (_accumulated, False)],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_every_sample_counts_once_over_several_backward_passes(how, repeated):
    model, x, y = smooth()
    exact = trajectory(model, x, layers="all")
    probe = Trajectory(Every(1), layers="all", bounds_every=1, clean=Every(1))
    values = {}
    with excite.watch(model, example=x, probes=[probe], strict=True) as watch:
        measure = probe.measure
        probe.measure = lambda now: values.update(measure(now)) or {}
        for _ in range(2):
            model.zero_grad()
            how(model, x, y)
            watch.step()
            for layer, one in exact.items():
                assert float(values[f"samples/{layer}"]) == 8
                assert float(values[f"mean/{layer}"]) == pytest.approx(one.mean, rel=1e-9)
                assert float(values[f"max/{layer}"]) == pytest.approx(one.max, rel=1e-9)
                assert float(values[f"clean/{layer}"]) == pytest.approx(one.mean, rel=1e-9) or how is _accumulated
            if how is not _accumulated:  # there the closer look is at the last part
                assert float(values["lipschitz/0"]) == pytest.approx(float(exact["0"].lipschitz.mean()), rel=1e-9)
            assert ("repeated" in probe.labels) == repeated
    model.zero_grad()


def test_the_closer_look_waits_for_a_pass_that_is_trained_on():
    model, x, y = smooth()
    with excite.watch(model, example=x, probes=[probe := Trajectory(Every(1), bounds_every=2)], strict=True) as watch:
        looks = []
        measure = probe.measure
        probe.measure = lambda now: looks.append("lipschitz/0" in (found := measure(now))) or found
        for _ in range(4):
            model.zero_grad()
            _own_pass_first(model, x, y)
            watch.step()
    assert looks == [True] * 4


def test_bounds_are_of_images_of_the_size_of_the_example():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    measured = []
    probe = Trajectory(Every(1), bounds_every=2)
    with excite.watch(model, torch.randn(4, 1, 8, 8), optimizer=optimizer, probes=[probe], strict=True) as watch:
        measure = probe.measure
        probe.measure = lambda ctx: measured.append(found := measure(ctx)) or found
        for size in (6, 8, 9, 9, 8):
            loss = model(torch.randn(4, 1, size, size)).square().mean()
            loss.backward()
            optimizer.step()
            watch.step(loss)
    assert ["lipschitz/0" in values for values in measured[:5]] == [False, True, False, False, True]
    assert all(math.isfinite(values["mean/0"]) for values in measured[:5])


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 1)

    def forward(self, x):
        h = self.first(x)
        return self.last(h + torch.randn_like(h) if self.training else h)


def _depth():
    class Depth(Noisy):
        def forward(self, x):
            h = self.first(x)
            keep = torch.rand(len(h), 1, dtype=h.dtype) < 0.5 if self.training else 1
            return self.last(torch.relu(h) * keep)

    return Depth()


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 1)), "'2'"),
        (lambda: nn.Sequential(nn.Linear(5, 16), nn.RReLU(), nn.AlphaDropout(0.5), nn.Linear(16, 1)), "'2'"),
        (Noisy, "Noisy"),
        (_depth, "Depth"),
    ],
)
def test_values_of_a_random_sub_network_are_labelled_once(make, named):
    torch.manual_seed(0)
    model, x, y = make().double(), torch.randn(64, 5, dtype=torch.float64), torch.randn(64, 1, dtype=torch.float64)
    before = state_of(model)
    with excite.watch(model, example=x, probes=[probe := Trajectory(Every(1), clean=Every(1))], strict=True) as watch:
        values = {}
        measure = probe.measure
        probe.measure = lambda now: values.update(measure(now)) or {}
        assert torch.equal(before["random"], torch.get_rng_state())
        with pytest.warns(UserWarning, match=f"noise \\(in {named}\\), not the network in evaluation mode"):
            _step(model, x, y, watch)
        assert "random" in probe.labels
        assert any("sub-network" in line for line in probe.explain())
        exact = next(iter(trajectory(model, x).values()))
        assert float(values[f"clean/{exact.layer}"]) == pytest.approx(exact.mean, rel=1e-9)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            _step(model, x, y, watch)
        model.eval()
        _step(model, x, y, watch)
        assert "random" not in probe.labels


def _step(model, x, y, watch):
    model.zero_grad()
    (model(x) - y).square().mean().backward()
    watch.step()
