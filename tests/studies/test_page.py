"""Tables of results pages."""

from __future__ import annotations

import importlib.util
import json
import math
import re
from pathlib import Path

import pytest

from excite.studies import STUDIES
from excite.studies.judging.numbers import judge_again
from excite.studies.overview import read_results_page
from excite.studies.page import claim_cell, missing_seeds, seeds_line, table
from excite.studies.study import Claim, VariantResult

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("claims", ROOT / "tools/claims.py")
assert _spec is not None
assert _spec.loader is not None
claims = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(claims)

COLUMNS = {"gap": ("gap", "{:.2f}"), "loss": ("loss", "{:.1f}"), "absent": ("absent", "{}")}


def test_means_and_ranges_by_variant() -> None:
    numbers = [VariantResult("plain", seed, {"gap": gap, "loss": 1.0}) for seed, gap in enumerate((0.1, 0.3))]
    numbers.append(VariantResult("excited", 0, {"gap": math.inf}, flags=("doubtful",)))
    assert table(numbers, COLUMNS) == [
        ["", "gap", "loss", "trusted"],
        ["plain", "0.20 (0.10–0.30)", "1.0", "2 of 2"],
        ["excited", "not reached", "–", "0 of 1"],
    ]


def claimed(quote: str = "", **more: str) -> Claim:
    return Claim(
        "a is larger", "section 6", "a − b", ("a", "b"), lambda n: n["a"].v - n["b"].v, above=0.0, quote=quote, **more
    )  # type: ignore[arg-type]


def test_a_claim_stands_beside_the_papers_words() -> None:
    assert claim_cell(claimed("a is |much| larger", strength="weaker")) == (
        "a is larger (section 6)<br>*“a is \\|much\\| larger”*; tested in a weaker form: the paper says more"
    )
    assert claim_cell(claimed()) == "a is larger (section 6)<br>the paper does not claim this: the claim is ours"


@pytest.mark.parametrize("page", sorted((ROOT / "docs/results").glob("*.md")), ids=lambda page: page.stem)
def test_results_pages_have_the_words_of_the_claims(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert claims.with_claims(text) == text, "run tools/claims.py"


@pytest.mark.parametrize("file", sorted((ROOT / "docs/results").glob("*.json")), ids=lambda file: file.stem)
def test_pages_show_the_verdicts_of_their_numbers(file: Path) -> None:
    text = file.with_suffix(".md").read_text(encoding="utf-8")
    assert claims.judged_again(text, file)[0] == text, "run tools/claims.py"


@pytest.mark.parametrize("file", sorted((ROOT / "docs/results").glob("*.json")), ids=lambda file: file.stem)
def test_identities_have_no_interval_over_seeds(file: Path) -> None:
    """Seeds that differ by rounding say nothing about other seeds: such a claim is exact, or universal."""
    for verdict in judge_again(json.loads(file.read_text(encoding="utf-8"))["study"], file).verdicts:
        if verdict.estimate is not None and verdict.claim.within is None:
            threshold = verdict.claim.above if verdict.claim.above is not None else verdict.claim.below or 0.0
            rounding = 1e-9 * max(abs(threshold), abs(verdict.effect))
            assert not 0 < verdict.estimate.error < rounding, verdict.claim.text


@pytest.mark.parametrize("page", sorted((ROOT / "docs/results").glob("*.md")), ids=lambda page: page.stem)
def test_pages_say_where_seeds_are_missing(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    found = read_results_page(text)
    study = STUDIES[page.stem.removesuffix(f"-{found['scale']}")]
    expected = seeds_line(found["seeds"], study.scales[found["scale"]].seeds)
    assert [line for line in text.splitlines() if line.startswith("- That is ")] == expected


@pytest.mark.parametrize("page", sorted((ROOT / "docs/results").glob("*.md")), ids=lambda page: page.stem)
def test_rows_of_a_table_have_as_many_cells(page: Path) -> None:
    """A bar inside a cell, as of |log2|, has a backslash."""
    lines = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    cells = [len(re.split(r"(?<!\\)\|", line)) for line in lines]
    separators = [number for number, line in enumerate(lines) if line.startswith("| ---")]
    for start, end in zip(separators, [*(number - 1 for number in separators[1:]), len(lines)], strict=True):
        assert set(cells[start - 1 : end]) == {cells[start]}


def test_missing_seeds_are_named_by_variant() -> None:
    names = [
        "plain (seed 3)",
        "a (b) (seed 4)",
        "a (b) (seed 5)",
        "a (b) (seed 6)",
        "dropout (seed 2)",
        "dropout (seed 7)",
    ]
    assert missing_seeds(names) == "plain (seed 3); a (b) (seeds 4 to 6); dropout (seeds 2, 7)"


def test_a_page_with_an_unknown_claim_is_refused() -> None:
    text = (ROOT / "docs/results/all-biases.md").read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="all-biases: no claim of the registry is 'bias 7"):
        claims.with_claims(text.replace("the trajectory of bias 1", "bias 7"))


@pytest.mark.parametrize("study", STUDIES.values(), ids=lambda study: study.name)
def test_claims_on_a_paper_quote_it_or_are_marked_as_ours(study) -> None:  # type: ignore[no-untyped-def]
    paper = re.compile(
        "(Persistency of excitation|Richness of hidden activations|What training reveals|Training invariances), "
    )
    for scale in study.scales.values():
        for claim in study.claims(scale):
            assert bool(claim.quote) or claim.ours
            if paper.match(claim.source) and not claim.quote:
                pytest.fail(f"{claim.text}: its source is the paper, and it quotes nothing")
