"""Under DistributedDataParallel the gradients are those of one process on the whole batch."""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from excite import PersistentExcitation
from models import build

Y = torch.tensor([0, 1, 1, 0])


def worker(rank, size, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)
    model, x = build("convolutional")
    pe = PersistentExcitation(DistributedDataParallel(model), {"0": 0.1, "3": 0.1, "7": 0.1, "9": 0.1})
    loss = pe.loss(x[rank::size], Y[rank::size])
    loss.backward()
    if rank == 0:
        torch.save([p.grad for p in model.parameters()], f"{folder}/gradients.pt")
    dist.destroy_process_group()


def test_gradients_equal_those_of_one_process(tmp_path):
    mp.spawn(worker, (2, str(tmp_path)), nprocs=2)
    model, x = build("convolutional")
    PersistentExcitation(model, 0.1).loss(x, Y).backward()
    for ours, theirs in zip(model.parameters(), torch.load(tmp_path / "gradients.pt")):
        assert torch.allclose(ours.grad, theirs, rtol=1e-10, atol=1e-14)
