"""`excite doctor`"""

from excite.cli import diagnosis
from excite.cli.diagnosis import Diagnosis


def test_problems_are_printed_and_set_the_exit_status(excite, monkeypatch):
    result = Diagnosis({"versions": [("excite", "1.2.3")]})
    monkeypatch.setattr(diagnosis, "diagnose", lambda: result)
    status, out, _ = excite("doctor")
    assert status == 0
    assert out.splitlines()[:2] == ["versions", "  excite  1.2.3"]
    result.problems.append("torch is too old")
    status, out, _ = excite("doctor")
    assert status == 1
    assert "torch is too old" in out
