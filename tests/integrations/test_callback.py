"""What all integrations share."""

import json
from enum import Enum

import torch
from torch import nn

import excite
from excite.integrations.callback import DeferredWatch, first_samples, plain_values, unused_folder, unwrap_optimizer


class Wrapper:
    def __init__(self, optimizer):
        self.optimizer = optimizer


def test_the_torch_optimizer_is_found_inside_wrappers():
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    assert unwrap_optimizer(Wrapper(Wrapper(optimizer))) is optimizer
    assert unwrap_optimizer([optimizer]) is None
    assert unwrap_optimizer(None) is None


def test_first_samples_are_detached_copies():
    x = torch.arange(600.0, requires_grad=True)
    samples = first_samples({"x": x, "scale": torch.tensor(2.0), "name": "a"})
    assert torch.equal(samples["x"], x[:256])
    assert not samples["x"].requires_grad
    assert samples["x"].data_ptr() != x.data_ptr()
    assert samples["name"] == "a"


def test_the_first_folder_that_does_not_exist(tmp_path):
    assert unused_folder(tmp_path / "excite") == tmp_path / "excite"
    for name in ("excite", "excite-2"):
        (tmp_path / name).mkdir()
    assert unused_folder(tmp_path / "excite") == tmp_path / "excite-3"


class Sink:
    name = "sink"

    def __init__(self):
        self.names = set()

    def log(self, step, values):
        self.names |= set(values)

    def close(self):
        pass


def test_probe_names_get_a_prefix_and_text_is_left_out(tmp_path):
    deferred = DeferredWatch(tmp_path / "run", {"probes": [excite.probes.Loss()]})
    deferred.log({"lr": 1.0}, "own")  # before there is a watch
    sink = Sink()
    deferred.start(nn.Linear(2, 1), None, None, tmp_path, [sink])
    deferred.step()
    deferred.log({"lr": 0.1, "loss": 2.0, "loss/a": 3.0, "note": "text", "": 1.0, "several": torch.ones(2)}, "own")
    deferred.end()
    assert excite.load_run(tmp_path / "run").names() == ["lr", "own/loss", "own/loss/a"]
    assert sink.names == set()  # the framework's loggers have them already


def test_only_plain_values_become_settings():
    class Colour(Enum):
        RED = "red"

    given = {
        "lr": 0.1,
        "net": nn.Linear(2, 1),
        "sizes": (1, 2),
        "mixed": [1, print],
        "deep": {"a": None, "b": object()},
        3: Colour.RED,
    }
    expected = {"lr": 0.1, "sizes": [1, 2], "deep": {"a": None}, "3": "red"}
    assert plain_values(given) == expected
    circle = {}
    circle["again"] = circle
    assert json.dumps(plain_values(circle))
