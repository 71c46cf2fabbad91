"""`make test` leaves out what is marked slow, and still meets every public name and every command."""

import ast
import importlib
import re
from pathlib import Path

import pytest

from syntax import functions, tree
from test_docs import SLOW_PAGES

TESTS = Path(__file__).parent
PACKAGES = [
    "excite", "excite.report.audit", "excite.bounds", "excite.data", "excite.excitation", "excite.train", "excite.lipschitz", "excite.margin",
    "excite.probes", "excite.report", "excite.runs", "excite.studies", "excite.wiring",
]  # fmt: skip


def is_slow(function):
    return any(ast.unparse(decorator) == "pytest.mark.slow" for decorator in function.decorator_list)


def names_used(tree):
    """Names, attributes and modules imported from, slow tests left out."""
    used, nodes = set(), [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef) and is_slow(node):
            continue
        if isinstance(node, ast.Name):
            used.add(node.id)
        elif isinstance(node, ast.Attribute):
            used.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            used |= set((node.module or "").split("."))
        nodes += ast.iter_child_nodes(node)
    return used


@pytest.fixture(scope="module")
def used():
    trees = [tree(path) for path in TESTS.rglob("test_*.py") if path != Path(__file__)]
    # Examples of the other pages are run by test_docs, README's by test_readme.
    pages = [page for page in (TESTS.parent / "docs").rglob("*.md") if page.name not in SLOW_PAGES]
    trees += [
        ast.parse(block) for page in pages for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    ]
    return set().union(*map(names_used, trees))


def annotations(value):
    """What a function takes and returns, what a class holds, as text."""
    parts = [value, *vars(value).values(), *vars(value).get("__mro__", ())] if isinstance(value, type) else [value]
    return " ".join(str(one) for part in parts for one in (getattr(part, "__annotations__", None) or {}).values())


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_used_by_a_quick_test(package, used):
    """By its name, or as what something that is used takes, holds or returns."""
    public = {
        name: getattr(module, name)
        for module in map(importlib.import_module, PACKAGES)
        for name in module.__all__
        if not name.startswith("_")
    }
    met = public.keys() & used
    while more := set(re.findall(r"\w+", " ".join(annotations(public[name]) for name in met))) & public.keys() - met:
        met |= more
    assert [name for name in importlib.import_module(package).__all__ if name in public.keys() - met] == []


def test_every_command_is_run_by_a_quick_test():
    from excite.cli.app import app
    from excite.cli.commands.data import data_app
    from excite.cli.commands.study import study_app

    calls = set()
    for path in TESTS.rglob("test_*.py"):
        for function in functions(path):
            if not is_slow(function):
                for node in ast.walk(function):
                    words = node.elts if isinstance(node, ast.List) else node.args if isinstance(node, ast.Call) else []
                    words = [word.value for word in words[:3] if isinstance(word, ast.Constant)]
                    if isinstance(node, ast.Call) and ast.unparse(node.func) == "excite":
                        calls.add(tuple(words))
                    elif words[:1] == ["excite"]:  # sys.argv
                        calls.add(tuple(words[1:]))
    for group, prefix in ((app, ()), (study_app, ("study",)), (data_app, ("data",))):
        for command in group.registered_commands:
            words = (*prefix, command.name or command.callback.__name__)
            if words == ("demo",):
                continue  # twenty seconds at least: .ci/run runs it, and so do slow tests
            assert any(call[: len(words)] == words for call in calls), f"no quick test runs excite {' '.join(words)}"


def test_the_list_of_packages_is_complete():
    """Whatever package the documentation tells users to import from."""
    text = "\n".join(page.read_text() for page in (TESTS.parent / "docs").rglob("*.md"))
    for found in set(re.findall(r"(?:from|import) (excite\.[a-z_]+)\b", text)):
        module = importlib.import_module(found)
        if hasattr(module, "__path__") and hasattr(module, "__all__"):
            assert found in PACKAGES
