"""`excite study list`, `excite study show`, `excite study judge`, `excite study plan` and `excite study run`"""

import json

import pytest

from excite.studies import STUDIES


def test_the_list_is_by_paper_and_figure(excite, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    status, out, _ = excite("study", "list")
    assert status == 0
    for text in (
        "margin-losses",
        "persistency:4",
        "persistency:6",
        "all layers?",
        "few-images",
        "excite study show NAME",
    ):
        assert text in out
    assert len(out.splitlines()) <= len(STUDIES) + 3  # one line each, the heading, and two that explain


def test_the_list_of_one_paper(excite, refused, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    status, out, _ = excite("study", "list", "richness", "--all")
    assert status == 0
    assert "margin-layers" in out
    assert "frequency" not in out
    refused("did you mean 'richness'", "study", "list", "richnes")


def test_a_study_is_shown_by_figure(excite):
    status, out, _ = excite("study", "show", "persistency:6")
    assert status == 0
    assert out.startswith("margin-layers: The input excited alone, or every layer")
    assert "holds       perturbing the input alone" in out


def test_verdicts_are_found_again_from_numbers(excite, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, err = excite("study", "judge", "margin-layers")
    assert status != 0
    assert "run `excite study run margin-layers`" in out + err
    refused("does not exist", "study", "judge", "margin-layers", "--numbers", "nowhere")


def test_seeds_are_planned_from_numbers(excite, refused, tmp_path):
    numbers = [
        {"arm": arm, "seed": seed, "gap": gap + 0.01 * seed * (arm != "plain"), "flags": []}
        for seed in range(3)
        for arm, gap in (("plain", 0.5), ("every layer", 0.2), ("input only", 0.4))
    ]
    stored = {"study": "margin-layers", "scale": "quick", "numbers": numbers, "verdicts": []}
    (tmp_path / "numbers.json").write_text(json.dumps(stored))
    status, out, _ = excite("study", "plan", "margin-layers", "--numbers", str(tmp_path))
    assert status == 0
    assert "if effects and their spread stay as they are" in out
    refused(
        "power: expected a number between", "study", "plan", "margin-layers", "--numbers", str(tmp_path), "--power", "2"
    )
    refused("does not exist", "study", "plan", "margin-layers", "--numbers", "nowhere")


def test_near_misses_are_not_run(refused):
    refused("did you mean 'margin-layers'", "study", "show", "margin-layer")
    refused("choose one: frequency", "study", "run", "reveals:2")
    refused("of which paper?", "study", "run", "6")
    refused("does not exist", "study", "run", "nowhere/my_study.py")


def test_bad_input_is_refused(refused, monkeypatch, tmp_path):
    monkeypatch.setenv("EXCITE_DATA", str(tmp_path / "empty"))
    refused("did you mean 'margin-losses'", "study", "run", "margin-loss")
    refused("expected 'quick' or 'paper'", "study", "run", "margin-losses", "--scale", "big")
    refused("run `excite data fetch cifar10`", "study", "run", "margin-losses")
    refused("expected 'local', 'ray' or 'ray:ADDRESS'", "study", "run", "margin-losses", "--on", "slurm")
    refused("gpus-per-job needs worker processes", "study", "run", "margin-losses", "--gpus-per-job", "1")


@pytest.mark.slow
def test_time_limit_says_what_is_done(excite, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, err = excite("study", "run", "excitation-basics", "--seeds", "1", "--seconds", "0")
    assert status == 1
    assert "not started" in out
    assert "jobs are finished and stored; the same command continues" in err


def test_earlier_names_of_options(refused):
    with pytest.warns(DeprecationWarning, match="--arms is deprecated: use --variants"):
        refused("variants: expected 'figure' or 'all'", "study", "run", "margin-losses", "--arms", "some")
    with pytest.warns(DeprecationWarning, match="--gpus-per-task is deprecated"):
        refused("gpus-per-job needs", "study", "run", "margin-losses", "--gpus-per-task=1")
