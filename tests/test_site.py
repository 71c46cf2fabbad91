"""The documentation site: navigation, gallery, reference."""

import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

import excite

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PACKAGES = (
    "bounds", "data", "excitation", "jobs.executors", "lipschitz", "margin", "probes", "report", "report.audit", "runs", "studies",
    "train", "wiring",
)  # fmt: skip


def load_tool(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / f"tools/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_gallery_is_current():
    gallery = load_tool("gallery")
    assert gallery.GALLERY.read_text() == gallery.gallery(gallery.results_pages()), "run make gallery"


def test_the_gallery_counts_verdicts():
    gallery = load_tool("gallery")
    text = gallery.results_pages()["boundaries"]
    assert gallery.entry(text)["verdicts"] == "3 hold, 1 fails"
    one_less = text.replace("| **holds** |", "| **undecided** |", 1)
    assert gallery.entry(one_less)["verdicts"] == "2 hold, 1 fails, 1 undecided"
    with pytest.raises(ValueError, match="not a results page"):
        gallery.entry("# Another page\n")


def test_every_page_is_in_the_navigation():
    named = set(re.findall(r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
    assert {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} == named


def test_lines_of_code_blocks_are_short():
    """Wider blocks wrap on the site; examples should not need that."""
    for page in [ROOT / "README.md", *DOCS.glob("*.md")]:
        for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.S):
            assert max(map(len, block.splitlines()), default=0) <= 120, page.name


def test_the_command_line_page_has_every_command():
    text = load_tool("site_hooks").command_help()
    for command in ("demo", "train", "margins", "audit", "serve", "study run", "data fetch"):
        assert f"## excite {command}\n" in text
    assert max(map(len, text.splitlines())) <= 100


def test_every_package_has_a_reference_page():
    text = "".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    packages = [name for name in excite.__all__ if inspect.ismodule(getattr(excite, name))]
    assert len(packages) > 10
    assert [name for name in packages if f"::: excite.{name}" not in text] == []


def inventory(file):
    """Names in a Sphinx inventory, which mkdocstrings writes."""
    body = file.read_bytes().split(b"\n", 4)[4]
    return {line.split(" ", 1)[0] for line in zlib.decompress(body).decode().splitlines()}


@pytest.mark.slow
def test_the_site_builds_and_its_reference_is_complete(tmp_path):
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    result = subprocess.run(build, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    names = inventory(tmp_path / "site" / "objects.inv")
    wanted = {f"excite.{name}" for name in excite.__all__}
    for package in PACKAGES:
        wanted |= {f"excite.{package}.{name}" for name in importlib.import_module(f"excite.{package}").__all__}
    packages = {f"excite.{name}" for name in excite.__all__ if inspect.ismodule(getattr(excite, name))}  # a page each
    left_out = {"excite.__version__", *packages}
    # A function in a module of the same name is listed below the module.
    missing = {name for name in wanted - left_out if not {name, f"{name}.{name.rsplit('.')[-1]}"} & names}
    assert missing == set()
    page = (tmp_path / "site/reference/command-line/index.html").read_text()
    assert "excite study run" in page
    page = (tmp_path / "site/reference/probes/index.html").read_text()
    assert '<span class="gp">&gt;&gt;&gt; </span>' in page  # examples of docstrings are code
    assert "<blockquote>" not in page
