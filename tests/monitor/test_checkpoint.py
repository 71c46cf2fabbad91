"""watch(checkpoint=...): when weights are stored, and with which factory."""

import warnings

import pytest
import torch
from torch import nn

import excite
from excite import InputError
from excite.monitor.checkpoint import make_saver
from excite.probes import Loss
from excite.runs import weights
from models import same_state


class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.first, self.last = nn.Linear(3, width), nn.Linear(width, 1)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


def trained(folder, checkpoint, model=None, steps=5, fail=False):
    model = model or Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stored = []
    with excite.watch(model, run=folder, optimizer=optimizer, probes=[Loss()], checkpoint=checkpoint) as watch:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 3)).square().mean()
            loss.backward()
            optimizer.step()
            watch.step(loss)
            path = folder / weights.NAME
            stored.append(weights.read(path).step if path.exists() else None)
        if fail:
            raise KeyboardInterrupt
    return model, stored


def test_at_the_end(tmp_path):
    model, steps = trained(tmp_path / "run", True)
    assert steps == [None] * 5
    stored = weights.read(tmp_path / "run" / weights.NAME)
    assert (stored.step, stored.source.factory) == (5, f"{__name__}:Net")
    assert same_state(stored.state, dict(model.state_dict()))


def test_every_two_steps(tmp_path):
    assert trained(tmp_path / "run", 2)[1] == [None, 2, 2, 4, 4]
    assert weights.read(tmp_path / "run" / weights.NAME).step == 5


def test_after_an_exception(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "run", True, fail=True)
    assert weights.read(tmp_path / "run" / weights.NAME).step == 5
    assert excite.load_run(tmp_path / "run").status == "stopped"


@pytest.mark.parametrize("checkpoint", [Net, f"{__name__}:Net", {"factory": Net, "options": {"width": 6}, "every": 3}])
def test_with_a_factory(tmp_path, checkpoint):
    options = checkpoint.get("options", {}) if isinstance(checkpoint, dict) else {}
    trained(tmp_path / "run", checkpoint, Net(**options))
    source = weights.read(tmp_path / "run" / weights.NAME).source
    assert (source.factory, source.options) == (f"{__name__}:Net", options)


def test_what_is_missing_is_said_before_the_training(tmp_path):
    with pytest.warns(
        UserWarning, match=r"checkpoint: .*Net\(\) without arguments builds another model.*pass checkpoint="
    ):
        watch = excite.watch(Net(7), run=tmp_path / "run", probes=[Loss()], checkpoint=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watch.close()
    watch.run.close()


@pytest.mark.parametrize("checkpoint", [None, False])
def test_nothing(tmp_path, checkpoint):
    trained(tmp_path / "run", checkpoint)
    assert not (tmp_path / "run" / weights.NAME).exists()


@pytest.mark.parametrize(
    ("checkpoint", "said"),
    [
        (0, "checkpoint: every: expected a whole number of at least 1; got 0"),
        (2.5, "checkpoint: expected True, a number of steps, a factory, or a dict"),
        ({"factry": Net}, "checkpoint: expected the keys factory, options, every; got 'factry'"),
        ("no_module:Net", "cannot import 'no_module'"),
        (nn.Linear(2, 2), "checkpoint: expected True"),
    ],
)
def test_refused_before_there_is_a_run(tmp_path, checkpoint, said):
    with pytest.raises(InputError, match=said):
        excite.watch(Net(), run=tmp_path / "run", checkpoint=checkpoint)
    assert not (tmp_path / "run").exists()


def test_nowhere_to_store_them():
    with pytest.raises(InputError, match=r"checkpoint: expected a run to store the weights in"):
        make_saver(True, Net(), None)


def test_a_full_disk_does_not_end_the_training(tmp_path, monkeypatch):
    def full(*args):
        raise excite.RunError("cannot write: the disk is full")

    monkeypatch.setattr(weights, "write", full)
    with pytest.warns(UserWarning, match=r"the weights of step 5 are not stored: cannot write: the disk is full"):
        trained(tmp_path / "run", True)
    assert excite.load_run(tmp_path / "run").status == "done"
