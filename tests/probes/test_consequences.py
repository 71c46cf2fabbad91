"""What hyperparameters decide: measured values against slow versions, predictions where they are known to hold."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import excite
from excite.errors import ExciteError
from excite.probes import Consequences, Every, Loss
from excite.probes.consequences import expected_rotation, rank_bound, turned


class Normalized(nn.Module):
    """Two layers behind which normalizations stand."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(16, 32, bias=False), nn.Linear(32, 8, bias=False)

    def forward(self, x):
        return 3 * F.layer_norm(self.two(F.layer_norm(self.one(x), (32,)).relu()), (8,))


def train(model, optimizer, run, steps, probe, teacher=None):
    torch.manual_seed(0)
    teacher = torch.randn(16, 8)
    with excite.watch(model, torch.randn(4, 16), run, optimizer, probes=[Loss(), probe]) as watch:
        for _ in range(steps):
            x = torch.randn(8, 16)
            before = {path: p.detach().double().clone() for path, p in model.named_parameters()}
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), (x @ teacher + torch.randn(8, 8)).argmax(1))
            loss.backward()
            optimizer.step()
            watch.step(loss)
    return before


def test_values_are_those_of_a_slow_version(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 8))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.05)
    before = train(model, optimizer, tmp_path / "run", 3, Consequences(Every(1), batch=8))
    values = excite.load_run(tmp_path / "run").frame().groupby("name").value.last()
    squared = []
    for layer in ("0", "2"):
        old, new = (
            before[f"{layer}.weight"].flatten(),
            dict(model.named_parameters())[f"{layer}.weight"].double().flatten(),
        )
        angle = 2 * math.asin(float((old / old.norm() - new.detach() / new.detach().norm()).norm()) / 2)
        squared.append(angle**2)
        assert values[f"consequences/rotation/{layer}"] == pytest.approx(angle, rel=1e-4)
        sizes = torch.linalg.svdvals(dict(model.named_parameters())[f"{layer}.weight"].double())
        assert values[f"consequences/rank/{layer}"] == int((sizes > 0.1 * sizes[0]).sum())
        assert values[f"consequences/expected/{layer}"] == pytest.approx(0.1)
        assert values[f"consequences/rank_bound/{layer}"] == pytest.approx(8 * math.log(20) / 0.005)
    assert values["consequences/angle/measured"] == pytest.approx(math.sqrt(sum(squared) / 2), rel=1e-4)
    first, second = (
        model[i].weight.double().square().sum() + (model[0].bias.double().square().sum() if i == 0 else 0)
        for i in (0, 2)
    )
    assert values["consequences/imbalance/0"] == pytest.approx(
        float(((second - first) / (second + first)).detach()), rel=1e-5
    )


def test_small_angles_are_exact():
    torch.manual_seed(0)
    w, u = (one / one.norm() for one in torch.randn(2, 40, 30, dtype=torch.float64))
    u = u - (u * w).sum() * w
    for angle in (1e-6, 1e-3, 0.5):
        after = 1.001 * (math.cos(angle) * w + math.sin(angle) * u / u.norm())
        assert float(turned([w], [after])) == pytest.approx(angle, rel=1e-6)


def test_expected_rotation():
    adam = {"lr": 1e-2, "weight_decay": 0.5, "betas": (0.9, 0.99)}
    assert expected_rotation(adam | {"decoupled_weight_decay": True}) == pytest.approx(math.sqrt(2 * 5e-3 * 0.1 / 1.9))
    assert expected_rotation(adam) is None
    sgd = {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.9, "dampening": 0}
    assert expected_rotation(sgd) == pytest.approx(math.sqrt(0.02 / 1.9))
    assert expected_rotation(sgd | {"weight_decay": 0}) is None
    assert rank_bound(4, 0.1, 0.05, 0.2) == pytest.approx(4 * math.log(10) / 0.005)


@pytest.mark.slow
def test_rotation_settles_where_it_is_expected(tmp_path):
    torch.manual_seed(0)
    model = Normalized()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, betas=(0.9, 0.99), weight_decay=1.0)
    train(model, optimizer, tmp_path / "run", 800, Consequences(Every(10)))
    run = excite.load_run(tmp_path / "run")
    measured, expected = (run.series(f"consequences/{key}/one")[1] for key in ("rotation", "expected"))
    assert measured[-20:].mean() == pytest.approx(expected[-1], rel=0.15)


def test_without_decay_nothing_is_expected(tmp_path):
    model = Normalized()
    train(model, torch.optim.Adam(model.parameters()), tmp_path / "run", 2, Consequences(Every(1)))
    names = excite.load_run(tmp_path / "run").names()
    assert "consequences/angle/measured" in names
    assert not any("expected" in name or "bound" in name for name in names)
    norm = nn.LayerNorm(3)
    with pytest.raises(ExciteError, match="no weight matrix"):
        excite.watch(norm, optimizer=torch.optim.SGD(norm.parameters(), 0.1), probes=[Consequences()], strict=True)


@pytest.mark.parametrize("options", [{"epsilon": 2.0}, {"epsilon": 0.0}, {"batch": 0}, {"max_width": 0}])
def test_bad_arguments_are_refused(options):
    with pytest.raises(ExciteError, match="Consequences"):
        Consequences(**options)


def test_wide_matrices_have_no_rank(tmp_path):
    model = Normalized()
    train(model, torch.optim.SGD(model.parameters(), 0.1), tmp_path / "run", 1, Consequences(Every(1), max_width=10))
    names = excite.load_run(tmp_path / "run").names()
    assert "consequences/rank/two" in names
    assert "consequences/rank/one" not in names


def test_diverged_weights_have_no_rank(tmp_path):
    model = nn.Sequential(nn.Linear(16, 12), nn.ReLU())
    with excite.watch(
        model, torch.randn(4, 16), tmp_path / "run", probes=[Consequences(Every(1))], strict=True
    ) as watch:
        watch.step(1.0)
        with torch.no_grad():
            model[0].weight[0, 0] = math.inf
        watch.step(math.nan)
    frame = excite.load_run(tmp_path / "run").frame()
    ranks = frame[frame.name.str.startswith("consequences/rank/")]
    assert set(ranks.name) == {"consequences/rank/0"}
    assert [math.isnan(value) for value in ranks.value] == [False, False, True]  # steps 0, 1, 2


def test_an_empty_layer_is_refused(tmp_path):
    with pytest.raises(ExciteError, match="no weight matrix that is trained"):
        excite.watch(
            nn.Linear(5, 0), torch.randn(4, 5), tmp_path / "run", probes=[Consequences(Every(1))], strict=True
        ).step(1.0)
