"""`excite train`"""

import re

import pytest

from excite import PersistentExcitation, load_run


def test_a_config_is_trained_measured_and_summarized(excite, tmp_path, small_config):
    (tmp_path / "small.toml").write_text(small_config)
    status, out, err = excite("train", "small.toml")
    assert status == 0, err
    assert "run: runs/small" in out
    assert re.search(r"test accuracy", out)
    assert load_run(tmp_path / "runs/small").status == "done"
    assert (tmp_path / "runs/small/artifacts/margins-inf-test.json").exists()


@pytest.mark.slow
def test_metrics_of_a_trained_run(trained, tmp_path):
    run = load_run(tmp_path / "runs/first")
    assert {"loss/step", "rank/effective/0", "accuracy/test"} <= set(run.names())


@pytest.mark.slow
def test_training_again_changes_nothing(excite, trained, tmp_path, config):
    before = load_run(tmp_path / "runs/first").frame()
    assert excite("train", "first.toml")[0] == 0
    assert load_run(tmp_path / "runs/first").frame().equals(before)
    (tmp_path / "first.toml").write_text(config.replace("epochs = 2", "epochs = 3"))
    status, _, err = excite("train", "first.toml")
    assert status == 1
    assert err.count("\n") == 1
    assert "epochs" in err


def test_a_training_that_never_started_does_not_block_its_folder(excite, tmp_path, config):
    (tmp_path / "first.toml").write_text(config.replace("radius = 0.05", "radius = 0.05\nbounds = [0, 1]"))
    status, _, err = excite("train", "first.toml")
    assert status == 1
    assert "within bounds" in err
    (tmp_path / "first.toml").write_text(config)
    assert excite("train", "first.toml", "--no-margins")[0] == 0


def test_an_interrupted_run_can_be_continued(excite, tmp_path, monkeypatch, config):
    (tmp_path / "first.toml").write_text(config.replace("epochs = 2", "epochs = 6"))
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


def test_missing_and_misspelled_configs_are_refused(refused, tmp_path, config):
    refused("cannot read the config nope.toml", "train", "nope.toml")
    (tmp_path / "bad.toml").write_text(config.replace("epochs", "epoch"))
    refused("did you mean 'epochs'", "train", "bad.toml")
