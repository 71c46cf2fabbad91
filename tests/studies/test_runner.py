"""The studies' whole path on a few dozen made-up images in the layout of CIFAR-10."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from excite import studies
from excite.cli import app as cli
from excite.errors import DataError, InputError, TrainingStopped
from excite.jobs import scheduler, training_job
from excite.jobs.progress import JobProgress
from excite.runs import load_run
from excite.studies import runner
from excite.studies.excitation.planes_and_horses import SCALES
from excite.train import from_config as training
from excite.train.evaluate import measure
from studies.small import made, numbers


@pytest.mark.slow
def test_a_study_writes_its_runs_figure_numbers_and_page(tiny: Path) -> None:
    messages: list[JobProgress] = []
    result = studies.run("margin-layers", workers=1, on_progress=messages.append, docs="pages")
    folder = tiny / "runs/studies/margin-layers-quick"
    assert result.folder == Path("runs/studies/margin-layers-quick")
    assert len(made(folder)) == 6
    assert sum(message.status == "done" for message in messages) == 6
    assert [v.claim.variants for v in result.verdicts] == [
        ("plain", "input excited"), ("plain", "input excited"),
        ("input excited", "every layer excited"), ("plain", "every layer excited"),
    ]  # fmt: skip
    assert (folder / "figure.svg").exists()
    stored = json.loads((folder / "numbers.json").read_text())
    assert {(n["arm"], n["seed"]) for n in stored["numbers"]} == {
        (variant, seed) for variant in ("plain", "input excited", "every layer excited") for seed in (0, 1)
    }
    assert stored["settings"]["arms"]["input excited"]["excitation"]["layers"] == "input"
    assert {"excite", "torch"} <= stored["versions"].keys()
    for verdict in stored["verdicts"]:
        assert verdict["verdict"] in ("holds", "fails", "undecided")
    page = (tiny / "pages/margin-layers.md").read_text()
    for text in ("images/margin-layers.png", "excite study run margin-layers --scale quick", "## Verdicts"):
        assert text in page
    assert (tiny / "pages/images/margin-layers.png").stat().st_size < 300_000
    for verdict in result.verdicts:
        assert str(verdict) in str(result)


@pytest.mark.slow
def test_what_is_finished_is_not_done_again(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = studies.run("margin-losses", seeds=1, workers=1)
    before = made(first.folder)
    monkeypatch.setattr(training_job, "measure", measure)
    more = studies.run("margin-losses", seeds=2, workers=1)
    after = made(first.folder)
    assert {name: after[name] for name in before} == before
    assert len(after) == 4
    assert more.numbers[0].gap == first.numbers[0].gap
    assert math.isnan(more.numbers[0].suspect_test)  # measured without evidence the first time, and left like that
    assert 0 <= more.numbers[1].suspect_test <= 1
    for found in more.numbers:
        with load_run(more.folder / f"{found.variant.replace(' ', '-')}-{found.seed}") as run:
            outputs = run.load_checkpoint()[1]["model"]["11.weight"].shape[0]
            assert outputs == (2 if found.variant == "cross-entropy" else 1)
            assert found.accuracy_test == run.series("accuracy/test")[1][-1]


@pytest.mark.slow
def test_what_another_study_trained_is_taken_over(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = studies.run("margin-losses", seeds=1, workers=1)
    trained: list[str] = []
    real: Callable[..., Any] = training.train

    def noting(config: Any, path: Any, progress: Any = None) -> Any:
        trained.append(Path(path).name)
        return real(config, path, progress)

    monkeypatch.setattr(training, "train", noting)
    second = studies.run("margin-radii", seeds=1, workers=1)
    assert trained == ["radius-0.005-0", "radius-0.010-0", "radius-0.020-0"]  # plain is the variant "squared error"
    assert second.numbers[0].plain() == {**first.numbers[0].plain(), "arm": "plain"}


@pytest.mark.slow
def test_a_stopped_study_continues_to_the_same_numbers(tiny: Path) -> None:
    whole = studies.run("margin-losses", seeds=1, workers=1, out=tiny / "whole")

    def interrupt(progress: JobProgress) -> None:
        if progress.name.startswith("cross-entropy") and progress.phase == "training" and progress.fraction > 0.3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        studies.run("margin-losses", seeds=1, workers=1, out=tiny / "out", on_progress=interrupt)
    assert load_run(tiny / "out/cross-entropy-0").status == "stopped"
    before = made(tiny / "out")["squared-error-0"]
    again = studies.run("margin-losses", seeds=1, workers=1, out=tiny / "out")
    assert made(tiny / "out")["squared-error-0"] == before
    assert [n.plain() for n in again.numbers] == [n.plain() for n in whole.numbers]


def test_the_command(tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "excite",
        "study",
        "run",
        "margin-losses",
        "--seeds",
        "1",
        "--workers",
        "1",
        "--out",
        "out",
        "--docs",
        "pages",
    ]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    out = capsys.readouterr().out
    assert stop.value.code == 0
    assert "undecided: training by squared error" in out
    assert "out/results.md" in out
    assert (tiny / "pages/margin-losses.md").exists()


@pytest.mark.slow
def test_a_failed_training_leaves_the_others_and_is_tried_again(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., Any] = training.train

    def fails_once(config: Any, path: Any, progress: Any = None) -> Any:
        if Path(path).name == "squared-error-0":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return real(config, path, progress)

    monkeypatch.setattr(training, "train", fails_once)
    with pytest.raises(TrainingStopped, match=r"squared-error-0: out of memory.*1 of 2 jobs are finished") as error:
        studies.run("margin-losses", seeds=1, workers=1)
    assert "\n" not in str(error.value)
    folder = tiny / "runs/studies/margin-losses-quick"
    before = made(folder)
    assert len(before) == 1
    monkeypatch.setattr(training, "train", real)
    assert len(studies.run("margin-losses", seeds=1, workers=1).numbers) == 2
    assert {name: made(folder)[name] for name in before} == before


@pytest.mark.slow
def test_on_a_gpu_the_seeds_of_a_variant_are_trained_together(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []

    def together(configs: Any, paths: Any, progress: Any = None) -> list[Any]:
        calls.append([path.name for path in paths])
        progress("training", 1, 1)
        return [training.train(config, path) for config, path in zip(configs, paths)]

    monkeypatch.setattr(training, "train_together", together, raising=False)
    todo = runner.plan_jobs(studies.STUDIES["margin-losses"], SCALES["quick"], 2, tiny / "out")
    assert scheduler._run_seeds(todo[:2], lambda progress: None) == []
    assert calls == [["squared-error-0", "squared-error-1"]]
    assert all(task.finished() for task in todo[:2])


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"name": "margin-layer"}, "did you mean 'margin-layers'"),
        ({"name": "zzz"}, "expected one of margin-losses"),
        ({"name": "margin-layers", "scale": "huge"}, "expected 'quick' or 'paper'; got 'huge'"),
        ({"name": "margin-layers", "seeds": 0}, "seeds: expected a whole number"),
        ({"name": "margin-layers", "variants": "some"}, "expected 'figure' or 'all'"),
        pytest.param(
            {"name": "margin-layers", "device": "cuda"}, "device 'cuda' is not available",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)  # fmt: skip
def test_bad_input(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        studies.run(**arguments)


def test_data_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXCITE_DATA", str(tmp_path / "nothing"))
    with pytest.raises(DataError, match="excite data fetch cifar10"):
        studies.run("margin-layers", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_earlier_words_for_variants_still_work() -> None:
    with pytest.warns(DeprecationWarning, match="use variants"), pytest.raises(InputError, match="'figure' or 'all'"):
        studies.run("margin-layers", arms="some")  # type: ignore[call-arg]
    with pytest.warns(DeprecationWarning, match="Variant"):
        assert studies.Arm is studies.Variant
    with pytest.warns(DeprecationWarning, match="variant"):
        assert numbers("plain", 0, 1.0).arm == "plain"
