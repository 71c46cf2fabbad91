"""Under DistributedDataParallel the gradients are those of one process on the whole batch."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
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


def worker(rank, size, folder, way):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)
    model, x = build(WAYS[way][0])
    WAYS[way][1](DistributedDataParallel(model)).loss(x[rank::size], Y[rank::size]).backward()
    if rank == 0:
        torch.save([p.grad for p in model.parameters()], f"{folder}/gradients.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("way", WAYS)
def test_gradients_equal_those_of_one_process(tmp_path, way):
    mp.spawn(worker, (2, str(tmp_path), way), nprocs=2)
    model, x = build(WAYS[way][0])
    WAYS[way][1](model).loss(x, Y).backward()
    for ours, theirs in zip(model.parameters(), torch.load(tmp_path / "gradients.pt")):
        assert torch.allclose(ours.grad, theirs, rtol=1e-10, atol=1e-14)
