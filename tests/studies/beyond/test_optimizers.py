"""Networks of one form trained at once by any optimizer of torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import excite
from excite.probes import Every, Trajectory, trajectory
from excite.studies.beyond.optimizers import NetworkStack, evaluate, optimizer_of, train

SMALL = [4, 6, 5]


def unstacked(networks: NetworkStack, i: int) -> nn.Sequential:
    """Network i as a module of its own."""
    first = nn.Linear(SMALL[0], SMALL[0])
    layers: list[nn.Module] = [first]
    with torch.no_grad():
        first.weight.copy_(torch.eye(SMALL[0]))
        first.bias.copy_(networks.first[i])
        for k, (weight, bias) in enumerate(zip(networks.weights, networks.biases)):
            linear = nn.Linear(weight.shape[2], weight.shape[1])
            linear.weight.copy_(weight[i])
            linear.bias.copy_(bias[i])
            if k and networks.normalization != "none":
                kind = nn.LayerNorm if networks.normalization == "layer" else nn.BatchNorm1d
                layers.append(kind(weight.shape[2]))
            layers += [nn.ReLU(), linear]
    first.weight.requires_grad_(False)
    return nn.Sequential(*layers)


# Not batch normalization with Adam: it divides the gradient of a bias in front of one, which is rounding, by its own size.
@pytest.mark.parametrize(
    ("normalization", "optimizer"),
    [("none", "sgd"), ("none", "momentum"), ("none", "adam"), ("none", "adamw"), ("layer", "adam"), ("batch", "sgd")],
)
def test_stacked_networks_are_trained_as_if_alone(optimizer, normalization):
    torch.manual_seed(0)
    x, y = torch.randn(2, 10, 4), torch.randn(2, 10)
    networks = NetworkStack([3, 8], SMALL, normalization)
    alone = [unstacked(networks, i) for i in range(2)]
    found = train(networks, optimizer_of(optimizer, networks, 0.01), (x, y), (x, y), steps=12, batch=5, windows=4)
    generator = torch.Generator().manual_seed(0)
    orders = [torch.randperm(10, generator=generator) for _ in range(6)]
    for i, model in enumerate(alone):
        probe, means, losses = Trajectory(Every(3), bounds_every=None), [], []
        measure = probe.measure
        probe.measure = lambda now, m=measure, into=means: into.append(v := m(now)) or v
        chosen = optimizer_of(optimizer, model, 0.01)
        with excite.watch(model, example=x[i], probes=[probe], strict=True) as watch:
            for step in range(12):
                at = orders[step // 2][5 * (step % 2) :][:5]
                chosen.zero_grad()
                loss = (model(x[i, at])[:, 0] - y[i, at]).square().mean() / 2
                loss.backward()
                chosen.step()
                losses.append(float(loss.detach()))
                watch.step(loss)
        assert found.loss[i].tolist() == pytest.approx([sum(losses[k : k + 3]) / 3 for k in (0, 3, 6, 9)], rel=1e-4)
        assert found.bias[i].tolist() == pytest.approx([v["mean/0"] for v in means if v], rel=1e-3)
        exact = trajectory(model, x[i])["0"]
        assert float(found.slope[i, -1]) == pytest.approx(exact.mean, rel=1e-3)
        assert torch.allclose(networks.first[i], model[0].bias, atol=1e-5)
    slope, test = evaluate(networks, x, (x, y))
    assert torch.allclose(slope, found.slope[:, -1])
    assert torch.allclose(test, found.test[:, -1])


def test_weights_are_measured_sample_by_sample():
    torch.manual_seed(0)
    x, y = torch.randn(1, 6, 4), torch.randn(1, 6)
    networks = NetworkStack([0], SMALL, "none")
    model = unstacked(networks, 0)
    found = train(networks, optimizer_of("sgd", networks, 0.0), (x, y), (x, y), steps=1, batch=6, windows=1)
    expected = []
    for i in range(6):
        gradients = torch.autograd.grad(
            model(x[0, i : i + 1]).sum(), [m.weight for m in model[1:] if isinstance(m, nn.Linear)]
        )
        expected.append(float(torch.cat([g.flatten() for g in gradients]).norm()))
    assert float(found.weights) == pytest.approx(sum(expected) / 6, rel=1e-5)
