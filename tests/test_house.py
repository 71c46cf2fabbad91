"""The plan of the packages (storeys, sizes of folders, the top level) and of the tests (their names, their checks)."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from syntax import functions, functions_of, tree

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "excite"


def modules() -> list[Path]:
    return sorted(path for path in SOURCE.rglob("*.py"))


def test_at_most_15_files_on_one_level():
    sizes = Counter(path.parent.relative_to(SOURCE) for path in modules())
    assert {str(folder): size for folder, size in sizes.items() if size > 15} == {}


def test_modules_at_the_top_level():
    assert {path.name for path in SOURCE.glob("*.py")} == {"__init__.py", "__main__.py", "_version.py", "errors.py"}


@pytest.mark.slow
def test_packages_load_when_first_used():
    packages = sorted(path.parent.name for path in SOURCE.glob("*/__init__.py"))
    public = [name for name in packages if name not in ("_core", "cli")]
    code = (
        "import sys, excite\n"
        f"names = {public}\n"
        "loaded = [name for name in names if f'excite.{name}' in sys.modules]\n"
        "missing = [name for name in names if name not in dir(excite) or name not in excite.__all__]\n"
        "wrong = [name for name in names if getattr(excite, name).__name__ != f'excite.{name}']\n"
        "print(loaded, missing, wrong)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "[] [] []", result.stderr


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    """Import-linter with the contracts of pyproject.toml on the package below `root`/src."""
    code = "import sys; sys.path.insert(0, 'src'); from importlinter.cli import lint_imports_command; lint_imports_command()"
    return subprocess.run(
        [sys.executable, "-c", code, "--no-logo", "--no-cache"], cwd=root, capture_output=True, text=True
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("wiring/planted.py", "from excite.margin import margins\n"),
        ("wiring/planted.py", "def late():\n    from excite.runs import Run\n    return Run\n"),
        ("excitation/planted.py", "from excite.probes import Probe\n"),
        ("planted/__init__.py", ""),
    ],
    ids=["upwards", "upwards inside a function", "a cycle on one storey", "a package on no storey"],
)
def test_import_contracts_catch_a_violation(tmp_path, file, line):
    shutil.copytree(SOURCE, tmp_path / "src" / "excite", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    assert lint_imports(tmp_path).returncode == 0
    planted = tmp_path / "src" / "excite" / file
    planted.parent.mkdir(exist_ok=True)
    planted.write_text(line)
    result = lint_imports(tmp_path)
    assert result.returncode != 0, result.stdout
    assert "BROKEN" in result.stdout


def test_imports_for_type_checking_may_go_upwards():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert "exclude_type_checking_imports = true" in text


PUBLIC = sorted({path.parent.name for path in SOURCE.glob("*/__init__.py")} - {"_core"})


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ('"""A module."""\n\n\ndef public():\n    pass\n', "D103"),
        ('"""A module."""\n\n\ndef public():\n    """No period"""\n', "D415"),
        ('"""A module."""\n\n\nclass Public:\n    """A class."""\n\n    def method(self):\n        pass\n', "D102"),
        ("x = 1\n", "D100"),
    ],
    ids=["no docstring", "no period", "no docstring of a method", "no docstring of the module"],
)
def test_docstring_rules_catch_a_violation(tmp_path, text, rule):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for package in PUBLIC:
        planted = tmp_path / "src" / "excite" / package / "inside" / "planted.py"
        planted.parent.mkdir(parents=True)
        planted.write_text(text)
    ruff = [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format", "concise", "."]
    result = subprocess.run(ruff, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode != 0
    caught = {line.split("/")[2] for line in result.stdout.splitlines() if f" {rule} " in line}
    assert caught == set(PUBLIC)


def functions_by_file() -> dict[str, list[ast.FunctionDef]]:
    """The test functions by file, methods of test classes included."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return {
        str(path.relative_to(ROOT)): [node for node in functions(path) if node.name.startswith("test")]
        for path in files
    }


def test_names_of_tests_have_at_most_60_characters():
    names = [(path, test.name) for path, functions in functions_by_file().items() for test in functions]
    assert len(names) > 1000
    assert [f"{path}::{name}" for path, name in names if len(name) > 60] == []


def test_tests_named_in_the_docs_exist():
    """`test_some_name` or `tests/path.py::test_some_name` in a page; `test_loss` and names of files are no tests, nor are those that the page itself defines."""
    names = {(path, test.name) for path, functions in functions_by_file().items() for test in functions}
    anywhere = {name for _, name in names}
    missing, count = [], 0
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        text = page.read_text(encoding="utf-8")
        for path, name in re.findall(r"(?:(tests/[\w/]+\.py)::)?\b(test_[a-z0-9]+_\w+)\b(?!\.py)", text):
            count += 1
            if not ((path, name) in names if path else name in anywhere or f"def {name}(" in text):
                missing.append(f"{page.relative_to(ROOT)}: {path}::{name}")
    assert count >= 20
    assert missing == []


def called(function: ast.AST) -> set[str]:
    """The names of the functions and fixtures that are called as such: `check(…)`, no method."""
    calls = (node for node in ast.walk(function) if isinstance(node, ast.Call))
    return {call.func.id for call in calls if isinstance(call.func, ast.Name)}


def checks_something(function: ast.AST) -> bool:
    """Whether there is an `assert`, a `pytest.raises` or its like, or a `testing.assert_…`."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assert):
            return True
        if isinstance(node, ast.Attribute) and (
            node.attr in ("raises", "warns", "fail", "deprecated_call") or node.attr.startswith("assert_")
        ):
            return True
    return False


def without_a_check(files: dict[str, list[ast.FunctionDef]]) -> list[str]:
    """Tests that cannot fail but by an error: neither they nor a helper that they call checks anything.

    A helper is a function of the same file, else one of that name anywhere in the tests (imported, or a fixture).
    """
    defined = {path: {node.name: node for node in nodes} for path, nodes in files.items()}
    anywhere = {name: (path, node) for path, nodes in defined.items() for name, node in nodes.items()}

    def checked(path: str, function: ast.FunctionDef, seen: frozenset[str] = frozenset()) -> bool:
        if checks_something(function):
            return True
        for name in called(function) - seen:
            home, helper = (path, defined[path][name]) if name in defined[path] else anywhere.get(name, ("", None))
            if helper is not None and checked(home, helper, seen | {name}):
                return True
        return False

    return [
        f"{path}::{name}"
        for path, nodes in defined.items()
        for name, function in nodes.items()
        if name.startswith("test") and not checked(path, function)
    ]


def test_every_test_checks_something():
    files = sorted((ROOT / "tests").rglob("*.py"))
    assert without_a_check({str(path.relative_to(ROOT)): functions(path) for path in files}) == []


def test_tests_that_check_nothing_are_caught():
    text = (
        "def close(a): assert a\n"
        "def through(a): close(a)\n"
        "def idle(a): return a\n"
        "def test_by_helper(): through(1)\n"
        "def test_by_fixture(refused): refused('x')\n"
        "def test_by_raises():\n    with pytest.raises(ValueError): f()\n"
        "def test_by_numpy(): np.testing.assert_allclose(1, 1)\n"
        "def test_nothing(): idle(1)\n"
        "def test_method(run): run.close()\n"
    )
    fixture = "def refused(excite):\n    def check(m):\n        assert m\n    return check\n"
    files = {name: functions_of(ast.parse(content)) for name, content in (("a.py", text), ("b.py", fixture))}
    assert without_a_check(files) == ["a.py::test_nothing", "a.py::test_method"]


def test_benchmarks_print_figures_of_the_docs():
    """Every benchmark is named with its command in a page; the others are parts that several of them import."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "Makefile"]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    sources = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "benchmarks").glob("[a-z]*.py")}
    imported = {name for source in sources.values() for name in re.findall(r"from benchmarks\.(\w+) import", source)}
    assert len(sources) > 20
    assert [name for name in sources if f"benchmarks.{name}" not in text and name not in imported] == []


@pytest.mark.slow
def test_benchmarks_import_names_that_exist():
    code = (
        "import importlib, pkgutil, benchmarks\n"
        "for module in pkgutil.walk_packages(benchmarks.__path__, 'benchmarks.'):\n"
        "    module.name.endswith('__main__') or importlib.import_module(module.name)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_class_names_stand_in_one_module():
    homes: dict[str, list[str]] = {}
    for path in modules():
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(str(path.relative_to(SOURCE)))
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


def test_functions_have_at_most_60_lines():
    long = [
        f"{path.relative_to(SOURCE)}:{node.lineno} {node.name}"
        for path in modules()
        for node in functions(path)
        if node.end_lineno - node.lineno > 60
    ]
    assert long == []


def wide_signatures(text: str) -> dict[str, int]:
    """Functions and methods with more than eight parameters, self and cls not counted, by qualified name."""
    found = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = f"{prefix}{getattr(child, 'name', '')}"
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                names = [
                    argument.arg for argument in (*child.args.posonlyargs, *child.args.args, *child.args.kwonlyargs)
                ]
                count = len(names) - (names[:1] in (["self"], ["cls"]))
                if count > 8:
                    found[name] = count
            visit(child, f"{name}." if isinstance(child, ast.ClassDef) else prefix)

    visit(ast.parse(text), "")
    return found


def test_signatures_above_8_parameters_have_a_reason():
    page = (ROOT / "docs" / "development" / "architecture.md").read_text(encoding="utf-8")
    listed = re.findall(r"(?m)^\| `(\S+\.py)` `([\w.]+)` \| (\d+) \| (.+) \|$", page)
    wide = {
        (str(path.relative_to(SOURCE)), name, str(count))
        for path in modules()
        for name, count in wide_signatures(path.read_text(encoding="utf-8")).items()
    }
    assert {row[:3] for row in listed} == wide
    assert all(len(reason) >= 9 for *_, reason in listed)


def test_signatures_are_counted_without_self():
    eight, nine = (", ".join("abcdefghi"[:n]) for n in (8, 9))
    text = (
        f"def f({eight}): 0\ndef g({nine}): 0\nclass A:\n    def h(self, {eight}): 0\n    def i(self, *, {nine}): 0\n"
    )
    assert wide_signatures(text) == {"g": 9, "A.i": 9}


# Names of earlier versions that mean something else to a reader, or nothing: say what the thing is.
FORMER_NAMES = {
    "agreeing", "anew", "arm", "arrived", "ask", "asked", "aside", "blind", "books", "cap", "coming", "engine", "everyone", "firm",
    "follower", "found", "given", "handed", "here", "kept", "least", "leave", "look", "looking", "looks", "meet", "mine", "most",
    "noted", "one", "owner", "part", "room", "said", "seen", "settle", "share", "shares", "silent", "standing", "steep",
    "steepness", "stretches", "take", "tally", "tell", "theirs", "there", "todo", "told", "turns", "untouched", "work",
}  # fmt: skip
# Public keywords, attributes and states of probes, which stay; and constants that count (one step, one search).
ALLOWED_NAMES = {
    "bounds/excitation/active.py": {"found"},
    "bounds/trajectory/dropout.py": {"found", "seen"},
    "bounds/trajectory/regions.py": {"share"},
    "excitation/loss.py": {"turns"},
    "excitation/radius.py": {"share"},
    "monitor/watcher/watcher.py": {"share"},
    "probes/activation_rank/units.py": {"silent"},
    "probes/bias_trajectory/windows.py": {"seen"},
    "probes/conserved/report.py": {"share"},
    "probes/direction.py": {"one"},
    "probes/flight_recorder/recorder.py": {"least"},
    "probes/flight_recorder/spikes.py": {"least"},
    "studies/beyond/robust_layers.py": {"ONE"},
    "studies/beyond/ten_classes.py": {"ONE"},
    "studies/excitation/excitation_basics.py": {"_ONE"},
    "studies/richness/by_spectra.py": {"SEEN"},
    "wiring/junctions.py": {"part"},
}


def former_names(text: str) -> list[str]:
    """Variables, arguments, attributes, functions and classes of a module that bear such a name; aliases of the compatibility module may."""
    tree = ast.parse(text)
    aliases = {
        id(target)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and getattr(node.value.func, "id", "").startswith("renamed_")
        for target in node.targets
    }
    found = []
    for node in ast.walk(tree):
        name = (
            node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in aliases
            else node.attr if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            else node.arg if isinstance(node, ast.arg)
            else node.name if isinstance(node, ast.FunctionDef | ast.ClassDef)
            else ""
        )  # fmt: skip
        if name.strip("_").lower() in FORMER_NAMES:
            found.append(f"{node.lineno} {name}")
    return found


def test_former_names_are_gone():
    found, allowed = set(), {(path, name) for path, names in ALLOWED_NAMES.items() for name in names}
    for path in modules():
        file = str(path.relative_to(SOURCE))
        found |= {(file, entry.partition(" ")[2]) for entry in former_names(path.read_text(encoding="utf-8"))}
    assert found == allowed


def test_former_names_are_caught():
    text = "class A:\n    arm = renamed_attribute('arm', 'variant')\n    def f(self, mine):\n        self.room = theirs = mine\n"
    assert sorted(former_names(text)) == ["3 mine", "4 room", "4 theirs"]
