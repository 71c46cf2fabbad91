"""A study of one's own from a function; the example of the documentation."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from excite import studies
from excite.errors import ExciteError, InputError
from excite.jobs.progress import JobProgress
from excite.studies import Claim, experiment, runner
from excite.studies.find import load_file
from excite.studies.runner import OutOfTime

EXAMPLE = Path(__file__).parents[2] / "examples/my_study.py"
calls = []


def line(settings, seed):
    calls.append((dict(settings), seed))
    return {"value": settings["slope"] * seed + 1}


def other(settings, seed):
    return settings["return"]


MORE = Claim("steep is larger", "not in the papers", "steep minus flat", ("flat", "steep"), lambda n: n["steep"].value - n["flat"].value, above=0.5)  # fmt: skip


def study(function=line, **changes):
    arguments = {"measures": {"value": "the value"}, "seeds": 3, **changes}
    return experiment("lines", "Two lines", function, {"flat": {"slope": 0.0}, "steep": {"slope": 0.0, "rise": 1}}, [MORE], **arguments)  # fmt: skip


def test_function_and_claims_become_a_results_page(tmp_path: Path) -> None:
    calls.clear()
    result = studies.run(study(), out=tmp_path / "out", workers=1)
    assert [verdict.word for verdict in result.verdicts] == [
        "undecided"
    ]  # the difference is 0 on three seeds: its spread is not known
    assert calls[0] == ({"slope": 0.0}, 0)  # settings as given, without the digest of the file
    assert len(calls) == 6
    stored = json.loads((result.folder / "numbers.json").read_text())
    assert stored["numbers"][0]["value"] == 1.0
    assert stored["seconds"] >= 0
    text = (result.folder / "results.md").read_text()
    assert "steep is larger" in text
    assert "the value" in text
    assert result.figure.stat().st_size > 5_000
    studies.run(study(), out=tmp_path / "out", workers=1)
    assert len(calls) == 6  # stored
    assert json.loads((result.folder / "numbers.json").read_text())["seconds"] == stored["seconds"]


def test_time_limit_keeps_what_is_finished(tmp_path: Path) -> None:
    calls.clear()
    with pytest.raises(OutOfTime, match="0 of 6 jobs are finished and stored; the same command continues") as nothing:
        studies.run(study(), out=tmp_path / "out", workers=1, seconds=0)
    assert set(nothing.value.states.values()) == {"not started"}
    assert not calls
    assert not (tmp_path / "out/results.md").exists()
    studies.run(study(), out=tmp_path / "out", workers=1, seeds=1)
    with pytest.raises(OutOfTime, match="2 of 6 jobs") as some:
        studies.run(study(), out=tmp_path / "out", workers=1, seconds=0)
    assert list(some.value.states.values()).count("done") == 2
    text = (tmp_path / "out/results.md").read_text()
    assert "- Not finished, and left out: flat (seeds 1, 2); steep (seeds 1, 2)." in text
    result = studies.run(study(), out=tmp_path / "out", workers=1, seconds=1000)
    assert [seed for _, seed in calls[2:]] == [1, 1, 2, 2]  # seed by seed
    assert not result.missing
    assert "Not finished" not in (tmp_path / "out/results.md").read_text()


def test_time_up_between_jobs_and_bad_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    with pytest.raises(OutOfTime, match=r"[1-5] of 6 jobs"):
        studies.run(study(), out=tmp_path / "out", workers=1, seconds=4)
    with pytest.raises(InputError, match="seconds: expected a finite number of at least 0"):
        studies.run(study(), out=tmp_path / "out", seconds=-1)


def test_ctrl_c_is_not_taken_for_the_time_limit(tmp_path: Path) -> None:
    def interrupt(progress: JobProgress) -> None:
        if progress.status == "running":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        studies.run(study(), out=tmp_path / "out", workers=1, seconds=1000, on_progress=interrupt)


def test_results_are_computed_again_when_the_file_changes(tmp_path: Path) -> None:
    file = tmp_path / "own_changing.py"
    counts = []
    for text in ("return {'v': 1.0}", "return {'v': 1.0}", "return {'v': 2.0}"):
        file.write_text(f"def f(settings, seed):\n    {text}\n")
        spec = importlib.util.spec_from_file_location("own_changing", file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        made = experiment("changing", "Changing", module.f, {"a": {}}, [], measures={"v": "v"}, seeds=1)
        counts.append(studies.run(made, out=tmp_path / "out", workers=1).numbers[0].v)
    assert counts == [1.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({"other": 1.0}, "returned other; expected the numbers value by name"),
        (1.0, "returned float; expected the numbers value by name"),
        ({"value": "many"}, "something that is no number"),
    ],
)
def test_wrong_returns_are_named(tmp_path: Path, returned: object, message: str) -> None:
    made = experiment(
        "wrong", "Wrong", other, {"a": {"return": returned}}, [], measures={"value": "the value"}, seeds=1
    )
    with pytest.raises(ExciteError, match=message):
        studies.run(made, out=tmp_path / "out", workers=1)


def test_numbers_that_are_not_finite_are_flagged(tmp_path: Path) -> None:
    made = experiment("infinite", "Infinite", other, {"a": {"return": {"value": math.nan}}}, [], measures={"value": "the value"}, seeds=1)  # fmt: skip
    result = studies.run(made, out=tmp_path / "out", workers=1)
    assert result.flags == ["a, value is not finite"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"seeds": 0}, "seeds"), ({"measures": {}}, "one measure"), ({"function": 3}, "expected a function")],
)
def test_bad_arguments_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        study(**changes)


@pytest.mark.slow
def test_the_example_is_a_study() -> None:
    made = load_file(EXAMPLE)
    assert [variant.name for variant in made.variants(made.scales["quick"])] == ["plain", "excited"]
    train = made.method.compute.function
    numbers = train({"radius": 0.1, "steps": 3}, 0)
    assert set(numbers) == {"margin", "accuracy"}


@pytest.mark.slow
def test_the_example_runs_on_worker_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = studies.run(EXAMPLE, seeds=2, workers=2)
    assert result.folder == Path("runs/studies/half-circles-quick")
    assert len(result.numbers) == 4
    assert all(found.margin > 0.2 and found.accuracy > 0.85 for found in result.numbers)
    assert result.command == f"excite study run {EXAMPLE} --scale quick --seeds 2"
