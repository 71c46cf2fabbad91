"""Probes that raise are switched off, and training continues."""

import warnings
from concurrent.futures import Future

import pytest
import torch
from torch import nn

import excite
from excite.probes import Conservation, Every, Loss, Probe
from excite.probes.conserved.step_terms import StepTerms
from models import build


def test_a_broken_probe_is_switched_off_and_training_goes_on(tmp_path):
    class Broken(Probe):
        name = "broken"

        def measure(self, ctx):
            if ctx.step == 3:
                raise KeyError("gone")
            return {"x": 1.0}

    model, _ = build("mlp")
    with (
        pytest.warns(UserWarning, match="'broken' is switched off.*step 3 it raised: KeyError"),
        excite.watch(model, run=tmp_path / "run", probes=[Broken(), Loss()]) as watch,
    ):
        for _ in range(6):
            watch.step(0.5)
    frame = excite.load_run(tmp_path / "run").frame()
    assert frame[frame.name == "broken/x"].step.tolist() == [0, 1, 2]
    assert len(frame[frame.name == "loss/step"]) == 6
    with pytest.raises(KeyError), excite.watch(model, run=tmp_path / "strict", probes=[Broken()], strict=True) as watch:
        for _ in range(6):
            watch.step()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_ledger_failing_inside_the_optimizer_is_switched_off(tmp_path, monkeypatch, when):
    real, calls = getattr(StepTerms, when), []

    def broken(self, *args):
        calls.append(when)
        if len(calls) == 3:
            raise ZeroDivisionError("in a hook")
        return real(self, *args)

    monkeypatch.setattr(StepTerms, when, broken)
    model, x = build("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with (
        pytest.warns(UserWarning, match="'conservation' is switched off.*step 4 it raised: ZeroDivisionError") as told,
        excite.watch(model, x, tmp_path / "run", optimizer, [Loss(), Conservation(Every(2))]) as watch,
    ):
        for _ in range(8):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            watch.step(loss)
        assert [probe.name for probe in watch.probes] == ["loss"]
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks
    assert len(told) == 1
    assert len(calls) == 3
    frame = excite.load_run(tmp_path / "run").frame()
    assert len(frame[frame.name == "loss/step"]) == 8
    assert set(frame[frame.name.str.startswith("conservation/")].step) == {0, 2}


def test_values_may_be_futures_and_a_failed_one_ends_the_probe(tmp_path):
    class Later(Probe):
        name = "later"

        def measure(self, ctx):
            promise = Future()
            promise.set_result({"x": float(ctx.step)}) if ctx.step < 3 else promise.set_exception(KeyError("gone"))
            return promise

    model, _ = build("mlp")
    with (
        pytest.warns(UserWarning, match="'later' is switched off.*step 3 it raised: KeyError"),
        excite.watch(model, run=tmp_path / "run", probes=[Later(), Loss()]) as watch,
    ):
        for _ in range(6):
            watch.step(0.5)
    frame = excite.load_run(tmp_path / "run").frame()
    assert frame[frame.name == "later/x"].value.tolist() == [0, 1, 2]
    assert len(frame[frame.name == "loss/step"]) == 6
    with (
        pytest.raises(KeyError),
        excite.watch(model, run=tmp_path / "strict", probes=[Later()], strict=True) as watch,
    ):
        for _ in range(6):
            watch.step()


def test_a_diverged_training_is_named_where_probes_fail():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    x = torch.randn(6, 3)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with excite.watch(model, x, alerts=[], every=2) as watch:
            watch.step(1.0)
            with torch.no_grad():
                model[0].weight.fill_(float("nan"))
            watch.step(float("nan"))
    [switched] = [str(one.message) for one in told if "switched off" in str(one.message)]
    assert switched.endswith("at step 2 the first raised: the weights are not finite, since training has diverged")
    assert {one.filename for one in told} == {__file__}  # the user's line, not one of Excite
