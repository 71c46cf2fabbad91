"""`excite sweep`"""

import json

import pytest


@pytest.mark.slow
def test_the_combinations_are_compared(excite, tmp_path, small_config):
    (tmp_path / "sweep.toml").write_text(small_config + '\n[sweep.over]\n"optimizer.lr" = [0.1, 0.2]\n')
    status, out, err = excite("sweep", "sweep.toml", "--workers", "1")
    assert status == 0, err
    assert "2 jobs: 2 done" in out
    assert "results: runs/sweeps/sweep/sweep.json" in out
    assert len(json.loads((tmp_path / "runs/sweeps/sweep/sweep.json").read_text())["rows"]) == 2


def test_a_failed_training_is_one_line_after_the_table(excite, tmp_path, small_config):
    (tmp_path / "sweep.toml").write_text(small_config + '\n[sweep.over]\n"optimizer.lr" = [0.1, 1e30]\n')
    status, out, err = excite("sweep", "sweep.toml", "--workers", "1")
    assert status == 1
    assert "failed: optimizer.lr-1e-30-0" in out
    assert "–" in out
    assert err.startswith("excite: optimizer.lr-1e-30-0: ")
    assert "1 of 2 jobs are finished" in err
    assert err.count("\n") == 1


def test_a_config_without_a_sweep_is_refused(refused, tmp_path, small_config):
    (tmp_path / "plain.toml").write_text(small_config)
    refused("sweep.over", "sweep", "plain.toml")
