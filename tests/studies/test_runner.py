"""The studies' whole path on a few dozen made-up images in the layout of CIFAR-10."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from excite import studies
from excite.cli import app as cli
from excite.errors import DataError, InputError, TrainingStopped
from excite.jobs import scheduler, training_job
from excite.jobs.progress import JobProgress
from excite.runs import load_run
from excite.studies import runner
from excite.studies.beyond import ten_classes
from excite.studies.computed import Computed, Outcome
from excite.studies.excitation.planes_and_horses import SCALES
from excite.studies.study import Claim, Scale, Study, Variant, VariantResult
from excite.studies.verdicts import judge, t_interval
from excite.train import from_config as training
from excite.train.evaluate import measure


@pytest.fixture
def tiny(few_images: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """40 training and 16 test images, scales to match, and a short search for margins."""
    small = replace(SCALES["quick"], train=20, test=12, epochs=4, batch=5, seeds=2, points=4, lr=0.1)
    monkeypatch.setitem(SCALES, "quick", replace(small, sizes={"half the data": 10, "twice the data": 40}))
    quickly = partial(measure, steps=3, restarts=1, evidence=False)
    monkeypatch.setattr(training_job, "measure", quickly)
    return few_images


def made(folder: Path) -> dict[str, int]:
    return {path.parent.name: path.stat().st_mtime_ns for path in folder.glob("*/metrics.db")}


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
    with pytest.raises(
        TrainingStopped, match=r"squared-error-0: out of memory.*1 of 2 trainings are finished"
    ) as error:
        studies.run("margin-losses", seeds=1, workers=1)
    assert "\n" not in str(error.value)
    folder = tiny / "runs/studies/margin-losses-quick"
    before = made(folder)
    assert len(before) == 1
    monkeypatch.setattr(training, "train", real)
    assert len(studies.run("margin-losses", seeds=1, workers=1).numbers) == 2
    assert {name: made(folder)[name] for name in before} == before


@pytest.mark.slow
def test_extra_variants_train_and_have_claims(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCALES, "quick", replace(SCALES["quick"], epochs=1))
    result = studies.run("margin-layers", seeds=1, workers=1, variants="all", out=tiny / "all", docs=tiny / "docs")
    variants = [n.variant for n in result.numbers]
    assert variants[3:] == [
        "hidden layers excited", "dropout", "augmented data", "half the data", "twice the data", "adaptive optimizer"
    ]  # fmt: skip
    assert len(result.verdicts) == 9
    assert all(v.word == "undecided" for v in result.verdicts)  # one seed has no interval
    assert "--seeds 1 --variants all" in result.command
    assert (tiny / "docs/images/margin-layers-variants.png").exists()
    assert len(load_run(tiny / "all/half-the-data-0").series("loss/step")[0]) == 2
    assert len(load_run(tiny / "all/twice-the-data-0").series("loss/step")[0]) == 8


@pytest.mark.slow
def test_ten_classes_compares_methods_under_attack(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scales = ten_classes.SCALES
    small = {"name": "resnet", "options": {"width": 2, "stages": 1, "blocks": 1}}
    quick = replace(scales["quick"], model=small, train=None, test=None, epochs=1, batch=10, points=6, check=3, steps=2)
    monkeypatch.setitem(scales, "quick", quick)
    result = studies.run("ten-classes", workers=1, docs="pages")
    assert len(result.numbers) == 7
    for found in result.numbers:
        lines = [
            [found.values[f"{name}_{part}"] for name in ("clean", "robust2", "robust4", "robust8")]
            for part in ("train", "test")
        ]
        assert all(line == sorted(line, reverse=True) for line in lines)  # larger perturbations break no fewer
        assert found.gap == pytest.approx(max(a - b for a, b in zip(*lines)))
        assert found.minutes > 0
    page = (tiny / "pages/ten-classes.md").read_text()
    assert "| adversarial, seven steps |" in page
    assert "excite data fetch cifar10" in page
    before = made(result.folder)
    studies.run("ten-classes", workers=1)
    assert made(result.folder) == before


def halves(settings: Mapping[str, Any], seed: int, on_progress: Callable[[float], None]) -> Outcome:
    on_progress(0.5)
    value = settings["start"] / 2 + seed
    return Outcome({"half": value}, [value], ("odd",) if seed else ())


def draw(study: Study, scale: Any, details: Mapping[str, list[Any]], numbers: Any) -> dict[str, Any]:
    from matplotlib.figure import Figure

    figure = Figure()
    figure.subplots().plot([detail[0] for detail in details["one"]])
    return {"figure": ("Halves", figure)}


def test_a_computed_study_goes_the_same_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    method = Computed(halves, {"half": ("half", "{:.2f}")}, draw, "Read it.", "Below.")
    scales = {"quick": Scale(name="quick", seeds=2, words="two numbers")}
    claims = [
        Claim(
            "two is more",
            "nowhere",
            "two minus one",
            ("one", "two"),
            lambda n: n["two"].half - n["one"].half,
            above=0.0,
        )
    ]
    study = Study(
        "halves", "Halves", "no figure", "numbers", method, scales,
        lambda scale: [Variant("one", {"start": 1}), Variant("two", {"start": 2})], lambda scale: claims,
    )  # fmt: skip
    monkeypatch.setitem(studies.STUDIES, "halves", study)
    monkeypatch.chdir(tmp_path)
    result = studies.run("halves", workers=1, docs="docs")
    assert [n.half for n in result.numbers] == [0.5, 1.5, 1.0, 2.0]
    assert result.verdicts[0].word == "holds"
    assert "the numbers of 1 of 2 networks" in str(result.verdicts[0])
    assert "one, odd" in (tmp_path / "docs/halves.md").read_text()
    stored = tmp_path / "runs/studies/halves-quick/one-0/result.json"
    before = stored.stat().st_mtime_ns
    studies.run("halves", workers=1)
    assert stored.stat().st_mtime_ns == before
    stored.write_text("{}")
    assert [n.half for n in studies.run("halves", workers=1).numbers] == [0.5, 1.5, 1.0, 2.0]


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


@pytest.mark.parametrize("name", [name for name in studies.STUDIES if name.startswith("margin-")])
def test_scale_paper_is_what_the_authors_did(name: str, tmp_path: Path) -> None:
    study = studies.STUDIES[name]
    todo = runner.plan_jobs(study, study.scales["paper"], 10, tmp_path, extra=True)
    assert {task.seed for task in todo} == set(range(10))
    for task in todo:
        config = task.config
        assert (config.epochs, config.model.name, config.data.classes) == (40, "papers-cnn", ["airplane", "horse"])
        if config.loss == "cross-entropy":
            assert (config.batch, config.optimizer.lr) == (1, 1e-3)
            assert config.optimizer.model_dump()["dampening"] == 0
        elif task.variant != "adaptive optimizer":
            optimizer = config.optimizer.model_dump()
            assert (config.batch, *(optimizer[k] for k in ("lr", "momentum", "dampening"))) == (50, 0.1, 0.9, 0.9)
        if config.excitation is not None and config.excitation.radius != "auto":
            assert (config.excitation.steps, config.excitation.stages, config.excitation.norm) == (4, 4, "inf")


def test_hidden_layers_are_all_but_the_first() -> None:
    from excite.studies.excitation.planes_and_horses import HIDDEN
    from excite.train import build
    from excite.wiring import trace

    names = [layer.name for layer in trace(build("papers-cnn"), torch.zeros(2, 3, 32, 32)).layers]
    assert names[1:] == HIDDEN


def numbers(
    variant: str, seed: int, margin: float, accuracy: float = 0.9, flags: tuple[str, ...] = ()
) -> VariantResult:
    return VariantResult(
        variant, seed, {"margin_train": margin, "margin_test": margin}, flags, by_chance=accuracy < 0.6
    )


def claim(**limit: float) -> Claim:
    return Claim("b is larger", "nowhere", "b minus a", ("a", "b"), lambda n: n["b"].margin_test - n["a"].margin_test, **limit)  # fmt: skip


@pytest.mark.parametrize(
    ("effects", "limit", "word"),
    [
        ([0.1, 0.2, 0.3], {"above": -0.1}, "holds"),
        ([0.1, 0.2, 0.3], {"above": 0.5}, "fails"),
        ([0.1, 0.2, 0.3], {"above": 0.0}, "undecided"),  # 0.2 ± 0.248
        ([0.1, 0.2, 0.3], {"below": 0.5}, "holds"),
        ([0.1, 0.2, 0.3], {"below": -0.1}, "fails"),
        ([0.2], {"above": 0.0}, "undecided"),
        ([0.2, math.inf], {"above": 0.0}, "undecided"),
    ],
)
def test_verdicts(effects: list[float], limit: dict[str, float], word: str) -> None:
    found = [n for i, e in enumerate(effects) for n in (numbers("a", i, 1.0), numbers("b", i, 1.0 + e))]
    verdict = judge(claim(**limit), found)
    assert verdict is not None
    assert verdict.word == word
    json.dumps(verdict.plain(), allow_nan=False)


def test_networks_that_decide_by_chance_settle_nothing_and_flags_are_told() -> None:
    found = [n for i in range(5) for n in (numbers("a", i, 1.0), numbers("b", i, 2.0 + i / 100))]
    settled = judge(claim(above=0.0), found)
    assert settled is not None
    assert (settled.word, settled.notes) == ("holds", ())
    chance = judge(claim(above=0.0), [*found[:-1], replace(found[-1], by_chance=True)])
    assert chance is not None
    assert chance.word == "undecided"
    assert "hardly better than by chance" in str(chance)
    flagged = judge(claim(above=0.0), [*found[:-1], replace(found[-1], flags=("masked",))])
    assert flagged is not None
    assert flagged.word == "holds"
    assert "1 of 5 networks are not to be trusted" in str(flagged)
    assert judge(claim(above=0.0), [numbers("a", 0, 1.0)]) is None


def test_the_interval_covers_the_mean_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    inside = [low <= 1 <= high for low, high in (t_interval(rng.normal(1, 2, 5)) for _ in range(2000))]
    assert 0.93 < np.mean(inside) < 0.97


def test_the_earlier_words_for_variants_still_work() -> None:
    with pytest.warns(DeprecationWarning, match="use variants"), pytest.raises(InputError, match="'figure' or 'all'"):
        studies.run("margin-layers", arms="some")  # type: ignore[call-arg]
    with pytest.warns(DeprecationWarning, match="Variant"):
        assert studies.Arm is studies.Variant
    with pytest.warns(DeprecationWarning, match="variant"):
        assert numbers("plain", 0, 1.0).arm == "plain"
