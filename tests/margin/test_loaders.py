"""Margins of a loader: the same as of its batches one by one, also when they were stored before."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset

from excite.errors import InputError, ModelError
from excite.margin import SearchOptions, loader_margins, margins
from excite.margin.loaders import _digest_of_model
from excite.margin.result import concatenate
from models import same_state, state_of

QUICK = SearchOptions(steps=6, restarts=1, certify=False)


def case() -> tuple[nn.Module, DataLoader]:
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    x = torch.rand(22, 5, generator=generator)
    return model, DataLoader(TensorDataset(x, torch.randint(0, 3, (22,), generator=generator)), batch_size=8)


@pytest.mark.slow
def test_equals_margins_of_the_batches():
    model, loader = case()
    batches, calls = list(loader), []  # a DataLoader draws a seed of its own
    before = state_of(model)
    found = loader_margins(model, batches, bounds=(0, 1), options=QUICK, progress=lambda *done: calls.append(done))
    parts = [margins(model, x, y, bounds=(0, 1), options=QUICK) for x, y in batches]
    assert torch.equal(found.values, torch.cat([part.values for part in parts]))
    assert found.evidence.attacked == sum(part.evidence.attacked for part in parts)
    assert found.evidence.checked == sum(part.evidence.checked for part in parts)
    assert calls == [(1, 3), (2, 3), (3, 3)]
    assert same_state(before, state_of(model))


@pytest.mark.slow
def test_continues_where_it_was_stopped(tmp_path):
    model, loader = case()

    class Stop(Exception):
        pass

    def stop(done, total):
        if done == 2:
            raise Stop

    with pytest.raises(Stop):
        loader_margins(model, loader, tmp_path, bounds=(0, 1), options=QUICK, progress=stop)
    times = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert sorted(times) == ["batch-000000.json", "batch-000001.json"]
    found = loader_margins(model, loader, tmp_path, bounds=(0, 1), options=QUICK)
    assert {name: (tmp_path / name).stat().st_mtime_ns for name in times} == times
    assert torch.equal(found.values, loader_margins(model, loader, bounds=(0, 1), options=QUICK).values)


@pytest.mark.slow
def test_stored_margins_of_another_model_do_not_count(tmp_path):
    model, loader = case()
    loader_margins(model, loader, tmp_path, bounds=(0, 1), options=QUICK)
    with torch.no_grad():
        model[0].weight.mul_(2)
    found = loader_margins(model, loader, tmp_path, bounds=(0, 1), options=QUICK)
    assert torch.equal(found.values, loader_margins(model, loader, bounds=(0, 1), options=QUICK).values)
    (tmp_path / "batch-000001.json").write_text("{")
    again = loader_margins(model, loader, tmp_path, bounds=(0, 1), options=QUICK)
    assert torch.equal(found.values, again.values)
    assert json.loads((tmp_path / "batch-000001.json").read_text())["margins"]


def test_long_bounds_that_differ_are_told_apart():
    low, high = torch.zeros(3000), torch.ones(3000)
    higher = high.index_fill(0, torch.tensor([1500]), 2.0)
    model = case()[0]
    first, again, other = (_digest_of_model(model, {"bounds": (low, end)}) for end in (high, high.clone(), higher))
    assert first == again != other


@pytest.mark.parametrize("loader", [3, [], [1, 2], [(torch.zeros(2, 5), 0)]])
def test_a_bad_loader_is_refused(loader):
    with pytest.raises(InputError, match="loader"):
        loader_margins(case()[0], loader, options=QUICK)


def test_points_are_those_of_the_loader():
    model, loader = case()
    with pytest.raises(InputError, match="loader"):
        loader_margins(model, loader, x=torch.zeros(2, 5))
    assert len(loader_margins(model, loader, batches=1, options=QUICK)) == 8


def test_only_margins_of_one_kind_are_joined():
    model, loader = case()
    x, y = next(iter(loader))
    one, other = (margins(model, x, y, norm=norm, options=QUICK) for norm in ("inf", "2"))
    with pytest.raises(InputError, match="same norm"):
        concatenate([one, other])
    with pytest.raises(InputError, match="at least one"):
        concatenate([])


def worker(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)
    model, loader = case()
    for sampler in (RandomSampler(loader.dataset), DistributedSampler(loader.dataset)):
        with pytest.raises(InputError, match=f"{type(sampler).__name__}: use DataLoader"):
            loader_margins(model, DataLoader(loader.dataset, 2, sampler=sampler), bounds=(0, 1), options=QUICK)
    found = loader_margins(model, loader, f"{folder}/margins", bounds=(0, 1), options=QUICK)
    torch.save(found.values, f"{folder}/{rank}.pt")
    x, y = loader.dataset.tensors
    broken = DataLoader(
        TensorDataset(torch.where(torch.arange(len(x))[:, None] == 9, torch.nan, x), y), loader.batch_size
    )
    with pytest.raises(InputError if rank == 1 else ModelError, match="NaN"):  # the second batch is that of process 1
        loader_margins(model, broken, bounds=(0, 1), options=QUICK)
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_share_the_batches_and_have_all(tmp_path):
    mp.spawn(worker, (2, str(tmp_path)), nprocs=2)
    model, loader = case()
    alone = loader_margins(model, loader, bounds=(0, 1), options=QUICK).values
    assert all(torch.equal(torch.load(tmp_path / f"{rank}.pt"), alone) for rank in range(2))
    assert len(list((tmp_path / "margins").iterdir())) == 3
