"""What a user of `PersistentExcitation` may rely on."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import excite
from excite import ExciteError, InputError, ModelError, PersistentExcitation, Relative, Stages
from models import CASES, ReturnsDict, build, papers_network, same_state, state_of

SCALAR = [name for name, case in CASES.items() if case.outputs == 1]
Y = torch.tensor([0, 1, 1, 0])


def excited(name, **options):
    model, x = build(name)
    options = {"radius": 0.05, "output": CASES[name].pick, **options}
    return PersistentExcitation(model, **options), x


@pytest.mark.parametrize("name", SCALAR)
def test_the_search_changes_nothing(name):
    pe, x = excited(name)
    pe.model.train()
    sum(p.sum() for p in pe.model.parameters()).backward()
    before = state_of(pe.model)
    pe.extremes(x)
    pe.perturbations(x)
    pe.predict(x)
    assert same_state(before, state_of(pe.model))


@pytest.mark.parametrize("name", SCALAR)
def test_the_loss_is_the_half_squared_error_at_the_extremes(name):
    pe, x = excited(name)
    torch.manual_seed(5)
    low, high = pe.extremes(x)
    expected = (0.5 * (high - Y) ** 2 + 0.5 * (low - Y) ** 2).mean()
    assert torch.allclose(pe.loss(x, Y), expected, rtol=1e-12)
    torch.manual_seed(5)
    assert torch.allclose(pe.loss(x, Y[:, None].float()), expected, rtol=1e-12)


@pytest.mark.parametrize("name", ["mlp", "dropout", "batchnorm", "resnet-norm", "transformer-dropout"])
def test_gradients_are_those_at_fixed_perturbations(name):
    pe, x = excited(name)
    torch.manual_seed(5)
    pe.loss(x, Y).backward()
    grads = [p.grad.clone() for p in pe.model.parameters()]
    pe, x = excited(name)
    torch.manual_seed(5)
    low, high = pe.extremes(x)
    expected = torch.autograd.grad((0.5 * (high - Y) ** 2 + 0.5 * (low - Y) ** 2).mean(), list(pe.model.parameters()))
    assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-14) for a, b in zip(grads, expected))


@pytest.mark.parametrize("name", SCALAR)
@pytest.mark.parametrize("radius", [0, 0.05])
def test_the_random_state_and_counters_move_as_in_one_forward(name, radius):
    pe, x = excited(name, radius=radius)
    torch.manual_seed(11)
    pe.loss(x, Y)
    after = torch.get_rng_state()
    twin, _ = build(name)
    torch.manual_seed(11)
    twin(x)
    assert torch.equal(after, torch.get_rng_state())
    for (key, buffer), other in zip(pe.model.named_buffers(), twin.buffers()):
        if key.endswith("num_batches_tracked"):
            assert buffer == other == (0 if name == "instancenorm" else 1)  # which does not count batches
        elif radius == 0:
            assert torch.equal(buffer, other)
        else:
            assert not torch.equal(buffer, build(name)[0].get_buffer(key))


def test_radius_zero_is_the_plain_squared_error():
    pe, x = excited("mlp", radius=0)
    assert torch.equal(pe.loss(x, Y), (pe.model(x).squeeze(1) - Y).square().mean())
    low, high = pe.extremes(x)
    assert torch.equal(low, high)


def test_two_outputs_shapes_of_a_scalar_model_are_one():
    model, x = build("mlp")
    flat = nn.Sequential(*model, nn.Flatten(0))
    assert torch.equal(PersistentExcitation(model, 0.1).loss(x, Y), PersistentExcitation(flat, 0.1).loss(x, Y))


def test_predict_uses_the_threshold_in_evaluation_mode():
    pe, x = excited("dropout", threshold=0.0)
    pe.model.train()
    with torch.no_grad():
        expected = (pe.model.eval()(x).squeeze(1) > 0).long()
        pe.model.train()
    assert torch.equal(pe.predict(x), expected)
    assert pe.model.training


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_works_under_autocast(dtype):
    torch.manual_seed(0)
    model, x, y = papers_network(), torch.rand(4, 3, 32, 32) * 2 - 1, Y
    pe = PersistentExcitation(model, 0.05)
    full = pe.loss(x, y)
    with torch.autocast("cpu", dtype=dtype):
        loss = pe.loss(x, y)
    loss.backward()
    assert torch.allclose(loss.float(), full, rtol=0.1)
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_works_where_gradients_are_off(guard):
    pe, x = excited("mlp")
    expected = pe.loss(x, Y)
    with guard():
        loss = pe.loss(x.clone(), Y)
    assert torch.equal(loss, expected.detach())
    assert not loss.requires_grad


def test_frozen_parameters_stay_frozen():
    pe, x = excited("mlp")
    pe.model[0].requires_grad_(False)
    pe.loss(x, Y).backward()
    assert pe.model[0].weight.grad is None
    assert pe.model[2].weight.grad is not None
    pe.model.requires_grad_(False)
    assert not pe.loss(x, Y).requires_grad


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_models_give_the_same_loss(backend):
    model, x = build("mlp")
    expected = PersistentExcitation(model, 0.1).loss(x, Y)
    compiled = torch.compile(model, backend=backend)
    compiled(x)
    assert torch.allclose(PersistentExcitation(compiled, {"0": 0.1, "2": 0.1, "4": 0.1}).loss(x, Y), expected)
    model.compile(backend=backend)
    assert torch.allclose(PersistentExcitation(model, 0.1).loss(x, Y), expected)
    torch._dynamo.reset()


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_is_refused(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(5, 6), nn.Linear(6, 1)

        def forward(self, x):
            return self.head(checkpoint(self.body, x.requires_grad_(), use_reentrant=reentrant).relu())

    with pytest.raises(ModelError, match="activation checkpointing"):
        PersistentExcitation(Checkpointed(), 0.1).loss(torch.randn(4, 5), Y)


def test_random_numbers_of_the_model_are_repeated():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(5, 6), nn.Linear(6, 1)

        def forward(self, x):
            h = self.body(x + 0.1 * torch.randn_like(x))
            keep = torch.empty(len(x), 1, dtype=x.dtype).bernoulli_(0.5)
            h = F.gumbel_softmax(F.alpha_dropout(F.rrelu(h, training=True), 0.3, training=True) * keep + torch.rand(1))
            return self.head(h)

    torch.manual_seed(1)
    model, x = Noisy().double(), torch.randn(4, 5, dtype=torch.float64)
    pe = PersistentExcitation(model, 1e-9)
    torch.manual_seed(2)
    low, high = pe.extremes(x)
    torch.manual_seed(2)
    assert torch.allclose(low, model(x).squeeze(1), atol=1e-7)
    assert torch.allclose(high, low, atol=1e-7)
    torch.manual_seed(2)
    pe.loss(x, Y)
    after = torch.get_rng_state()
    torch.manual_seed(2)
    model(x)
    assert torch.equal(after, torch.get_rng_state())


@pytest.mark.slow
def test_training_with_it_learns():
    torch.manual_seed(0)
    x = torch.randn(64, 2)
    y = (x[:, 0] * x[:, 1] > 0).long()
    model = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(), nn.Linear(32, 1))
    pe = PersistentExcitation(model, 0.02)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    first = pe.loss(x, y).item()
    for _ in range(150):
        optimizer.zero_grad()
        loss = pe.loss(x, y)
        loss.backward()
        optimizer.step()
    assert loss < first / 2
    assert (pe.predict(x) == y).float().mean() > 0.9


class Detached(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 1)

    def forward(self, x):
        return self.layer(x).detach()


class Elementwise(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, x):
        return (x * self.scale).amax(1)


class Calling(nn.Module):
    """Has a weight, but never makes an affine call."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 1)

    def forward(self, x):
        return self.table.weight[:, 0].sum() * x.sum(1)


def loss(model=None, x=None, y=Y, **options):
    model = model if model is not None else nn.Linear(5, 1)
    return PersistentExcitation(model, **{"radius": 0.1, **options}).loss(x if x is not None else torch.zeros(4, 5), y)


NAN = float("nan")
BAD = {
    "negative radius": (lambda: loss(radius=-0.1), "at least 0 and at most .*; got -0.1"),
    "nan radius": (lambda: loss(radius=NAN), "finite number"),
    "infinite radius": (lambda: loss(radius=float("inf")), "finite number"),
    "boolean radius": (lambda: loss(radius=True), "expected a number"),
    "text radius": (lambda: loss(radius="big"), "'big'"),
    "negative radius of a layer": (lambda: loss(radius={"weight": -1}), "layer 'weight'"),
    "unknown layer in radii": (lambda: loss(radius={"wieght": 0.1}), "did you mean 'weight'"),
    "no radius above zero": (lambda: loss(radius={"weight": 0}), "nothing would be perturbed"),
    "relative zero": (lambda: loss(radius=Relative(0)), "never perturb"),
    "relative nan": (lambda: loss(radius=Relative(NAN)), "finite"),
    "one stage": (lambda: loss(radius=Stages(0.1, 1)), "at least 2"),
    "stages of zero": (lambda: loss(radius=Stages(0)), "never perturb"),
    "stages of stages": (lambda: loss(radius=Stages(Stages(0.1))), "Stages inside Stages"),
    "unknown norm": (lambda: loss(norm="3"), "unknown norm '3'"),
    "boolean norm": (lambda: loss(norm=True), "unknown norm"),
    "zero steps": (lambda: loss(steps=0), "at least 1"),
    "unknown layer": (lambda: loss(layers=["nope"]), "unknown layer 'nope'"),
    "unknown layers word": (lambda: loss(layers="hidden"), "'all', 'input' or a list"),
    "no layers": (lambda: loss(layers=[]), "at least one layer name"),
    "named radii at the input": (lambda: loss(layers="input", radius={"weight": 1}), "one radius instead"),
    "threshold": (lambda: loss(threshold=NAN), "threshold"),
    "labels out of range": (lambda: loss(y=torch.tensor([0, 1, 2, 0])), "expected 0 and 1; got 2"),
    "nan labels": (lambda: loss(y=torch.tensor([0, 1, NAN, 0])), "expected 0 and 1; got nan"),
    "labels of the wrong length": (lambda: loss(y=torch.zeros(3)), r"\(4,\) or \(4, 1\).*got \(3,\)"),
    "labels of the wrong shape": (lambda: loss(y=torch.zeros(4, 2)), r"got \(4, 2\)"),
    "labels as a list": (lambda: loss(y=[0, 1, 0, 1]), "got list"),
    "nan inputs": (lambda: loss(x=torch.full((4, 5), NAN)), "20 of 20 values"),
    "inputs outside bounds": (lambda: loss(x=torch.full((4, 5), 3.0), bounds=(-1, 1)), "from 3 to 3"),
    "bounds upside down": (lambda: loss(bounds=(1, -1)), "low < high"),
    "bounds of one number": (lambda: loss(bounds=1), r"expected \(low, high\)"),
    "tokens at the input": (lambda: loss(build("tokens")[0], torch.zeros(4, 4, dtype=torch.long), layers="input"), "int64"),
    "no tensor": (lambda: loss(x=[1, 2]), "a tensor, a tuple or a dict"),
    "no affine layer": (lambda: loss(Elementwise()), "no affine layer"),
    "no affine call": (lambda: loss(Calling()), "no affine layer"),
    "no gradient path": (lambda: loss(Detached()), "no gradient path"),
    "vector output": (lambda: loss(nn.Linear(5, 3)), r"returned \(4, 3\)"),
    "dict output": (lambda: loss(ReturnsDict()), "output='logits'"),
    "missing output": (lambda: loss(ReturnsDict(), output="nope"), "output='nope' is not in"),
    "not a module": (lambda: loss(torch.relu), "expected a torch.nn.Module"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_with_the_reason(case):
    action, message = BAD[case]
    with pytest.raises(ExciteError, match=message):
        action()


def test_advance_takes_a_fraction():
    pe, _ = excited("linear")
    for fraction in (-0.1, 1.1, NAN, "half"):
        with pytest.raises(InputError, match="at least 0 and at most 1"):
            pe.advance(fraction)


@pytest.mark.parametrize("train", [True, False])
def test_a_failing_model_is_left_as_it_was(train):
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.layer, self.calls = nn.BatchNorm1d(5), nn.Linear(5, 1), 0

        def forward(self, x):
            out = self.layer(F.dropout(self.norm(x), 0.5, self.training))
            if len(x) > 4:
                raise RuntimeError("too many")
            return out

    model, x = Fails().train(train), torch.randn(4, 5)
    before = state_of(model)
    with pytest.raises(ModelError, match="RuntimeError: too many"):
        PersistentExcitation(model, 0.1).extremes(x)
    assert same_state(before, state_of(model))
    assert torch.overrides._get_current_function_mode() is None


def test_public_names():
    assert {"PersistentExcitation", "Relative", "Stages", "ExciteError"} <= set(dir(excite))
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        excite.nope  # noqa: B018


class Subtracts(nn.Module):
    """Changes its input in place."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 1)

    def forward(self, x):
        x -= 0.5
        return self.layer(x)


@pytest.mark.parametrize("layers", ["all", "input"])
def test_a_model_that_changes_its_input_in_place_is_not_misled(layers):
    model, x = Subtracts().double(), torch.randn(4, 5, dtype=torch.float64)
    pe, kept = PersistentExcitation(model, 0.1, layers=layers), x.clone()
    low, high = pe.extremes(x)
    assert torch.equal(x, kept)
    clean, reach = model.layer(x - 0.5).squeeze(1), 0.1 * model.layer.weight.abs().sum()
    assert torch.allclose(high, clean + reach)
    assert torch.allclose(low, clean - reach)


def test_a_frozen_backbone_under_no_grad_is_left_out():
    class Tuned(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(5, 6), nn.Linear(6, 1)

        def forward(self, x):
            with torch.no_grad():
                h = self.body(x)
            return self.head(h)

    pe = PersistentExcitation(Tuned(), 0.1)
    assert set(pe.perturbations(torch.randn(4, 5))) == {"head"}
    pe.loss(torch.randn(4, 5), Y).backward()


def test_bounds_hold_behind_a_copy_and_in_tuples():
    x = (torch.rand(4, 3, 4, 4) * 2 - 1).to(memory_format=torch.channels_last)
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 1))
    _, high = PersistentExcitation(model, 5.0, bounds=(-1, 1)).perturbations(x)["1"]
    assert (x.flatten(1) + high).abs().max() <= 1 + 1e-6

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 1)

        def forward(self, x, scale):
            return self.layer(x) * scale

    pair = (torch.rand(4, 5), torch.ones(4, 1))
    _, high = PersistentExcitation(Two(), 5.0, bounds=(-1, 1)).perturbations(pair)["layer"]
    assert (pair[0] + high).abs().max() <= 1 + 1e-6


def test_a_signal_that_all_samples_share_is_not_perturbed():
    class Table(nn.Module):
        def __init__(self, rows):
            super().__init__()
            self.table = nn.Parameter(torch.randn(rows, 3))
            self.embed, self.head = nn.Linear(3, 5), nn.Linear(5, 1)

        def forward(self, x):
            return self.head(x + self.embed(self.table).mean(0))

    for rows in (3, 4):
        assert set(PersistentExcitation(Table(rows), 0.1).perturbations(torch.randn(4, 5))) == {"head"}


def test_direct_calls_of_batch_norm_use_clean_statistics():
    class Direct(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.norm, self.head = nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)

        def forward(self, x):
            n = self.norm
            h = torch.batch_norm(
                self.layer(x), n.weight, n.bias, n.running_mean, n.running_var, self.training, 0.1, 1e-5, False
            )
            return self.head(h)

    torch.manual_seed(0)
    direct, x = Direct().double(), torch.randn(4, 5, dtype=torch.float64)
    usual = nn.Sequential(direct.layer, nn.BatchNorm1d(6).double(), direct.head)
    ours, theirs = (PersistentExcitation(m, 0.1).extremes(x) for m in (direct, usual))
    assert torch.allclose(torch.stack(ours), torch.stack(theirs))


class Gamble(nn.Module):
    """Branches by chance, with numbers that torch does not draw."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.calls = nn.Linear(5, 1), nn.Linear(5, 1), 0

    def forward(self, x):
        self.calls += 1
        return self.a(x) if self.calls % 2 else self.b(x)


class Recurrent(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.drop, self.rnn, self.head = nn.Dropout(0.3), nn.LSTM(5, 4, 2, dropout=dropout), nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.drop(self.rnn(x[None])[0][0]))


MORE_BAD = {
    "another path": (lambda: loss(Gamble()), "another path on the doubled batch"),
    "dropout inside a kernel": (lambda: loss(Recurrent(0.5)), "dropout inside lstm"),
    "no chosen layer with a radius": (
        lambda: loss(nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 1)), radius={"1": 0.1}, layers=["0"]),
        "nothing would be perturbed.*affine layers: 0, 1",
    ),
    "a call that does not happen": (lambda: loss(radius={"weight#2": 0.1}), "nothing would be perturbed"),
    "empty batch": (lambda: loss(x=torch.zeros(0, 5), y=torch.zeros(0)), "at least one sample"),
    "lazy": (lambda: loss(nn.LazyLinear(1)), "not initialized yet"),
    "bounds of the wrong shape": (lambda: loss(bounds=(torch.zeros(3), torch.ones(3))), "do not broadcast"),
    "bounds in words": (lambda: loss(bounds=("a", "b")), "numbers or tensors"),
    "batch norm on one": (
        lambda: loss(nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)), torch.zeros(1, 5), Y[:1]),
        "more than one value per channel",
    ),
}


@pytest.mark.parametrize("case", MORE_BAD)
def test_what_cannot_be_excited_is_refused_with_the_reason(case):
    action, message = MORE_BAD[case]
    with pytest.raises(ExciteError, match=message):
        action()


def test_recurrent_layers_without_dropout_work():
    pe = PersistentExcitation(Recurrent(0.0), 0.1)
    assert set(pe.perturbations(torch.randn(4, 5))) == {"head"}
