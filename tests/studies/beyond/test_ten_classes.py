"""Study `ten-classes` at a size for tests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from excite import studies
from excite.studies.beyond import ten_classes
from studies.small import made


@pytest.mark.slow
def test_ten_classes_compares_methods_under_attack(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scales = ten_classes.SCALES
    small = {"name": "resnet", "options": {"width": 2, "stages": 1, "blocks": 1}}
    quick = replace(scales["quick"], model=small, train=None, test=None, epochs=1, batch=10, points=6, check=3, steps=2)
    monkeypatch.setitem(scales, "quick", quick)
    result = studies.run("ten-classes", workers=1, docs="pages")
    assert len(result.numbers) == 7
    for found in result.numbers:
        lines = [
            [found.values[f"{name}_{part}"] for name in ("clean", "robust2", "robust4", "robust8")]
            for part in ("train", "test")
        ]
        assert all(line == sorted(line, reverse=True) for line in lines)  # larger perturbations break no fewer
        assert found.gap == pytest.approx(max(a - b for a, b in zip(*lines)))
        assert found.minutes > 0
    page = (tiny / "pages/ten-classes.md").read_text()
    assert "| adversarial, seven steps |" in page
    assert "excite data fetch cifar10" in page
    before = made(result.folder)
    studies.run("ten-classes", workers=1)
    assert made(result.folder) == before
