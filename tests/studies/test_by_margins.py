"""Jobs of studies that compare margin curves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from excite.margin import Margins
from excite.runs import Run
from excite.studies.beyond.weight_decay import SCALES, variants
from excite.studies.by_margins import RESAMPLES, ByMargins, _resamples, radius_trace


def test_seeds_draw_splits_only_where_asked() -> None:
    plain = variants(SCALES["quick"])[0]
    for splits in (False, True):
        job = ByMargins(splits=splits).job("weight-decay", plain, SCALES["quick"], 3, Path("folder"), "cpu")
        assert (job.config.seed, job.config.data.seed) == (3, 3 if splits else 0)
        assert ("their split" in ByMargins(splits=splits).settings[0]) == splits


def test_resampled_medians_and_gaps() -> None:
    """Naively: a median and a distance for every draw."""
    train, test = (torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in (40, 30))
    test[:20] = float("inf")  # no adversarial example
    drawn = _resamples(*(Margins(values, "inf") for values in (train, test)))
    assert {name: len(values) for name, values in drawn.items()} == dict.fromkeys(drawn, RESAMPLES)
    assert np.std(drawn["margin_train"]) > 0
    assert np.isinf(drawn["margin_test"]).mean() > 0.5  # as two thirds are infinite
    assert min(drawn["gap"]) > 0.3
    assert _resamples(*(Margins(values, "inf") for values in (train, test))) == drawn


def test_course_of_an_automatic_radius_by_epoch(tmp_path: Path) -> None:
    with Run.create(tmp_path / "run", {}) as run:
        assert radius_trace(run) == {}
        for epoch, (factor, cost) in enumerate([(0.001, 0.2), (0.004, 0.01)]):
            run.log(epoch, {"excitation/factor": factor, "excitation/cost": cost})
        run.flush()
        assert radius_trace(run) == {"factor": [0.001, 0.004], "cost": [0.2, 0.01]}
