"""Values of several processes as one."""

import math
import time
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import excite
from excite.monitor.reduce import reduce_rows, reduction_of
from excite.probes import Loss, Probe


class PerProcess(Probe):
    name = "process"

    def __init__(self, reduction):
        super().__init__()
        self.name, self.reduction = f"process-{reduction}", reduction

    def measure(self, ctx):
        # NaN: this process has no value. It must not matter which one that is.
        some = {f"only-{rank}": 5.0 if dist.get_rank() == rank else math.nan for rank in range(2)}
        return {"value": float(dist.get_rank() + 1), **some, "none": math.nan}


def worker(rank, size, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)
    model = torch.nn.Linear(2, 1)
    probes = [PerProcess(r) for r in ("mean", "sum", "max", "min", "first")]
    while rank > 0 and not (Path(folder) / "run" / "run.json").exists():
        time.sleep(0.01)  # a late process finds the run of the first one there already
    with excite.watch(model, run=f"{folder}/run", probes=[*probes, Loss()]) as watch:
        for step in range(3):
            watch.step(float(rank + step))
    dist.destroy_process_group()


@pytest.mark.slow
def test_values_are_reduced_across_processes(tmp_path):
    mp.spawn(worker, (2, str(tmp_path)), nprocs=2)
    frame = excite.load_run(tmp_path / "run").frame()
    last = {row.name: row.value for row in frame.itertuples(index=False)}
    for reduction, value in {"mean": 1.5, "sum": 3, "max": 2, "min": 1, "first": 1}.items():
        assert last[f"process-{reduction}/value"] == value
        assert math.isnan(last[f"process-{reduction}/none"])
        for rank in range(2):
            expected = 5.0 if reduction in ("max", "min") or (reduction, rank) == ("first", 0) else math.nan
            assert last[f"process-{reduction}/only-{rank}"] == pytest.approx(expected, nan_ok=True)
    assert frame[frame.name == "loss/step"].value.tolist() == [0.5, 1.5, 2.5]


class Several(Probe):
    name = "several"
    reduction = "mean"
    reductions = MappingProxyType({"peak": "max"})


def test_rows_of_one_process_are_returned_as_they_are():
    probe = Several()
    rows = [(1, probe, {"several/peak/a": 2.0, "several/norm": math.inf}), (2, probe, None)]
    assert reduce_rows(rows, torch.device("cpu")) == [rows[0][2], None]
    assert [reduction_of(probe, name) for name in ("several/peak/a", "several/norm")] == ["max", "mean"]
