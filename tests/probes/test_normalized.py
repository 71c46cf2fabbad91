"""Five normalizations, with training and evaluation modes, at the first and the thousandth step; residual sums; time first."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import excite
from excite.probes import Consistency, Every, Rank, Trajectory, effective_rank, richness
from excite.probes.base import StepContext
from excite.report.audit import audit
from probes.networks import Zero

KINDS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "BatchNorm1d": (lambda: nn.BatchNorm1d(6), False),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(6), True),
    "LayerNorm": (lambda: nn.LayerNorm(6), False),
    "GroupNorm": (lambda: nn.GroupNorm(2, 6), True),
    "InstanceNorm": (lambda: nn.InstanceNorm2d(6, affine=True, track_running_stats=True), True),
}


def made(kind: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(3)
    make, images = KINDS[kind]
    first: nn.Module = nn.Conv2d(2, 6, 3) if images else nn.Linear(5, 6)
    last = nn.Conv2d(6, 1, 3) if images else nn.Linear(6, 1)
    model = nn.Sequential(first, make(), nn.ReLU(), nn.Dropout(0.3), last, nn.Flatten()).double()
    nn.init.normal_(model[1].bias)  # signs before and after the normalization differ
    with torch.no_grad():
        first.weight.mul_(torch.linspace(0.1, 3, 6).double().view(-1, *[1] * (first.weight.dim() - 1)))
    x = torch.randn(12, *((2, 5, 5) if images else (5,)), dtype=torch.float64) * 2 + 1
    return model, x, x.flatten(1).sum(1).sin()


def recalibrated(model: nn.Module, x: Tensor) -> nn.Module:
    """A copy in evaluation mode whose running statistics are mean and variance of what the normalization gets."""
    copied = copy.deepcopy(model).eval()
    norm = copied[1]
    if isinstance(norm, nn.modules.batchnorm._BatchNorm):
        with torch.no_grad():
            z = copied[0](x)
        axes = [axis for axis in range(z.dim()) if axis != 1]
        norm.running_mean, norm.running_var = z.mean(axes), z.var(axes, correction=0)
    elif isinstance(norm, nn.InstanceNorm2d):
        norm.train()  # each sample has its own statistics
    return copied


def by_hooks(model: nn.Module, x: Tensor) -> tuple[float, float, Tensor]:
    """Effective rank of what the last layer sees, the share of inputs of the ReLU that are positive, and by unit."""
    kept: dict[str, Tensor] = {}
    handles = [
        model[2].register_forward_pre_hook(lambda _, args: kept.update(relu=args[0].clone())),
        model[4].register_forward_pre_hook(lambda _, args: kept.update(last=args[0].clone())),
    ]
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    seen = kept["last"]
    rows = F.unfold(seen, 3).transpose(1, 2).flatten(0, 1) if seen.dim() == 4 else seen
    positive = (kept["relu"] > 0).transpose(0, 1).flatten(1)
    return effective_rank(rows), float(positive.double().mean()), positive.sum(1)


def compare(model: nn.Module, x: Tensor, reference: nn.Module) -> None:
    rank, positive, by_unit = by_hooks(reference, x)
    now = StepContext(model, 0, example=x)
    values = Rank(max_rows=10**6).measure(now)
    assert values["effective/4"] == pytest.approx(rank, rel=1e-9)
    active = now.signals[0].active
    assert float(active.double().mean()) == positive
    assert torch.equal(active.sum(0), by_unit)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_at_the_first_step_and_at_the_thousandth(kind: str, mode: str) -> None:
    model, x, y = made(kind)
    model.train(mode == "train")
    reference = (lambda: recalibrated(model, x)) if mode == "train" else (lambda: copy.deepcopy(model).eval())
    compare(model, x, reference())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(1000):
        optimizer.zero_grad()
        (model(x)[:, 0] - y).square().mean().backward()
        optimizer.step()
    compare(model, x, reference())


@pytest.mark.parametrize("kind", KINDS)
def test_units_of_a_model_are_judged_before_their_activation(kind: str) -> None:
    """On data, in evaluation mode: the rows that activate a unit are those whose ReLU gets something positive."""
    model, x, _ = made(kind)
    model(x)  # running statistics that are neither those of the data nor of the start
    _, _, by_unit = by_hooks(copy.deepcopy(model).eval(), x)
    assert richness(model, x, units=True, patches=None)["0"].units.points.tolist() == by_unit.tolist()


def test_with_half_of_the_points_active_the_units_are_excited() -> None:
    """Linear-BatchNorm-ReLU: the affine outputs are all negative, the inputs of the ReLU are not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1)).double()
    nn.init.constant_(model[0].bias, -100.0)
    nn.init.constant_(model[3].bias, 1.0)
    x = torch.randn(40, 3, dtype=torch.float64)
    with torch.no_grad():
        for _ in range(200):
            model(x)
    model.eval()
    found = audit(model, (x, torch.randint(2, (40,))), with_margins=False).layers["0"].units
    assert str(found) == "4 of 4 units excited"
    with torch.no_grad():
        assert found.points.tolist() == (model[:2](x) > 0).sum(0).tolist()


def test_a_collapse_is_not_hidden_by_untrained_statistics() -> None:
    """The scale of the first layer makes one direction lead unless the normalization takes it out."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 1)).double()
    with torch.no_grad():
        model[0].weight[0] *= 1000
    x = torch.randn(100, 30, dtype=torch.float64)
    in_evaluation = float(richness(model, x)["3"].covariance.effective_rank)
    measured = Rank().measure(StepContext(model, 0, example=x))
    assert in_evaluation < 1.1
    assert measured["effective/3"] > 15
    assert measured["statistics/example"] == 1


def test_which_statistics_were_used_is_written_down(tmp_path) -> None:
    model, x, _ = made("BatchNorm1d")
    with excite.watch(model, example=x, run=tmp_path / "run", probes=[Rank(Every(1))], strict=True) as watch:
        watch.step()
        model[1].eval()
        watch.step()
    frame = excite.load_run(tmp_path / "run").frame()
    written = {(row.step, row.name): row.value for row in frame.itertuples() if "statistics" in row.name}
    assert written == {
        (0, "rank/statistics/example"): 1, (1, "rank/statistics/example"): 1, (2, "rank/statistics/running"): 1
    }  # fmt: skip


def test_an_example_of_one_sample_says_what_it_cannot_give() -> None:
    model, x, _ = made("BatchNorm1d")
    probe = Rank()
    with pytest.warns(UserWarning, match="1 gets one value per channel"):
        values = probe.measure(StepContext(model, 0, example=x[:1]))
    assert values["statistics/few"] == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        probe.measure(StepContext(model, 1, example=x[:1]))  # once is enough


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_the_same_to_the_bit(kind: str) -> None:
    def trained(watched: bool) -> list[Tensor]:
        model, x, y = made(kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        probes = [Rank(Every(1), units=True), Trajectory(Every(1), clean=Every(1))]
        if model(x).shape[1] == 1:
            probes.append(Consistency(Every(1)))
        with excite.watch(model, example=x[:5], probes=probes if watched else [], strict=True) as watch:
            for _ in range(3):
                optimizer.zero_grad()
                (model(x)[:, 0] - y).square().mean().backward()
                optimizer.step()
                watch.step()
        return [t.clone() for t in model.state_dict().values()]

    for one, other in zip(trained(False), trained(True), strict=True):
        assert torch.equal(one, other)


# -- Assumption 1 ----------------------------------------------------------------------------------------------------------
def test_a_residual_sum_switches_units_off() -> None:
    """Every affine output keeps its sign while the sum that enters the ReLU changes it."""

    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.skip, self.last = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 1)
            for layer, bias in ((self.first, 10.0), (self.skip, -9.0)):
                nn.init.constant_(layer.bias, bias)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(F.relu(self.first(x) + self.skip(x)))

    torch.manual_seed(0)
    model, x = Summed().double(), torch.rand(16, 3, dtype=torch.float64) / 10
    probe = Consistency()
    probe.measure(StepContext(model, 0, example=x))
    assert probe.since().holds
    with torch.no_grad():
        model.skip.bias.fill_(-11.0)
    values = probe.measure(StepContext(model, 1, example=x))
    assert (float(values["points"]), float(values["units"])) == (1, 1)
    assert probe.since().changed == 1


def test_nothing_switches_behind_a_batch_normalization() -> None:
    """Biases before it change the signs of affine outputs and of nothing else."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1)).double()
    x = torch.randn(16, 3, dtype=torch.float64)
    probe = Consistency()
    probe.measure(StepContext(model, 0, example=x))
    with torch.no_grad():
        model[0].bias.add_(0.7)
    values = probe.measure(StepContext(model, 1, example=x))
    assert float(values["points"]) == 0
    assert float(values["gamma"]) == pytest.approx(0, abs=1e-9)
    assert probe.since().holds


@pytest.mark.parametrize("layout", ["batch first", "time first", "time outermost", "batch outermost"])
def test_patterns_by_sample_wherever_the_batch_stands(layout: str) -> None:
    torch.manual_seed(0)
    model, x = Zero(layout).double(), torch.randn(4, 4, 3, dtype=torch.float64)
    from excite.probes.bias_trajectory.consistency import patterns_and_slopes

    signs, _ = patterns_and_slopes(model, x)
    with torch.no_grad():
        expected = (model.hidden(x) > 0).flatten(1)
    gates = (x[:, 0, :1] > 0) if signs.shape[1] > expected.shape[1] else expected[:, :0]
    found = torch.sort(signs.int(), 1).values
    assert torch.equal(found, torch.sort(torch.cat([gates, expected], 1).int(), 1).values)


def test_a_clean_pass_at_the_first_step_uses_batch_statistics() -> None:
    model, x, y = made("BatchNorm1d")
    model.pop(3)  # no dropout: the reference has its own
    probe = Trajectory(Every(1), clean=Every(1))
    with excite.watch(model, example=x, probes=[probe], strict=True) as watch:
        (model(x)[:, 0] - y).square().mean().backward()
        watch.steps += 1
        values = probe.measure(watch._context(None))
    reference = recalibrated(model, x)
    found = []
    for point in x:
        z = reference[0](point[None]).detach().requires_grad_()
        (gradient,) = torch.autograd.grad(reference[1:](z).sum(), z)
        found.append(float(gradient.norm()))
    assert float(values["clean/0"]) == pytest.approx(np.mean(found), rel=1e-10)
