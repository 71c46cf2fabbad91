"""watch.log: what is recorded, what is refused, and where it arrives."""

import json
import math

import numpy as np
import pytest
import torch
from torch import nn

import excite
from excite import InputError
from excite.monitor.buffer import DeviceScalars
from excite.monitor.logged import check_logged, is_owned
from excite.probes import Loss, Probe


class Kept:
    """A sink that keeps what it gets."""

    name = "kept"

    def __init__(self):
        self.rows = []

    def log(self, step, values):
        self.rows.append((step, dict(values)))

    def close(self):
        pass


def watched(folder, **options):
    return excite.watch(nn.Linear(3, 1), run=folder, probes=[Loss()], **options)


def test_logged_values_reach_run_and_sinks_at_the_current_step(tmp_path):
    sink = Kept()
    with watched(tmp_path / "run", sinks=[sink]) as watch:
        watch.log(lr=0.1)
        for step in range(1, 4):
            watch.step(1.0)
            watch.log({"val/acc": torch.tensor(step / 10, requires_grad=True)}, lr=np.float32(0.5), done=step == 3)
    run = excite.load_run(tmp_path / "run")
    assert [one.tolist() for one in run.series("lr")] == [[0, 1, 2, 3], [0.1, 0.5, 0.5, 0.5]]
    assert run.series("val/acc")[1].tolist() == pytest.approx([0.1, 0.2, 0.3])
    assert run.series("done")[1].tolist() == [0, 0, 1]
    assert run.series("loss/step")[0].tolist() == [1, 2, 3]
    assert (0, {"lr": 0.1}) in sink.rows
    assert {name for _, values in sink.rows for name in values} == {"lr", "val/acc", "done", "loss/step"}


def test_a_diverging_run_logs_nan_and_infinity(tmp_path):
    with watched(tmp_path / "run", alerts=[]) as watch:
        watch.step(1.0)
        watch.log(a=math.nan, b=-math.inf, c=torch.tensor([float("inf")]))
    run = excite.load_run(tmp_path / "run")
    assert math.isnan(run.series("a")[1][0])
    assert (run.series("b")[1][0], run.series("c")[1][0]) == (-math.inf, math.inf)


def test_rules_apply_to_logged_values(tmp_path):
    with watched(tmp_path / "run", alerts=[excite.monitor.alerts.Above("val/loss", 3)]) as watch:
        watch.step(1.0)
        watch.log({"val/loss": 4.0})
    assert "alert/Above/val/loss" in excite.load_run(tmp_path / "run").names()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"note": "text"}, r"'note': expected a number or a tensor with one element; got 'text'"),
        ({"x": torch.zeros(3)}, r"'x': .*shape \(3,\).*log a summary"),
        ({"x": np.zeros(3)}, r"'x': .*shape \(3,\).*log a summary"),
        ({"x": [1.0]}, r"'x': .*log a summary"),
        ({"x": None}, r"'x': .*got None"),
        ({"x": 1j}, r"'x': .*got 1j"),
        ({"x": torch.tensor(1j)}, r"'x': .*complex"),
        ({"x": torch.tensor(1.0, device="meta")}, r"'x': .*meta"),
        ({"x": torch.tensor([1.0]).to_sparse()}, r"'x': .*sparse"),
        ({"x": 10**400}, r"'x': expected a number that fits into float64"),
        ({"loss": 1.0}, r"'loss' belongs to the probe 'loss': choose another name, such as 'train/loss'"),
        ({"margin/x": 1.0}, r"'margin/x' belongs to the probe 'margin'"),
        ({"alert/Above/x": 1.0}, r"belongs to the alerts"),
        ({"": 1.0}, r"expected names such as 'lr'"),
        ({"/lr": 1.0}, r"expected names such as 'lr'"),
        ({3: 1.0}, r"expected names such as 'lr'"),
        (0.5, r"expected names and values, as in watch.log\(lr=0.1\); got 0.5"),
    ],
)
def test_refused_in_one_line_and_nothing_is_recorded(tmp_path, values, said):
    with watched(tmp_path / "run") as watch:
        watch.step(1.0)
        with pytest.raises(InputError, match=said) as error:
            watch.log({"fine": 1.0, **values} if isinstance(values, dict) else values)
        assert "\n" not in str(error.value)
    assert excite.load_run(tmp_path / "run").names() == ["loss/step"]


def test_the_name_of_an_attached_probe_is_not_free():
    class Own(Probe):
        name = "own"

    assert is_owned("own/x", [Own()])
    assert not is_owned("own/x", [])
    assert not is_owned("owned", [Own()])


def test_after_the_end(tmp_path):
    with watched(tmp_path / "run") as watch:
        watch.log()
    with pytest.raises(InputError, match=r"watch.log after the watch was closed"):
        watch.log(lr=1)


def test_a_tensor_on_a_device_is_not_read(monkeypatch):
    """Whatever would read a value waits for the device; here every such call raises."""

    def refuse(*args, **kwargs):
        raise AssertionError("the value was read")

    value = torch.tensor(2.0)
    with monkeypatch.context() as patch:
        for name in ("item", "__float__", "tolist", "cpu", "__bool__"):
            patch.setattr(torch.Tensor, name, refuse)
        assert check_logged(None, {"x": value}, [])["x"] is value
    assert DeviceScalars.fetch([DeviceScalars({"x": value})]) == [{"x": 2.0}]


def test_a_logged_tensor_that_changes_later_keeps_its_value(tmp_path):
    total = torch.zeros(1)
    with watched(tmp_path / "run") as watch:
        for _ in range(3):
            total += 1
            watch.step(0.0)
            watch.log(total=total)
    assert excite.load_run(tmp_path / "run").series("total")[1].tolist() == [1, 2, 3]


def test_many_logged_values_do_not_wait_for_the_end(tmp_path):
    with watched(tmp_path / "run") as watch:
        for _ in range(200):
            watch.step(0.0)
            watch.log(x=1)
        watch._writer.drain()
        watch.run.flush()
        assert len(excite.load_run(tmp_path / "run").series("x")[0]) > 100


def test_logged_values_are_dropped_when_a_checkpoint_is_loaded(tmp_path):
    with watched(tmp_path / "run") as watch:
        state = watch.state_dict()
        watch.step(0.0)
        watch.log(x=1)
        watch.load_state_dict(json.loads(json.dumps(state)))
    assert "x" not in excite.load_run(tmp_path / "run").names()
