"""The recorder in trainings: values of a slow version, a planted spike, compiled and with several processes."""

import json
import logging
import math

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import excite
from excite.probes import Every, FlightRecorder, Loss, vital_signs
from excite.probes.base import StepContext
from transformer_zoo import HandGPT


def language(model, ids):
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def rows_of(probe):
    return probe._ring[: len(probe._host)]


def norm(tensors):
    return math.sqrt(sum(one**2 for tensor in tensors for one in tensor.flatten().tolist()))


def test_every_series_is_that_of_a_slow_version():
    torch.manual_seed(0)
    model = HandGPT("kernel").double()
    model.embed.weight.requires_grad_(False)  # frozen
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    probe, ids = FlightRecorder(), torch.randint(17, (4, 8))
    probe.attach(StepContext(model, 0, optimizer=optimizer))
    probe.measure(StepContext(model, 0, optimizer=optimizer))
    streams = {}
    handles = [
        block.register_forward_hook(lambda m, a, out, i=i: streams.update({i: out.detach()}))
        for i, block in enumerate(model.blocks)
    ]
    for step in range(1, 4):
        optimizer.zero_grad()
        for part in ids.chunk(2):  # accumulated
            (language(model, part) / 2).backward()
        before = {path: p.detach().clone() for path, p in model.named_parameters()}
        optimizer.step()
        probe.measure(StepContext(model, step, torch.tensor(1.5), optimizer=optimizer))
    columns, row = probe._history.columns, rows_of(probe)[-1].tolist()[1:]
    trained = {path: p for path, p in model.named_parameters() if p.requires_grad}
    expected = []
    for quantity, layer in columns:
        own = [path for path in trained if not layer or path.rpartition(".")[0] == layer]
        if quantity == "gradient":
            expected.append(norm([trained[path].grad for path in own]))
        elif quantity == "update":
            expected.append(
                norm([trained[path].detach() - before[path] for path in own]) / norm([before[path] for path in own])
            )
        elif quantity == "m":
            expected.append(norm([optimizer.state[trained[path]]["exp_avg"] for path in own]))
        elif quantity == "v":
            expected.append(norm([optimizer.state[trained[path]]["exp_avg_sq"].sqrt() for path in own]))
        else:
            expected.append(float(streams[int(layer.split(".")[1])].square().mean().sqrt()))
    assert row == pytest.approx(expected, rel=1e-6)
    exact = [i for i, (quantity, _) in enumerate(columns) if quantity != "residual"]  # those are noted in float32
    assert [row[i] for i in exact] == pytest.approx([expected[i] for i in exact], rel=1e-10)
    for handle in handles:
        handle.remove()
    probe.detach()
    assert not any(block._forward_hooks for block in model.blocks)
    assert not optimizer._optimizer_step_pre_hooks


def plant(run, steps=170, at=120, probes=None):
    """A GPT of three blocks whose middle one is trained 1,000 times too fast from a step on."""
    torch.manual_seed(0)
    model = HandGPT("kernel", layers=3)
    groups = [{"params": list(block.parameters())} for block in model.blocks]
    rest = [p for path, p in model.named_parameters() if not path.startswith("blocks")]
    optimizer = torch.optim.AdamW([*groups, {"params": rest}], lr=1e-3)
    text = torch.randint(17, (300,))
    example = text[:64].view(8, 8)
    probes = probes if probes is not None else [Loss(), FlightRecorder(past=60)]
    with excite.watch(model, example, run, optimizer, probes, strict=True) as watch:
        for step in range(1, steps + 1):
            if step == at:
                optimizer.param_groups[1]["lr"] = 1.0
            starts = torch.randint(290, (8,))
            optimizer.zero_grad()
            loss = language(model, torch.stack([text[start : start + 9] for start in starts]))
            loss.backward()
            optimizer.step()
            watch.step(loss)


@pytest.mark.slow
def test_the_layer_that_moved_first_is_named(tmp_path, caplog, capsys):
    caplog.set_level(logging.INFO, "excite")
    plant(tmp_path / "run")
    (file,) = (tmp_path / "run" / "artifacts").glob("spike-*.json")
    report = json.loads(file.read_text())
    assert report["first"]["layer"].startswith("blocks.1.")
    assert report["first"]["quantity"] == "update"
    assert report["first"]["step"] == 120
    assert report["first"]["lead"] >= 1
    assert report["curves"]["step"][0] < 120 < report["curves"]["step"][-1]
    assert report["help"]
    assert any("the loss spiked at step" in one for one in caplog.messages)
    run = excite.load_run(tmp_path / "run")
    (name,) = [one for one in run.frame().name.unique() if one.startswith("recorder/lead/")]
    assert name == f"recorder/lead/update/{report['first']['layer']}"
    steps, _ = run.series("recorder/update")
    assert steps.tolist() == report["curves"]["step"]


@pytest.mark.slow
def test_the_page_tells_of_the_spike(tmp_path, caplog):
    from excite.report import make_report

    plant(tmp_path / "run")
    page = make_report([tmp_path / "run"]).write(tmp_path / "page.html").read_text()
    assert "Flight recorder" in page
    assert "first the update of blocks.1." in page


@pytest.mark.slow
def test_a_quiet_training_writes_nothing(tmp_path):
    plant(tmp_path / "run", at=10**9, steps=130)
    names = excite.load_run(tmp_path / "run").frame().name.unique()
    assert not any(name.startswith("recorder/") for name in names)
    assert not list((tmp_path / "run" / "artifacts").glob("spike-*.json"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 50}, "expected at least recent \\+ past = 105; got 50"),
        ({"recent": 0}, "FlightRecorder: recent"),
        ({"past": 2}, "FlightRecorder: past"),
        ({"sigmas": -1}, "FlightRecorder: sigmas"),
        ({"least": "a"}, "FlightRecorder: least"),
        ({"warn": 1}, "FlightRecorder: warn"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(excite.InputError, match=message):
        FlightRecorder(**options)


def test_an_optimizer_is_needed():
    with pytest.raises(excite.InputError, match="expected an optimizer"):
        FlightRecorder().attach(StepContext(nn.Linear(2, 1), 0))


def test_other_networks_and_sgd_are_recorded():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with excite.watch(model, optimizer=optimizer, probes=[FlightRecorder()], strict=True) as watch:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(2, 3)).square().mean().backward()
            optimizer.step()
            watch.step(0.5)
        probe = watch.probes[0]
        values = dict(zip(probe._history.columns, rows_of(probe)[-1].tolist()[1:]))
    assert values["gradient", "0"] > 0
    assert math.isnan(values["m", ""])


def frames(watched, model):
    """Graph breaks and graphs of a compiled step."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(17, (4, 9), generator=torch.Generator().manual_seed(0))
    probes = [Loss(), *vital_signs(1), FlightRecorder()]
    watch = excite.watch(compiled, ids[:, :-1], optimizer=optimizer, probes=probes, strict=True) if watched else None
    rows = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = language(compiled, ids)
        loss.backward()
        optimizer.step()
        if watch is not None:
            watch.step(loss)
            rows.append(rows_of(watch.probes[-1])[-1].clone())
    if watch is not None:
        watch.close()
    counters = torch._dynamo.utils.counters
    return sum(counters["graph_break"].values()), counters["stats"]["unique_graphs"], rows


@pytest.mark.slow
def test_compiled_graphs_are_not_broken():
    torch.manual_seed(0)
    plain, weights = HandGPT("kernel"), None
    weights = {path: one.clone() for path, one in plain.state_dict().items()}
    breaks, graphs, _ = frames(False, plain)
    watched = HandGPT("kernel")
    watched.load_state_dict(weights)
    more_breaks, more_graphs, rows = frames(True, watched)
    assert (more_breaks, more_graphs) == (breaks, graphs) == (0, 1)
    assert all(torch.equal(one, plain.state_dict()[path]) for path, one in watched.state_dict().items())
    eager = HandGPT("kernel")
    eager.load_state_dict(weights)
    optimizer = torch.optim.AdamW(eager.parameters(), lr=1e-3)
    probe, ids = FlightRecorder(), torch.randint(17, (4, 9), generator=torch.Generator().manual_seed(0))
    probe.attach(StepContext(eager, 0, optimizer=optimizer))
    for step in range(1, 4):
        optimizer.zero_grad()
        loss = language(eager, ids)
        loss.backward()
        optimizer.step()
        probe.measure(StepContext(eager, step, loss.detach(), optimizer=optimizer))
        assert rows_of(probe)[-1].tolist()[1:] == pytest.approx(rows[step - 1].tolist()[1:], rel=1e-5)


def worker(rank: int, size: int, folder: str, sharded: bool) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet{sharded}", rank=rank, world_size=size)
    torch.manual_seed(0)
    model = HandGPT("kernel").double()
    if sharded:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (size,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    called = model if sharded else DistributedDataParallel(model)
    ids = torch.randint(17, (4, 9), generator=torch.Generator().manual_seed(0))
    steps(
        called,
        ids[:, :-1],
        ids.chunk(size)[rank],
        f"{folder}/run{sharded}",
        [Loss(), *vital_signs(1), FlightRecorder()],
        f"{folder}/rows{sharded}",
    )
    dist.destroy_process_group()


def steps(model, example, ids, run, probes, rows):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with excite.watch(model, example, run, optimizer, probes, strict=True) as watch:
        for _ in range(3):
            optimizer.zero_grad()
            loss = language(model, ids)
            loss.backward()
            optimizer.step()
            watch.step(loss)
        if watch.run is not None:
            torch.save(rows_of(watch.probes[-1]).clone(), rows)


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_two_processes_have_the_values_of_one(tmp_path, sharded):
    mp.spawn(worker, (2, str(tmp_path), sharded), nprocs=2)
    torch.manual_seed(0)
    model = HandGPT("kernel").double()
    ids = torch.randint(17, (4, 9), generator=torch.Generator().manual_seed(0))
    steps(model, ids[:, :-1], ids, tmp_path / "one", [Loss(), *vital_signs(1), FlightRecorder()], tmp_path / "rows")
    one, two = (torch.load(tmp_path / name) for name in ("rows", f"rows{sharded}"))
    columns = 1 + [quantity for quantity, _ in _columns(model)].index("residual")
    assert torch.allclose(one[:, 1:columns], two[:, 1:columns], rtol=1e-10)
    single, double = (excite.load_run(tmp_path / name).frame() for name in ("one", f"run{sharded}"))
    expected = {(s, n): v for s, n, v in zip(single.step, single.name, single.value)}
    found = {(s, n): v for s, n, v in zip(double.step, double.name, double.value)}
    assert set(found) == set(expected)
    assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-10, nan_ok=True)


def _columns(model):
    probe = FlightRecorder()
    probe.attach(StepContext(model, 0, optimizer=torch.optim.AdamW(model.parameters())))
    probe.detach()
    return probe._history.columns


def test_every_does_not_slow_the_recorder_down():
    model = HandGPT("kernel")
    optimizer = torch.optim.AdamW(model.parameters())
    with excite.watch(model, torch.randint(17, (2, 4)), optimizer=optimizer, every=7) as watch:
        by_name = {probe.name: probe.schedule for probe in watch.probes}
    assert by_name["recorder"] == Every(1)
    assert by_name["attention"] == Every(7)
