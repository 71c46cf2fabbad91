"""One way to load every saved model: of `excite train`, of a watched run, of a file of weights."""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import excite
from excite import InputError, ModelError, RunError
from excite.probes import Loss
from excite.report.audit import audit
from excite.runs import Run
from excite.train.evaluate import load_model, measure
from excite.train.from_config import train

HERE = __name__


class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 3))

    def forward(self, x):
        return self.body(x)


class Named(Net):
    """Takes its input by name and returns several things."""

    def forward(self, *, pixels):
        return {"hidden": pixels, "logits": self.body(pixels)}


def points(seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(24, 2, generator=generator)
    y = (3 * x[:, 0]).long().clamp(0, 2)
    return {"x_train": x[:12], "y_train": y[:12], "x_test": x[12:], "y_test": y[12:]}


def store_points(folder, **about):
    save_file(points(), folder / "artifacts/points.safetensors", {"settings": json.dumps(about)})


def watched(folder, model=None, checkpoint=None, with_points=True, **about):
    model = model or Net()
    with excite.watch(model, run=folder, probes=[Loss()], config={"lr": 0.1}, checkpoint=checkpoint or Net) as watch:
        watch.step(1.0)
    if with_points:
        store_points(folder, **about)
    return model


def same(model, other):
    return all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values()))


@pytest.mark.slow
def test_a_watched_run_with_its_own_points(tmp_path):
    model = watched(tmp_path / "run")
    saved = load_model(tmp_path / "run", trust=True)
    assert same(model, saved.model)
    assert not saved.model.training
    assert (saved.step, saved.name, saved.data_from, saved.config) == (1, "run", "run", None)
    assert torch.equal(saved.data.x_test, points()["x_test"])
    assert set(measure(saved, steps=5)) == {"train", "test"}
    assert (tmp_path / "run/artifacts/margins-inf-test.json").is_file()
    found = audit(tmp_path / "run", trust=True, margin_points=3)
    assert set(found.accuracy) == {"train", "test"}
    (variant,) = excite.report.make_report([tmp_path / "run"]).variants
    assert set(variant.runs[0].margins) == {"train", "test"}


def test_a_built_in_model_needs_no_trust(tmp_path):
    options = {"inputs": 2, "outputs": 3, "widths": [4]}
    model = excite.train.build("mlp", **options)
    watched(tmp_path / "run", model, {"factory": "mlp", "options": options})
    assert same(model, load_model(tmp_path / "run").model)


def test_a_stored_factory_is_never_called_without_trust(tmp_path, monkeypatch):
    watched(tmp_path / "run")
    called = []
    monkeypatch.setattr("os.system", lambda *args, **options: called.append(options))
    with Run.open(tmp_path / "run", "a") as run:
        state = {name: value.clone() for name, value in Net().state_dict().items()}
        run.save_weights(state, 1, excite.runs.import_paths.ModelSource("os:system", {"command": "touch executed"}))
    attempts = [
        load_model,
        audit,
        lambda path: load_model(path / "artifacts/model.safetensors"),
        lambda path: load_model(path, data="moons"),
    ]
    for attempt in attempts:
        with pytest.raises(
            InputError, match=r"its model is built by calling 'os:system', which may run any code.*--trust"
        ):
            attempt(tmp_path / "run")
    copy = tmp_path / "model.safetensors"  # the file alone
    copy.write_bytes((tmp_path / "run/artifacts/model.safetensors").read_bytes())
    with pytest.raises(InputError, match=r"'os:system'.*--trust"):
        load_model(copy, data="moons")
    assert called == []
    load_model(tmp_path / "run", model=Net, options={})  # the caller's own, not the stored one
    assert called == []


@pytest.mark.slow
def test_a_config_of_the_user_is_not_one_of_excite_train(tmp_path):
    config = {"model": {"name": "os:system", "options": {"command": "touch executed"}}, "data": {"name": "moons"}}
    with excite.watch(Net(), run=tmp_path / "run", probes=[Loss()], config=config, checkpoint=Net):
        pass
    store_points(tmp_path / "run")
    with pytest.raises(InputError, match=rf"'{HERE}:Net'"):
        load_model(tmp_path / "run")
    assert load_model(tmp_path / "run", trust=True).config is None
    with Run.create(tmp_path / "own", {"model": "resnet", "data": "cifar10"}) as run:
        run.save(Net())
    assert load_model(tmp_path / "own", trust=True, data=excite.data.load("moons")).config is None


@pytest.mark.parametrize("model", [f"{HERE}:Net", Net, Net()], ids=["name", "class", "module"])
def test_the_callers_own_model(tmp_path, model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained = watched(tmp_path / "run", Net(), True)
    assert same(trained, load_model(tmp_path / "run", model=model).model)


def test_options(tmp_path):
    trained = watched(tmp_path / "run", Net(7), {"factory": Net, "options": {"width": 7}})
    assert same(trained, load_model(tmp_path / "run", model=f"{HERE}:Net").model)  # the stored options
    assert same(trained, load_model(tmp_path / "run", model=Net, options={"width": 7}).model)
    with pytest.raises(
        ModelError, match=r"does not fit the Net: of another shape body.0.weight \(7, 2\) instead of \(5, 2\)"
    ):
        load_model(tmp_path / "run", model=Net, options={"width": 5})
    with pytest.raises(InputError, match="options: expected a model that takes them"):
        load_model(tmp_path / "run", options={"width": 7})


def test_what_a_run_does_not_say(tmp_path):
    with pytest.warns(UserWarning, match="without a way to build"):
        watched(tmp_path / "run", Net(9), True)
    with pytest.raises(
        InputError,
        match=r"does not say how to build its model \(Net\(\) without arguments builds another model\): pass --model",
    ):
        load_model(tmp_path / "run")
    watched(tmp_path / "bare", with_points=False)
    with pytest.raises(RunError, match=r"has no data: excite.watch\(train=, test=\) stores them: pass --data NAME"):
        load_model(tmp_path / "bare", trust=True)
    with pytest.raises(InputError, match=r"data: expected a dataset \(.*moons.*; got 'moonz'"):
        load_model(tmp_path / "bare", trust=True, data="moonz")


def test_the_callers_own_data(tmp_path):
    watched(tmp_path / "run")
    np.savez(tmp_path / "other.npz", **{name: value.numpy() for name, value in points(5).items()})
    saved = load_model(tmp_path / "run", trust=True, data=tmp_path / "other.npz", bounds=(0, 1))
    assert (saved.data_from, saved.data.bounds) == ("other", (0, 1))
    watched(tmp_path / "bare", with_points=False)
    assert load_model(tmp_path / "bare", trust=True, data=str(tmp_path / "other.npz")).data_from == "caller"


@pytest.mark.slow
def test_margins_of_other_data_are_not_taken_for_the_runs(tmp_path):
    watched(tmp_path / "run")
    measure(load_model(tmp_path / "run", trust=True), steps=3)
    found = audit(tmp_path / "run", trust=True, units=False, margin_points=2)
    assert "stored in the run" in found.margins_why
    other = load_model(tmp_path / "run", trust=True, data=excite.data.load("moons", train=4, test=2))
    assert "stored in the run" not in audit(other, units=False, margin_points=2).margins_why


def test_what_is_stored_with_the_points(tmp_path):
    model = watched(tmp_path / "run", Named(), Named, bounds=[0, 1], threshold=0.25, output="logits", key="pixels")
    saved = load_model(tmp_path / "run", trust=True)
    x = points()["x_test"]
    assert torch.equal(saved.model(x), model(pixels=x)["logits"])
    assert (saved.data.bounds, saved.threshold) == ((0, 1), 0.25)


def test_the_newest_weights_count(tmp_path):
    model = Net()
    with Run.create(tmp_path / "run", {}) as run:
        run.save(model, Net, step=3)
        later = Net()
        run.save_checkpoint(4, {"model": later.state_dict()})
    store_points(tmp_path / "run")
    assert same(later, load_model(tmp_path / "run", model=Net).model)
    one = load_model(tmp_path / "run/artifacts/model.safetensors", trust=True)
    assert (one.step, one.run) == (3, tmp_path / "run")
    assert same(model, one.model)
    with pytest.raises(
        RunError, match=r"points.safetensors is not a checkpoint in .*step-00000004.safetensors, model.safetensors"
    ):
        load_model(tmp_path / "run/artifacts/points.safetensors")


@pytest.mark.slow
def test_a_bare_file(tmp_path):
    model = Net()
    torch.save(model.state_dict(), tmp_path / "w.pt")
    save_file(points(), tmp_path / "data.safetensors")
    saved = load_model(tmp_path / "w.pt", model=f"{HERE}:Net", data=tmp_path / "data.safetensors")
    assert same(model, saved.model)
    assert (saved.run, saved.name, saved.step) == (None, "w.pt", -1)
    assert set(measure(saved, steps=3, store=False)) == {"train", "test"}
    with pytest.raises(InputError, match=r"w.pt is a file of weights, not a run"):
        measure(saved, steps=3)
    with pytest.raises(RunError, match="a file of weights has no data: pass --data"):
        load_model(tmp_path / "w.pt", model=Net)
    with pytest.raises(InputError, match=r"the file does not say how to build its model.*--model MODULE:FACTORY"):
        load_model(tmp_path / "w.pt", data="moons")
    found = audit(
        tmp_path / "w.pt",
        model=Net,
        data=tmp_path / "data.safetensors",
        loss="cross-entropy",
        units=False,
        margin_points=2,
    )
    assert (found.name, found.step) == ("w.pt", None)
    d = points()
    found = audit(
        tmp_path / "w.pt",
        model=Net,
        train=(d["x_train"], d["y_train"]),
        test=(d["x_test"], d["y_test"]),
        units=False,
        with_margins=False,
    )
    assert set(found.accuracy) == {"train", "test"}
    with pytest.raises(InputError, match="test: expected training points as well"):
        audit(tmp_path / "w.pt", model=Net, test=(d["x_test"], d["y_test"]))


def test_bad_models(tmp_path):
    torch.save(Net().state_dict(), tmp_path / "w.pt")
    with pytest.raises(InputError, match="cannot import 'no_module'"):
        load_model(tmp_path / "w.pt", model="no_module:Net", data="moons")
    with pytest.raises(InputError, match=r"expected a function that returns a torch.nn.Module; it returned 3"):
        load_model(tmp_path / "w.pt", model=lambda: 3, data="moons")
    with pytest.raises(RunError, match="there is no run folder at"):
        load_model(tmp_path / "none")


def test_a_run_of_excite_train(tmp_path):
    config = {
        "data": {"name": "moons", "train": 20, "test": 10}, "model": {"name": "mlp", "options": {"widths": [4]}},
        "optimizer": {"name": "sgd", "lr": 0.1}, "epochs": 1, "batch": 10, "watch": False,
    }  # fmt: skip
    train(config, tmp_path / "run").close()
    saved = load_model(tmp_path / "run")
    assert saved.config is not None
    assert (saved.data.name, saved.data_from) == ("moons", "run")
    (file,) = Path(tmp_path / "run/checkpoints").glob("final-*")
    bare = tmp_path / "copied.safetensors"
    bare.write_bytes(file.read_bytes())
    again = load_model(bare, model="mlp", options={"widths": [4]}, data="moons")
    assert same(saved.model, again.model)
    assert load_file(bare).keys() != saved.model.state_dict().keys()  # a checkpoint has other names


def test_weights_that_say_how_they_are_built_need_no_config(tmp_path):
    config = {
        "data": {"name": "moons", "train": 20, "test": 10}, "model": {"name": "mlp", "options": {"widths": [4]}},
        "optimizer": {"name": "sgd", "lr": 0.1}, "epochs": 1, "batch": 10, "watch": False,
    }  # fmt: skip
    train(config, tmp_path / "run").close()
    model = Net(6)
    with Run.open(tmp_path / "run", "a") as run:
        run.save(model, Net, {"width": 6}, step=100)
    with pytest.raises(InputError, match=r":Net'.*--trust"):
        load_model(tmp_path / "run")
    assert same(model, load_model(tmp_path / "run", trust=True).model)
