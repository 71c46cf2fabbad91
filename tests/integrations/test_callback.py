"""What all integrations share."""

import torch
from torch import nn

from excite.integrations.callback import first_samples, unused_folder, unwrap_optimizer


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
