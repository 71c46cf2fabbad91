"""What a reasonable user passes is taken: numbers of numpy and torch, sequences of any kind, paths, other dtypes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from excite import AdversarialTraining, Hierarchy, InputError, ModelError, PersistentExcitation, Relative, Stages
from excite.data import load
from excite.lipschitz import largest, region_map
from excite.margin import SearchOptions, margins
from excite.margin.fixed_radius import robust_accuracy
from excite.monitor.watch import watch
from excite.probes import Every, Loss, Signs


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 1)).double()


X = torch.linspace(-1, 1, 40, dtype=torch.float64).reshape(8, 5)
Y = torch.arange(8) % 2


@pytest.mark.parametrize("radius", [np.float64(0.1), np.float32(0.1), torch.tensor(0.1), np.array(0.1)])
def test_radius(model, radius):
    expected = PersistentExcitation(model, float(radius)).loss(X, Y)
    assert PersistentExcitation(model, radius).loss(X, Y) == expected
    assert PersistentExcitation(model, {"0": radius}).loss(X, Y) == PersistentExcitation(
        model, {"0": float(radius)}
    ).loss(X, Y)
    assert PersistentExcitation(model, Relative(radius)).loss(X, Y).isfinite()
    assert AdversarialTraining(model, Stages(radius, np.int64(4)), random_start=np.False_).loss(X, Y).isfinite()


@pytest.mark.parametrize("steps", [np.int64(2), torch.tensor(2)])
def test_steps(model, steps):
    assert PersistentExcitation(model, 0.1, steps=steps).loss(X, Y) == PersistentExcitation(model, 0.1, steps=2).loss(
        X, Y
    )
    assert torch.equal(
        margins(model, X, Y, options=SearchOptions(steps=steps)).values,
        margins(model, X, Y, options=SearchOptions(steps=2)).values,
    )
    assert largest(model, X, 0.1, rounds=steps, places=8).value == largest(model, X, 0.1, rounds=2, places=8).value


@pytest.mark.slow
@pytest.mark.parametrize(
    "bounds",
    [
        (-2, 2),
        [-2.0, 2.0],
        np.array([-2.0, 2.0]),
        (np.float32(-2), np.int64(2)),
        (torch.tensor(-2.0), torch.tensor(2.0)),
    ],
)
def test_bounds(model, bounds):
    expected = PersistentExcitation(model, 0.1, bounds=(-2, 2)).loss(X, Y)
    assert PersistentExcitation(model, 0.1, bounds=bounds).loss(X, Y) == expected
    assert torch.equal(
        margins(model, X, Y, options=SearchOptions(steps=2), bounds=bounds).values,
        margins(model, X, Y, options=SearchOptions(steps=2), bounds=(-2, 2)).values,
    )


@pytest.mark.parametrize(
    "radii",
    [
        [0.0, 0.1],
        (0, 0.1),
        np.array([0, 0.1]),
        torch.tensor([0, 0.1], dtype=torch.float64),
        [torch.tensor(0), np.float64(0.1)],
    ],
)
def test_radii(model, radii):
    assert robust_accuracy(model, X, Y, radii, steps=2) == robust_accuracy(
        model, X, Y, [0, 0.1], steps=2, seed=np.int64(0)
    )


@pytest.mark.parametrize("schedule", [2, np.int64(2), Every(2), Every(np.int64(2)), Every(torch.tensor(2))])
def test_schedules_and_losses(model, schedule):
    probe = Signs(schedule, window=np.int64(3))
    assert probe.schedule == Every(2)
    with watch(model, X, probes=(probe, Loss())) as watching:
        for loss in (torch.tensor(0.5), torch.tensor([0.5]), 0.5, 1, np.float32(0.5), np.array(0.5)):
            watching.step(loss)


def test_a_schedule_of_0_is_refused():
    with pytest.raises(InputError, match="at least 1; got 0"):
        Signs(0)


@pytest.mark.parametrize(
    "groups",
    [
        [[0, 1], [2, 3]],
        ((0, 1), (2, 3)),
        np.array([[0, 1], [2, 3]]),
        torch.tensor([[0, 1], [2, 3]]),
        [[np.int64(0), 1], [2, 3]],
    ],
)
def test_hierarchy(groups):
    assert Hierarchy(groups).nodes == Hierarchy([[0, 1], [2, 3]]).nodes


@pytest.mark.parametrize("classes", [(0, 1), [0, 1], range(2), np.array([0, 1]), torch.tensor([0, 1])])
def test_classes_of_data(classes):
    assert load("digits", classes=classes, train=np.int64(10)).classes == ("0", "1")


def test_ranges(model):
    expected = region_map(model, X[0], X[1], X[2], across=(-1, 1), size=3)
    assert torch.equal(
        region_map(model, X[0], X[1], X[2], across=np.array([-1, 1]), size=np.int64(3)).slopes, expected.slopes
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_other_dtypes(model, dtype):
    model, x = model.to(dtype), X.to(dtype)
    assert PersistentExcitation(model, 0.1).loss(x, Y.to(dtype)).isfinite()
    assert PersistentExcitation(model, 0.1).predict(x).shape == (8,)
    assert len(robust_accuracy(model, x, Y, [0.1], steps=2)) == 1


def test_the_dtype_of_the_model_is_named_where_the_inputs_differ(model):
    for function in (PersistentExcitation(model, 0.1).loss, AdversarialTraining(model, 0.1).loss):
        with pytest.raises(ModelError, match=r"the model raised RuntimeError: .*dtype") as caught:
            function(X.float(), Y)
        assert isinstance(caught.value.__cause__, RuntimeError)


def test_no_points(model):
    for call in (
        lambda: margins(model, X[:0], Y[:0]),
        lambda: robust_accuracy(model, X[:0], Y[:0], [0.1]),
        lambda: PersistentExcitation(model, 0.1).loss(X[:0], Y[:0]),
    ):
        with pytest.raises(InputError, match="at least one"):
            call()
