"""Models by the name of a factory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from excite.errors import InputError
from excite.train import import_factory, make_model


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch) -> str:
    text = (
        "import torch\nfrom torch import nn\n"
        "def make(width=3):\n    return nn.Linear(2, width)\n"
        "class Inner:\n    @staticmethod\n    def make():\n        return nn.Linear(1, 1)\n"
        "def wrong():\n    return 3\n"
        "def broken():\n    raise RuntimeError('no\\nluck')\n"
        "number = 3\n"
    )
    (tmp_path / "users_models_.py").write_text(text)
    (tmp_path / "users_broken_.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    return "users_models_"


def test_a_factory_of_the_user(user_module: str) -> None:
    before = torch.get_rng_state()
    one, two = (make_model(f"{user_module}:make", seed=3, width=4) for _ in range(2))
    assert isinstance(one, nn.Linear)
    assert torch.equal(one.weight, two.weight)
    assert torch.equal(before, torch.get_rng_state())
    assert isinstance(make_model(f"{user_module}:Inner.make"), nn.Linear)


@pytest.mark.parametrize(
    ("name", "match"),
    [("{}:nothing", "has no 'nothing'"), ("{}:wrong", "not a torch.nn.Module"), ("{}:broken", "could not make a model"),
     ("{}:number", "not a function"), ("no_such_module_:make", "cannot import"), ("users_broken_:make", "cannot import"),
     ("{}:", "expected 'module:factory'"), (":make", "expected 'module:factory'"), ("a.b", "module:factory")],
)  # fmt: skip
def test_bad_factories_are_refused(user_module: str, name: str, match: str) -> None:
    with pytest.raises(InputError, match=match) as error:
        make_model(name.format(user_module))
    assert "\n" not in str(error.value)


def test_bad_options_of_a_factory_are_refused(user_module: str) -> None:
    with pytest.raises(InputError, match="could not make a model"):
        make_model(f"{user_module}:make", widht=3)
    assert callable(import_factory(f"{user_module}:make"))
