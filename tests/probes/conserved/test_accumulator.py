"""Steps that are booked together are booked as if one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import excite
from excite.errors import InputError
from excite.probes import Conservation, Every, Ledger, conservation
from models import build
from probes.conserved.trainings import followed

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.02),
    "sgd with decay": lambda ps: torch.optim.SGD(ps, lr=0.02, weight_decay=0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.02, momentum=0.9, weight_decay=0.1),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-3),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=1e-3, momentum=0.5),
    "measured": lambda ps: torch.optim.NAdam(ps, lr=1e-3),
}


def trained(make: Any, monkeypatch: pytest.MonkeyPatch, many: int) -> tuple[Ledger, list[Tensor]]:
    """Nine steps of every kind: rates that change, a layer that skips a step, one with a rate of its own, NaN at the end."""
    monkeypatch.setattr("excite.probes.conserved.ledger._RECORDS", many)
    model, x = build("resnet-norm")
    parameters = list(model.parameters())
    optimizer = make([{"params": parameters[:2]}, {"params": parameters[2:]}])
    ledger = conservation(model, optimizer, x)
    snapshots = []
    for step in range(9):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step)
        (model(x) * torch.randn(len(x), 1, generator=generator, dtype=x.dtype)).sum().backward()
        if step == 3:
            parameters[2].grad = None
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        if step == 5:
            optimizer.param_groups[0]["lr"] *= 2
        if step == 7:
            with torch.no_grad():
                parameters[9].add_(0.1)  # not by the optimizer
        if step == 8:
            parameters[0].grad[0] *= torch.nan  # type: ignore[index]
        optimizer.step()
        snapshots.append(ledger.snapshot())
    ledger.commit()
    return ledger, [snapshot.state for snapshot in snapshots]


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_accumulator_does_not_depend_on_batch_of_records(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make = OPTIMIZERS[name]
    (one, each), *others = (trained(make, monkeypatch, many) for many in (1, 4, 64))
    first = one.state_dict()
    assert {4, 8} <= set(first["flagged"].tolist())
    assert bool((first["parts"] != 0).any(1).sum() >= 2)
    for other, books in others:
        for mine, theirs in zip(each, books, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-13, atol=1e-13, equal_nan=True)
        second = other.state_dict()
        for key in ("parts", "value", "scale", "worst"):
            torch.testing.assert_close(first[key], second[key], rtol=1e-13, atol=1e-13, equal_nan=True)
        assert torch.equal(first["flagged"], second["flagged"])
        same = first["worst"] > 1e-10  # below it is rounding, and which step had most of it is chance
        assert bool(same.any())
        assert torch.equal(first["worst_step"][same], second["worst_step"][same])


def test_snapshots_committed_later_are_those_of_their_steps() -> None:
    """Of two equal trainings, one commits every step, the other takes snapshots and commits them at the end."""

    def summarized(ledger: Ledger) -> tuple[Tensor, Any]:
        snapshot = ledger.snapshot()
        ledger.commit()
        return snapshot.state, snapshot.summary()

    committed, snapshots, ledgers = followed(9, summarized), [], []
    for snapshot, ledger in followed(9, lambda ledger: (ledger.snapshot(), ledger)):
        snapshots.append(snapshot)
        ledgers.append(ledger)
    ledgers[0].commit()
    assert len({float(state[0].abs().max()) for state, _ in committed}) == 9
    for (state, row), snapshot in zip(committed, snapshots, strict=True):
        torch.testing.assert_close(state, snapshot.state, rtol=1e-13, atol=1e-15)
        assert row.drift == pytest.approx(snapshot.summary().drift, rel=1e-12)
        assert row.fractions[0] == pytest.approx(snapshot.summary().fractions[0], rel=1e-9)
        assert [len(shares) for shares in row.fractions] == [len(row.names)] * len(row.fractions)


def test_read_commits_pending_records() -> None:
    def read(ledger: Ledger) -> tuple[int, Any]:
        assert ledger._records
        return len(ledger._records), ledger.read()

    for step, (waiting, reading) in enumerate(followed(3, read), 1):
        assert waiting == 1
        assert reading.holds
        assert all(float(entry.terms["step"].abs().max()) > 0 for entry in reading.entries), step
    assert followed(3, lambda ledger: len(ledger._records)) == [1, 2, 3]


def test_the_memory_of_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("excite.probes.conserved.ledger._BYTES", 1)
    assert followed(3, lambda ledger: len(ledger._records)) == [0, 0, 0]


def test_momentum_that_is_switched_off_leaves_no_rest() -> None:
    """From then on decay acts on the weights alone, no longer through a buffer."""
    model, x = build("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=0.1)
    ledger = conservation(model, optimizer, x)
    for step in range(6):
        if step == 3:
            optimizer.param_groups[0]["momentum"] = 0.0
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    assert ledger.read().holds


def test_groups_that_differ_in_decay_alone_have_no_part_of_rates() -> None:
    model, x = build("mlp")
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [{"params": parameters[::2], "weight_decay": 0.1}, {"params": parameters[1::2], "weight_decay": 0.0}], lr=1e-3
    )
    ledger = conservation(model, optimizer, x)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    assert all(bool((entry.terms["rates"] == 0).all()) for entry in ledger.read().entries)
    optimizer.param_groups[1]["lr"] = 2e-3
    optimizer.step()
    assert any(bool((entry.terms["rates"] != 0).any()) for entry in ledger.read().entries)


@pytest.mark.parametrize("product", [1 - 1e-9, 1.0, 1.5])
def test_a_decay_that_takes_all_of_the_weights(product: float) -> None:
    model, x = build("resnet-norm")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=2 * product)
    ledger = conservation(model, optimizer, x)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    assert ledger.read().holds


def test_the_probe_goes_on_after_a_step_back(tmp_path: Any) -> None:
    """Accumulator promised of steps that were taken back are not waited for."""
    model, x = build("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)

    def train(watch: Any, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            watch.step()

    with excite.watch(model, x, tmp_path / "run", optimizer, [Conservation(Every(1))], strict=True) as watch:
        train(watch, 3)
        kept, weights = watch.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}
        train(watch, 3)
        model.load_state_dict(weights)
        watch.load_state_dict(kept)
        train(watch, 3)
    with excite.load_run(tmp_path / "run") as run:
        assert sorted(set(run.frame().step)) == list(range(7))


def test_a_snapshot_of_a_replaced_accumulator_raises() -> None:
    model, x = build("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    ledger = conservation(model, optimizer, x)
    kept = ledger.state_dict()
    model(x).square().mean().backward()
    optimizer.step()
    snapshot = ledger.snapshot()
    ledger.load_state_dict(kept)
    ledger.commit()
    for read in (snapshot.summary, lambda: snapshot.state):
        with pytest.raises(InputError, match="checkpoint"):
            read()


def test_every_step_is_written_with_its_own_books(tmp_path: Any) -> None:
    model, x = build("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    expected: list[float] = []
    with excite.watch(model, x, tmp_path / "run", optimizer, [Conservation(Every(1))], strict=True) as watch:
        probe: Any = watch.probes[0]
        name = probe.ledger.laws[0].name
        law = probe.ledger.laws[0].group
        start = {k: p.detach().clone() for k, p in model.named_parameters()}

        def value(weights: Any) -> Tensor:
            sides = [
                sum(site.rows(weights[site.parameter]).square().sum(1) for site in sites)
                for sites in (law.producers, law.consumers)
            ]
            return torch.stack([torch.as_tensor(side) for side in sides])

        scale = value(start).sum(0)
        for _ in range(70):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            watch.step()
            now = value({k: p.detach() for k, p in model.named_parameters()})
            scale = torch.maximum(scale, now.sum(0))
            drift = now[0] - now[1] - (value(start)[0] - value(start)[1])
            expected.append(float((drift.abs() / scale).max()))
    with excite.load_run(tmp_path / "run") as run:
        frame = run.frame()
    found = frame[frame.name == f"conservation/drift/{name}"].set_index("step").value
    assert found[found.index > 0].tolist() == pytest.approx(expected, rel=1e-9)
