"""Studies batch-size, all-biases and optimizers: networks against the probe, and the whole path in seconds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from excite.studies.beyond import optimizers
from excite.studies.trajectory import all_biases, batch_size
from studies.small import run_tiny


@pytest.mark.slow
@pytest.mark.parametrize("study", [batch_size, all_biases, optimizers])
def test_the_whole_path_in_seconds(study, tmp_path, monkeypatch):
    steps = {batch_size: 400, all_biases: 1000, optimizers: 100}[study]
    tiny = replace(study.SCALES["quick"], seeds=2, steps=steps)
    result = run_tiny(study.STUDY.name, tiny, tmp_path, monkeypatch)
    assert len(result.numbers) == 2 * len(study.variants(tiny))
    assert len(result.verdicts) == len(study.claims(tiny))
    assert result.figure.exists()
