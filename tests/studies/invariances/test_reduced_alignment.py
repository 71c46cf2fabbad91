"""Study `reduced-alignment` at a size for tests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from excite.studies.invariances import reduced_alignment
from studies.small import run_tiny


@pytest.mark.slow
def test_reduced_alignment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduced_alignment, "MEASUREMENTS", 3)
    tiny = replace(reduced_alignment.SCALES["quick"], steps=20, seeds=1)
    result = run_tiny("reduced-alignment", tiny, tmp_path, monkeypatch)
    by_variant = {n.variant: n for n in result.numbers}
    # Two residual blocks of six channels: the first layer has K = 4, as printed 64, but never less than 1/6.
    assert by_variant[reduced_alignment.FREE["linear"]].limit == pytest.approx(1 / 4)
    assert by_variant[reduced_alignment.FREE["linear"]].printed == pytest.approx(1 / 6)
    # Behind the first convolution: kernel 3 on 4 channels, then 4 channels at 4 places: 3 · 4, never less than 1/4.
    assert by_variant[reduced_alignment.CONV["linear"]].limit == pytest.approx(1 / 4)
    assert all(
        by_variant[variant].room > 0 for variant in (reduced_alignment.CONV["linear"], reduced_alignment.FREE["linear"])
    )
