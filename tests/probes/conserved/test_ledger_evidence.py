"""A ledger that can fail: a penalty in the loss is flagged wherever a law is checked, and where it is not the ledger says so."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, NAdam, RMSprop
from torch.utils.checkpoint import checkpoint

import excite
from excite.probes import Conservation, Every, LedgerEntry, conservation
from excite.wiring import Wiring, trace
from probes.conserved.normalized import normed, simple

Make = Callable[[Any], torch.optim.Optimizer]
CHECKED: dict[str, Make] = {
    "sgd": lambda p: SGD(p, 0.02),
    "decay": lambda p: SGD(p, 0.02, weight_decay=0.1),
    "momentum": lambda p: SGD(p, 0.02, momentum=0.9, dampening=0.2, weight_decay=0.1),
    "nesterov": lambda p: SGD(p, 0.02, momentum=0.9, nesterov=True, weight_decay=0.1),
    "nesterov, foreach": lambda p: SGD(p, 0.02, momentum=0.9, nesterov=True, foreach=True),
    "maximize": lambda p: SGD(p, 0.02, maximize=True, weight_decay=0.1),
    "maximize, momentum": lambda p: SGD(p, 0.02, maximize=True, momentum=0.9, weight_decay=0.1),
    "adam": lambda p: Adam(p, 1e-3, weight_decay=0.1),
    "adam, foreach": lambda p: Adam(p, 1e-3, foreach=True),
    "adam, fused": lambda p: Adam(p, 1e-3, fused=True),
    "adam, maximize": lambda p: Adam(p, 1e-3, maximize=True),
    "amsgrad": lambda p: Adam(p, 1e-3, amsgrad=True),
    "adamw": lambda p: AdamW(p, 1e-3, weight_decay=0.1),
    "rmsprop": lambda p: RMSprop(p, 1e-3, weight_decay=0.1),
    "rmsprop, momentum": lambda p: RMSprop(p, 1e-3, momentum=0.9, centered=True, weight_decay=0.1),
    "adagrad": lambda p: Adagrad(p, 1e-2, lr_decay=0.1, weight_decay=0.1),
    "sgd, lr tensor": lambda p: SGD(p, torch.tensor(0.02), momentum=0.9),
    "adam, lr tensor": lambda p: Adam(p, torch.tensor(1e-3)),
    "adamw, lr tensor": lambda p: AdamW(p, torch.tensor(1e-3), weight_decay=0.1),
    "adam, tensors": lambda p: Adam(p, torch.tensor(1e-3, dtype=torch.float64), (torch.tensor(0.9), torch.tensor(0.99))),
    "adam, decay tensor": lambda p: Adam(p, 1e-3, weight_decay=torch.tensor(0.1)),  # type: ignore[arg-type]
    "rmsprop, lr tensor": lambda p: RMSprop(p, torch.tensor(1e-3)),
}  # fmt: skip
PENALTIES: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda w: w.new_zeros(()),
    "L1": lambda w: 1e-2 * w.abs().sum(),
    "L2": lambda w: 1e-2 * w.square().sum(),
}
MIDDLE: dict[str, Callable[[], list[nn.Module]]] = {
    "matrix": list,
    "channel": lambda: [nn.ReLU()],
    "norm": lambda: [nn.BatchNorm1d(5, eps=0.1), nn.ReLU()],
}


def network(kind: str) -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), *MIDDLE[kind](), nn.Linear(5, 1)).double(), torch.randn(8, 4).double()


@cache
def laws(kind: str) -> Wiring:
    return trace(*network(kind))


def train(make: Make, penalty: str, kind: str, closure: bool = False, steps: int = 4) -> Any:
    model, x = network(kind)
    optimizer = make(model.parameters())

    def loss() -> Tensor:
        optimizer.zero_grad()
        loss = (model(x) - x[:, :1]).square().mean() + PENALTIES[penalty](model[0].weight)  # type: ignore[arg-type]
        loss.backward()
        return loss

    with conservation(model, optimizer, wiring=laws(kind)) as ledger:
        for _ in range(steps):
            if closure:
                optimizer.step(loss)  # type: ignore[arg-type]
            else:
                loss()
                optimizer.step()
        return ledger.read()


@pytest.mark.parametrize("kind", MIDDLE)
@pytest.mark.parametrize("name", CHECKED)
def test_a_penalty_is_flagged_and_nothing_else_is(name: str, kind: str) -> None:
    for penalty in PENALTIES:
        reading = train(CHECKED[name], penalty, kind)
        entry = reading.entries[0]
        assert entry.law == kind
        assert entry.state == ("holds" if penalty == "none" else "flagged"), penalty
        assert reading.holds == (penalty == "none")


class Own(torch.optim.Optimizer):
    """SGD by hand, under a name that Excite does not know; with a closure it is evaluated twice."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.02})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for _ in range(2 if closure else 0):
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad)


UNCHECKED: dict[str, tuple[Make, bool, str, str]] = {
    "l-bfgs": (lambda p: LBFGS(p, 0.1), True, "closure", "LBFGS.step(closure) makes its gradients inside the step"),
    "nesterov": (
        CHECKED["nesterov, foreach"],
        True,
        "closure",
        "SGD.step(closure) makes its gradients inside the step",
    ),
    "own, closure": (Own, True, "closure", "Own.step(closure) makes its gradients inside the step"),
    "own": (Own, False, "optimizer", "no formula predicts the update of Own from the gradient"),
    "nadam": (lambda p: NAdam(p, 1e-3), False, "optimizer", "no formula predicts the update of NAdam"),
}


@pytest.mark.parametrize("kind", MIDDLE)
@pytest.mark.parametrize("name", UNCHECKED)
def test_an_update_that_is_not_predicted_never_holds(name: str, kind: str, tmp_path: Any) -> None:
    make, closure, key, why = UNCHECKED[name]
    for penalty in PENALTIES:
        reading = train(make, penalty, kind, closure)
        entry: LedgerEntry = reading.entries[0]
        assert not reading.holds
        assert not entry.holds
        assert entry.why is not None
        assert why in entry.why
        if penalty == "none" or key == "closure":
            assert entry.state == "not checked"
            assert f"not checked: {entry.why}" in str(reading)


@pytest.mark.parametrize("kind", MIDDLE)
@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "adamw", "rmsprop"])
def test_a_closure_is_checked_if_the_update_follows_its_gradient(name: str, kind: str) -> None:
    for penalty in PENALTIES:
        entry = train(CHECKED[name], penalty, kind, closure=True).entries[0]
        assert entry.state == ("holds" if penalty == "none" else "flagged"), penalty


def test_a_law_states_in_how_many_steps_it_was_not_checked() -> None:
    model, x = network("channel")
    optimizer = SGD(model.parameters(), 0.02, momentum=0.9, nesterov=True)

    def loss() -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss  # type: ignore[no-any-return]

    with conservation(model, optimizer, x) as ledger:
        for step in range(4):
            if step == 1:
                optimizer.step(loss)  # type: ignore[arg-type]
            else:
                loss()
                optimizer.step()
        kept = ledger.state_dict()
        entry = ledger.read().entries[0]
    assert entry.state == "not checked"
    assert "(in 1 of 4 steps)" in (entry.why or "")
    with conservation(model, optimizer, x) as ledger:
        ledger.load_state_dict(kept)
        assert ledger.read().entries[0].why == entry.why


def test_the_probe_writes_no_rest_where_nothing_was_checked(tmp_path: Any) -> None:
    model, x = network("channel")
    optimizer = LBFGS(model.parameters(), 0.1)

    def loss() -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean() + PENALTIES["L1"](model[0].weight)  # type: ignore[arg-type]
        loss.backward()
        return loss  # type: ignore[no-any-return]

    with excite.watch(model, x, tmp_path / "run", optimizer, [Conservation(Every(1))], strict=True) as watch:
        for _ in range(3):
            optimizer.step(loss)  # type: ignore[arg-type]
            watch.step()
    with excite.load_run(tmp_path / "run") as run:
        frame = run.frame()
    after = frame[frame.step > 0]
    names = set(after.name)
    assert "conservation/drift/0" in names
    assert "conservation/rest/0" not in names
    assert after[after.name == "conservation/unchecked/0"].value.tolist() == [1.0] * 3
    assert after[after.name == "conservation/label/closure"].value.tolist() == [1.0] * 3


@pytest.mark.parametrize("frozen", ["0", "2"])
def test_a_layer_with_rate_zero_cannot_hide_a_penalty(frozen: str) -> None:
    """What the other layers do alone is explained by the rates; that the gradient obeys the law is checked all the same."""
    for penalty in PENALTIES:
        model, x = network("channel")
        still = [p for k, p in model.named_parameters() if k.startswith(frozen)]
        moving = [p for k, p in model.named_parameters() if not k.startswith(frozen)]
        optimizer = SGD([{"params": still, "lr": 0.0}, {"params": moving}], lr=0.02)
        with conservation(model, optimizer, x) as ledger:
            (model(x).square().mean() + PENALTIES[penalty](model[0].weight)).backward()  # type: ignore[arg-type]
            optimizer.step()
            assert ledger.read().entries[0].state == ("holds" if penalty == "none" else "flagged"), penalty


@pytest.mark.parametrize("tensor", [False, True])
def test_schedules_that_change_or_replace_the_learning_rate(tensor: bool) -> None:
    for make in (SGD, Adam, AdamW):
        model, x = network("norm")
        groups = [{"params": model[0].parameters(), "lr": torch.tensor(3e-3) if tensor else 3e-3}]
        groups.append(
            {"params": [*model[1].parameters(), *model[3].parameters()], "lr": torch.tensor(1e-3) if tensor else 1e-3}
        )
        optimizer = make(groups)  # type: ignore[operator]
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        with conservation(model, optimizer, x) as ledger:
            for step in range(5):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                schedule.step()
                if step == 2:
                    optimizer.param_groups[0]["lr"] = torch.tensor(5e-3) if tensor else 5e-3
            assert ledger.read().holds


# -- the eps of normalizations -----------------------------------------------------------------------------------


@cache
def laws_of_normed(name: str, affine: bool) -> Wiring:
    return trace(*normed(name, affine))


SHORT = ["batch_norm", "instance_norm", "group_norm", "layer_norm", "rms_norm"]
Step = Callable[[nn.Module, torch.optim.Optimizer, Tensor], None]


def accumulated(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    for k in range(3):
        (simple(model, x + k) / 3).backward()


def clipped(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    accumulated(model, optimizer, x)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-2)


def together(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    (model(x) - model(2 * x + 1)).square().mean().backward()


def discarded(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    (100 * simple(model, x)).backward()
    optimizer.zero_grad()
    model(x + 1).sum()  # without a backward pass
    simple(model, x).backward()


def zeroed(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    (100 * simple(model, x)).backward()
    optimizer.zero_grad(set_to_none=False)
    simple(model, x).backward()


def reentrant(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    (checkpoint(model, x.requires_grad_(), use_reentrant=True) - 1).square().mean().backward()


WAYS: dict[str, Step] = {
    "plain": lambda model, optimizer, x: simple(model, x).backward(),  # type: ignore[no-untyped-call]
    "accumulated": accumulated,
    "clipped": clipped,
    "two passes in one graph": together,
    "discarded": discarded,
    "zeroed in place": zeroed,
    "reentrant checkpointing": reentrant,
}


@pytest.mark.slow
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SHORT)
def test_the_eps_is_predicted_however_gradients_come_about(name: str, way: str, affine: bool) -> None:
    for make in (CHECKED["decay"], CHECKED["adam"]):
        for penalty in ("none", "L2"):
            model, x = normed(name, affine)
            optimizer = make(model.parameters())
            with conservation(model, optimizer, wiring=laws_of_normed(name, affine)) as ledger:
                for _ in range(3):
                    optimizer.zero_grad()
                    WAYS[way](model, optimizer, x.clone())
                    PENALTIES[penalty](model[0].weight).backward() if penalty != "none" else None  # type: ignore[index, no-untyped-call]
                    optimizer.step()
                (entry,) = [e for e in ledger.read().entries if e.law == "norm"]
            assert entry.terms["eps"].abs().max() > 1e-9
            assert entry.state == ("holds" if penalty == "none" else "flagged"), (entry.why, entry.relative)


class ByHand(nn.Module):
    """A normalization as a bare function."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.layer_norm(self.first(x), (6,)))  # type: ignore[no-any-return]


def checkpointed(model: nn.Module, x: Tensor) -> Tensor:
    return (checkpoint(model, x, use_reentrant=False) - 1).square().mean()  # type: ignore[no-any-return]


def in_parts(model: nn.Module, x: Tensor) -> Tensor:
    first, norm, _, last = model.children()
    return (last(F.relu(F.layer_norm(first(x), (6,), *norm.parameters()))) - 1).square().mean()  # type: ignore[no-any-return]


def frozen(model: nn.Module, x: Tensor) -> Tensor:
    model[1].eval()  # type: ignore[index]
    return simple(model, x)


UNPREDICTED: dict[str, tuple[Callable[[], tuple[nn.Module, Tensor]], Callable[[nn.Module, Tensor], Tensor], str]] = {
    "function": (
        lambda: (ByHand().double(), torch.randn(5, 4).double()), simple, "normalizes by layer_norm in a function",
    ),
    "checkpoint": (
        lambda: normed("layer_norm"), checkpointed, "1: its input is not kept until the backward pass (activation checkpointing",
    ),
    "part": (lambda: normed("layer_norm"), in_parts, "1: no pass through it was recorded"),
    "frozen": (lambda: normed("batch_norm"), frozen, "1: its statistics are frozen, so there is no law in front of it"),
}  # fmt: skip


@pytest.mark.parametrize("what", UNPREDICTED)
def test_an_eps_that_cannot_be_predicted_is_named(what: str) -> None:
    make, loss, why = UNPREDICTED[what]
    for penalty in PENALTIES:
        model, x = make()
        optimizer = SGD(model.parameters(), 0.02)
        with conservation(model, optimizer, x) as ledger:
            for _ in range(2):
                optimizer.zero_grad()
                first = next(model.parameters())
                (loss(model, x) + PENALTIES[penalty](first)).backward()
                optimizer.step()
            reading = ledger.read()
        (entry,) = [e for e in reading.entries if e.law == "norm"]
        assert entry.state == "not checked"
        assert why in (entry.why or "")
        assert not reading.holds


def test_batch_norm_under_checkpointing_needs_only_its_variance() -> None:
    model, x = normed("batch_norm")
    optimizer = SGD(model.parameters(), 0.02)
    with conservation(model, optimizer, x) as ledger:
        for _ in range(3):
            optimizer.zero_grad()
            (checkpoint(model, x, use_reentrant=False) - 1).square().mean().backward()
            optimizer.step()
        assert ledger.read().holds


def test_hooks_are_not_copied_or_saved_and_are_removed() -> None:
    model, x = normed("batch_norm")
    optimizer = SGD(model.parameters(), 0.02)
    with conservation(model, optimizer, x) as ledger:
        twin = copy.deepcopy(model)
        file = io.BytesIO()
        torch.save(model, file)
        twin(x).sum().backward()
        simple(model, x).backward()
        optimizer.step()
        assert ledger.read().holds
    assert not model[1]._forward_hooks  # type: ignore[index]
    file.seek(0)
    torch.load(file, weights_only=False)(x)
