"""A training step never waits for a GPU: on the CPU with checks that are deferred as on a GPU, and on a GPU itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from excitation.deferring import deferring
from excite import AdversarialTraining, InputError, PersistentExcitation, Relative
from excite._core.replay import passes

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
HIGH = torch.tensor([1.0, 1.0, 0.9]).reshape(3, 1, 1)


class Normalized(nn.Module):
    """Its first layer reads as many numbers as the input has, but others."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model((x - 0.5) / 0.25)  # type: ignore[no-any-return]


class Copying(nn.Module):
    """Its first layer reads a copy of the input."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x.clone())  # type: ignore[no-any-return]


def network(outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1), nn.ReLU(), nn.Dropout(0.2),
        nn.Flatten(), nn.Linear(48, outputs),
    )  # fmt: skip


def batch(classes: int = 2) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.rand(8, 3, 4, 4) * 0.9, torch.arange(8) % classes


LOSSES: dict[str, Any] = {
    "one output": lambda: PersistentExcitation(network(1), 0.1),
    "one logit": lambda: PersistentExcitation(network(1), 0.1, loss="cross-entropy", norm="2"),
    "codes": lambda: PersistentExcitation(network(4), Relative(0.1), classes=4, norm="1"),
    "logits": lambda: PersistentExcitation(network(4), 0.1, classes=4, loss="cross-entropy", kind="multiplicative"),
    "hierarchy": lambda: PersistentExcitation(network(3), 0.1, classes=4, hierarchy="balanced"),
    "auto": lambda: PersistentExcitation(network(4), "auto", classes=4),
    "hierarchy, auto": lambda: PersistentExcitation(network(3), "auto", classes=4, hierarchy="balanced"),
    "at the input": lambda: PersistentExcitation(network(4), 0.1, classes=4, layers="input", bounds=(0, 1)),
    "bounds": lambda: PersistentExcitation(network(4), 0.1, classes=4, bounds=(0, 1)),
    "bounds by channel": lambda: PersistentExcitation(network(4), 0.1, classes=4, bounds=(0 * HIGH, HIGH)),
    "bounds of a copy": lambda: PersistentExcitation(Copying(network(4)), 0.1, classes=4, bounds=(0 * HIGH, HIGH)),
    "bounds, normalized": lambda: PersistentExcitation(Normalized(network(4)), 0.1, classes=4, bounds=(0, 1)),
    "radius 0": lambda: PersistentExcitation(network(4), 0.0, classes=4, bounds=(0, 1)),
    "adversarial": lambda: AdversarialTraining(network(4), 0.1, classes=4, steps=3, bounds=(0, 1)),
    "adversarial, bounds by channel": lambda: AdversarialTraining(network(4), 0.1, "2", classes=4, bounds=(0 * HIGH, HIGH)),
    "adversarial, gap": lambda: AdversarialTraining(
        network(4), 0.1, classes=4, steps=2, hidden_radius="auto", held_out=batch(4), bounds=(0, 1)
    ),
    "adversarial, hidden layers": lambda: AdversarialTraining(
        network(4), 0.1, classes=4, loss="cross-entropy", hidden_radius=0.01, awp=0.005, trades=6, keep_best=True, bounds=(0, 1)
    ),
}  # fmt: skip


def classes_of(method: Any) -> int:
    return 4 if method.target.__class__.__name__ != "Binary" else 2


class Reads(TorchDispatchMode):
    """Notes operations that make the host wait for the device, such as `.item()`, `bool(tensor)` and `torch.equal`."""

    WAITING = ("_local_scalar_dense", "equal", "nonzero", "is_nonzero", "masked_select")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        # Random states are compared on the host.
        if name in self.WAITING and args[0].dtype != torch.uint8:
            self.found.append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", LOSSES)
def test_no_value_is_read_and_the_loss_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, method = LOSSES[name](), LOSSES[name]()
    x, y = batch(classes_of(method))
    for one in (first, method):  # codes and paths of classes are copied to the device once
        torch.manual_seed(2)
        one.loss(x, y)
    torch.manual_seed(3)
    expected = first.loss(x, y)
    method._known_layouts = first._known_layouts  # found once for every shape
    method._checks = deferring()
    monkeypatch.setattr(passes, "runs_ahead", lambda tensor: True)
    torch.manual_seed(3)
    reads = Reads()
    for make in (torch.tensor, torch.as_tensor):  # numbers that are copied to the device are waited for, too

        def noted(data: object, *args: Any, make: Any = make, **kwargs: Any) -> Tensor:
            if not isinstance(data, Tensor) and kwargs.get("device") is not None:
                reads.found.append(f"{make.__name__}({data!r})")
            return make(data, *args, **kwargs)

        monkeypatch.setattr(torch, make.__name__, noted)
    with reads:
        found = method.loss(x, y)
    assert reads.found == []
    assert torch.equal(found, expected)
    method.state_dict()


@pytest.mark.parametrize(
    "name", ["one output", "codes", "hierarchy", "auto", "adversarial", "adversarial, hidden layers"]
)
def test_bad_values_are_refused_by_next_call_or_checkpoint(name: str) -> None:
    method = LOSSES[name]()
    x, y = batch(classes_of(method))
    method._checks = deferring()
    method.loss(x, y)
    for bad, labels, message in [
        (x * torch.nan, y, "expected finite inputs; some values are NaN or infinite: clean the data"),
        (x, torch.full_like(y, 7), "labels: .* got 7"),
        (x, torch.full_like(y, -1), "labels: .* got -1"),
    ]:
        assert method.loss(bad, labels).shape == ()
        with pytest.raises(InputError, match=f"{message}.*in call [0-9]+ of loss, 1 calls ago"):
            method.loss(x, y)
        method.loss(bad, labels)
        with pytest.raises(InputError, match=f"{message}.*in call [0-9]+ of loss, 0 calls ago"):
            method.state_dict()
        method.state_dict()
    with pytest.raises(InputError, match="shape"):
        method.loss(x, y[:3])


def test_bounds_placed_while_predicting_serve_in_training() -> None:
    x, y = batch(4)
    gradients = []
    for predict in (False, True):
        method = PersistentExcitation(network(4).double(), 0.1, classes=4, bounds=(0 * HIGH, HIGH))
        if predict:
            with torch.inference_mode():
                method.predict(x.double())
        torch.manual_seed(2)
        method.loss(x.double(), y).backward()
        gradients.append([p.grad for p in method.model.parameters()])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@on_a_gpu
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_nothing_waits_on_a_gpu(name: str, autocast: bool) -> None:
    method = LOSSES[name]()
    method.model.cuda()
    x, y = (t.cuda() for t in batch(classes_of(method)))

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = method.loss(x, y)
        loss.backward()

    for _ in range(3):  # layouts and workspaces
        step()
    with no_waiting():
        for _ in range(3):
            step()
        with pytest.raises(RuntimeError, match="synchronizing"):  # what waits is seen
            y.sum().item()
    method.state_dict()


@on_a_gpu
@pytest.mark.parametrize("name", ["one output", "codes", "hierarchy", "auto", "adversarial"])
def test_a_gpu_survives_bad_values_and_they_are_named(name: str) -> None:
    method = LOSSES[name]()
    method.model.cuda()
    x, y = (t.cuda() for t in batch(classes_of(method)))
    for bad, labels, message in [(x / 0, y, "expected finite inputs"), (x, y + 10**6, "labels: .* got 1000000")]:
        method.loss(bad, labels).backward()
        torch.cuda.synchronize()
        with pytest.raises(InputError, match=f"{message}.*1 calls ago"):
            method.loss(x, y)
        method.loss(bad, labels).backward()
        with pytest.raises(InputError, match=message):
            method.state_dict()
    method.loss(x, y).backward()
    method.state_dict()
