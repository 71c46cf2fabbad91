"""`excite study list` and `excite study run`"""

import pytest


def test_the_list_shows_claims_and_scales(excite):
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


def test_bad_input_is_refused(refused, monkeypatch, tmp_path):
    monkeypatch.setenv("EXCITE_DATA", str(tmp_path / "empty"))
    refused("did you mean 'margin-losses'", "study", "run", "margin-loss")
    refused("expected 'quick' or 'paper'", "study", "run", "margin-losses", "--scale", "big")
    refused("run `excite data fetch cifar10`", "study", "run", "margin-losses")
    refused("expected 'local', 'ray' or 'ray:ADDRESS'", "study", "run", "margin-losses", "--on", "slurm")
    refused("gpus-per-job needs worker processes", "study", "run", "margin-losses", "--gpus-per-job", "1")


def test_earlier_names_of_options(refused):
    with pytest.warns(DeprecationWarning, match="--arms is deprecated: use --variants"):
        refused("variants: expected 'figure' or 'all'", "study", "run", "margin-losses", "--arms", "some")
    with pytest.warns(DeprecationWarning, match="--gpus-per-task is deprecated"):
        refused("gpus-per-job needs", "study", "run", "margin-losses", "--gpus-per-task=1")
