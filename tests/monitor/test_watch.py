"""`excite.watch` in a plain loop."""

import json
import time
import warnings
from concurrent.futures import Future

import pytest
import torch

import excite
from excite import InputError, RunError
from excite.probes import Distance, Every, Loss, PowersOfTwo, Probe, Rank
from excite.runs import Run
from models import build, same_state, state_of


def train(model, x, watch, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        watch.step(loss)
        losses.append(loss.item())
    return losses


def test_a_plain_loop_is_watched(tmp_path):
    model, x = build("mlp")
    start = [p.detach().clone() for p in model.parameters()]
    with excite.watch(model, example=x, run=tmp_path / "run") as watch:
        losses = train(model, x, watch, 100)
    run = excite.load_run(tmp_path / "run")
    frame = run.frame()
    assert list(frame.columns) == ["step", "name", "value"]
    assert run.status == "done"
    logged = frame[frame.name == "loss/step"]
    assert logged.step.tolist() == list(range(1, 101))
    assert logged.value.tolist() == losses
    moved = frame[frame.name == "distance/absolute"]
    assert moved.step.tolist() == [0, 50, 100]
    expected = sum((p - s).square().sum() for p, s in zip(model.parameters(), start)).sqrt()
    assert moved.value.iloc[-1] == pytest.approx(float(expected.detach()))
    ranks = frame[frame.name == "rank/effective/2"]
    assert ranks.step.tolist() == [0, 50, 100]


def test_watching_does_not_change_training(tmp_path):
    results = []
    for watched in (False, True):
        model, x = build("dropout")
        torch.manual_seed(3)
        watch = excite.watch(model, example=x, run=tmp_path / "run") if watched else Nothing()
        losses = train(model, x, watch, 60)
        watch.close()
        results.append((losses, state_of(model)))
    assert results[0][0] == results[1][0]
    assert same_state(results[0][1], results[1][1])


class Nothing:
    def step(self, loss):
        pass

    def close(self):
        pass


def test_nothing_is_attached_after_an_exception(tmp_path):
    class Hooked(Probe):
        name = "hooked"

        def attach(self, ctx):
            self.handle = ctx.model.register_forward_hook(lambda *_: None)

        def detach(self):
            self.handle.remove()

        def measure(self, ctx):
            return {"one": 1.0}

    model, x = build("mlp")
    before = state_of(model)
    with pytest.raises(ZeroDivisionError), excite.watch(model, x, tmp_path / "run", probes=[Hooked(), Loss()]) as watch:
        watch.step(1.0)
        raise ZeroDivisionError("mine")
    assert same_state(before, state_of(model))
    run = excite.load_run(tmp_path / "run")
    assert run.status == "failed"
    assert run.frame().name.tolist().count("hooked/one") == 2
    with pytest.raises(InputError, match="after the watch was closed"):
        watch.step(1.0)


def test_a_probe_of_ones_own_takes_ten_lines(tmp_path):
    class WeightNorm(Probe):
        name, reduction = "weights", "first"

        def measure(self, ctx):
            return {"norm": sum(p.square().sum() for p in ctx.model.parameters()).sqrt(), "norm/0": 2}

    model, _ = build("mlp")
    with excite.watch(model, run=tmp_path / "run", probes=[WeightNorm(PowersOfTwo())]) as watch:
        for _ in range(10):
            watch.step()
    frame = excite.load_run(tmp_path / "run").frame()
    assert frame[frame.name == "weights/norm"].step.tolist() == [0, 1, 2, 4, 8, 10]  # also at the end
    assert frame[frame.name == "weights/norm/0"].value.tolist() == [2.0] * 6


def test_training_does_not_wait_for_what_was_promised(tmp_path, monkeypatch):
    monkeypatch.setattr("excite.monitor.buffer._MEASUREMENTS", 2)
    promises = {}

    class Slow(Probe):
        name, reduction = "slow", "first"

        def measure(self, ctx):
            promises[ctx.step] = Future()
            if ctx.final:
                promises[ctx.step].set_result({"x": float(ctx.step)})
            return promises[ctx.step]

    model, _ = build("mlp")
    with excite.watch(model, run=tmp_path / "run", probes=[Slow(Every(3))], strict=True) as watch:
        for _ in range(6):  # asked for at step 3, while nothing is there
            watch.step()
        assert watch.run.frame().empty
        for step, promise in promises.items():
            promise.set_result({"x": float(step)})
        deadline = time.monotonic() + 240
        while watch.run.frame().empty and time.monotonic() < deadline:
            watch.step()
            for step, promise in promises.items():
                if not promise.done():
                    promise.set_result({"x": float(step)})
        steps, values = watch.run.series("slow/x")
        assert steps[0] == 0
        assert values.tolist() == steps.tolist()
    frame = excite.load_run(tmp_path / "run").frame()
    assert frame.step.tolist() == [float(step) for step in promises]


def test_bad_use_is_refused(tmp_path):
    model, x = build("mlp")
    with pytest.raises(InputError, match=r"expected a torch\.nn\.Module"):
        excite.watch(torch.relu)
    with pytest.raises(InputError, match="two probes are called 'loss'"):
        excite.watch(model, probes=[Loss(), Loss()])
    with pytest.raises(InputError, match="at least 1; got 0"):
        Every(0)
    with pytest.raises(InputError, match=r"expected one loss; got a tensor of shape \(4,\)"):
        excite.watch(model).step(torch.zeros(4))
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "file").write_text("mine")
    with pytest.raises(RunError):
        excite.watch(model, x, tmp_path / "foreign")
    assert (tmp_path / "foreign" / "file").read_text() == "mine"
    with pytest.warns(UserWarning, match="needs an example batch"):
        excite.watch(model, probes=[Rank()])


def test_without_a_run_or_an_example_it_still_works():
    model, x = build("mlp")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with excite.watch(model) as watch:
            train(model, x, watch, 70)
    assert watch.steps == 70
    assert "rank" not in {probe.name for probe in watch.probes}


def test_a_restart_continues_the_count(tmp_path):
    model, x = build("mlp")
    with excite.watch(model, run=tmp_path / "a", probes=[Loss(), Distance(Every(1))]) as watch:
        train(model, x, watch, 5)
        state = watch.state_dict()
    with excite.Run.open(tmp_path / "a", "a") as run:
        again = excite.watch(model, run=run, probes=[Loss(), Distance(Every(1))])
        again.load_state_dict(state)
        train(model, x, again, 5)
        again.close()
    frame = excite.load_run(tmp_path / "a").frame()
    assert frame[frame.name == "loss/step"].step.tolist() == list(range(1, 11))
    assert frame[frame.name == "distance/absolute"].value.is_monotonic_increasing


def test_values_are_those_of_their_step(tmp_path):
    class Weight(Probe):
        name = "weight"

        def measure(self, ctx):
            return {"first": ctx.model.bias[0]}

    model, total = torch.nn.Linear(2, 1), torch.zeros(())
    with excite.watch(model, run=tmp_path / "run", probes=[Loss(), Weight()]) as watch:
        for step in range(5):
            with torch.no_grad():
                model.bias[:] = step
            total += 1
            watch.step(total)
    frame = excite.load_run(tmp_path / "run").frame()
    assert frame[frame.name == "loss/step"].value.tolist() == [1, 2, 3, 4, 5]
    assert frame[frame.name == "weight/first"].value.tolist()[1:] == [0, 1, 2, 3, 4]


def test_every_probe_is_detached_whatever_the_others_do(tmp_path):
    class Hooked(Probe):
        def __init__(self, name, fail):
            super().__init__()
            self.name, self.fail = name, fail

        def attach(self, ctx):
            self.handle = ctx.model.register_forward_hook(lambda *_: None)
            if self.fail == "attach":
                raise OSError(self.fail)

        def measure(self, ctx):
            if self.fail == "measure":
                raise OSError(self.fail)
            return {}

        def detach(self):
            self.handle.remove()
            if self.fail == "detach":
                raise OSError(self.fail)

    model = torch.nn.Linear(2, 1)
    for fail in ("attach", "measure", "detach"):
        with (
            pytest.raises(OSError, match=fail),
            excite.watch(
                model,
                probes=[Hooked("a", ""), Hooked("b", fail), Hooked("c", "")][: 2 if fail == "attach" else 3],
                strict=True,
            ),
        ):
            pass
        assert not model._forward_hooks, fail


def test_odd_arguments_are_refused(tmp_path):
    model = torch.nn.Linear(2, 1)
    with pytest.raises(InputError, match="got 'rank'"):
        excite.watch(model, probes=["rank"])
    with pytest.raises(InputError, match="a folder or an open Run; got 3"):
        excite.watch(model, run=3)
    with pytest.raises(InputError, match="got 'a'"):
        excite.watch(model).step("a")
    excite.watch(model, run=tmp_path / "run").close()
    with pytest.raises(RunError, match="give an open Run to continue it"):
        excite.watch(model, run=tmp_path / "run")

    class Vector(Probe):
        name = "vector"

        def measure(self, ctx):
            return {"all": ctx.model.weight}

    with pytest.warns(UserWarning, match=r"vector/all: expected one number; got a tensor of shape \(1, 2\)"):
        excite.watch(model, probes=[Vector()])


@pytest.mark.slow
def test_values_from_before_training_wait_until_training_begins(tmp_path):
    """A training that starts over clears what an earlier try has written: slow first looks must come after that."""

    class Slow(Probe):
        name = "slow"

        def measure(self, ctx):
            time.sleep(1.2 if ctx.step == 0 else 0.0)
            return {"step": float(ctx.step)}

    model = torch.nn.Linear(2, 1)
    with Run.create(tmp_path / "run", {}) as run, excite.watch(model, run=run, probes=[Slow()]) as watching:
        assert run.names() == []
        watching.step(0.0)
        watching.flush()
        assert run.series("slow/step")[0].tolist() == [0, 1]


def test_the_run_says_what_the_model_is_made_of(tmp_path):
    model, x = build("convolutional", batch=6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with excite.watch(model, x, tmp_path / "all", optimizer):
        pass
    with excite.watch(model, x, tmp_path / "layers", probes=[excite.probes.Loss()]):
        pass
    with excite.watch(model, run=tmp_path / "none", probes=[excite.probes.Loss()]):
        pass
    truth = excite.trace(model, x).rows()
    assert excite.load_run(tmp_path / "all").read_json("wiring") == json.loads(json.dumps(truth))
    layers = excite.load_run(tmp_path / "layers").read_json("wiring")
    assert layers["layers"] == json.loads(json.dumps(truth["layers"]))
    assert layers["groups"] == []
    assert not (tmp_path / "none" / "artifacts" / "wiring.json").exists()


def test_the_run_says_that_inputs_are_token_ids(tmp_path):
    model, ids = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 2)), torch.randint(5, (4, 6))
    for name, example in (("ids", ids), ("floats", None)):
        excite.watch(model, example, tmp_path / name, probes=[Loss()]).close()
    assert excite.load_run(tmp_path / "ids").config["watch"]["inputs"] == "integers"
    assert "inputs" not in excite.load_run(tmp_path / "floats").config["watch"]
