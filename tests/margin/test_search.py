"""What is returned is real: perturbations that flip the decision, in the user's type, of the stated size, within bounds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from excite._core.calls import pick_output
from excite.margin import SearchOptions, margins
from models import CASES, build, same_state, state_of

DIFFERENTIABLE = [name for name, case in CASES.items() if not case.tokens]


def decide(model: nn.Module, x: Tensor, output: str | int | None = None) -> Tensor:
    with torch.no_grad():
        f = pick_output(model(x), output)
    f = f.reshape(len(x), -1)
    return (f[:, 0] > 0.5).long() if f.shape[1] == 1 else f.argmax(1)


def check_real(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    norm: str,
    bounds: tuple[float, float] | None,
    pick: str | int | None = None,
    evidence: bool = False,
) -> None:
    found = margins(
        model,
        x,
        y,
        norm=norm,
        bounds=bounds,
        output=pick,
        perturbations=True,
        options=SearchOptions(certify=False, evidence=evidence, steps=20),
    )
    d = found.perturbations
    assert d is not None
    assert d.dtype == x.dtype
    model.eval()
    wrong = decide(model, x, pick) != y
    assert torch.equal(found.values == 0, wrong)
    broken = ~found.censored & ~wrong
    assert broken.any()
    moved = x + d
    assert (decide(model, moved, pick) != y)[broken].all()
    for i in torch.nonzero(broken)[:, 0][:5]:  # alone in a batch, where rounding differs
        assert decide(model, moved[i : i + 1], pick) != y[i]
    size = torch.linalg.vector_norm(d.flatten(1), float(norm), dim=1)
    torch.testing.assert_close(found.values[~found.censored], size[~found.censored].double(), rtol=0, atol=0)
    if bounds is not None:
        assert moved.min() >= bounds[0]
        assert moved.max() <= bounds[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", DIFFERENTIABLE)
@pytest.mark.parametrize("norm", ["inf", "2"])
def test_perturbations_of_the_table_of_models_flip_decisions(name: str, norm: str) -> None:
    model, x = build(name, batch=8)
    pick = CASES[name].pick
    model.eval()
    y = decide(model, x, pick)
    y[0] = 1 - y[0] if CASES[name].outputs == 1 else (y[0] + 1) % CASES[name].outputs
    check_real(model, x, y, norm, None, pick)


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["inf", "2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_perturbations_stay_within_bounds_in_both_types(norm: str, dtype: torch.dtype) -> None:
    model, x = build("convolutional-classes", batch=30)
    model, x = model.to(dtype).eval(), torch.rand(x.shape, generator=torch.Generator().manual_seed(0), dtype=dtype)
    x[x < 0.3], x[x > 0.8] = 0.1, 0.9
    with torch.no_grad():  # no class is the nearest everywhere
        model[-1].bias -= model(x).mean(0)
    check_real(model, x, decide(model, x), norm, (0.1, 0.9), evidence=True)


@pytest.mark.slow
def test_bounds_may_differ_by_pixel() -> None:
    model, x = build("mlp", batch=20)
    low, high = x.amin(0) - torch.rand(5, dtype=torch.float64), x.amax(0) + torch.rand(5, dtype=torch.float64)
    found = margins(model, x, decide(model, x), bounds=(low, high), perturbations=True)
    moved = x + found.perturbations
    assert (moved >= low).all()
    assert (moved <= high).all()
    free = margins(model, x, decide(model, x))
    assert (found.values >= 0.99 * free.values).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dropout", "batchnorm", "resnet-norm", "transformer-dropout", "dict"])
@pytest.mark.parametrize("mode", [True, False])
def test_model_gradients_modes_and_random_state_stay_as_they_are(name: str, mode: bool) -> None:
    model, x = build(name)
    model.train(mode)
    pick = CASES[name].pick
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    frozen = next(model.parameters())
    frozen.requires_grad_(False)
    before = state_of(model)
    margins(model, x, torch.zeros(len(x)), output=pick, options=SearchOptions(steps=5, restarts=2))
    assert same_state(before, state_of(model))
    assert not frozen.requires_grad


def test_the_model_is_restored_when_it_fails_halfway() -> None:
    model, x = build("batchnorm")
    model.train()
    calls = [0]

    def fail(*_: object) -> None:
        calls[0] += 1
        if calls[0] == 5:
            raise KeyboardInterrupt

    handle = model.register_forward_hook(fail)
    before = state_of(model)
    with pytest.raises(KeyboardInterrupt):
        margins(model, x, torch.zeros(len(x)))
    assert same_state(before, state_of(model))
    handle.remove()


@pytest.mark.slow
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_works_inside_no_grad_and_inference_mode(context: type) -> None:
    model, x = build("mlp", batch=6)
    y = decide(model, x)
    expected = margins(model, x, y)
    with context():
        found = margins(model, x.clone(), y.clone())
    torch.testing.assert_close(found.values, expected.values, rtol=0, atol=0)


@pytest.mark.slow
def test_same_seed_same_margins() -> None:
    model, x = build("convolutional", batch=10)
    y = decide(model, x)
    first, again = (margins(model, x, y, options=SearchOptions(steps=20, evidence=False)) for _ in range(2))
    assert torch.equal(first.values, again.values)


@pytest.mark.slow
def test_labels_of_any_kind_and_shape_mean_the_same() -> None:
    model, x = build("mlp", batch=6)
    y = decide(model, x)
    expected = margins(model, x, y, options=SearchOptions(certify=False, evidence=False)).values
    for labels in (y.double(), y.bool(), y[:, None], y.int(), y.numpy(), y.tolist()):
        found = margins(model, x, labels, options=SearchOptions(certify=False, evidence=False))
        torch.testing.assert_close(found.values, expected, rtol=0, atol=0)


def test_the_norm_one_moves_few_pixels_to_their_bounds() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(1200, 1), torch.rand(6, 1200)
    with torch.no_grad():
        f = model(x)[:, 0]
    y = (f > 0.5).long()
    # exactly: pixels with the largest weights go to their bounds, one after the other, until the output is changed enough
    toward = model.weight.detach()[0] * (1 - 2 * y[:, None])
    room = torch.where(toward > 0, 1 - x, x)
    order = toward.abs().argsort(1, descending=True)
    room, slope = room.gather(1, order), toward.abs().gather(1, order)
    left = (0.5 - f).abs()[:, None] - (slope * room).cumsum(1) + slope * room  # before each pixel
    exact = torch.minimum(room, left.clamp_min(0) / slope).sum(1).double()
    found = margins(model, x, y, norm="1", bounds=(0, 1), options=SearchOptions(certify=False, evidence=False))
    assert (found.values >= exact * (1 - 1e-4)).all()
    assert (found.values <= exact * 1.01).all()


def test_one_point_alone() -> None:
    model, x = build("mlp", batch=1)
    assert len(margins(model, x, decide(model, x))) == 1


def test_all_misclassified_is_all_zero_and_nothing_to_doubt() -> None:
    model, x = build("linear", batch=6)
    found = margins(model, x, 1 - decide(model, x))
    assert (found.values == 0).all()
    assert found.median == 0
    assert found.flags == ()


@pytest.mark.parametrize("norm", ["inf", "2", "1"])
@pytest.mark.parametrize("power", [85, -85])
def test_huge_and_tiny_outputs_have_the_margins_of_usual_ones(norm: str, power: int) -> None:
    class Scaled(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            return self.model(x) * 2.0**power

    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)), torch.rand(9, 6)
    y, options = model(x).argmax(1), SearchOptions(steps=8, restarts=2, evidence=False)
    usual, scaled = (margins(m, x, y, norm=norm, bounds=(0, 1), options=options) for m in (model, Scaled(model)))
    assert torch.equal(scaled.values, usual.values)  # powers of two change no digits; squares of 2**85 overflow


def test_perturbations_near_the_boundary_stay_adversarial() -> None:
    weight = torch.randn(8, generator=torch.Generator().manual_seed(0))
    model = nn.Linear(8, 2)
    with torch.no_grad():
        model.weight.copy_(torch.stack([10 * weight / weight.norm(), torch.zeros(8)])), model.bias.fill_(3.7)
    x = 1e-3 * weight.expand(4, 8) / weight.norm()
    found = margins(
        model, x, torch.zeros(4).long(), norm="2", perturbations=True, options=SearchOptions(steps=8, restarts=1)
    )
    f = model((x + found.perturbations).double().float()).detach()
    assert (f[:, 0] - f[:, 1] <= -64 * torch.finfo(torch.float32).eps * 3.7).all()
    assert ((found.values >= 1e-3) & (found.values <= 1.006e-3)).all()
