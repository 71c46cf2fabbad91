"""Every sink for real: what the run holds is what the sink holds."""

import builtins
import math
import sys

import pytest
import torch

import excite
from excite import InputError
from excite._core.checks import MissingPackage
from excite.monitor.sinks import MLflow, TensorBoard, WandB
from excite.probes import Distance, Every, Loss
from models import build


def train(tmp_path, sinks, steps=6):
    model, x = build("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with excite.watch(model, run=tmp_path / "run", probes=[Loss(), Distance(Every(2))], sinks=sinks) as watch:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            watch.step(loss)
    return excite.load_run(tmp_path / "run")


def test_tensorboard_holds_what_the_run_holds(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is an extra: pip install 'excite[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = train(tmp_path, ["tensorboard"])
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    assert set(events.Tags()["scalars"]) == {f"excite/{name}" for name in run.names()}
    for name in ("loss/step", "distance/absolute/2"):
        steps, values = run.series(name)
        scalars = events.Scalars(f"excite/{name}")
        assert [one.step for one in scalars] == steps.tolist()
        assert [one.value for one in scalars] == pytest.approx(values.tolist(), rel=1e-6)  # float32 there


@pytest.mark.slow
def test_wandb_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is an extra: pip install 'excite[wandb]'")

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    logged = []
    with wandb.init(project="excite-test", dir=str(tmp_path)) as theirs:
        log = theirs.log
        monkeypatch.setattr(theirs, "log", lambda values, **how: (logged.append(values), log(values, **how)))
        theirs.log({"own": 1.0})
        run = train(tmp_path, ["wandb"])
        assert wandb.run is theirs, "an open run stays open"
        assert theirs.summary["excite/loss/step"] == run.series("loss/step")[1][-1]
    steps, values = run.series("loss/step")
    found = [(one["excite/step"], one["excite/loss/step"]) for one in logged if "excite/loss/step" in one]
    assert found == list(zip(steps.tolist(), values.tolist()))
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))


@pytest.mark.slow
def test_mlflow_holds_what_the_run_holds(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is an extra: pip install 'excite[mlflow]'")

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_AGENT_BACKEND", "true")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    with mlflow.start_run() as theirs:
        run = train(tmp_path, ["mlflow"])
        assert mlflow.active_run() is not None, "an open run stays open"
    client = mlflow.MlflowClient()
    history = client.get_metric_history(theirs.info.run_id, "excite/loss/step")
    steps, values = run.series("loss/step")
    assert [(one.step, one.value) for one in history] == list(zip(steps.tolist(), values.tolist()))
    assert client.get_run(theirs.info.run_id).data.metrics.keys() >= {
        "excite/distance/absolute",
        "excite/distance/absolute.2",
    }
    # Without an open run there is a new one, which is closed at the end.
    train(tmp_path / "second", ["mlflow"], steps=1)
    assert mlflow.active_run() is None
    assert len(client.search_runs(["0"])) == 2
    sink = MLflow(run_id=theirs.info.run_id)
    sink.log(7, {"margin/median": math.inf, "rank/effective/a#2": 1.0})
    assert "excite/rank/effective.a_2" in client.get_run(theirs.info.run_id).data.metrics
    sink.close()


@pytest.mark.parametrize(("kind", "package"), [(TensorBoard, "tensorboard"), (WandB, "wandb"), (MLflow, "mlflow")])
def test_a_missing_package_is_one_line(kind, package, monkeypatch):
    for name in [one for one in sys.modules if one.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    real = builtins.__import__

    def no(name, *args, **kwargs):
        if name.partition(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        return real(name, *args, **kwargs)

    class Hidden:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == package:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(builtins, "__import__", no)
    monkeypatch.setattr(sys, "meta_path", [Hidden(), *sys.meta_path])
    with pytest.raises(MissingPackage, match=rf"^{package} is not installed: pip install 'excite\[{package}\]'$"):
        kind()


def test_sinks_are_checked_and_one_that_fails_is_switched_off(tmp_path):
    model, _ = build("mlp")
    for given in (["tensorbored"], [3], "wandb"):
        with pytest.raises(InputError, match="sinks: expected"):
            excite.watch(model, sinks=given)

    class Broken:
        name = "broken"

        def log(self, step, values):
            if step == 2:
                raise OSError("gone")

        def close(self):
            pass

    with pytest.warns(UserWarning, match="broken is switched off, training continues; it raised: OSError: gone"):
        run = train(tmp_path, [Broken()])
    assert len(run.series("loss/step")[0]) == 6
