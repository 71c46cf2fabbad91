"""Hidden signals against plain arrays, and the study's whole path on a few dozen made-up images."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from excite import studies
from excite.errors import RunError
from excite.studies import runner
from excite.studies.richness import by_spectra, hidden_rank
from excite.studies.richness.by_spectra import LAYERS
from excite.studies.richness.hidden_rank import SCALES
from excite.studies.study import VariantResult


def test_networks_whose_signals_do_not_vary_settle_nothing() -> None:
    names = [variant.name for variant in hidden_rank.variants(SCALES["quick"])]
    for dead in ("plain", "dropout"):
        values = {f"{kind}_{layer}": 1.0 for kind in ("effective", "untrained") for layer in LAYERS}
        numbers = {name: VariantResult(name, 0, values) for name in names}
        numbers[dead] = VariantResult(dead, 0, {**values, "effective_linear2": 0.0})
        claims = [
            c for c in hidden_rank.claims(SCALES["quick"]) if "effective rank" in c.measure and dead in c.variants
        ]
        effects = [claim.effect(numbers) for claim in claims if claim.text.startswith("linear 2")]
        assert effects
        assert all(map(math.isnan, effects))


@pytest.fixture
def tiny(few_images: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    small = replace(SCALES["quick"], train=20, test=12, epochs=1, batch=5, points=10, lr=0.1, every_variant=True)
    monkeypatch.setitem(SCALES, "quick", replace(small, sizes={"half the data": 10, "twice the data": 40}))
    return few_images


@pytest.mark.slow
def test_the_study(tiny: Path) -> None:
    result = studies.run("hidden-rank", seeds=1, workers=1, out="out")
    variants = [variant.name for variant in hidden_rank.variants(SCALES["quick"])]
    assert [found.variant for found in result.numbers] == variants
    assert len(result.verdicts) == len(hidden_rank.claims(SCALES["quick"])) == 34
    for name in ("figure", "variants"):
        assert (tiny / f"out/{name}.png").stat().st_size < 300_000
    stored = json.loads((tiny / "out/plain-0/artifacts/spectra.json").read_text())
    assert {state: stored[state]["conv1"]["points"] for state in by_spectra.STATES} == dict.fromkeys(
        by_spectra.STATES, 10
    )
    made = (tiny / "out/plain-0/artifacts/spectra.json").stat().st_mtime_ns
    again = studies.run("hidden-rank", seeds=1, workers=1, out="out", variants="figure")
    assert (tiny / "out/plain-0/artifacts/spectra.json").stat().st_mtime_ns == made
    assert again.numbers[0] == result.numbers[0]
    assert (
        again.numbers[0].untrained_linear2 == result.numbers[1].untrained_linear2
    )  # the same initial weights in every variant


@pytest.mark.slow
def test_damaged_artifacts_are_said(tiny: Path) -> None:
    studies.run("hidden-rank", seeds=1, workers=1, out="out", variants="figure")
    place = tiny / "out/plain-0/artifacts/spectra.json"
    kept = json.loads(place.read_text())
    place.write_text(json.dumps({**kept, "test": {}}))
    with pytest.raises(RunError, match="damaged"):
        studies.run("hidden-rank", seeds=1, workers=1, out="out", variants="figure")


def test_scale_paper_has_the_papers_network(tmp_path: Path) -> None:
    study = studies.STUDIES["hidden-rank"]
    for task in runner.plan_jobs(study, study.scales["paper"], 10, tmp_path, extra=True):
        config = task.config
        assert config.model.options["widths"] == [6, 18, 120, 84]
        assert (config.epochs, config.batch, config.loss, config.data.classes) == (
            40, 50, "squared", ["airplane", "horse"]
        )  # fmt: skip
        assert config.data.train == {"2,500 images": 2500, "5,000 images": 5000}.get(task.variant)
