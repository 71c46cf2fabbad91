"""The drawing of docs/development/architecture.md is that of the imports as they are."""

import importlib.util
import re
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def architecture():
    spec = importlib.util.spec_from_file_location("architecture", ROOT / "tools/architecture.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_drawing_is_current(architecture):
    drawing = architecture.draw(architecture.imports(), architecture.storeys())
    assert architecture.DRAWING.read_text() == drawing, "run make architecture"


def test_the_page_names_every_package(architecture):
    page = (ROOT / "docs/development/architecture.md").read_text()
    named = set(re.findall(r"^\| `(\w+)` \|", page, re.M))
    assert named == {name for layer in architecture.storeys() for name in layer}


def test_arrows_lead_down_and_none_is_implied(architecture):
    graph = nx.DiGraph([("top", "middle"), ("top", "low"), ("middle", "low"), ("low", "_core"), ("_core", "errors")])
    drawing = architecture.draw(graph, [["top"], ["middle", "low"], ["_core"], ["errors"]])
    assert drawing.count('<path d="M') == 2 + 1  # top > middle > low, and the head of an arrow
    assert architecture.rows_of(["low", "middle"], graph) == [["middle"], ["low"]]
    assert all(f">{name}</text>" in drawing for name in ("top", "middle", "low", "_core"))


def test_the_walks_name_files_and_functions_that_exist():
    page = (ROOT / "docs/development/architecture.md").read_text()
    rows = re.findall(r"^\| \d+ \| (.+?) \| (.+?) \|", page, re.M)
    assert len(rows) > 15
    for files, functions in rows:
        paths = [ROOT / "src/excite" / name for name in re.findall(r"`(.+?)`", files)]
        assert all(path.exists() for path in paths), files
        text = "".join(path.read_text() for path in paths)
        for name in re.findall(r"`(.+?)`", functions):
            assert f"def {name}(" in text, (files, name)


def test_the_walks_name_functions_that_exist():
    page = (ROOT / "docs/development/architecture.md").read_text()
    rows = re.findall(r"^\| \d+ \| (.*?) \| (.*?) \| .* \|$", page, re.MULTILINE)
    assert len(rows) > 20
    missing = []
    for files, functions in rows:
        source = "".join((ROOT / "src/excite" / file).read_text() for file in re.findall(r"`([\w/]+\.py)`", files))
        missing += [name for name in re.findall(r"`(\w+)`", functions) if not re.search(rf"\bdef {name}\b", source)]
    assert missing == []
