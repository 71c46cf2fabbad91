"""The gate for what users pass."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import excite
from excite import lipschitz, wiring
from excite._core.checks import (
    check_choice,
    check_count,
    check_dense,
    check_flag,
    check_model,
    check_number,
    check_numbers,
    check_output,
    check_pair,
    check_seed,
    check_tensor,
    check_weights,
    model_errors,
    same_shapes,
    shown,
    to_array,
)
from excite.errors import InputError, ModelError
from excite.report import audit as auditing
from models import build, same_state, state_of


@pytest.mark.parametrize(
    "value",
    [
        0,
        -1,
        1.0,
        True,
        "1",
        None,
        math.nan,
        10**30,
        torch.tensor(1.0),
        torch.tensor(True),
        torch.tensor([1, 2]),
        np.True_,
    ],
)
def test_what_is_no_count_is_refused(value):
    with pytest.raises(InputError, match="steps: expected a whole number"):
        check_count(value, "steps")


def test_counts_of_numpy_are_counts():
    assert check_count(np.int64(3), "steps") == 3


@pytest.mark.parametrize("value", [-1, True, "1", None, math.nan, math.inf, 10**400, 1j, torch.ones(2)])
def test_what_is_no_number_is_refused(value):
    with pytest.raises(InputError, match="radius: expected a finite number of at least 0"):
        check_number(value, "radius", 0)


def test_limits_of_numbers():
    assert check_number(1, "share", 0, 1) == 1.0
    with pytest.raises(InputError, match="above 0 and at most 1; got 0"):
        check_number(0, "share", 0, 1, above=True)


@pytest.mark.parametrize("value", [-1, 2**64, 1.5, None])
def test_seeds(value):
    with pytest.raises(InputError, match="seed"):
        check_seed(value)


def test_flags_choices_and_pairs():
    assert check_flag(True, "strict") is True
    assert check_pair([0, 1], "across") == (0.0, 1.0)
    assert check_choice("mse", "loss", ("squared", "mse")) == "mse"
    for check in (
        lambda: check_flag(1, "strict"),
        lambda: check_choice([], "loss", ("squared", "mse")),
        lambda: check_pair((1, 0), "across"),
        lambda: check_pair((0, math.nan), "across"),
        lambda: check_pair(3, "across"),
    ):
        with pytest.raises(InputError, match=r"^(strict|loss|across): expected .* got "):
            check()


def test_any_value_is_shown_in_one_short_line():
    for value in ("a" * 500, torch.ones(3, 3), np.ones((3, 3)), nn.Linear(2, 2), 10**5000, "two\nlines"):
        assert "\n" not in shown(value)
        assert len(shown(value)) <= 80


@pytest.mark.parametrize(
    "tensor", [torch.ones(2, device="meta"), torch.ones(2, 2).to_sparse(), torch.ones(2, 2).to_sparse_csr()]
)
def test_tensors_without_values_to_read_are_refused(tensor):
    with pytest.raises(InputError, match="expected"):
        check_dense(tensor)
    with pytest.raises(InputError, match="expected"):
        to_array("weights", tensor)


def test_tensors_and_lists_of_them():
    with pytest.raises(InputError, match="floating-point"):
        check_tensor(torch.ones(2, dtype=torch.long), "inputs")
    with pytest.raises(InputError, match="same shapes"):
        same_shapes([torch.ones(2)], [torch.ones(3)], "weights")
    with pytest.raises(InputError, match="1 of 2 values are NaN"):
        same_shapes([torch.tensor([1.0, math.nan])], [torch.ones(2)], "weights")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_named(value):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    assert check_weights(model) is model
    with torch.no_grad():
        model[1].weight[0, 0] = value
    with pytest.raises(ModelError, match=r"1\.weight has NaN or infinite"):
        check_weights(model)


def test_weights_made_in_inference_mode_are_named():
    with torch.inference_mode():
        model = nn.Linear(2, 2)
    with pytest.raises(ModelError, match=r"weight was made under torch\.inference_mode"):
        check_weights(model)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float64])
def test_weights_of_every_size_are_checked(dtype):
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.ones(2, 2).to(dtype), requires_grad=False)
    assert check_weights(model) is model
    model.weight = nn.Parameter(torch.full((2, 2), math.nan).to(dtype), requires_grad=False)
    with pytest.raises(ModelError, match="weight has NaN or infinite"):
        check_weights(model)


def test_masks_of_infinities_are_no_weights():
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.full((2, 2), -math.inf))
    assert check_weights(model) is model


def test_models_without_values_are_refused():
    for model in (nn.Linear(2, 2, device="meta"), nn.LazyLinear(2)):
        with pytest.raises(ModelError, match="weight"):
            check_weights(model)
    with pytest.raises(InputError, match=r"expected a torch\.nn\.Module; got 3"):
        check_model(3)
    with pytest.raises(ModelError, match="finite outputs"):
        check_output(torch.tensor([math.nan]))


class Failing(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.layer, self.error = nn.Linear(5, 1).double(), error

    def forward(self, x):
        self.layer(x)
        raise self.error


def test_errors_of_the_model_have_their_cause():
    error = KeyError("mask")
    model, x = Failing(error), torch.randn(4, 5).double()
    for call in (
        lambda: lipschitz.local(model, x),
        lambda: excite.margins(model, x, torch.zeros(4)),
        lambda: excite.PersistentExcitation(model, 0.1).predict(x),
        lambda: excite.PersistentExcitation(model, 0.1).extremes(x),
        lambda: excite.PersistentExcitation(model, 0.1).loss(x, torch.zeros(4)),
        lambda: excite.PersistentExcitation(model, 0.1).losses(x, torch.zeros(4)),
        lambda: excite.AdversarialTraining(model, 0.1).loss(x, torch.zeros(4)),
    ):
        with pytest.raises(ModelError, match="the model raised KeyError: 'mask'") as raised:
            call()
        assert raised.value.__cause__ is error


def test_other_errors_stay_what_they_are():
    @model_errors
    def broken():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        broken()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_no_answer_about_weights_that_are_not_finite(value):
    model, x = build("mlp")
    with torch.no_grad():
        next(model.parameters())[0, 0] = value
    for call in (
        lambda: lipschitz.local(model, x),
        lambda: lipschitz.largest(model, x, 0.1),
        lambda: lipschitz.along(model, x, x + 1),
        lambda: lipschitz.bound(model, x),
        lambda: lipschitz.region_map(model, x[0], x[1], x[2], size=3),
        lambda: excite.PersistentExcitation(model, 0.1).predict(x),
        lambda: excite.AdversarialTraining(model, 0.1).predict(x),
        lambda: excite.margins(model, x, torch.zeros(4)),
    ):
        with pytest.raises(ModelError, match="finite weights"):
            call()


def test_a_bound_that_overflows_is_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1e200)
    with pytest.raises(ModelError, match="no finite Lipschitz bound"):
        lipschitz.bound(model, torch.ones(2, 2).double())


def test_a_plane_with_an_integer_origin_is_refused():
    model, x = build("mlp")
    with pytest.raises(InputError, match="origin as floating-point"):
        lipschitz.region_map(model, torch.zeros(5, dtype=torch.long), x[0], x[1], size=4)


@pytest.mark.parametrize("label", [10**9, -1, 7])
def test_an_audit_takes_labels_of_the_models_classes_only(label):
    model, x = build("mlp")
    with pytest.raises(InputError, match="labels"):
        auditing.audit(model, (x, torch.tensor([0, 1, 0, label])))


@pytest.mark.parametrize("output", [0, -1, "T", "logits"])
def test_a_tensor_has_no_parts_to_pick(output):
    model, x = build("mlp")
    with pytest.raises(InputError, match="the model returned a tensor"):
        excite.PersistentExcitation(model, 0.1, output=output).predict(x)


def test_counting_paths_leaves_counters_alone():
    model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 1)).double()
    before = state_of(model)
    wiring.path_count(model, torch.randn(4, 5).double(), biases=True)
    before["random"] = torch.get_rng_state()
    assert same_state(before, state_of(model))


@pytest.mark.parametrize("value", [2, np.int64(2), np.uint8(2), torch.tensor(2), torch.tensor([2]), np.array(2)])
def test_numbers_of_numpy_and_torch_are_numbers(value):
    assert check_count(value, "steps") == 2
    assert type(check_count(value, "steps")) is int
    assert check_number(value, "radius") == 2
    assert type(check_number(value, "radius")) is float


@pytest.mark.parametrize(
    "values",
    [
        [0, 0.5],
        (0.0, np.float32(0.5)),
        np.array([0, 0.5]),
        torch.tensor([0, 0.5]),
        [torch.tensor(0), torch.tensor(0.5)],
    ],
)
def test_numbers_in_any_order_preserving_form(values):
    assert check_numbers(values, "radii", 0) == [0.0, 0.5]


@pytest.mark.parametrize(
    "values", [0.5, "ab", None, {0.1}, torch.tensor(0.5), torch.ones(2, 2), [-1], ["a"], [math.nan], [[0.1]]]
)
def test_what_is_no_list_of_numbers_is_refused(values):
    with pytest.raises(InputError, match=r"^radii: expected"):
        check_numbers(values, "radii", 0)


@pytest.mark.parametrize("value", [True, np.True_, torch.tensor(True)])
def test_flags_of_numpy_and_torch_are_flags(value):
    assert check_flag(value, "evidence") is True


@pytest.mark.parametrize("value", [0, 1, "yes", None, torch.tensor(1), torch.ones(2) > 0])
def test_what_is_no_flag_is_refused(value):
    with pytest.raises(InputError, match=r"^evidence: expected True or False"):
        check_flag(value, "evidence")
