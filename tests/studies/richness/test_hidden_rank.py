"""Hidden signals against plain arrays, and the study's whole path on a few dozen made-up images."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from excite import studies
from excite.errors import RunError
from excite.probes import richness
from excite.studies import runner
from excite.studies.richness import by_spectra, hidden_rank
from excite.studies.richness.by_spectra import LAYERS, SEEN, signals, spectra
from excite.studies.richness.hidden_rank import NETWORK, SCALES
from excite.studies.study import VariantResult
from excite.train import build
from models import same_state, state_of

WIDTHS = {"conv1": 4704, "conv2": 1800, "pooled1": 1176, "pooled2": 450, "linear1": 120, "linear2": 84}


def test_signals_have_the_widths_of_the_paper_and_of_the_next_layer() -> None:
    """Figure 1 prints 4704, 1800, 120, 84: convolutions before pooling. What layers see is 1176, 450, 120, 84."""
    for dropout in (0.0, 0.5):
        model = build("papers-cnn", dropout=dropout, **NETWORK)
        found = signals(model, torch.randn(3, 3, 32, 32))
        assert {name: signal.shape[1] for name, signal in found.items()} == WIDTHS
        assert found.keys() == LAYERS.keys()


@pytest.mark.parametrize("points", [40, 130])  # fewer than every layer has units, and more than some
def test_spectra_are_those_of_the_singular_values(points: int) -> None:
    model, x = build("papers-cnn", seed=1, dropout=0.5, **NETWORK).double(), torch.randn(points, 3, 32, 32).double()
    before = state_of(model)
    found = spectra(model, x, batch=27)
    assert same_state(before, state_of(model))
    model.eval()
    for name, signal in signals(model, x).items():
        rows = signal.detach().numpy()
        values = np.linalg.svd(rows - rows.mean(0), compute_uv=False) ** 2
        shares = values / values.sum()
        assert found[name]["explained"][:30] == pytest.approx(np.cumsum(shares)[:30], abs=1e-9)
        some = shares[shares > 1e-14]
        assert found[name]["effective"] == pytest.approx(np.exp(-(some * np.log(some)).sum()), rel=1e-7)
        assert found[name]["components99"] == int((np.cumsum(shares) < 0.99).sum()) + 1
        assert (found[name]["width"], found[name]["points"]) == (WIDTHS[name], points)


def test_inputs_of_layers_are_those_of_richness() -> None:
    model, x = build("papers-cnn", seed=1, **NETWORK), torch.randn(60, 3, 32, 32)
    found = spectra(model, x)
    known = richness(model, x, patches="whole", exact=4000)
    for name, layer in zip(SEEN, known.layers[1:], strict=True):
        assert found[name]["effective"] == pytest.approx(float(layer.covariance.effective_rank), rel=1e-5)


def test_a_signal_that_never_varies_has_no_rank() -> None:
    model = build("papers-cnn", **NETWORK)
    with torch.no_grad():
        model[9].weight.zero_()
    found = spectra(model, torch.randn(20, 3, 32, 32))["linear2"]
    assert (found["effective"], found["rank"], found["explained"][0]) == (0.0, 0.0, 0.0)


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
    small = replace(SCALES["quick"], train=20, test=12, epochs=1, batch=5, seeds=2, points=10, lr=0.1)
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
