"""`excite audit`"""


def test_a_page_of_a_small_run_is_written(excite, small_run, tmp_path):
    status, out, err = excite("audit", "runs/small", "--points", "3", "--no-margins")
    assert status == 0, err
    assert "page: audit.html" in out
    assert (tmp_path / "audit.html").stat().st_size > 5000


def test_a_missing_run_is_refused(refused):
    refused("no run folder at nowhere", "audit", "nowhere")
