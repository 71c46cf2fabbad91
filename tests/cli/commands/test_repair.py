"""`excite repair`"""


def test_the_exit_status_says_whether_problems_remain(excite, small_run, tmp_path):
    assert excite("repair", "runs/small")[0] == 0
    (tmp_path / "runs/small/config.json").write_text("{")
    before = (tmp_path / "runs/small/config.json").read_text(), sorted((tmp_path / "runs/small").rglob("*"))
    assert excite("repair", "runs/small", "--dry-run")[0] == 1
    assert before == ((tmp_path / "runs/small/config.json").read_text(), sorted((tmp_path / "runs/small").rglob("*")))
