"""How a model is built again: the names of factories and classes."""

import functools

import pytest
import torch
from torch import nn

from excite import InputError
from excite.runs.import_paths import BUILT_IN, ModelSource, import_path, model_source


class Plain(nn.Module):
    def __init__(self, width=4, dropout=0.0):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, width), nn.Dropout(dropout), nn.Linear(width, 1))

    def forward(self, x):
        return self.body(x)


class Needy(nn.Module):
    def __init__(self, width, *, depth):
        super().__init__()


class Angry(nn.Module):
    made = 0

    def __init__(self):
        super().__init__()
        type(self).made += 1
        if self.made > 1:
            raise RuntimeError("only once\nreally")


def make(width=4):
    return Plain(width)


def test_a_class_that_builds_this_model_without_arguments():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    assert model_source(Plain()) == ModelSource(f"{__name__}:Plain", {})
    torch.manual_seed(5)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (lambda: Plain(5), r"Plain\(\) without arguments builds another model"),
        (lambda: Plain(dropout=0.5), r"Plain\(\) without arguments builds another model"),
        (lambda: Needy(1, depth=2), r"Needy takes width, depth"),
        (lambda: nn.Linear(2, 3), r"Linear takes in_features, out_features"),
        (lambda: nn.Sequential(nn.Linear(2, 3)), r"Sequential\(\) without arguments builds another model"),
        (Angry, r"Angry\(\) cannot be tried: RuntimeError: only once"),
    ],
)
def test_nothing_is_guessed(model, why):
    import re

    source = model_source(model())
    assert source.factory is None
    assert re.fullmatch(why, source.missing), source.missing


def test_classes_that_no_other_program_finds():
    class Local(nn.Module):
        pass

    Main = type("Main", (nn.Module,), {"__module__": "__main__"})
    assert "has no name that can be imported" in model_source(Local()).missing
    assert model_source(Main()).missing.startswith("Main is defined in the program itself")
    assert import_path(lambda: None)[0] is None


def test_factories():
    model = Plain(5)
    expected = ModelSource(f"{__name__}:make", {"width": 5})
    assert model_source(model, make, {"width": 5}) == expected
    assert model_source(model, f"{__name__}:make", {"width": 5}) == expected
    assert model_source(model, functools.partial(make, width=5)) == expected
    assert model_source(model, Plain, {"width": 5}).factory == f"{__name__}:Plain"
    assert model_source(model, "small-cnn", {"channels": (1,)}) == ModelSource("small-cnn", {"channels": [1]})


@pytest.mark.parametrize(
    ("factory", "options", "said"),
    [
        ("no_such_module:make", None, "cannot import 'no_such_module'"),
        (f"{__name__}:other", None, "has no 'other'"),
        ("models.Net", None, "factory: expected 'module:function'"),
        (lambda: None, None, "factory: .*has no name that can be imported.*: pass one that a module defines"),
        (3, None, "factory: expected 'module:function', a function or a class; got 3"),
        (nn.Linear(2, 2), None, "factory: expected 'module:function', a function or a class; got a Linear module"),
        (make, {"width": object()}, "options: expected JSON values"),
        (make, [1], "options: expected keyword arguments"),
        (None, {"width": 3}, "options: expected a factory that takes them"),
    ],
)
def test_refused(factory, options, said):
    with pytest.raises(InputError, match=said) as error:
        model_source(Plain(), factory, options)
    assert "\n" not in str(error.value)


def test_a_built_in_name_with_a_typo_is_refused_when_saving():
    from excite.train import ARCHITECTURES

    assert tuple(ARCHITECTURES) == BUILT_IN
    for name in BUILT_IN:
        assert model_source(nn.Linear(2, 1), name).factory == name
    with pytest.raises(InputError, match="no built-in model 'papers_cnn': did you mean 'papers-cnn'"):
        model_source(nn.Linear(2, 1), "papers_cnn")
    with pytest.raises(InputError, match=r"'swin': expected one of papers-cnn, .*, or 'module:function'"):
        model_source(nn.Linear(2, 1), "swin")
