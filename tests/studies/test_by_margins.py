"""Jobs of studies that compare margin curves."""

from __future__ import annotations

from pathlib import Path

from excite.studies.beyond.weight_decay import SCALES, variants
from excite.studies.by_margins import ByMargins


def test_seeds_draw_splits_only_where_asked() -> None:
    plain = variants(SCALES["quick"])[0]
    for splits in (False, True):
        job = ByMargins(splits=splits).job("weight-decay", plain, SCALES["quick"], 3, Path("folder"), "cpu")
        assert (job.config.seed, job.config.data.seed) == (3, 3 if splits else 0)
        assert ("their split" in ByMargins(splits=splits).settings[0]) == splits
