"""A few dozen made-up images in the layout of CIFAR-10."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from excite.data.sources import SOURCES, Archive, File
from excite.jobs import training_job
from excite.margin import Margins, SearchOptions
from excite.studies.excitation.planes_and_horses import SCALES
from excite.train.evaluate import measure


def fake_images(count: int, rng: np.random.Generator) -> bytes:
    """Records of planes (0), bright above, and horses (7), bright below."""
    rows = np.empty((count, 3073), np.uint8)
    for i, row in enumerate(rows):
        image = rng.integers(60, 160, (3, 32, 32))
        half = slice(0, 16) if i % 2 == 0 else slice(16, 32)
        image[:, half] += rng.integers(40, 95)
        row[0], row[1:] = 7 * (i % 2), image.reshape(-1)
    return rows.tobytes()


@pytest.fixture
def few_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with a cache of 40 training and 16 test images."""
    rng = np.random.default_rng(0)
    contents = {f"data_batch_{i}.bin": fake_images(8, rng) for i in range(1, 6)}
    contents["test_batch.bin"] = fake_images(16, rng)
    folder = tmp_path / "data" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    files = tuple(File(n, len(c), hashlib.sha256(c).hexdigest()) for n, c in contents.items())
    archive = Archive("http://127.0.0.1:9/none.tar.gz", "", files, "cifar-10-batches-bin/")
    monkeypatch.setitem(SOURCES, "cifar10", replace(SOURCES["cifar10"], archives=(archive,)))
    monkeypatch.setenv("EXCITE_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def tiny(few_images: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """40 training and 16 test images, scales to match, and a short search for margins."""
    small = replace(SCALES["quick"], train=20, test=12, epochs=4, batch=5, seeds=2, points=4, lr=0.1)
    monkeypatch.setitem(SCALES, "quick", replace(small, sizes={"half the data": 10, "twice the data": 40}))

    def quickly(*args: Any, options: SearchOptions, **settings: Any) -> dict[str, Margins]:
        return measure(*args, options=replace(options, steps=3, restarts=1, evidence=False), **settings)

    monkeypatch.setattr(training_job, "measure", quickly)
    return few_images
