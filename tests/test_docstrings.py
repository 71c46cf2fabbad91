"""Public names: what they take and return is documented, and the examples in their docstrings run."""

from __future__ import annotations

import ast
import doctest
import functools
import importlib
import inspect
import pkgutil
import re
import textwrap
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import excite
from excite._core import checks

PACKAGES = (
    "excite", "excite.bounds", "excite.data", "excite.excitation", "excite.lipschitz",
    "excite.margin", "excite.monitor.alerts", "excite.probes", "excite.report", "excite.report.audit", "excite.runs",
    "excite.studies", "excite.train", "excite.wiring",
)  # fmt: skip
INTEGRATIONS = ("accelerate", "lightning", "transformers")  # where these packages are installed
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def members(package: str) -> dict[str, Any]:
    """The names of `__all__`; without one, those that the module defines."""
    module = importlib.import_module(package)
    own = [name for name, item in vars(module).items() if getattr(item, "__module__", "") == package]
    chosen = getattr(module, "__all__", [name for name in own if not name.startswith("_")])
    return {f"{package}.{name}": getattr(module, name) for name in chosen}


def referenced() -> dict[str, Any]:
    """The names of the reference pages."""
    pages = sorted((Path(__file__).parent.parent / "docs" / "reference").glob("*.md"))
    names = [name for page in pages for name in re.findall(r"^::: ([\w.]+)$", page.read_text("utf-8"), re.MULTILINE)]
    assert len(names) > 50
    optional = tuple(f"excite.integrations.{name}" for name in INTEGRATIONS)
    return {name: pkgutil.resolve_name(name) for name in names if not name.startswith(optional)}


def public() -> dict[str, Any]:
    """Functions and classes by their shortest name, each once."""
    by_identity: dict[int, tuple[str, Any]] = {}
    installed = [f"excite.integrations.{name}" for name in INTEGRATIONS if find_spec(name)]
    for package in (*PACKAGES, *installed):
        for name, item in members(package).items():
            if inspect.isclass(item) or inspect.isroutine(item):
                by_identity.setdefault(id(item), (name, item))
    for name, item in referenced().items():
        if inspect.isclass(item) or inspect.isroutine(item):
            by_identity.setdefault(id(item), (name, item))
    return dict(sorted(by_identity.values()))


def methods(cls: type) -> dict[str, Any]:
    """Public methods and properties that the class or a base class of this library defines."""
    found = {}
    own = [base for base in reversed(cls.__mro__) if base is cls or base.__module__.startswith("excite")]
    for name, item in [pair for base in own for pair in vars(base).items()]:
        function = getattr(item, "__func__", getattr(item, "fget", item))
        if (
            not name.startswith("_")
            and inspect.isfunction(function)
            and "renamed_attribute" not in function.__qualname__
        ):
            found[name] = function
    return found


PUBLIC = public()


def test_names_of_the_readme_are_documented() -> None:
    text = (Path(__file__).parent.parent / "README.md").read_text("utf-8")
    names = set(re.findall(r"\bexcite(?:\.[A-Za-z_]\w*)+(?=\()", text))
    assert names
    documented = {id(item) for item in PUBLIC.values()}
    assert [name for name in sorted(names) if id(pkgutil.resolve_name(name)) not in documented] == []


FUNCTIONS = [name for name, item in PUBLIC.items() if inspect.isroutine(item)]
CLASSES = [name for name, item in PUBLIC.items() if inspect.isclass(item)]


ERRORS = [name for name in CLASSES if issubclass(PUBLIC[name], Exception)]
EXCITE_ERRORS = {PUBLIC[name].__name__ for name in ERRORS}


def written(function: Any) -> bool:
    """Whether it stands in a file: the `__init__` of a dataclass does not."""
    return Path(inspect.unwrap(function).__code__.co_filename).is_file()


def missing_arguments(function: Any) -> list[str]:
    """Parameters that the section `Args:` of the docstring does not name."""
    text = inspect.getdoc(function) or ""
    parameters = inspect.signature(function).parameters.values()
    hidden = {p.name for p in parameters if p.name.startswith("_") or p.name in ("self", "cls")}
    documented = re.findall(r"^    \*{0,2}(\w+(?:, \w+)*)(?: \(.*?\))?:", text.partition("Args:")[2], re.MULTILINE)
    return [p.name for p in parameters if p.name not in hidden | {n for row in documented for n in row.split(", ")}]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str) -> None:
    text = inspect.getdoc(PUBLIC[name]) or ""
    assert text.splitlines()[0].endswith((".", ":"))
    assert missing_arguments(PUBLIC[name]) == []
    returned = inspect.signature(PUBLIC[name]).return_annotation
    assert "\nReturns:" in text or "\nYields:" in text or returned in (None, "None")
    assert ">>> " in text


@pytest.mark.parametrize("name", CLASSES)
def test_classes(name: str) -> None:
    cls = PUBLIC[name]
    text = inspect.cleandoc(cls.__doc__ or "")
    assert text.splitlines()[0].endswith((".", ":"))
    if not issubclass(cls, Exception):
        plain = getattr(cls, "_is_protocol", False) or not inspect.signature(cls).parameters
        assert "\nAttributes:" in text or "\nArgs:" in text or plain
        assert ">>> " in text
    assert [method for method, function in methods(cls).items() if not function.__doc__] == []


def refuses(function: Any) -> bool:
    """Whether the function's own lines raise, or check an argument by a function `check_…`."""
    body = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    raised = [getattr(node.exc, "func", node.exc) for node in ast.walk(body) if isinstance(node, ast.Raise)]
    called = [node.func for node in ast.walk(body) if isinstance(node, ast.Call)]
    errors, names = ({getattr(item, "id", getattr(item, "attr", "")) for item in group} for group in (raised, called))
    return bool(errors & EXCITE_ERRORS) or any(name.startswith("check_") for name in names)


@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in ERRORS])
def test_errors_that_users_can_cause(name: str) -> None:
    item = PUBLIC[name]
    makers = [vars(item).get(method) for method in ("__init__", "__post_init__")] if inspect.isclass(item) else [item]
    if any(refuses(maker) for maker in makers if inspect.isfunction(inspect.unwrap(maker)) and written(maker)):
        assert "\nRaises:" in inspect.cleandoc(item.__doc__ or "")


def undocumented(cls: type) -> list[str]:
    """Methods of two or more parameters without `Args:`, in the class or in the class of this library that it overrides.

    Hooks of a framework (overrides of a method from elsewhere) have its signature and are documented there.
    """
    missing = []
    for name, method in methods(cls).items():
        parameters = [
            p for p in inspect.signature(method).parameters if p not in ("self", "cls") and not p.startswith("_")
        ]
        bases = [base for base in cls.__mro__[1:] if name in vars(base)]
        ours = [methods(base)[name] for base in bases if base.__module__.startswith("excite")]
        if len(parameters) < 2 or len(ours) < len(bases):
            continue
        if all(missing_arguments(function) for function in (method, *ours)):
            missing.append(f"{name}: {missing_arguments(method)}")
    return missing


@pytest.mark.parametrize("name", CLASSES)
def test_methods(name: str) -> None:
    assert undocumented(PUBLIC[name]) == []


def test_an_undocumented_method_is_caught() -> None:
    class Planted:
        def both(self, first: int, second: int) -> None:
            """Two.

            Args:
                first: Documented.
            """

        def one(self, first: int) -> None:
            """One argument needs no section."""

    class Hook(dict):  # type: ignore[type-arg]
        def setdefault(self, key: Any, default: Any = None) -> None:
            """As the framework calls it."""

    class Derived(Planted):
        def both(self, first: int, second: int) -> None:
            """Two.

            Args:
                first: Documented.
                second: Documented.
            """

    assert undocumented(Planted) == ["both: ['second']"]
    assert undocumented(Hook) == undocumented(Derived) == []


class AnyOutput(doctest.OutputChecker):
    """Where an example shows no output, any is right."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return not want or super().check_output(want, got, optionflags)


def names(item: Any) -> dict[str, Any]:
    """What an example may use without defining it: the modules, a small model and data, and the public names beside its own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    x, y = torch.randn(6, 4), torch.tensor([0, 1] * 3)
    beside = importlib.import_module(".".join(item.__module__.split(".")[:2]))
    context = {name: getattr(beside, name) for name in getattr(beside, "__all__", ())}
    context |= {name: value for name, value in vars(inspect.getmodule(item)).items() if not name.startswith("_")}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return context | {
        "torch": torch,
        "nn": nn,
        "excite": excite,
        "model": model,
        "x": x,
        "y": y,
        "optimizer": optimizer,
    }


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", [name for name, item in PUBLIC.items() if ">>> " in (item.__doc__ or "")])
def test_examples(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    item = PUBLIC[name]
    for owner in [item, *(methods(item).values() if inspect.isclass(item) else ())]:
        text = inspect.getdoc(owner) or ""
        if ">>> " not in text:
            continue
        test = doctest.DocTestParser().get_doctest(text, names(item), name, None, None)
        printed: list[str] = []
        result = doctest.DocTestRunner(AnyOutput(), optionflags=FLAGS).run(test, out=printed.append)
        assert result.attempted > 0 or "+SKIP" in text
        assert not result.failed, "".join(printed)


SKIPPED = {
    "excite.data.fetch": "downloads",
    "excite.studies.StudyResult": "trains for minutes",
    "excite.studies.run": "trains for minutes",
    "excite.studies.judge_again": "the folder of a study",
    "excite.studies.plan_seeds": "the folder of a study",
    "excite.jobs.sweep.SweepResult": "a sweep of the user",
    "excite.jobs.sweep.read_sweep": "a file of the user",
    "excite.jobs.sweep.run_sweep": "a sweep of the user",
    "excite.monitor.sinks.WandB": "an account",
    "excite.monitor.sinks.MLflow": "a server of the user",
    "excite.integrations.accelerate.AcceleratedWatch": "the training loop of the user",
    "excite.integrations.lightning.LightningCallback": "the trainer of the user",
    "excite.integrations.lightning.PersistentlyExcited": "the network of the user",
    "excite.integrations.transformers.TransformersCallback": "the trainer of the user",
    "excite.integrations.transformers.ExcitedTrainer": "the trainer of the user",
}


def test_skipped_examples_have_a_reason() -> None:
    skipped = {name for name, item in PUBLIC.items() if "+SKIP" in (item.__doc__ or "")}
    assert skipped <= SKIPPED.keys()


def test_a_wrong_example_is_caught() -> None:
    test = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "planted", None, None)
    assert doctest.DocTestRunner(AnyOutput(), optionflags=FLAGS).run(test, out=lambda _: None).failed == 1


def test_an_error_without_a_section_is_caught() -> None:
    def raising(x: object) -> None:
        raise excite.InputError("planted")

    def checking(x: object) -> None:
        checks.check_count(x, "x")

    def neither(x: object) -> None:
        raise NotImplementedError

    assert [refuses(function) for function in (raising, checking, neither)] == [True, True, False]


def test_an_undocumented_argument_is_caught() -> None:
    def planted(first: int, second: int) -> None:
        """A function.

        Args:
            first: Documented.
        """

    assert missing_arguments(planted) == ["second"]
    assert missing_arguments(functools.partial(planted, 1)) != []
