"""Training image by image, with the trajectory of the first bias."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from excite.studies.trajectory.image_trajectory import STEPS, Learner, TrainingLength, network, train, variance
from studies.trajectory.images import RATE, images


def by_hand(model: nn.Sequential, x: Tensor, y: Tensor) -> dict[str, list[Tensor]]:
    """SGD at batch size one; normalized updates from the updates themselves, biases before each of them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    bias = model[0].bias
    seen: dict[str, list[Tensor]] = {"loss": [], "ratio": [], "theirs": [], "raw": [], "bias": []}
    for image, label in zip(x, y):
        before = bias.detach().clone()
        f = torch.sigmoid(model(image[None])).reshape(())
        f.retain_grad()
        loss = F.binary_cross_entropy(f, label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        moved = (bias.detach() - before).norm()
        assert f.grad is not None
        seen["ratio"].append(moved / (RATE * f.grad.abs()))
        seen["theirs"].append(moved / RATE * f.grad.abs())
        seen["raw"].append(moved)
        seen["bias"].append(before)
        seen["loss"].append(loss.detach())
    return seen


def test_the_trainer_is_sgd_with_the_lengths_of_its_updates() -> None:
    x, y = images(STEPS + 7)
    one, two = (network(0, (4, 6, 5)).double() for _ in range(2))
    expected = by_hand(one, x, y)
    learner = Learner(two, torch.device("cpu"))
    learner.begin(RATE)
    learner.learn(x, y)
    for a, b in zip(one.parameters(), two.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    sums = [torch.stack(expected[name]).sum() for name in ("loss", "ratio", "theirs", "raw")]
    torch.testing.assert_close(learner.sums[:4], torch.stack(sums), rtol=1e-9, atol=0)
    torch.testing.assert_close(learner.largest, torch.stack(expected["ratio"]).max(), rtol=1e-9, atol=0)


def test_the_variance_is_that_of_the_biases() -> None:
    x, y = images(30)
    found = train(
        network(0, (4, 6, 5)).double(), (x, y, x, y), TrainingLength(3, RATE), seed=3, device=torch.device("cpu")
    )
    model, biases = network(0, (4, 6, 5)).double(), []
    for epoch in range(3):
        order = torch.randperm(30, generator=torch.Generator().manual_seed(3 * 100_003 + epoch))
        biases.append(torch.stack(by_hand(model, x[order], y[order])["bias"]).flatten(1))
    last = torch.cat(biases[1:])
    assert variance(found, 2) == pytest.approx(float((last - last.mean(0)).square().sum(1).mean()), rel=1e-8)
    assert float(found["distance"][-1]) == pytest.approx(float(model[0].bias.detach().norm()), rel=1e-10)


def test_a_stopped_training_continues_with_the_same_numbers(tmp_path: Path) -> None:
    x, y = images(20)
    settings = {"settings": TrainingLength(4, RATE, 0.9), "seed": 1, "device": torch.device("cpu")}
    whole = train(network(1, (4, 6, 5)), (x.float(), y.float(), x.float(), y.float()), **settings)

    def stop(share: float) -> None:
        if share == 0.5:
            raise KeyboardInterrupt

    data = (x.float(), y.float(), x.float(), y.float())
    with pytest.raises(KeyboardInterrupt):
        train(network(1, (4, 6, 5)), data, checkpoint=tmp_path / "a/kept.safetensors", on_progress=stop, **settings)
    again = train(network(1, (4, 6, 5)), data, checkpoint=tmp_path / "a/kept.safetensors", **settings)
    for name, curve in whole.items():
        assert torch.equal(curve, again[name]), name


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_graph_of_many_steps_is_the_same_training() -> None:
    x, y = images(3 * STEPS + 7)
    data = (x, y, x, y)
    settings = {"settings": TrainingLength(2, RATE, 0.9), "seed": 1}
    found = [
        train(network(1, (4, 6, 5)).double(), data, device=torch.device(place), **settings) for place in ("cpu", "cuda")
    ]
    for name, curve in found[0].items():
        torch.testing.assert_close(curve, found[1][name], rtol=1e-7, atol=1e-12)
