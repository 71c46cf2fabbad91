"""Relative size of a step, against a slow version, in the ways people train."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import excite
from excite.probes import Every, GradientNorm, UpdateRatio
from excite.probes.update_ratio import StepCopy, copies
from excite.report.history import MetricHistory


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_copies_are_the_same_bit_by_bit(dtype):
    numbers = torch.tensor([0.0, -0.0, 1e-45, -1e-7, 3.1, torch.inf, -torch.inf]).to(dtype)
    several = [
        nn.Parameter(numbers),
        nn.Parameter(torch.randn(3, 4).to(dtype).t()),
        nn.Parameter(torch.tensor(2.0).to(dtype)),
    ]
    found = copies(several)
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(found[:1], [numbers]))
    assert all(torch.equal(a, b) and a.stride() == b.stride() and not a.requires_grad for a, b in zip(found, several))
    assert not {a.data_ptr() for a in found} & {b.data_ptr() for b in several}
    assert copies([]) == []


def test_copies_of_other_tensors_are_made_one_by_one():
    sparse = torch.eye(3).to_sparse()
    found = copies([torch.ones(2), sparse])
    assert torch.equal(found[1].to_dense(), torch.eye(3))


def slow_ratios(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> dict[str, float]:
    """Entry by entry, in plain Python."""
    moved: dict[str, float] = {}
    size: dict[str, float] = {}
    for path, old in before.items():
        for a, b in zip(old.flatten().tolist(), after[path].flatten().tolist()):
            for key in ("update/ratio", f"update/ratio/{path.rpartition('.')[0]}"):
                moved[key] = moved.get(key, 0.0) + (b - a) ** 2
                size[key] = size.get(key, 0.0) + a**2
    return {key: (moved[key] / size[key]) ** 0.5 for key in moved}


def copied(model: nn.Module) -> dict[str, torch.Tensor]:
    return {path: p.detach().clone() for path, p in model.named_parameters()}


def at_step(run: object, step: int, prefix: str = "update/") -> dict[str, float]:
    frame = excite.load_run(run).frame()
    rows = frame[(frame.step == step) & frame.name.str.startswith(prefix)]
    return dict(zip(rows.name, rows.value))


def test_ratios_are_those_of_a_slow_version(tmp_path):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    expected = {}
    with excite.watch(model, run=tmp_path / "run", probes=[UpdateRatio(Every(3))], strict=True) as watch:
        for step in range(1, 8):
            before = copied(model)
            for _ in range(2):  # accumulated
                model(torch.randn(4, 3).double()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            expected[step] = slow_ratios(before, copied(model))
            watch.step()
            assert bool(watch.probes[0]._before._copies) == (step % 3 == 2)  # no copy is held between
    for step in range(8):
        assert at_step(tmp_path / "run", step) == (pytest.approx(expected[step]) if step in (3, 6) else {})


def test_zero_weights_have_no_ratio_and_skipped_steps_have_zero(tmp_path):
    model = network()
    nn.init.zeros_(model[2].weight)
    nn.init.zeros_(model[2].bias)
    with excite.watch(model, run=tmp_path / "run", probes=[UpdateRatio(Every(1))], strict=True) as watch:
        watch.step()
    found = at_step(tmp_path / "run", 1)
    assert found["update/ratio/0"] == found["update/ratio"] == 0
    assert np.isnan(found["update/ratio/2"])


@pytest.mark.parametrize("hooks", [True, False])
def test_weights_are_copied_when_the_optimizer_begins(hooks):
    model = network().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    copy = StepCopy()
    copy.attach(dict(model.named_parameters()), optimizer)
    copy.announce(True)  # no step so far: it is not known whether hooks run
    assert copy._copies
    for _ in range(3):
        model(torch.randn(4, 3)).sum().backward()
        before = copied(model)
        if hooks:
            optimizer.step()
        else:  # as in a CUDA graph
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(0.1 * p.grad)
        taken = copy.pop()
        assert taken.keys() == before.keys()
        assert all(torch.equal(taken[path], one) for path, one in before.items())
        copy.announce(True)
        assert bool(copy._copies) != hooks
    copy.announce(False)
    optimizer.step()
    assert not copy.pop()
    copy.detach()
    assert not optimizer._optimizer_step_pre_hooks


def worker(rank: int, size: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
    model = network()
    called = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(1)).double()
    probes = [UpdateRatio(Every(1)), GradientNorm(Every(1))]
    with excite.watch(called, run=f"{folder}/run", optimizer=optimizer, probes=probes, strict=True) as watch:
        called(x.chunk(size)[rank]).square().mean().backward()
        optimizer.step()
        watch.step()
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_have_the_values_of_one(tmp_path):
    mp.spawn(worker, (2, str(tmp_path)), nprocs=2)
    model = network()
    before = copied(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(8, 3, generator=torch.Generator().manual_seed(1)).double()).square().mean().backward()
    norm = float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm())
    optimizer.step()
    assert at_step(tmp_path / "run", 1) == pytest.approx(slow_ratios(before, copied(model)))
    assert at_step(tmp_path / "run", 1, "gradient/")["gradient/norm"] == pytest.approx(norm)


def test_findings_name_layers_that_move_too_fast_or_not_at_all():
    curves = {"update/ratio": 0.3, "update/ratio/fc1": 0.5, "update/ratio/fc2": 0.0}
    series = {name: (np.arange(4), np.full(4, value)) for name, value in curves.items()}
    fast, still = UpdateRatio.findings(MetricHistory(series, series.__getitem__))
    assert "fc1 by 50%" in fast.text
    assert still.text == "The weights of fc2 do not change."
    series = {"update/ratio": (np.arange(3), np.full(3, 0.001))}
    (note,) = UpdateRatio.findings(MetricHistory(series, series.__getitem__))
    assert note.kind == "note"
    assert UpdateRatio.findings(MetricHistory({}, series.__getitem__)) == []
