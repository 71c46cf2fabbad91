"""The command line, as a user meets it."""

import json
import re
import subprocess
import sys

import pytest

from excite import PersistentExcitation, load_run

CONFIG = """
epochs = 2
batch = 20

[data]
name = "digits"
classes = [8, 1]
train = 40
test = 20

[model]
name = "small-cnn"

[excitation]
radius = 0.05

[optimizer]
name = "sgd"
lr = 0.1
momentum = 0.9
"""


@pytest.fixture
def trained(excite, tmp_path):
    (tmp_path / "first.toml").write_text(CONFIG)
    status, out, err = excite("train", "first.toml")
    assert status == 0, err
    return out


SMALL = CONFIG.replace("train = 40\ntest = 20", "train = 12\ntest = 6").replace('name = "small-cnn"', 'name = "mlp"')


def test_commands_on_one_small_run(excite, tmp_path):
    """Train, measure, audit, report and sweep; the slow tests look at what each of them writes."""
    (tmp_path / "small.toml").write_text(SMALL)
    assert excite("train", "small.toml")[0] == 0
    assert excite("margins", "runs/small", "--points", "3", "--steps", "5")[0] == 0
    assert excite("audit", "runs/small", "--points", "3")[0] == 0
    assert excite("report", "runs/small", "--out", "page.html")[0] == 0
    assert load_run(tmp_path / "runs/small").status == "done"
    assert "Margins on training and test data" in (tmp_path / "page.html").read_text()
    (tmp_path / "sweep.toml").write_text(SMALL + '\n[sweep.over]\n"optimizer.lr" = [0.1, 0.2]\n')
    status, _, err = excite("sweep", "sweep.toml", "--workers", "1")
    assert status == 0, err


@pytest.mark.slow
def test_train_margins_and_report_from_a_config(excite, trained, tmp_path):
    assert "run: runs/first" in trained
    assert re.search(r"test accuracy", trained)
    run = load_run(tmp_path / "runs/first")
    assert run.status == "done"
    assert {"loss/step", "rank/effective/0", "accuracy/test"} <= set(run.names())
    status, out, _ = excite("margins", "runs/first", "--norm", "2", "--points", "10", "--figure", "curve.png")
    assert status == 0
    assert "gap between the curves" in out
    assert (tmp_path / "curve.png").stat().st_size > 5000
    checkpoint = next((tmp_path / "runs/first/checkpoints").glob("final-*"))
    assert excite("margins", checkpoint, "--points", "5")[0] == 0
    summary = json.loads((tmp_path / "runs/first/artifacts/summary.json").read_text())
    assert summary["arm"] == "first"
    assert len(json.loads((tmp_path / "runs/first/artifacts/margins-inf-train.json").read_text())["values"]) == 40
    status, out, _ = excite("report", "runs/first", "--out", "page.html")
    assert status == 0
    assert "report: page.html" in out
    assert "Margins on training and test data" in (tmp_path / "page.html").read_text()


@pytest.mark.slow
def test_margins_of_all_layers_lie_beside_those_of_the_input(excite, trained, tmp_path):
    assert excite("margins", "runs/first", "--points", "6")[0] == 0
    status, out, _ = excite("margins", "runs/first", "--points", "6", "--layers", "all", "--steps", "20")
    assert status == 0
    assert "gap between the curves" in out
    folder = tmp_path / "runs/first/artifacts"
    everywhere = json.loads((folder / "layer-margins-inf-test.json").read_text())
    assert everywhere["layers"] != "input"
    assert json.loads((folder / "margins-inf-test.json").read_text())["layers"] == "input"
    assert max(everywhere["values"]) < max(json.loads((folder / "margins-inf-test.json").read_text())["values"])
    status, _, error = excite("margins", "runs/first", "--layers", "nowhere")
    assert status == 1
    assert "nowhere" in error
    status, _, error = excite("margins", "runs/first", "--relative")
    assert status == 1
    assert "relative" in error


@pytest.mark.slow
def test_training_again_does_nothing_and_a_changed_config_is_refused(excite, trained, tmp_path):
    before = load_run(tmp_path / "runs/first").frame()
    assert excite("train", "first.toml")[0] == 0
    assert load_run(tmp_path / "runs/first").frame().equals(before)
    (tmp_path / "first.toml").write_text(CONFIG.replace("epochs = 2", "epochs = 3"))
    status, _, err = excite("train", "first.toml")
    assert status == 1
    assert err.count("\n") == 1
    assert "epochs" in err


@pytest.mark.slow
def test_demo_continues_where_it_was(excite, tmp_path):
    arguments = ("demo", "--seeds", "1", "--epochs", "1", "--workers", "1", "--out", "demo", "--no-open")
    status, out, err = excite(*arguments)
    assert status == 0, err
    for arm in ("plain", "input excited", "every layer excited"):
        assert arm in out
    report = tmp_path / "demo/report.html"
    assert f"report: {report.relative_to(tmp_path)}" in out
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "demo").glob("*/metrics.db")}
    assert len(made) == 3
    assert excite(*arguments)[0] == 0
    assert made == {path: path.stat().st_mtime_ns for path in (tmp_path / "demo").glob("*/metrics.db")}


@pytest.mark.slow
def test_demo_does_not_pass_off_other_settings(excite):
    arguments = ("demo", "--seeds", "1", "--workers", "1", "--out", "demo", "--no-open")
    assert excite(*arguments, "--epochs", "1")[0] == 0
    status, _, err = excite(*arguments, "--epochs", "2")
    assert status == 1
    assert "another config" in err


def test_a_training_that_never_started_does_not_block_its_folder(excite, tmp_path):
    (tmp_path / "first.toml").write_text(CONFIG.replace("radius = 0.05", "radius = 0.05\nbounds = [0, 1]"))
    status, _, err = excite("train", "first.toml")
    assert status == 1
    assert "within bounds" in err
    (tmp_path / "first.toml").write_text(CONFIG)
    assert excite("train", "first.toml", "--no-margins")[0] == 0


def test_an_interrupt_is_one_line_and_the_run_can_be_continued(excite, tmp_path, monkeypatch):
    (tmp_path / "first.toml").write_text(CONFIG.replace("epochs = 2", "epochs = 6"))
    step = PersistentExcitation.loss
    calls = []

    def interrupted(self, x, y):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return step(self, x, y)

    monkeypatch.setattr(PersistentExcitation, "loss", interrupted)
    status, _, err = excite("train", "first.toml", "--no-margins")
    assert status == 130
    assert "stopped; the same command continues" in err
    assert load_run(tmp_path / "runs/first").status == "stopped"
    assert excite("train", "first.toml", "--no-margins")[0] == 0
    assert load_run(tmp_path / "runs/first").series("loss/step")[0].tolist() == list(range(1, 13))


def test_trace_prints_the_table(excite):
    status, out, _ = excite("trace", "papers-cnn", "--shape", "3x32x32")
    assert status == 0
    assert "3×32×32" in out
    assert "channel" in out
    options = ("--option", "in_features=5", "--option", "out_features=2")
    assert excite("trace", "torch.nn:Linear", "--shape", "5", *options)[0] == 0


def test_data_list_and_a_wrong_name(excite):
    status, out, _ = excite("data", "list")
    assert status == 0
    assert "digits" in out
    assert "excite data fetch cifar10" in out
    status, _, err = excite("data", "fetch", "imagenet")
    assert status == 1
    assert "imagenet" in err


def test_study_list_shows_the_claims(excite):
    status, out, _ = excite("study", "list")
    assert status == 0
    for text in (
        "margin-losses",
        "margin-radii",
        "margin-layers",
        "quick, paper",
        "figure 4",
        "figure 6",
        "every layer",
    ):
        assert text in out


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["demo"],
        ["train"],
        ["margins"],
        ["trace"],
        ["report"],
        ["repair"],
        ["doctor"],
        ["audit"],
        ["sweep"],
        ["serve"],
        ["data", "fetch"],
        ["data", "list"],
        ["study", "list"],
        ["study", "run"],
    ],
)
def test_help_has_an_example(excite, command):
    status, out, _ = excite(*command, "--help")
    assert status == 0
    assert "Example: excite" in out or not command


BAD = {
    "no config": (["train", "nope.toml"], "cannot read the config nope.toml"),
    "misspelled key": (["train", "bad.toml"], "did you mean 'epochs'"),
    "no run": (["margins", "nowhere"], "no run folder at nowhere"),
    "foreign folder": (["report", "foreign"], "not a run folder"),
    "unknown norm": (["margins", "runs/first", "--norm", "3"], "unknown norm '3'"),
    "no such module": (["trace", "nope:thing", "--shape", "3"], "cannot import 'nope'"),
    "no shape": (["trace", "papers-cnn", "--shape", "big"], "expected sizes such as 3x32x32"),
    "wrong shape": (["trace", "papers-cnn", "--shape", "5"], ""),
    "odd figure": (["margins", "runs/first", "--figure", "a.xyz"], "ends in .png, .svg or .pdf"),
    "unknown study": (["study", "run", "margin-loss"], "did you mean 'margin-losses'"),
    "unknown scale": (["study", "run", "margin-losses", "--scale", "big"], "expected 'quick' or 'paper'"),
    "no data": (["study", "run", "margin-losses"], "run `excite data fetch cifar10`"),
    "bad option": (["trace", "torch.nn:Linear", "--shape", "3", "--option", "x"], "expected name=value"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_a_non_zero_status(excite, tmp_path, case, request, monkeypatch):
    command, message = BAD[case]
    if "runs/first" in command:
        request.getfixturevalue("trained")
    (tmp_path / "bad.toml").write_text(CONFIG.replace("epochs", "epoch"))
    (tmp_path / "foreign").mkdir()
    monkeypatch.setenv("EXCITE_DATA", str(tmp_path / "foreign"))
    status, _, err = excite(*command)
    assert status == 1
    assert message in err
    assert err.startswith("excite: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err


@pytest.mark.slow
def test_debug_shows_the_traceback():
    command = [sys.executable, "-m", "excite.cli.app", "--debug", "report", "nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "Traceback" in done.stderr


def test_importing_excite_needs_only_torch_and_numpy():
    code = (
        "import sys, json, excite; from excite import PersistentExcitation, margins, trace, watch, lipschitz, fit\n"
        "print(json.dumps([m for m in ('pandas', 'pydantic', 'plotly', 'typer', 'matplotlib', 'sklearn', 'rich', 'pooch', 'jinja2') if m in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code.replace(", fit", "; import excite.train")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == []
