"""The whole path of a study of small experiments at a size for tests."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from excite import studies
from excite.studies import runner as running
from excite.studies.figures import save
from excite.studies.study import VariantResult


def drawn_once() -> Callable[..., None]:
    """`save`, but a figure is drawn once and then copied: drawing takes most of the time."""
    drawn: dict[int, Path] = {}

    def save_once(figure: Any, path: Path, *kinds: str) -> None:
        if id(figure) in drawn:
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(drawn[id(figure)], path.with_suffix(".png"))
        else:
            save(figure, path, "png")
            drawn[id(figure)] = path.with_suffix(".png")

    return save_once


def run_tiny(name: str, tiny: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> studies.StudyResult:
    """Run a study with `tiny` as its scale quick, and look at what it wrote: a second call would find everything done."""
    study = studies.STUDIES[name]
    monkeypatch.setitem(study.scales, "quick", tiny)  # type: ignore[arg-type]
    monkeypatch.setattr(
        running, "save", lambda figure, path, *kinds: save(figure, path, "png")
    )  # one drawing is enough
    monkeypatch.chdir(folder)
    result = studies.run(name, workers=1, docs="pages")
    stored = json.loads((result.folder / "numbers.json").read_text())
    variants = [variant.name for variant in study.variants(tiny)]
    assert {(n["arm"], n["seed"]) for n in stored["numbers"]} == {(a, s) for a in variants for s in range(tiny.seeds)}
    claims = [claim.text for claim in study.claims(tiny)]
    assert [verdict["text"] for verdict in stored["verdicts"]] == claims
    page = (folder / f"pages/{name}.md").read_text()
    for text in (*claims, f"excite study run {name} --scale quick", f"images/{name}.png"):
        assert text in page
    for image in (folder / "pages/images").iterdir():
        assert f"images/{image.name}" in page
        assert image.stat().st_size < 300_000
    jobs = running.plan_jobs(study, tiny, tiny.seeds, result.folder, extra=True)
    assert len(jobs) == len(variants) * tiny.seeds
    assert all(job.finished() for job in jobs)
    return result


def made(folder: Path) -> dict[str, int]:
    return {path.parent.name: path.stat().st_mtime_ns for path in folder.glob("*/metrics.db")}


def numbers(
    variant: str, seed: int, margin: float, accuracy: float = 0.9, flags: tuple[str, ...] = ()
) -> VariantResult:
    return VariantResult(
        variant, seed, {"margin_train": margin, "margin_test": margin}, flags, by_chance=accuracy < 0.6
    )


def nothing(fraction: float) -> None:
    pass
