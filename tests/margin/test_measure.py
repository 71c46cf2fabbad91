"""Margins against a dense grid in the plane, and what is refused."""

import math

import pytest
import torch
from torch import Tensor, nn

from excite import ExciteError, PersistentExcitation, margins
from excite.margin import SearchOptions

NORMS = ["inf", "2"]


@pytest.fixture(scope="module")
def trained():
    """A small network that fits two moons, in float64."""
    from excite.data import load

    data = load("moons", train=200, test=60)
    x, y = data.x_train.double(), data.y_train
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 1)).double()
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    excitation = PersistentExcitation(model, 0)
    for _ in range(300):
        optimizer.zero_grad()
        excitation.loss(x, y).backward()
        optimizer.step()
    return model, data.x_test.double(), data.y_test


@pytest.mark.slow
@pytest.mark.parametrize("norm", NORMS)
def test_margins_of_a_plane_model_agree_with_a_dense_grid(trained, norm):
    model, x, y = trained
    found = margins(model, x, y, norm=norm)
    assert found.trusted, found.flags
    angles = torch.linspace(0, 2 * math.pi, 721, dtype=torch.float64)
    rays = torch.stack([angles.cos(), angles.sin()], 1)
    rays = rays / rays.norm(p=float(norm), dim=1, keepdim=True)
    radii = torch.linspace(0, 2, 801, dtype=torch.float64)
    for i in range(0, len(x), 3):
        grid = x[i] + radii[:, None, None] * rays
        flipped = (model(grid.reshape(-1, 2)).reshape(801, 721) > 0.5).long() != y[i]
        hit = flipped.any(1)
        exact = radii[hit.long().argmax()] if hit.any() else math.inf
        assert found.values[i] <= exact * 1.01 + 1e-9
        assert found.values[i] >= exact - 0.003


class Mixed(nn.Module):
    """A model that works in one precision and answers in another."""

    def __init__(self, model: nn.Module, inside: torch.dtype, outside: torch.dtype) -> None:
        super().__init__()
        self.model, self.inside, self.outside = model.to(inside), inside, outside

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x.to(self.inside)).to(self.outside)


MIXED = [
    (first, inside, outside)
    for first in (torch.float32, torch.float64)
    for inside in (torch.float32, torch.float64)
    for outside in (torch.float32, torch.float64, torch.bfloat16)
    if not first == inside == outside
]


@pytest.mark.slow
@pytest.mark.parametrize("types", MIXED, ids=lambda types: "-".join(str(t)[6:] for t in types))
@pytest.mark.parametrize(
    ("outputs", "options"), [(1, {}), (3, {"norm": "2", "bounds": (-3, 3)}), (1, {"layers": "all"})], ids=str
)
def test_outputs_may_have_another_precision_than_inputs(types, outputs, options):
    """Float32 in and float64 out ended in "Index put requires the source and destination dtypes match"."""
    first, inside, outside = types
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, outputs)).double()
    x = torch.randn(5, 4, dtype=first)
    f = model(x.double()).detach()
    y = f.argmax(1) if outputs > 1 else (f[:, 0] > 0).long()
    searched = SearchOptions(restarts=2, steps=40, evidence=not options)
    settings = {"threshold": 0.0, "options": searched, **options}
    expected = margins(model, x.double(), y, **settings)
    mixed = Mixed(model, inside, outside)
    found = margins(mixed, x, y, perturbations=True, **settings)
    if "layers" in options and first != inside:  # what is converted is a layer's input beside x: never harder to break
        assert (found.values <= 1.01 * expected.values).all()
    elif outside != torch.bfloat16:  # which decides otherwise where outputs are close
        assert found.values == pytest.approx(expected.values, rel=0.01)
    if "layers" in options:
        return
    assert found.perturbations.dtype == first
    moved = x + found.perturbations
    for f in (mixed(moved), torch.cat([mixed(one[None]) for one in moved])):
        chosen = f.argmax(1) if outputs > 1 else (f[:, 0] > 0).long()
        assert (chosen != y).tolist() == torch.isfinite(found.values).tolist()


def call(x=None, y=None, model=None, **options):
    x = torch.zeros(4, 5) if x is None else x
    return margins(model or nn.Linear(5, 1), x, torch.zeros(4, dtype=torch.long) if y is None else y, **options)


class Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).detach()


BAD = {
    "norm": (lambda: call(norm="3"), "unknown norm '3'"),
    "norm of layers": (lambda: call(norm="1", layers="all"), "unknown norm '1'"),
    "certificate": (lambda: call(options=SearchOptions(certify="crown")), "certify: expected True, False, 'lipschitz'"),
    "certificate of layers": (lambda: call(layers="all", options=SearchOptions(certify="linear")), "input only"),
    "seconds": (lambda: call(options=SearchOptions(seconds=-1)), "seconds"),
    "labels out of range": (lambda: call(y=torch.tensor([0, 1, 2, 0])), "2"),
    "labels for classes": (lambda: call(model=nn.Linear(5, 3), y=torch.tensor([0, 1, 3, 0])), "3"),
    "label shape": (lambda: call(y=torch.zeros(3, dtype=torch.long)), "shape"),
    "fractional labels": (lambda: call(y=torch.full((4,), 0.5)), "0.5|integer|whole"),
    "outside bounds": (lambda: call(torch.full((4, 5), 2.0), bounds=(-1, 1)), "bounds"),
    "bounds upside down": (lambda: call(bounds=(1, -1)), "bounds"),
    "nan": (lambda: call(torch.full((4, 5), math.nan)), "finite|NaN"),
    "integers": (lambda: call(torch.zeros(4, 5, dtype=torch.long)), "int64"),
    "empty": (lambda: call(torch.zeros(0, 5), torch.zeros(0, dtype=torch.long)), "at least one input"),
    "no gradient path": (lambda: call(model=Detached()), "gradient"),
    "steps": (lambda: call(options=SearchOptions(steps=0)), "steps"),
    "options": (lambda: call(options=40), "expected excite.margin.SearchOptions; got 40"),
    "threshold": (lambda: call(threshold=math.nan), "threshold"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_with_the_reason(case):
    action, message = BAD[case]
    with pytest.raises(ExciteError, match=message) as caught:
        action()
    assert "\n" not in str(caught.value)


class Refusing(nn.Module):
    """Like attention written with reshape(..., -1, size): it does not run on a batch of no samples."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = nn.Linear(2, 8), nn.Linear(8, 3)

    def forward(self, x):
        heads = torch.relu(self.hidden(x)).reshape(len(x), -1, 4)
        return self.out(heads.flatten(1))


@pytest.mark.parametrize("layers", ["input", "all"])
def test_the_model_is_not_run_without_points(layers):
    torch.manual_seed(0)
    model, x = Refusing(), torch.randn(4, 2)
    wrong = (model(x).argmax(1) + 1) % 3
    assert margins(model, x, wrong, layers=layers).values.tolist() == [0.0] * 4


class LayerDrop(nn.Module):
    """Draws a number in evaluation mode as well, and does not use it there, as the encoders of Wav2Vec2 do."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = nn.Linear(2, 8), nn.Linear(8, 3)

    def forward(self, x):
        number = torch.rand([])
        x = torch.relu(self.hidden(x))
        return self.out(x * 0 if self.training and number < 0.1 else x)


@pytest.mark.slow
def test_random_numbers_in_eval_mode_do_not_stop_layer_margins():
    torch.manual_seed(0)
    model, x = LayerDrop().eval(), torch.randn(4, 2)
    plain = nn.Sequential(model.hidden, nn.ReLU(), model.out)
    y = plain(x).argmax(1)
    assert torch.equal(*(margins(m, x, y, layers="all").values for m in (model, plain)))


def test_earlier_keywords_still_work_with_a_warning():
    torch.manual_seed(0)
    model, x = nn.Linear(3, 1), torch.randn(6, 3)
    y = (model(x)[:, 0] > 0.5).long()
    expected = margins(model, x, y, options=SearchOptions(steps=5, seed=3, evidence=False))
    with pytest.warns(DeprecationWarning, match=r"options=SearchOptions\(seed=..., steps=...\)"):
        found = margins(model, x, y, steps=5, seed=3, options=SearchOptions(evidence=False))
    assert torch.equal(found.values, expected.values)
    assert found.evidence is None
    with pytest.raises(TypeError, match="unexpected keyword argument 'step'"):
        margins(model, x, y, step=5)


class Viewing(nn.Sequential):
    """Flattens activations by a view, which needs them contiguous."""

    def forward(self, x):
        x = self[1](self[0](x))
        return self[3](x.view(len(x), -1))


def test_images_run_channels_last_where_the_model_takes_it():
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 6 * 6, 3)
    model, x, formats = nn.Sequential(*layers), torch.rand(6, 3, 8, 8), []
    hook = model.register_forward_pre_hook(
        lambda _, args: formats.append(args[0].is_contiguous(memory_format=torch.channels_last))
    )
    y = model(x).argmax(1)
    options = SearchOptions(steps=10, evidence=False)
    found = margins(model, x, y, bounds=(0, 1), perturbations=True, options=options)
    assert sum(formats) > len(formats) / 2
    assert (model(x + found.perturbations).argmax(1) != y).all()  # in the format of x too
    hook.remove()
    viewing = margins(Viewing(*layers), x, y, bounds=(0, 1), options=options)
    torch.testing.assert_close(viewing.values, found.values, rtol=1e-3, atol=0)  # single precision, 10 steps
