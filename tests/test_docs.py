"""Every Python example of the docs runs, in order, in an empty folder. README's: tests/test_readme.py."""

import re
import unicodedata
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SLOW_PAGES = (  # examples of several seconds
    "audit.md", "index.md", "integrations.md", "language-models.md", "margins.md", "new-study.md", "robust-training.md", "runs.md", "sweeps.md", "watch.md",
)  # fmt: skip
WITH_EXAMPLES = [page for page in PAGES[1:] if "```python" in page.read_text()]
EXAMPLE = re.compile(r"```python\n(.*?)```\n(?:\n?```text\n(.*?)```)?", re.S)  # and the output shown below it
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]\d+)?")


def given():
    """What examples may use without having made it: a small model, a batch, an optimizer, a loader."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 1))
    x, y = torch.rand(20, 1, 8, 8) * 2 - 1, torch.arange(20) % 2
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x_test, y_test = torch.rand(20, 1, 8, 8) * 2 - 1, torch.arange(20) % 2
    return {
        "torch": torch, "nn": nn, "model": model, "x": x, "y": y, "optimizer": optimizer, "loader": [(x, y)] * 3,
        "loss": model(x).mean().detach(), "x_train": x, "y_train": y, "x_test": x_test, "y_test": y_test,
    }  # fmt: skip


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.slow] * (page.name in SLOW_PAGES), id=page.name) for page in WITH_EXAMPLES],
)
def test_the_examples_of_a_page_run(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    names = given()
    examples = EXAMPLE.findall(page.read_text())
    assert examples
    for code, shown in examples:
        exec(compile(code, str(page), "exec"), names)
        printed = capsys.readouterr().out
        if shown and page.name != "index.md":  # its example is README's, whose output tests/test_readme.py compares
            assert words(printed) == words(shown)


def words(text):
    """A text without its numbers, which may depend on the machine, and without its line breaks."""
    return " ".join(NUMBER.sub("#", text).split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def sections(page):
    """Anchors of the headings of a page, as the site names them (`markdown.extensions.toc.slugify`)."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    headings = re.findall(r"^#+ (.+)$", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text), re.M)
    plain = [unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode() for heading in headings]
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in plain}


def test_links_to_sections_lead_somewhere():
    links = [
        (page, *link)
        for page in PAGES
        for link in re.findall(r"\]\(((?!https?:)[^)#\s]*)#([^)\s]+)\)", page.read_text())
    ]
    assert len(links) > 100
    wrong = [
        (page.name, path, section)
        for page, path, section in links
        if section not in sections(page.parent / path if path else page)
    ]
    assert wrong == []


def test_links_of_findings_lead_to_sections():
    """Sections that findings and panels name, such as "richness.md#quantities-of-a-layer"."""
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py")]
    named = {link for source in sources for link in re.findall(r'"(?:docs/)?([\w/-]+\.md)#([\w-]+)"', source)}
    assert named
    assert {(path, section) for path, section in named if section not in sections(ROOT / "docs" / path)} == set()


def test_every_benchmark_is_shown_on_a_page():
    helpers = {"__init__", "__main__", "hostile_calls", "scaling_model", "timing"}
    text = "".join(page.read_text() for page in PAGES)
    names = {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - helpers
    assert {name for name in names if f"benchmarks.{name}" not in text} == set()


# Words of earlier versions of the pages. Quotations of the papers and code may have them.
FORMER_WORDS = re.compile(r"\b(anew|trainings|tally|alike|told|asked for|look(?:s|ed)? away|goes on to|room for)\b")


def former_words(text):
    prose = re.sub(r"```.*?```|`[^`]*`|“.*?”", "", text, flags=re.S)
    return FORMER_WORDS.findall(prose)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_former_words_are_gone(page):
    assert former_words(page.read_text()) == []


def test_former_words_are_caught():
    assert former_words("Two trainings, drawn anew: `tally` “as told”") == ["trainings", "anew"]
