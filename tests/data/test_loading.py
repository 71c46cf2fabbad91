from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from excite.data import BUILT_IN, DOWNLOADED, NAMES, load
from excite.errors import DataError, InputError

SYNTHETIC = ["boundaries", "linear-margins-1", "linear-margins-2", "frequencies", "moons"]


@pytest.mark.parametrize("name", ["digits", *SYNTHETIC])
def test_the_same_arguments_give_the_same_bits(name: str) -> None:
    first, second = load(name, seed=3), load(name, seed=3)
    for part in ("x_train", "y_train", "x_test", "y_test"):
        assert torch.equal(getattr(first, part), getattr(second, part))


@pytest.mark.parametrize("name", ["digits", "boundaries", "linear-margins-2", "frequencies", "moons"])
def test_another_seed_gives_other_points(name: str) -> None:
    assert not torch.equal(load(name, seed=1).x_train, load(name, seed=2).x_train)


def test_loading_consumes_no_global_randomness() -> None:
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    for name in ("digits", *SYNTHETIC):
        load(name)
    assert torch.equal(before, torch.get_rng_state())
    assert np.array_equal(numpy_before, np.random.get_state()[1])  # noqa: NPY002


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"name": "digit"}, "did you mean 'digits'"),
        ({"name": "imagenet"}, "expected one of"),
        ({"name": "digits", "classes": (3, 10)}, "no class 10"),
        ({"name": "digits", "classes": (3, -1)}, "no class -1"),
        ({"name": "digits", "classes": (3, True)}, "no class True"),
        ({"name": "digits", "classes": (3, 3)}, "different"),
        ({"name": "digits", "classes": (3,)}, "at least two"),
        ({"name": "digits", "classes": "38"}, "at least two"),
        ({"name": "digits", "classes": (3, 8), "train": 1000}, "ask for at most"),
        ({"name": "digits", "train": 0}, "train: expected"),
        ({"name": "digits", "test": 2.5}, "test: expected"),
        ({"name": "digits", "seed": -1}, "seed"),
        ({"name": "digits", "scale": (1, 0)}, "scale"),
        ({"name": "digits", "scale": (0, math.nan)}, "scale"),
        ({"name": "digits", "scale": 3}, "scale"),
        ({"name": "digits", "omega": 1.0}, "no option"),
        ({"name": "moons", "omega": 1.0}, "its options: noise"),
        ({"name": "moons", "noise": -1.0}, "noise"),
        ({"name": "moons", "classes": (0, 1)}, "do not apply"),
        ({"name": "moons", "train": 1}, "train"),
        ({"name": "linear-margins-1", "train": 10}, "leave train and test out"),
    ],
)
def test_bad_options_are_refused(arguments: dict, match: str) -> None:
    with pytest.raises(InputError, match=match) as error:
        load(**arguments)
    assert "\n" not in str(error.value)


def test_offline_data_says_how_to_get_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("EXCITE_DATA", str(tmp_path))
    for name in ("cifar10", "mnist", "fashion-mnist"):
        with pytest.raises(DataError, match=f"excite data fetch {name}") as error:
            load(name)
        assert "EXCITE_DATA" in str(error.value)
        assert "\n" not in str(error.value)


def test_all_names_are_known() -> None:
    assert set(NAMES) == {"digits", "cifar10", "mnist", "fashion-mnist", *SYNTHETIC}


def test_names_are_those_built_in_and_those_downloaded() -> None:
    assert sorted(NAMES) == sorted([*BUILT_IN, *DOWNLOADED])
    assert "digits" in BUILT_IN
    assert {"cifar10", "mnist", "fashion-mnist"} <= set(DOWNLOADED)
