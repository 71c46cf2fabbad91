"""Study `decomposition` at a size for tests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from excite.studies.invariances import decomposition
from studies.small import run_tiny


@pytest.mark.slow
def test_decomposition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = replace(decomposition.SCALES["quick"], steps=3, seeds=1)
    result = run_tiny("decomposition", tiny, tmp_path, monkeypatch)
    by_variant = {n.variant: n for n in result.numbers}
    assert by_variant["ReLU"].error < 1e-12
    assert by_variant[decomposition.COUNTS].resnet18 > 20
    assert by_variant[decomposition.COUNTS].values["count error"] < 1e-9  # width^(depth + 1) paths, fully connected
