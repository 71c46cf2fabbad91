"""The networks of `architecture`, its two ways of training against each other, and its whole path on made-up images."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from excite.data import Dataset
from excite.studies import computed
from excite.studies.judging.verdicts import judge
from excite.studies.study import VariantResult
from excite.studies.trajectory import architecture
from excite.studies.trajectory.architecture import SCALES, STUDY, claims, in_an_ensemble, name_of, network, with_a_probe
from studies.small import run_tiny

SETTINGS: dict[str, Any] = {"steps": 20, "lr": 0.02, "test": 6}


def images(seed: int = 0) -> Dataset:
    """Twenty training images and six test images, of label 1 where the upper half is bright."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for count in (20, 6):
        y = torch.arange(count) % 2
        x = torch.rand(count, 1, 28, 28, generator=generator) - 0.5
        x[:, :, :14] += 0.5 * y[:, None, None, None]
        parts += [x, y]
    return Dataset("made up", *parts, ("0", "1"), None, "halves")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architecture, "WINDOW", 10)
    for module in (architecture, computed):
        monkeypatch.setattr(module, "load", lambda *a, seed=0, **how: images(seed))


def test_settings_are_the_authors() -> None:
    plain, conv = network("mlp", 0), network("cnn", 0)
    shapes = [tuple(p.shape) for p in conv.parameters() if p.requires_grad]
    assert shapes == [
        (784,), (96, 1, 5, 5), (96,), (384, 96, 5, 5), (384,), (384, 384), (384,), (1, 384), (1,)
    ]  # fmt: skip
    assert [tuple(p.shape) for p in plain.parameters() if p.requires_grad] == [
        (784,),
        (512, 784),
        (512,),
        (1, 512),
        (1,),
    ]
    for model in (plain, conv):
        first = model[0]
        assert isinstance(first, nn.Linear)
        assert torch.equal(first.weight, torch.eye(784))
        assert model(torch.zeros(3, 784)).shape == (3, 1)
    assert {variant.config["lr"] for variant in STUDY.variants(SCALES["paper"])} == {2e-3}
    assert all(scale.steps % 2000 == 0 for scale in SCALES.values())  # whole epochs of 2,000 images


def test_an_ensemble_and_a_watched_module_see_the_same() -> None:
    """Loss, trajectory, test loss and weights of the fully connected network, trained in both ways."""
    one = network("mlp", 3).double()
    other = copy.deepcopy(one)
    data = images()
    data = replace(data, x_train=data.x_train.double(), x_test=data.x_test.double())
    together = in_an_ensemble(one, data, SETTINGS, 5, lambda share: None)
    watched = with_a_probe(other, data, SETTINGS, 5, lambda share: None)
    for name, curve in together.items():
        assert len(curve) == 2
        torch.testing.assert_close(curve, watched[name], rtol=1e-8, atol=1e-10)
    for p, q in zip(one.parameters(), other.parameters()):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-10)


@pytest.mark.slow
def test_the_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run_tiny("architecture", replace(SCALES["quick"], seeds=1, steps=20), tmp_path, monkeypatch)
    assert [n.variant for n in result.numbers] == [name_of(k, n) for n in (100, 1000) for k in ("mlp", "cnn")]
    assert all(n.length > 0 and n.loss < 1 for n in result.numbers)
    assert "excite data fetch mnist" in (tmp_path / "pages/architecture.md").read_text()


def test_claims_judge_what_they_say() -> None:
    def runs(conv: float) -> list[VariantResult]:
        values = {"mlp": 1.0, "cnn": conv}
        names = ("loss", "length", "length_fit", "test", "total")
        return [
            VariantResult(name_of(kind, n), s, dict.fromkeys(names, v))
            for s in range(6) for n in (100, 1000) for kind, v in values.items()
        ]  # fmt: skip

    for conv, word in ((0.5, "holds"), (2.0, "fails")):
        assert {judge(c, runs(conv)).word for c in claims(SCALES["quick"])} == {word}  # type: ignore[union-attr]
