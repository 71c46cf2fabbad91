"""An ensemble ends with the weights of separate training, and its trajectory is that of autograd, step by step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from excite.errors import InputError
from excite.train import Ensemble, ensemble, fit
from excite.train.batches import Shuffle
from train.vectorized.ensemble_networks import F32, X, Y, close, mlp

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


def alone(
    model: nn.Sequential,
    x: Tensor,
    y: Tensor,
    *,
    epochs: int,
    batch: int,
    seed: int,
    loss: str,
    lr: float,
    **sgd: float,
) -> dict[str, Any]:
    """One network as anyone would train it: nn.Module, autograd, torch.optim.SGD; with what the paper measures."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, **sgd)
    linear = [m for m in model if isinstance(m, nn.Linear)]
    shuffle = Shuffle(len(x), batch, seed)
    seen: dict[str, Any] = {"ratios": [[] for _ in linear], "losses": [], "biases": [[] for _ in linear]}
    kept: list[Tensor] = []

    def keep(module: nn.Module, given: Any, z: Tensor) -> None:
        z.retain_grad()
        kept.append(z)

    hooks = [m.register_forward_hook(keep) for m in linear]
    for _ in range(epochs):
        for at in shuffle.epoch(torch.device("cpu")):
            kept.clear()
            f = model(x[at])
            f.retain_grad()
            if loss == "half-squared":
                each = (f[:, 0] - y[at]).square() / 2
            elif isinstance(model[-1], nn.Sigmoid):
                each = functional.binary_cross_entropy(f[:, 0], y[at], reduction="none")
            else:
                each = functional.binary_cross_entropy_with_logits(f[:, 0], y[at], reduction="none")
            optimizer.zero_grad()
            each.mean().backward()
            for layer, z in enumerate(kept):
                seen["ratios"][layer].append(z.grad.norm(dim=1) / f.grad[:, 0].abs())
                if linear[layer].bias is not None:
                    seen["biases"][layer].append(linear[layer].bias.detach().clone())
            seen["losses"].append(each.detach())
            optimizer.step()
    for hook in hooks:
        hook.remove()
    for layer, m in enumerate(linear):
        if m.bias is not None:
            seen["biases"][layer].append(m.bias.detach().clone())
            seen["biases"][layer] = torch.stack(seen["biases"][layer])
    return seen


def same_weights(models: Any, others: Any, to: float = 1e-10) -> None:
    for a, b in zip(models, others):
        for p, q in zip(a.parameters(), b.parameters(), strict=True):
            torch.testing.assert_close(p.cpu(), q, rtol=0, atol=to)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "frequency": ({"sizes": (10, 10, 32, 32, 32, 1), "fixed": "identity"}, {"epochs": 20, "points": 50}),
    "three layers, batches": ({"sizes": (4, 8, 6, 1)}, {"epochs": 200, "batch": 5, "points": 23}),
    "leaky": ({"sizes": (3, 9, 5, 1), "act": nn.LeakyReLU(0.2)}, {"epochs": 50, "points": 20}),
    "tanh, momentum": ({"sizes": (3, 7, 1), "act": nn.Tanh()}, {"momentum": 0.9, "batch": 4, "epochs": 200, "points": 17}),
    "decay": ({"sizes": (3, 7, 5, 1)}, {"weight_decay": 0.01, "epochs": 50, "points": 20}),
    "momentum, decay, probabilities": (
        {"sizes": (5, 6, 6, 1), "sigmoid": True, "fixed": "random"},
        {"momentum": 0.8, "weight_decay": 0.02, "loss": "bce", "epochs": 50, "points": 20},
    ),
    "logits": ({"sizes": (5, 6, 1)}, {"loss": "bce", "batch": 3, "epochs": 150, "points": 20}),
    "no bias": ({"sizes": (4, 6, 5, 1), "bias": False}, {"epochs": 50, "points": 20}),
    "linear": ({"sizes": (4, 1)}, {"epochs": 50, "points": 20}),
    "full batch": ({"sizes": (4, 6, 1), "act": nn.ELU(0.7)}, {"batch": 30, "epochs": 1000, "points": 30}),
    "softplus": ({"sizes": (4, 6, 1), "act": nn.Softplus(2.0)}, {"epochs": 50, "points": 20}),
    "silu": ({"sizes": (4, 6, 4, 1), "act": nn.SiLU()}, {"epochs": 50, "points": 20}),
    "gelu": ({"sizes": (4, 6, 4, 1), "act": nn.GELU("tanh")}, {"epochs": 50, "points": 20}),
    "sigmoid": ({"sizes": (4, 6, 4, 1), "act": nn.Sigmoid()}, {"epochs": 50, "points": 20}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_as_one_by_one(name: str, device: str) -> None:
    compare(name, device, 1 if name == "frequency" else 10)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_thousand_steps_as_one_by_one(name: str) -> None:
    compare(name, "cpu", 1)


def compare(name: str, device: str, share: int) -> None:
    """All of an ensemble of two against separate training, over a thousand steps divided by `share`."""
    made, how = CASES[name]
    count, how = 2, {"batch": 1, "loss": "half-squared", "momentum": 0.0, "weight_decay": 0.0, **how}
    points, epochs, batch, loss = how.pop("points"), how.pop("epochs") // share, how.pop("batch"), how.pop("loss")
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, points, made["sizes"][0], generator=generator, dtype=torch.float64)
    y = torch.rand(count, points, generator=generator, dtype=torch.float64)
    y = y.round() if loss == "bce" else 2 * y - 1
    lr, seeds = [0.02, 0.01], [5, 2]
    models = [mlp(**made, seed=i) for i in range(count)]
    expected = [copy.deepcopy(m) for m in models]
    found = ensemble(
        [m.to(device) for m in models], x, y, epochs=epochs, batch=batch, loss=loss, lr=lr, seeds=seeds, layers="all",
        test=(x[:, :7], y[:, :7]), **how,
    )  # fmt: skip
    assert found.steps == epochs * -(-points // batch) >= 1000 // share
    assert not found.diverged
    per = found.window
    for i, model in enumerate(expected):
        seen = alone(model, x[i], y[i], epochs=epochs, batch=batch, seed=seeds[i], loss=loss, lr=lr[i], **how)
        for layer, t in enumerate(found.trajectories):
            ratios = seen["ratios"][layer]
            windows = [ratios[k : k + per] for k in range(0, len(ratios), per)]
            close(t.length[i], [float(torch.cat(w).sum()) for w in windows], 1e-7)
            close(t.mean[i], [float(torch.cat(w).mean()) for w in windows], 1e-7)
            close(t.max[i], [float(torch.cat(w).max()) for w in windows], 1e-7)
            assert t.zero.sum() == t.nonfinite.sum() == 0
            if not made.get("bias", True):
                assert (t.bias == 0).all()
                continue
            b = seen["biases"][layer]
            close(t.bias[i], b[::per])
            moves = (b[1:] - b[:-1]).norm(dim=1)
            close(t.raw[i], [float(moves[k : k + per].sum()) for k in range(0, len(moves), per)], 1e-8)
            close(t.distance[i], (b[per::per] - b[0]).norm(dim=1))
            late = b[:-1][-3 * per :]
            close(t.variance(3)[i], float((late - late.mean(0)).square().sum(1).mean()))
            close(t.total[i][-1], float(t.length[i].sum()))
        close(found.loss[i], [float(torch.cat(seen["losses"][k : k + per]).mean()) for k in range(0, len(ratios), per)])
        f = model(x[i, :7]).detach()[:, 0]
        if loss == "half-squared":
            close(found.test_loss[i, -1], float((f - y[i, :7]).square().mean() / 2))  # type: ignore[index]
        else:
            of = functional.binary_cross_entropy if made.get("sigmoid") else functional.binary_cross_entropy_with_logits
            close(found.test_loss[i, -1], float(of(f, y[i, :7])))  # type: ignore[index]
    same_weights(models, expected)


def test_the_normalized_update_is_the_paper_s_at_batch_one() -> None:
    """‖b(t+1) − b(t)‖ / (lr · |f − y|) of Theorem 1, from weights alone; and λ itself, as the first layer is an identity."""
    models = [mlp((4, 4, 8, 1), fixed="identity", seed=i) for i in range(3)]
    before = [copy.deepcopy(m) for m in models]
    x, y = torch.randn(3, 6, 4, dtype=torch.float64), torch.randn(3, 6, dtype=torch.float64)
    found = ensemble(models, x, y, epochs=3, lr=[0.1, 0.01, 0.02], window=1)
    t = found.trajectory
    for i, (model, lr) in enumerate(zip(before, (0.1, 0.01, 0.02))):
        shuffle = Shuffle(6, 1, i)
        order = torch.cat([shuffle.order() for _ in range(3)])
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
        for step, at in enumerate(order):
            point = x[i, at].clone().requires_grad_()
            f = model(point)
            (slope,) = torch.autograd.grad(f, point, retain_graph=True)
            optimizer.zero_grad()
            ((f - y[i, at]) ** 2 / 2).sum().backward()
            optimizer.step()
            move = (t.bias[i, step + 1] - t.bias[i, step]).norm() / (lr * float((f - y[i, at]).detach().abs()))
            close(t.length[i, step], float(move), 1e-9)
            close(t.length[i, step], float(slope.norm()), 1e-9)


def test_one_set_of_data_and_the_order_of_fit() -> None:
    """The same weights as `fit` with the same seed."""
    from excite.data import load

    data = load("frequencies", train=20, test=5)
    models = [mlp((10, 6, 1), seed=i, dtype=torch.float32) for i in range(2)]
    others = [copy.deepcopy(m) for m in models]
    ensemble(models, data.x_train, data.y_train, epochs=3, batch=3, lr=0.01, seeds=[4, 4])
    for other in others:
        optimizer = torch.optim.SGD(other.parameters(), lr=0.01)
        fit(other, data, lambda x, y, m=other: ((m(x)[:, 0] - y) ** 2).mean() / 2, optimizer, epochs=3, batch=3, seed=4)
    same_weights(models, others, 1e-6)


def test_windows_do_not_change_anything() -> None:
    x, y = torch.randn(13, 3, dtype=torch.float64), torch.randn(13, dtype=torch.float64)

    def trained(**how: Any) -> Ensemble:
        return ensemble([mlp((3, 4, 4, 1), seed=i) for i in range(2)], x, y, epochs=4, batch=2, **how)

    whole, cut = trained(), trained(window=5)  # 7 steps an epoch, the last one of a single point
    assert whole.trajectory.counts.tolist() == [7] * 4
    assert cut.trajectory.counts.tolist() == [5, 5, 5, 5, 5, 3]
    same_weights(whole.models, cut.models, 1e-14)
    close(cut.trajectory.length.sum(1), whole.trajectory.length.sum(1))
    close(cut.trajectory.raw.sum(1), whole.trajectory.raw.sum(1))
    close(cut.trajectory.variance(6), whole.trajectory.variance(4))
    close(cut.trajectory.max.amax(1), whole.trajectory.max.amax(1))
    assert "2 networks, 28 steps each" in str(whole)


def test_points_without_a_gradient_are_left_out_and_counted() -> None:
    model = mlp((2, 3, 1))
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    y = torch.stack([model(x[:1])[0, 0].detach(), torch.tensor(5.0)])  # the first point is fitted exactly
    found = ensemble([model], x, y, epochs=1, batch=2)
    assert found.trajectory.zero.tolist() == [[1]]
    assert found.trajectory.length.item() == found.trajectory.max.item() > 0
    still = ensemble([mlp((2, 3, 1))], x[:1], y[:1], epochs=1)
    assert still.trajectory.length.item() == 0
    assert still.trajectory.mean.isnan().all()


def test_a_network_that_diverges_leaves_the_others() -> None:
    x, y = torch.randn(10, 3, dtype=torch.float64), torch.randn(10, dtype=torch.float64)
    models = [mlp((3, 8, 1), seed=i) for i in range(3)]
    single = copy.deepcopy(models[2])
    found = ensemble(models, x, y, epochs=30, lr=[0.01, 50.0, 0.01], weight_decay=0.1)
    assert found.diverged == [1]
    assert "not finite: 1" in str(found)
    assert found.trajectory.nonfinite[:, -1].tolist() == [0, 10, 0]
    ensemble([single], x, y, epochs=30, lr=0.01, weight_decay=0.1, seeds=[2])
    same_weights([models[2]], [single], 1e-14)


def test_random_state_and_modes_are_left_alone() -> None:
    model = mlp((3, 4, 1)).eval()
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    ensemble([model], x, y, epochs=2)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), before)
    assert not model.training
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_variance_of_too_many_windows() -> None:
    found = ensemble([mlp((3, 4, 1), **F32)], X, Y, epochs=2)
    with pytest.raises(InputError, match="at most 2; got 3"):
        found.trajectory.variance(3)
