"""What a page says first: verdict, ranking and the settings that differ."""

import json

from excite.report import make_report
from excite.report.collect import collect
from excite.report.verdict.contents import differing_settings, first_line, to_json
from excite.report.verdict.runs import overviews
from excite.runs import Run

from ..conftest import make_run


def test_only_settings_that_differ(tmp_path):
    for name, lr in (("a", 0.1), ("b", 0.2), ("c", 0.2)):
        make_run(tmp_path / name, name, 0.0, config={"optimizer": {"name": "sgd", "lr": lr}, "epochs": 3})
    assert differing_settings(collect([tmp_path])) == [("optimizer.lr", ["0.1", "0.2", "0.2"])]
    assert differing_settings(collect([tmp_path / "a"])) == []


def test_the_page_begins_with_the_line_and_shows_the_ranking(runs, tmp_path):
    variants = collect([runs])
    line, outcomes = first_line(variants, overviews(variants))
    found = to_json(line, outcomes, variants)
    assert [row["run"] for row in found["ranking"]] == ["excited", "plain"]
    assert [row["rank"] for row in found["ranking"]] == [1, 2]
    report = make_report([runs])
    assert report.headline == line
    page = report.write(tmp_path / "r.html").read_text()
    main = page.partition("<main")[2]
    assert (
        main.index('id="verdict"')
        < main.index('id="ranking"')
        < main.index('id="chart-margins"')
        < main.index('id="findings"')
    )
    frozen = json.loads(page.partition('id="frozen">')[2].partition("</script>")[0])
    assert frozen["verdict"] == line.to_dict()
    assert frozen["settings"] == [["radius", ["0.3", "0.0"]]]


def test_a_diverged_run_is_never_done(tmp_path):
    with Run.create(tmp_path / "a", {}) as run:
        for step in range(50):
            run.log(step, {"loss/step": 2.0 if step < 20 else float("inf")})
    assert run.status == "done"
    report = make_report([tmp_path / "a"])
    assert report.headline.kind == "diverged"
    assert "since step 20" in report.headline.text
    assert 'class="verdict diverged"' in report.write(tmp_path / "r.html").read_text()
