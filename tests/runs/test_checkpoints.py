from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from excite.errors import InputError, RunError
from excite.runs import Run, read_checkpoint


@pytest.fixture
def run(tmp_path: Path):
    with Run.create(tmp_path / "run", {}, keep=2) as run:
        yield run


def state(value: float = 0.0) -> dict:
    return {"model": {"w": torch.full((3, 2), value), "b": torch.arange(4)}, "optimizer": {"groups": [{"lr": 0.1}]}}


def test_the_last_checkpoints_and_the_final_one_are_kept(run: Run) -> None:
    for step in (1, 2, 3, 4):
        run.save_checkpoint(step, state(step))
    run.save_checkpoint(4, state(9), final=True)
    run.save_checkpoint(5, state(5))
    assert [(c.step, c.final) for c in run.checkpoints()] == [(4, False), (4, True), (5, False)]
    assert run.load_checkpoint()[0] == 5
    assert float(run.load_checkpoint(4)[1]["model"]["w"][0, 0]) == 9


@pytest.mark.parametrize("keep", [0, -1, True, 1.5])
def test_at_least_one_checkpoint_is_kept(run: Run, keep) -> None:
    run.save_checkpoint(1, state())
    run.close()
    for refused in (
        lambda: Run.open(run.path, "a", keep=keep),
        lambda: Run.create(run.path, {}, resume=True, keep=keep),
        lambda: Run.create(run.path.with_name("new"), {}, keep=keep),
    ):
        with pytest.raises(InputError, match="keep"):
            refused()
    with Run.open(run.path, "a") as again:
        again.keep = keep
        with pytest.raises(InputError, match="keep"):
            again.save_checkpoint(2, state())
        assert [c.step for c in again.checkpoints()] == [1]


@pytest.mark.parametrize("step", [-1, True, 1.0, 2**63])
def test_a_step_that_would_never_be_read_again_is_refused(run: Run, step) -> None:
    with pytest.raises(InputError, match="step"):
        run.save_checkpoint(step, state())
    assert list((run.path / "checkpoints").iterdir()) == []


def test_the_checkpoint_just_written_stays(run: Run) -> None:
    for step in (10, 20, 5):
        run.save_checkpoint(step, state())
    assert [c.step for c in run.checkpoints()] == [5, 20]
    run.keep = 1
    run.save_checkpoint(30, state())
    assert [c.step for c in run.checkpoints()] == [30]
    run.keep = 4
    for step in (31, 32):
        run.save_checkpoint(step, state())
    assert [c.step for c in run.checkpoints()] == [30, 31, 32]


def test_the_file_is_ordinary_safetensors(run: Run) -> None:
    path = run.save_checkpoint(3, state(2.5)).path
    assert torch.equal(load_file(path)["model/w"], torch.full((3, 2), 2.5))


def test_tied_and_strided_tensors_are_stored(run: Run) -> None:
    tied = torch.randn(4, 4)
    run.save_checkpoint(1, {"a": tied, "b": tied, "t": tied.T, "part": tied[1:3, ::2], "empty": torch.zeros(0, 3)})
    _, read = run.load_checkpoint()
    assert torch.equal(read["a"], tied)
    assert torch.equal(read["t"], tied.T)
    assert torch.equal(read["part"], tied[1:3, ::2])
    assert read["empty"].shape == (0, 3)


def test_what_is_loaded_does_not_hang_on_the_file(run: Run) -> None:
    path = run.save_checkpoint(1, state(1.0)).path
    _, read = run.load_checkpoint()
    path.unlink()
    read["model"]["w"] += 1
    assert float(read["model"]["w"].sum()) == 12


def test_a_sparse_tensor_is_refused_and_nothing_is_written(run: Run) -> None:
    with pytest.raises(InputError, match="dense"):
        run.save_checkpoint(1, {"x": torch.eye(2).to_sparse()})
    assert list((run.path / "checkpoints").iterdir()) == []


def test_every_flipped_byte_is_noticed(run: Run) -> None:
    path = run.save_checkpoint(7, state(1.0)).path
    good = path.read_bytes()
    for at in range(len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 0x10]) + good[at + 1 :])
        with pytest.raises(RunError, match=r"step-00000007\.safetensors"):
            run.load_checkpoint()
    path.write_bytes(good)
    assert run.load_checkpoint()[0] == 7


def test_every_truncation_is_noticed(run: Run) -> None:
    path = run.save_checkpoint(7, state(1.0)).path
    good = path.read_bytes()
    for size in range(0, len(good), 7):
        path.write_bytes(good[:size])
        with pytest.raises(RunError, match=r"step-00000007\.safetensors is damaged"):
            run.load_checkpoint()


def test_a_damaged_newest_checkpoint_says_what_to_do(run: Run) -> None:
    run.save_checkpoint(6, state())
    path = run.save_checkpoint(7, state()).path
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(RunError, match="delete it to continue from step 6"):
        run.load_checkpoint()
    path.unlink()
    assert run.load_checkpoint()[0] == 6


def test_foreign_and_missing_checkpoints(run: Run, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no checkpoint"):
        run.load_checkpoint()
    run.save_checkpoint(1, state())
    with pytest.raises(RunError, match=r"no checkpoint at step 5 \(existing: 1\)"):
        run.load_checkpoint(5)
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(RunError, match="not a checkpoint of Excite"):
        read_checkpoint(tmp_path / "other.safetensors")
    with pytest.raises(RunError, match="no checkpoint"):
        read_checkpoint(tmp_path / "none.safetensors")
    with pytest.raises(RunError):
        read_checkpoint(tmp_path)


def test_metrics_are_on_the_disk_before_the_checkpoint(run: Run, monkeypatch) -> None:
    from excite.runs import checkpoints, load_run

    seen = []
    write = checkpoints.write
    monkeypatch.setattr(
        checkpoints, "write", lambda *a, **k: seen.append(len(load_run(run.path).frame())) or write(*a, **k)
    )
    run.log(1, {"a/b": 1.0})
    run.save_checkpoint(1, state())
    assert seen == [1]


def test_left_over_temporary_files_are_removed_on_opening(tmp_path: Path) -> None:
    Run.create(tmp_path / "run", {}).close()
    left = tmp_path / "run" / "checkpoints" / ".tmp-abc"
    left.write_bytes(b"half")
    Run.open(tmp_path / "run").close()
    assert left.exists()  # a reader removes nothing
    Run.open(tmp_path / "run", "a").close()
    assert not left.exists()
