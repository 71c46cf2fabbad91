"""`excite.watch` where people train: compiled, mixed precision, accumulation, checkpointing, several models, processes."""

import json

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import excite
from excite import ModelError
from excite.margin import Margins, SearchOptions
from excite.monitor.results import read_points
from excite.probes import Budget, Distance, Every, Loss, MarginGap, Probe, Rank, Trajectory, default_probes
from excite.runs import weights
from models import build, same_state, state_of


class Net(nn.Module):
    def __init__(self, how="plain"):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(5, 8), nn.Linear(8, 6), nn.Linear(6, 1)
        self.how = how

    def middle(self, h):
        return torch.relu(self.second(h))

    def forward(self, x):
        h = torch.relu(self.first(x))
        h = checkpoint(self.middle, h, use_reentrant=False) if self.how == "checkpointed" else self.middle(h)
        f = self.third(h)
        return {"dict": {"logits": f, "hidden": h}, "tuple": (f, h)}.get(self.how, f)


PICK = {"dict": "logits", "tuple": 0}
NAMES = (
    "loss/step",
    "trajectory/mean/first",
    "trajectory/lipschitz/first",
    "distance/absolute",
    "rank/effective/second",
)


def data(batch=8):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(batch, 5, generator=generator), torch.rand(batch, 1, generator=generator)) for _ in range(6)]


def probes(how="plain"):
    every, output = Every(1), PICK.get(how)
    return [Loss(), Trajectory(every, output=output, bounds_every=1), Distance(every), Rank(every)]


def train(
    folder, how="plain", *, parts=1, model=None, wrap=lambda model: model, scaler=None, dtype=None, chosen=None, x=None
):
    """Six steps; the values by name."""
    model = Net(how) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    called = wrap(model)
    example = data()[0][0] if x is None else x
    with excite.watch(
        called, example, folder, optimizer, probes(how) if chosen is None else chosen, output=PICK.get(how), strict=True
    ) as watch:
        for x, y in data():
            optimizer.zero_grad()
            total = 0.0
            for mine, theirs in zip(x.chunk(parts), y.chunk(parts)):
                with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
                    f = called(mine)
                    f = f[PICK[how]] if how in PICK else f
                loss = (f.float() - theirs).square().mean() / parts
                (loss if scaler is None else scaler.scale(loss)).backward()
                total = total + loss
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            watch.step(total)
    run = excite.load_run(folder)
    return {name: run.series(name)[1].tolist() for name in run.names()}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return train(tmp_path_factory.mktemp("plain") / "run")


def equal(found, expected, names=NAMES, **how):
    for name in names:
        assert found[name] == pytest.approx(expected[name], **{"rel": 1e-5, **how}), name


@pytest.mark.parametrize("how", ["dict", "tuple", "checkpointed"])
def test_what_a_model_returns_and_recomputes_changes_no_number(plain, tmp_path, how):
    equal(train(tmp_path / "run", how), plain)


def test_an_accumulated_step_has_the_numbers_of_the_whole_one(plain, tmp_path):
    found = train(tmp_path / "run", parts=2)
    # The bounds on the ratio are computed once per pass: here at half a batch.
    equal(found, plain, [name for name in NAMES if "lipschitz" not in name])
    assert found["trajectory/samples/first"] == plain["trajectory/samples/first"]


def test_a_scaled_loss_changes_no_number(plain, tmp_path):
    equal(train(tmp_path / "run", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**8)), plain)


def test_autocast_changes_numbers_by_its_rounding_only(plain, tmp_path):
    equal(train(tmp_path / "run", dtype=torch.bfloat16), plain, rel=0.03)


@pytest.mark.slow
def test_compiled_models_are_watched_from_their_first_call_on(plain, tmp_path):
    torch.compiler.reset()
    compiled = lambda model: torch.compile(model, backend="aot_eager")  # noqa: E731
    equal(train(tmp_path / "run", wrap=compiled), plain)
    model = compiled(Net())
    model(data()[0][0])
    with pytest.raises(
        ModelError, match=r"a compiled Net ran already.*before the first compiled call.*compiler\.reset"
    ):
        excite.watch(model, data()[0][0])
    torch.compiler.reset()
    excite.watch(model, data()[0][0]).close()


def test_two_models_in_one_process_do_not_disturb_each_other(plain, tmp_path):
    models = [Net(), Net()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    watches = [
        excite.watch(m, data()[0][0], tmp_path / str(i), o, probes())
        for i, (m, o) in enumerate(zip(models, optimizers))
    ]
    for x, y in data():
        for model, optimizer, watch in zip(models, optimizers, watches):
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            watch.step(loss)
    for i, watch in enumerate(watches):
        watch.__exit__(None, None, None)
        run = excite.load_run(tmp_path / str(i))
        equal({name: run.series(name)[1].tolist() for name in run.names()}, plain)


def test_numbers_equal_those_computed_from_saved_checkpoints(tmp_path):
    """After the fact, from the weights of each step: slow and obvious."""
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batches = [(x.double(), y.double()) for x, y in data()]
    example, saved = batches[0][0], [{k: v.clone() for k, v in model.state_dict().items()}]
    points = example, (batches[0][1] > 0.5).long().reshape(-1)
    with excite.watch(model, example, tmp_path / "run", optimizer, every=1, margin_batch=points, strict=True) as watch:
        for x, y in batches:
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            watch.step(loss)
            saved.append({k: v.clone() for k, v in model.state_dict().items()})
    run, twin = excite.load_run(tmp_path / "run"), Net().double()
    flat = lambda state: torch.cat([v.reshape(-1) for v in state.values()])  # noqa: E731
    for step, state in enumerate(saved):
        twin.load_state_dict(state)
        value = {name: dict(zip(*map(list, run.series(name)))).get(step) for name in run.names()}
        assert value["distance/absolute"] == pytest.approx(float((flat(state) - flat(saved[0])).norm()), rel=1e-12)
        hidden = torch.relu(twin.first(example))
        eigenvalues = torch.linalg.eigvalsh(torch.cov(hidden.T.detach())).clamp_min(0)
        shares = eigenvalues / eigenvalues.sum()
        assert value["rank/effective/second"] == pytest.approx(float(torch.special.entr(shares).sum().exp()), rel=1e-9)
        s = torch.linalg.svdvals(state["second.weight"]).square()
        assert value["alignment/ratio/second"] == pytest.approx(float(s[0] / s.sum()), rel=1e-9)
        if step:
            before = Net().double()
            before.load_state_dict(saved[step - 1])
            x, y = batches[step - 1]
            assert value["loss/step"] == pytest.approx((before(x) - y).square().mean().item(), rel=1e-12)
            slopes = []
            for one in x:
                z = before.first(one[None]).detach().requires_grad_()
                f = before.third(before.middle(torch.relu(z)))
                slopes.append(float(torch.autograd.grad(f.sum(), z)[0].norm()))
            assert value["trajectory/mean/first"] == pytest.approx(sum(slopes) / len(slopes), rel=1e-9)
            flipped = (flat(state) >= 0) != (flat(saved[step - 1]) >= 0)
            assert value["signs/changed"] >= float(flipped.float().mean()) * (1 - 1e-6)
    margins = excite.margins(
        Net().double(), *points, options=SearchOptions(steps=20, restarts=1, evidence=False, certify=False)
    )
    assert run.series("margin/median")[1][0] == pytest.approx(margins.median, rel=1e-9)


def test_every_default_probe_leaves_nothing_behind(tmp_path):
    model, x = build("convolutional")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before, hooks = state_of(model), len(optimizer._optimizer_step_post_hooks)
    watch = excite.watch(model, x, tmp_path / "run", optimizer, margin_batch=(x, torch.zeros(len(x))), strict=True)
    assert {probe.name for probe in watch.probes} == {probe.name for probe in default_probes()} | {"margin"}
    watch.close()
    assert same_state(before, state_of(model))
    assert len(optimizer._optimizer_step_post_hooks) == hooks


# -- several processes --------------------------------------------------------------------------------------------------
class Failing(Probe):
    """Raises in one process only."""

    name = "failing"

    def measure(self, ctx):
        if ctx.step == 2 and dist.get_rank() == 1:
            raise KeyError("here")
        return {"x": 1.0}


class Sometimes(Probe):
    """The second process has nothing to say at odd steps."""

    name, reduction = "sometimes", "max"

    def measure(self, ctx):
        return {} if dist.get_rank() == 1 and ctx.step % 2 else {"step": float(ctx.step)}


class Uneven(Probe):
    """Has other names in each process."""

    name = "uneven"

    def measure(self, ctx):
        return {"both": float(dist.get_rank()), f"only-{dist.get_rank()}": 5.0}


def classified(part):
    """Points of one part and their labels for one output."""
    x = torch.cat([inputs for inputs, _ in data()])[:12]
    return (x, (x[:, 0] > 0).float()) if part == "train" else (-x[:7], (-x[:7, 0] > 0).float())


def worker(rank, size, folder):
    torch.set_num_threads(1)
    MarginGap.__init__.__kwdefaults__["seconds"] = 1e9  # of the fixture in conftest; this process is a new one
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)
    x = data()[0][0]
    for how in ("ddp", "fsdp", "budget", "defaults"):
        model = Net()
        if how == "fsdp":
            mesh = init_device_mesh("cpu", (size,))
            for layer in (model.first, model.second, model.third):
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        called = model if how == "fsdp" else DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        chosen = {"budget": [Loss(), Rank(Budget(0.5)), Failing(), Uneven(), Sometimes()], "defaults": None}.get(
            how, probes()
        )
        stored = {"every": 2, "factory": Net} if how in ("ddp", "fsdp") else None
        options = {"strict": how != "budget", "checkpoint": stored}
        if how == "defaults":
            options |= {"train": classified("train"), "test": classified("test"), "every": {"margin_gap": 2}}
        with excite.watch(called, x, f"{folder}/{how}", optimizer, chosen, **options) as watch:
            for inputs, y in data() * (1 if how != "budget" else 5):
                optimizer.zero_grad()
                loss = (called(inputs[rank::size]) - y[rank::size]).square().mean()
                loss.backward()
                optimizer.step()
                watch.step(loss)
                if rank == 0 and how == "budget":  # as many do: the first process logs, the others do not
                    watch.log(process=rank, seen=watch.steps)
        if stored:
            full = {name: getattr(p, "full_tensor", lambda p=p: p)() for name, p in model.state_dict().items()}
            torch.save(full, f"{folder}/{how}-{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    mp.spawn(worker, (2, str(folder)), nprocs=2)
    return folder


@pytest.mark.slow
def test_two_processes_share_the_points_of_the_margins(two):
    run = excite.load_run(two / "defaults")
    steps, points = run.series("margin_gap/points/train")
    assert steps.tolist() == sorted({*range(0, len(data()) + 1, 2), len(data())})
    assert set(points) == {12}
    stored = Margins.from_dict(run.read_json("margins-inf-test"))
    assert len(stored) == 7
    assert run.series("margin_gap/median/test")[1][-1] == pytest.approx(stored.median)
    assert read_points(two / "defaults").data["train"][0].shape[0] == 12


@pytest.mark.slow
def test_only_the_first_process_logs(two):
    run = excite.load_run(two / "budget")
    steps, values = run.series("seen")
    assert steps.tolist() == values.tolist() == list(range(1, len(steps) + 1))
    assert len(steps) == 5 * len(data())
    assert set(run.series("process")[1]) == {0}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_the_weights_of_two_processes_are_stored_as_of_one(two, how):
    stored = weights.read(two / how / weights.NAME)
    assert stored.step == len(data())
    assert same_state(stored.state, dict(torch.load(two / f"{how}-0.pt", weights_only=True)))
    Net().load_state_dict(stored.state)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_two_processes_give_the_numbers_of_one_on_the_full_batch(plain, two, how):
    run = excite.load_run(two / how)
    found = {name: run.series(name)[1].tolist() for name in run.names()}
    more = ("max", "length", "total", "samples", "phi")
    equal(found, plain, (*NAMES, *(f"trajectory/{key}/first" for key in more)))
    # τ is the last of the processes' own: no update of any of them exceeded φ from there on.
    peaks, late = found["trajectory/max/first"], found["trajectory/tau/first"]
    for step, (phi, tau) in enumerate(zip(found["trajectory/phi/first"], late), start=1):
        assert max(peaks[int(tau) : step]) <= phi
    assert all(tau >= alone for tau, alone in zip(late, plain["trajectory/tau/first"]))
    assert max(late) > 0
    # FSDP trains a shard of the bias: its path as a whole is not seen.
    missing = {f"trajectory/{key}/first" for key in ("raw", "variance", "distance")} if how == "fsdp" else set()
    assert set(found) == set(plain) - missing


@pytest.mark.slow
def test_the_models_structure_is_written_once_as_by_one_process(two, tmp_path):
    """Finding it runs the model, which all processes would have to do: without a probe that asks it is left out."""
    train(tmp_path / "one", chosen=default_probes())
    found = []
    for folder in (tmp_path / "one", two / "defaults"):
        (file,) = folder.rglob("*wiring*")
        assert file.relative_to(folder).as_posix() == "artifacts/wiring.json"
        found.append(json.loads(file.read_text()))
    assert found[0] == found[1]
    assert [layer["name"] for layer in found[1]["layers"]] == ["first", "second", "third"]
    assert not list((two / "ddp").rglob("*wiring*"))


@pytest.mark.slow
def test_processes_agree_when_to_measure_and_what_is_off(two):
    run = excite.load_run(two / "budget")
    assert run.series("rank/effective/second")[0].tolist()[:2] == [0, 1]
    assert len(run.series("loss/step")[0]) == 30
    assert run.series("failing/x")[0].tolist() == [0, 1]
    assert set(run.series("uneven/both")[1]) == {0.5}
    steps, values = run.series("sometimes/step")
    assert values.tolist() == steps.tolist() == list(range(31))
    assert set(run.series("uneven/only-1")[1]) == {5.0}
