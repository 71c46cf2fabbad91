"""Copies of runs to and from a store."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from excite.runs import Run, load_run
from excite.runs.copies import Copy
from excite.runs.store import Store, StoreError


def run_at(path: Path, steps: int) -> Run:
    run = Run.create(path, {"lr": 0.1})
    for step in range(steps):
        run.log(step, {"loss/step": 1 / (step + 1)})
    run.save_checkpoint(steps, {"weight": torch.full((3,), float(steps))})
    return run


def test_a_run_is_copied_while_it_is_written(store: Store, tmp_path: Path) -> None:
    with run_at(tmp_path / "here", 5) as run:
        copy = Copy(store, "run", run.path)
        copy.put()
        assert not copy.changed()
        run.log(5, {"loss/step": 0.5})
        run.flush()
        assert not copy.changed()  # metrics alone wait for the next checkpoint
        run.save_checkpoint(6, {"weight": torch.zeros(3)})
        assert copy.changed()
        with load_run(f"{store.url}/run") as there:
            assert there.status == "running"
            assert there.series("loss/step")[0].tolist() == [0, 1, 2, 3, 4]
            assert there.load_checkpoint()[0] == 5
        for step in (7, 8):
            run.save_checkpoint(step, {"weight": torch.zeros(3)})
        copy.put()
    copy.put()
    with load_run(f"{store.url}/run") as there:
        assert there.status == "done"
        assert [found.step for found in there.checkpoints()] == [7, 8]  # old ones are removed there too
        assert len(there.series("loss/step")[0]) == 6
    assert not any(name.endswith(("-wal", "-shm", "lock")) for name in store.list("run"))


def test_only_what_changed_is_fetched_again(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with run_at(tmp_path / "here", 2) as run:
        copy = Copy(store, "run", run.path)
        copy.put()
        there = Copy(store, "run", tmp_path / "there")
        there.fetch()
        fetched: list[str] = []
        real = store.fetch
        monkeypatch.setattr(store, "fetch", lambda name, path: fetched.append(name) or real(name, path))
        Copy(store, "run", tmp_path / "there").fetch()
        assert fetched == []
        run.write_json("summary", {"accuracy": 1})
        copy.put()
        Copy(store, "run", tmp_path / "there").fetch()
        assert fetched == ["run/artifacts/summary.json"]


@pytest.mark.parametrize("first", [True, False])
def test_a_copy_cut_anywhere_can_be_continued_from(
    first: bool, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the process was killed: nothing is there, or a run whose metrics reach its last checkpoint."""
    real, cut = store.put, 0
    while True:
        folder = tmp_path / f"{first}-{cut}"
        with run_at(folder / "here", 3) as run:
            copy = Copy(store, folder.name, run.path)
            if not first:
                copy.put()
                for step in range(3, 6):
                    run.log(step, {"loss/step": 0.0})
                run.save_checkpoint(6, {"weight": torch.zeros(3)}, final=True)
                run.write_json("summary", {"accuracy": 1})
                run.set_status("done")
            left = cut

            def failing(source: Path, name: str) -> None:
                nonlocal left
                if left == 0:
                    raise StoreError("cut")
                left -= 1
                real(source, name)

            monkeypatch.setattr(store, "put", failing)
            try:
                copy.put()
                whole = True
            except StoreError:
                whole = False
            monkeypatch.setattr(store, "put", real)
        there = Copy(store, folder.name, folder / "there")
        if there.fetch():
            with load_run(there.folder) as found:
                step, _ = found.load_checkpoint()
                assert len(found.series("loss/step")[0]) >= step
                assert found.status == "running" or (step == 6 and found.read_json("summary"))
        else:
            assert first
            assert not whole
        if whole:
            break
        cut += 1
    assert cut >= 4
