"""Vital signs are the same whether the step is compiled or made of several micro-batches, and in autocast's own numbers."""

import math

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import excite
from excite.probes import AttentionLogits, CriticalSharpness, LogNormalizer, Loss, ResidualStream, vital_signs
from excite.probes.base import StepContext
from transformer_zoo import NAMES, HandGPT, captured, make, slow_stream_signs

TOKENS = torch.randint(17, (4, 9), generator=torch.Generator().manual_seed(0))


def loss_of(model, ids):
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def signs(way, folder):
    """All vital signs of three steps, by step and name."""
    torch.manual_seed(0)
    model = HandGPT("kernel").double()
    torch.compiler.reset()  # other tests may have compiled this class
    called = torch.compile(model, backend="aot_eager") if way == "compiled" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    probes = [Loss(), *vital_signs(1)]
    parts = TOKENS.chunk(2 if way == "accumulated" else 1)
    with excite.watch(called, TOKENS[:, :-1], folder / way, optimizer, probes, strict=True) as watch:
        for _ in range(3):
            optimizer.zero_grad()
            losses = [loss_of(called, part) / len(parts) for part in parts]
            for loss in losses:
                loss.backward()
            optimizer.step()
            watch.step(sum(losses))
    frame = excite.load_run(folder / way).frame()
    return {(step, name): value for step, name, value in zip(frame.step, frame.name, frame.value)}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["compiled", "accumulated"])
def test_signs_of_every_way_of_training_are_the_same(way, tmp_path):
    expected, measured = signs("plain", tmp_path), signs(way, tmp_path)
    quantities = {name.partition("/")[0] for _, name in expected}
    assert quantities == {"loss", *(probe.name for probe in vital_signs(1))}
    assert measured == pytest.approx(expected, rel=1e-10, abs=1e-12, nan_ok=True)


def some_loss(output, batch):
    logits = getattr(output, "logits", output)
    return logits.square().mean() + logits.sin().mean()


def family_signs(zoo, folder):
    """All vital signs of two steps."""
    model = zoo.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    probes = [probe for probe in vital_signs(1) if probe.name != "sharpness"]
    probes.append(CriticalSharpness(excite.probes.Every(1), loss=some_loss))
    with excite.watch(model, zoo.example, folder, optimizer, probes, strict=True) as watch:
        for _ in range(2):
            optimizer.zero_grad()
            some_loss(model(zoo.example), None).backward()
            optimizer.step()
            watch.step()


def sharded_worker(rank, size, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size,))
    for name in NAMES:
        zoo, output = make(name), None if name in ("softmax", "kernel") else "logits"
        whole = excite.trace(zoo.model, zoo.example, output=output)
        for block in zoo.blocks:
            fully_shard(zoo.model.get_submodule(block), mesh=mesh)
        fully_shard(zoo.model, mesh=mesh)
        sharded = excite.trace(zoo.model, zoo.example, output=output)
        assert (sharded.rows(), sharded.attentions) == (whole.rows(), whole.attentions)
        family_signs(zoo, f"{folder}/{name}")
    dist.destroy_process_group()


@pytest.mark.slow
def test_signs_of_sharded_models_are_those_of_whole_ones(tmp_path):
    """σ₁ gathers weights, and critical sharpness changes shards in place: wrong ones would show in the second step."""
    mp.spawn(sharded_worker, (2, str(tmp_path)), nprocs=2)
    for name in NAMES:
        family_signs(make(name), tmp_path / f"whole-{name}")
        whole, sharded = (excite.load_run(tmp_path / folder).frame() for folder in (f"whole-{name}", name))
        expected = {(step, sign): value for step, sign, value in zip(whole.step, whole.name, whole.value)}
        measured = {(step, sign): value for step, sign, value in zip(sharded.step, sharded.name, sharded.value)}
        assert {sign.partition("/")[0] for _, sign in expected} == {probe.name for probe in vital_signs(1)}
        assert measured == pytest.approx(expected, rel=1e-10, abs=1e-14, nan_ok=True)


def test_under_autocast_signs_are_those_of_its_tensors():
    torch.manual_seed(0)
    model = HandGPT("kernel")
    ctx = StepContext(model, 0, example=TOKENS)
    paths = ["blocks.0", "blocks.1", "blocks.0.attention.qkv", "blocks.1.attention.qkv"]
    with torch.autocast("cpu", torch.bfloat16):
        _, outputs, logits = captured(model, paths, TOKENS[:2])
        attention, streams, log_z = (
            probe.measure(ctx) for probe in (AttentionLogits(), ResidualStream(), LogNormalizer())
        )
    allowed = torch.ones(9, 9, dtype=torch.bool).tril()
    for block in (0, 1):
        qkv = outputs[f"blocks.{block}.attention.qkv"]
        assert qkv.dtype == torch.bfloat16
        q, k, _ = (part.double().unflatten(-1, (2, 4)).transpose(1, 2) for part in qkv.chunk(3, -1))
        largest = (q @ k.mT / 2).masked_fill(~allowed, -math.inf).amax((0, 2, 3))
        measured = [float(attention[f"logit/blocks.{block}.attention/head{head}"]) for head in (0, 1)]
        assert measured == pytest.approx(largest.tolist(), rel=1e-6)
        for quantity, expected in slow_stream_signs(outputs[f"blocks.{block}"].double()).items():
            assert float(streams[f"{quantity}/blocks.{block}"]) == pytest.approx(expected, rel=1e-5)
    assert logits.dtype == torch.bfloat16
    assert float(log_z["mean"]) == pytest.approx(float(logits.double().logsumexp(-1).mean()), rel=1e-6)
