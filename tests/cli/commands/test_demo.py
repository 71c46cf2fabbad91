"""`excite demo`"""

import pytest

ARGUMENTS = ("demo", "--seeds", "1", "--workers", "1", "--out", "demo", "--no-open")


@pytest.mark.slow
def test_the_demo_continues_and_refuses_other_settings(excite, tmp_path):
    status, out, err = excite(*ARGUMENTS, "--epochs", "1")
    assert status == 0, err
    for variant in ("plain", "input excited", "every layer excited"):
        assert variant in out
    assert "3 jobs: 3 done" in out
    assert "report: demo/report.html" in out
    assert (tmp_path / "demo/report.html").exists()
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "demo").glob("*/metrics.db")}
    assert len(written) == 3
    assert excite(*ARGUMENTS, "--epochs", "1")[0] == 0
    assert written == {path: path.stat().st_mtime_ns for path in (tmp_path / "demo").glob("*/metrics.db")}
    status, _, err = excite(*ARGUMENTS, "--epochs", "2")
    assert status == 1
    assert "another config" in err


def test_a_number_of_seeds_below_one_is_wrong_usage(excite):
    status, _, err = excite("demo", "--seeds", "0")
    assert status == 2
    assert "--seeds" in err
