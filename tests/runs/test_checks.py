"""What can be stored, and which versions are read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from excite.errors import InputError, RunError
from excite.runs.checks import MAX_STEP, NewerVersion, check_keep, check_metrics, check_step, check_version, is_name


def test_numbers_of_any_kind_become_floats() -> None:
    values = {"a": 1, "b/c": np.float32(0.5), "d": torch.tensor([2.0]), "e": np.array([[3]]), "f": True}
    assert dict(check_metrics(values)) == {"a": 1.0, "b/c": 0.5, "d": 2.0, "e": 3.0, "f": 1.0}


@pytest.mark.parametrize("values", [[1.0], {"": 1.0}, {"a": "1"}, {"a": torch.ones(2)}, {"a": 10**400}, {"a": None}])
def test_other_metrics_are_refused(values: Any) -> None:
    with pytest.raises(InputError):
        list(check_metrics(values))


def test_steps_and_numbers_of_checkpoints() -> None:
    assert check_step(MAX_STEP) == MAX_STEP
    for step in (-1, 1.5, MAX_STEP + 1, True):
        with pytest.raises(InputError, match="step"):
            check_step(step)
    with pytest.raises(InputError, match="keep"):
        check_keep(0)


def test_names_of_metrics() -> None:
    assert is_name("rank/effective/conv1")
    assert not any(map(is_name, ("", "/a", "a/", " a", "a\n", 3)))


def test_newer_versions_are_refused() -> None:
    assert check_version("x", "1", 2) == 1
    with pytest.raises(NewerVersion, match="x has format version 3"):
        check_version("x", 3, 2)
    with pytest.raises(RunError, match="damaged"):
        check_version("x", None, 2)
