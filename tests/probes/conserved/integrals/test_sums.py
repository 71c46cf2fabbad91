"""Sums over classes in the ledger."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import excite
from excite.probes import Conservation, Every, Loss, conservation


def classifier(dtype=torch.float64):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).to(dtype)
    return model, torch.randn(8, 4, dtype=dtype), torch.arange(8) % 3


def train(model, optimizer, x, y, steps, loss=F.cross_entropy):
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize(
    "options",
    [
        {}, {"momentum": 0.9}, {"weight_decay": 0.05}, {"momentum": 0.9, "dampening": 0.4, "weight_decay": 0.05},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.05},
    ],
)  # fmt: skip
def test_rest_after_100_steps(options):
    model, x, y = classifier()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, **options)
    with conservation(model, optimizer, x) as ledger:
        train(model, optimizer, x, y, 100)
        report = ledger.read()
    (entry,) = report.translations
    assert (entry.name, entry.state, entry.value.shape) == ("2/translation", "holds", (7,))
    assert entry.relative < 1e-12
    assert (entry.moved > 1e-3) == ("weight_decay" in options)
    assert report.holds
    assert "2/translation: sums over the classes moved by" in str(report)


def test_other_losses_and_optimizers_are_not_checked():
    model, x, y = classifier()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with conservation(model, optimizer, x) as ledger:
        train(model, optimizer, x, y, 3, lambda output, labels: F.mse_loss(output, F.one_hot(labels, 3).double()))
        report = ledger.read()
    assert (report.translations[0].state, report.holds) == ("not checked", True)
    assert "not softmax cross-entropy" in str(report)
    adam = torch.optim.Adam(model.parameters())
    with conservation(model, adam, x) as ledger:
        train(model, adam, x, y, 3)
        assert ledger.read().translations[0].state == "not checked"


def test_weights_changed_outside_are_flagged():
    model, x, y = classifier()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with conservation(model, optimizer, x) as ledger:
        train(model, optimizer, x, y, 3)
        with torch.no_grad():
            model[2].bias[0] += 0.1
        report = ledger.read()
    assert report.translations[0].state == "flagged"
    assert not report.holds


def test_a_checkpoint_goes_on():
    model, x, y = classifier()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.05)
    with conservation(model, optimizer, x) as ledger:
        train(model, optimizer, x, y, 20)
        state = ledger.state_dict()
    with conservation(model, optimizer, x) as resumed:
        resumed.load_state_dict(state)
        train(model, optimizer, x, y, 20)
        (entry,) = resumed.read().translations
    assert entry.relative < 1e-12
    assert torch.equal(entry.start[:6], state["translations"]["2/translation"]["2.weight"]["start"])


def test_layers_outside_the_optimizer_have_none():
    model, x, y = classifier()
    optimizer = torch.optim.SGD(model[0].parameters(), 0.1)
    with conservation(model, optimizer, x) as ledger:
        train(model, optimizer, x, y, 1)
        assert ledger.read().translations == ()


def test_a_run_has_their_rest(tmp_path):
    model, x, y = classifier(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.05)
    with excite.watch(model, x, tmp_path / "run", optimizer, probes=[Loss(), Conservation(Every(5))]) as watch:
        for _ in range(20):
            train(model, optimizer, x, y, 1)
            watch.step(0.0)
    run = excite.load_run(tmp_path / "run")
    assert 0 < run.series("conservation/rest/2/translation")[1][-1] < 1e-5
    assert run.series("conservation/drift/2/translation")[1][-1] > 1e-4
