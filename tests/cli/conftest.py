"""A small run for the tests of commands, and the check of refused input."""

from collections.abc import Callable
from typing import Any

import pytest

CONFIG = """
epochs = 2
batch = 20

[data]
name = "digits"
classes = [8, 1]
train = 40
test = 20

[model]
name = "small-cnn"

[excitation]
radius = 0.05

[optimizer]
name = "sgd"
lr = 0.1
momentum = 0.9
"""


@pytest.fixture
def config() -> str:
    """A training of two epochs, as TOML."""
    return CONFIG


@pytest.fixture
def small_config() -> str:
    """A training of a fraction of a second, as TOML."""
    return CONFIG.replace("train = 40\ntest = 20", "train = 12\ntest = 6").replace('"small-cnn"', '"mlp"')


@pytest.fixture
def trained(excite: Any, tmp_path: Any) -> str:
    """Trains runs/first; what the command printed."""
    (tmp_path / "first.toml").write_text(CONFIG)
    status, out, err = excite("train", "first.toml")
    assert status == 0, err
    return str(out)


@pytest.fixture
def small_run(excite: Any, tmp_path: Any, small_config: str) -> None:
    """Trains runs/small."""
    (tmp_path / "small.toml").write_text(small_config)
    status, _, err = excite("train", "small.toml", "--no-margins")
    assert status == 0, err


@pytest.fixture
def refused(excite: Any) -> Callable[..., None]:
    """Checks that a command ends with one line on standard error and exit status 1."""

    def check(message: str, *command: str) -> None:
        status, _, err = excite(*command)
        assert status == 1
        assert message in err
        assert err.startswith("excite: ")
        assert err.count("\n") == 1
        assert "Traceback" not in err

    return check
