"""The writer of values: slow, full and broken disks."""

import time
import warnings

import pytest
from torch import nn

import excite
from excite import RunError
from excite.probes import Distance, Every, Loss, Probe


def test_strict_ends_the_training_where_values_cannot_be_written(tmp_path, monkeypatch):
    with (
        pytest.raises(RunError, match="disk is full"),
        excite.watch(nn.Linear(2, 1), run=tmp_path / "run", probes=[Loss(), Distance(Every(1))], strict=True) as watch,
    ):

        def full(rows):
            raise RunError("the disk is full")

        watch.step(1.0)
        monkeypatch.setattr(watch.run, "log_many", full)
        watch.flush()


class Many(Probe):
    name = "many"

    def measure(self, ctx):
        return {f"v/l{i}": float(i) for i in range(20)}


@pytest.mark.slow
def test_measuring_faster_than_the_disk_loses_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("excite.monitor.writer._MAX_VALUES", 2000)
    with excite.watch(nn.Linear(2, 1), run=tmp_path / "run", probes=[Many()], strict=True) as watch:
        log = watch.run.log_many
        monkeypatch.setattr(watch.run, "log_many", lambda rows: (time.sleep(0.001 * len(rows)), log(rows)))
        for _ in range(500):
            watch.step()
    assert len(excite.load_run(tmp_path / "run").frame()) == 20 * 501


def test_what_waits_for_a_broken_disk_is_the_newest(tmp_path, monkeypatch):
    monkeypatch.setattr("excite.monitor.writer._MAX_VALUES", 100)
    monkeypatch.setattr("excite.monitor.writer._PAUSE", 60.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with excite.watch(nn.Linear(2, 1), run=tmp_path / "run", probes=[Many()]) as watch:
            watch.flush()
            log = watch.run.log_many
            monkeypatch.setattr(watch.run, "log_many", lambda rows: (_ for _ in ()).throw(RunError("the disk is full")))
            for _ in range(100):
                watch.step()
                watch.flush()
            monkeypatch.setattr(watch.run, "log_many", log)
    steps = sorted(set(excite.load_run(tmp_path / "run").frame().step))
    assert steps[-1] == 100
    assert len(steps) < 20
    assert any("measured values are lost" in str(one.message) for one in caught)


def test_an_unexpected_disk_error_is_raised_and_loses_nothing(tmp_path, monkeypatch):
    with excite.watch(nn.Linear(2, 1), run=tmp_path / "run", probes=[Loss()]) as watch:
        log = watch.run.log_many

        def broken(rows):
            raise OSError("no such device")

        monkeypatch.setattr(watch.run, "log_many", broken)
        watch.step(1.0)
        with pytest.raises(OSError, match="no such device"):
            watch.flush()
        monkeypatch.setattr(watch.run, "log_many", log)
        watch.step(2.0)
    assert excite.load_run(tmp_path / "run").series("loss/step")[1].tolist() == [1.0, 2.0]
