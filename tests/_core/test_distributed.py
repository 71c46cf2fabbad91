"""Under DistributedDataParallel the gradients are those of one process on the whole batch."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from excite import AdversarialTraining, PersistentExcitation
from models import build

Y = torch.tensor([0, 1, 1, 0])
WAYS = {
    "scalar": ("convolutional", lambda model: PersistentExcitation(model, 0.1)),
    "classes": ("convolutional-classes", lambda model: PersistentExcitation(model, 0.1, classes=4)),
    "hierarchy": (
        "convolutional-classes",
        lambda model: PersistentExcitation(model, 0.1, hierarchy=[[0, 1], 2, [3, 4]]),
    ),
    "adversarial": ("convolutional", lambda model: AdversarialTraining(model, 0.1, random_start=False)),
}

SHARDED = ["written", "products", "padding-circular"]  # under FSDP2 a forward pass has other parameters than the model


def worker(rank, size, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)
    for way, (name, make) in WAYS.items():
        model, x = build(name)
        excited = make(DistributedDataParallel(model))
        excited.loss(x[rank::size], Y[rank::size]).backward()
        if rank == 0:
            torch.save([p.grad for p in model.parameters()], f"{folder}/{way}.pt")
    for name in SHARDED:
        model, x = build(name)
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
        PersistentExcitation(model, 0.1).loss(x[rank::size], Y[rank::size]).backward()
        whole = [p.grad.full_tensor() for p in model.parameters()]
        if rank == 0:
            torch.save(whole, f"{folder}/{name}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_gradients_equal_those_of_one_process(tmp_path):
    mp.spawn(worker, (2, str(tmp_path)), nprocs=2)
    alone = {name: (name, WAYS["scalar"][1]) for name in SHARDED}
    for way, (name, make) in (WAYS | alone).items():
        model, x = build(name)
        make(model).loss(x, Y).backward()
        for ours, theirs in zip(model.parameters(), torch.load(tmp_path / f"{way}.pt")):
            assert torch.allclose(ours.grad, theirs, rtol=1e-10, atol=1e-14), way
