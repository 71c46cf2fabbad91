"""The environment of torchrun, and the device of each process."""

from __future__ import annotations

import pytest
import torch

from excite.errors import InputError
from excite.train.distributed.process_group import local_device
from excite.train.distributed.processes import many_processes
from train.distributed.process_jobs import free_port

TORCHRUN = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"MASTER_ADDR": ""}, "WORLD_SIZE is 2, but MASTER_ADDR is not set: start with torchrun"),
        ({"RANK": ""}, "WORLD_SIZE is 2, but RANK is not set"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE: expected an integer of at least 1; got 'two'"),
        ({"RANK": "2", "MASTER_PORT": "1"}, r"RANK is 2, but WORLD_SIZE is 2"),
        ({"MASTER_PORT": "70000"}, "the 2 processes could not connect at 127.0.0.1:70000"),
        ({"MASTER_PORT": "free"}, "the 2 processes could not connect at 127.0.0.1:"),
    ],
)
def test_a_wrong_environment_is_one_line(monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], words: str) -> None:
    if changes.get("MASTER_PORT") == "free":
        changes = {"MASTER_PORT": str(free_port())}  # nobody else comes
    for name, value in {**TORCHRUN, **changes}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=words) as raised, many_processes("cpu", wait=1):
        pass
    assert "\n" not in str(raised.value)


def test_every_process_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert local_device("cuda", 1, 2) == local_device("auto", 1, 2) == torch.device("cuda:1")
    assert local_device("cpu", 1, 4) == torch.device("cpu")
    with pytest.raises(InputError, match=r"4 processes on this machine, but it has 2 GPUs: .*--nproc-per-node 2"):
        local_device("cuda", 0, 4)
    with pytest.raises(InputError, match="device 'cuda:0': several processes take 'cpu', 'cuda'"):
        local_device("cuda:0", 0, 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="2 processes on this machine, but it has no GPUs"):
        local_device("cuda", 0, 2)
