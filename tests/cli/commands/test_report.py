"""`excite report`"""


def test_a_page_of_a_small_run_is_written(excite, small_run, tmp_path):
    assert excite("margins", "runs/small", "--points", "3", "--steps", "5")[0] == 0
    status, out, err = excite("report", "runs/small", "--out", "page.html", "--title", "A small run")
    assert status == 0, err
    assert "report: page.html" in out
    text = (tmp_path / "page.html").read_text()
    assert "Margins on training and test data" in text
    assert "A small run" in text


def test_a_folder_that_is_no_run_is_refused(refused, tmp_path):
    (tmp_path / "foreign").mkdir()
    refused("not a run folder", "report", "foreign")
