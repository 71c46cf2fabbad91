"""The ledger of conserved quantities against explicit matrices, in float64."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import excite
from excite import InputError
from excite.errors import ModelError
from excite.probes import conservation
from models import CASES, build, same_state, state_of
from probes.conserved.trainings import OPTIMIZERS, PARTS, hidden_laws, snapshot, squared, train

LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "squared": lambda f, y: (f - y).square().mean(),
    "logistic": lambda f, y: F.softplus(-y * f).mean(),
    "exponential": lambda f, y: (-y * f).exp().mean(),
    "absolute": lambda f, y: (f - y).abs().mean(),
}


class Slow:
    """The update of SGD, Adam and AdamW in stages, written out entry by entry, each judged by the laws it leads to."""

    def __init__(self, kind: str, setting: dict[str, Any]):
        self.kind, self.setting, self.time = kind, setting, 0
        self.first: dict[str, Tensor] = {}
        self.second: dict[str, Tensor] = {}

    def stages(self, w: dict[str, Tensor], g: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        """Weights after −ηg, after −η(g + what decay has in the update), after momentum, after the rescaling."""
        s, self.time = self.setting, self.time + 1
        rate, decay = s["lr"], s.get("weight_decay", 0.0)
        plain = {k: w[k] - rate * g[k] for k in w}
        # The optimizer run on gradients alone and on the decay alone: its buffers are linear in what enters them.
        of_gradients = self.direction("g", g)
        of_decay = {k: decay * w[k] for k in w} if self.kind == "adamw" else self.direction("d", w, decay)
        decayed = {k: plain[k] - rate * of_decay[k] for k in w}
        moved = {k: w[k] - rate * (of_gradients[k] + of_decay[k]) for k in w}
        if self.kind == "sgd":
            return [plain, decayed, moved, moved]
        scaled = {}
        for k in w:
            d = g[k] + (0.0 if self.kind == "adamw" else decay) * w[k]
            b2 = s["betas"][1]
            self.second[k] = b2 * self.second.get(k, torch.zeros_like(d)) + (1 - b2) * d * d
            below = (self.second[k] / (1 - b2**self.time)).sqrt() + s["eps"]
            apart = of_decay[k] if self.kind == "adamw" else 0.0
            first = of_gradients[k] if self.kind == "adamw" else of_gradients[k] + of_decay[k]
            scaled[k] = w[k] - rate * (first / below + apart)
        return [plain, decayed, moved, scaled]

    def direction(self, name: str, entering: dict[str, Tensor], factor: float = 1.0) -> dict[str, Tensor]:
        s, result = self.setting, {}
        for k, e in entering.items():
            e, old = factor * e, self.first.get(name + k)
            if self.kind != "sgd":
                b1 = s["betas"][0]
                self.first[name + k] = b1 * (0.0 if old is None else old) + (1 - b1) * e
                result[k] = self.first[name + k] / (1 - b1**self.time)
                continue
            self.first[name + k] = e if old is None else s["momentum"] * old + (1 - s["dampening"]) * e
            buffer = self.first[name + k]
            result[k] = e if not s["momentum"] else e + s["momentum"] * buffer if s["nesterov"] else buffer
        return result


SETTINGS = st.one_of(
    st.tuples(
        st.just("sgd"),
        st.fixed_dictionaries(
            {
                "lr": st.floats(1e-3, 0.2),
                "momentum": st.sampled_from([0.0, 0.5, 0.9]),
                "weight_decay": st.sampled_from([0.0, 0.01, 0.3]),
                "dampening": st.sampled_from([0.0, 0.9]),
                "nesterov": st.booleans(),
            }
        ),
    ),
    st.tuples(
        st.sampled_from(["adam", "adamw"]),
        st.fixed_dictionaries(
            {
                "lr": st.floats(1e-4, 1e-2),
                "betas": st.sampled_from([(0.9, 0.999), (0.5, 0.9)]),
                "weight_decay": st.sampled_from([0.0, 0.1]),
                "eps": st.sampled_from([1e-8, 1e-3]),
            }
        ),
    ),
)


def parts_equal_explicit_matrices(
    widths: list[int], bias: bool, slope: float, loss: str, batch: int, seed: int, rule: Any, foreach: bool
) -> None:
    kind, setting = rule
    if kind == "sgd" and setting["nesterov"]:
        setting = {**setting, "dampening": 0.0, "momentum": setting["momentum"] or 0.9}
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for before, after in zip([3, *widths], [*widths, 1]):
        layers += [nn.Linear(before, after, bias=bias), nn.LeakyReLU(slope)]
    model = nn.Sequential(*layers[:-1]).double()
    make = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[kind]
    optimizer = make(model.parameters(), foreach=foreach, **setting)
    slow = Slow(kind, setting)
    start = hidden_laws(model, snapshot(model))
    sums = {part: [torch.zeros_like(q) for q in start] for part in PARTS}
    with conservation(model, optimizer, torch.randn(2, 3, dtype=torch.float64)) as ledger:
        for _ in range(4):
            x, y = torch.randn(batch, 3, dtype=torch.float64), torch.randint(2, (batch, 1)).double() * 2 - 1
            optimizer.zero_grad()
            LOSSES[loss](model(x), y).backward()
            w, g = snapshot(model), snapshot(model, grads=True)
            ways = [hidden_laws(model, w)] + [hidden_laws(model, stage) for stage in slow.stages(w, g)]
            for part, before, after in zip(PARTS, ways, ways[1:]):
                for total, a, b in zip(sums[part], before, after):
                    total += b - a
            optimizer.step()
        reading = ledger.read()
    assume(all(float(entry.scale.max()) < 1e9 for entry in reading.entries))  # it did not diverge
    for i, (entry, value) in enumerate(zip(reading.entries, hidden_laws(model, snapshot(model)), strict=True)):
        scale = entry.scale
        assert torch.all((entry.value - value).abs() <= 1e-12 * scale)
        assert torch.all((entry.drift - (value - start[i])).abs() <= 1e-12 * scale)
        for part in PARTS:
            assert torch.all((entry.terms[part] - sums[part][i]).abs() <= 1e-11 * scale), part
        assert entry.relative < 1e-12
        parts = sum(entry.terms.values())
        torch.testing.assert_close(parts + entry.residual, entry.drift, rtol=0, atol=1e-13 * float(scale.max()))
    assert reading.holds


RANDOM = given(
    widths=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    bias=st.booleans(),
    slope=st.sampled_from([0.0, 0.2, 1.0]),
    loss=st.sampled_from(list(LOSSES)),
    batch=st.integers(1, 6),
    seed=st.integers(0, 10**6),
    rule=SETTINGS,
    foreach=st.booleans(),
)


@pytest.mark.slow
@settings(max_examples=12)
@RANDOM
def test_every_part_equals_explicit_matrices(**drawn: Any) -> None:
    parts_equal_explicit_matrices(**drawn)


@pytest.mark.slow
@settings(max_examples=200)
@RANDOM
def test_every_part_equals_explicit_matrices_on_many_networks(**drawn: Any) -> None:
    parts_equal_explicit_matrices(**drawn)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_rest_is_rounding_on_the_shared_table(name: str) -> None:
    wiring = excite.trace(*build(name), output=CASES[name].pick)
    for make in OPTIMIZERS.values():
        model, x = build(name)
        optimizer = make(model.parameters())
        with conservation(model, optimizer, wiring=wiring) as ledger:
            torch.manual_seed(0)
            train(model, optimizer, x, 5)
            reading = ledger.read()
        assert all(entry.relative < 1e-12 for entry in reading.entries)
        assert reading.holds == bool(reading.entries)
        assert reading.steps == 5


@pytest.mark.parametrize("name", ["mlp", "resnet-identity", "shared"])
def test_plain_sgd_is_explained_by_the_step_size_alone(name: str) -> None:
    """Appendix F: drift = Σ η² (‖G‖² of producers − ‖G‖² of consumers), exactly; any batch, any loss."""
    model, x = build(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with conservation(model, optimizer, x) as ledger:
        train(model, optimizer, x, 200)
        reading = ledger.read()
    for entry in reading.entries:
        assert entry.moved > 1e-6
        assert entry.share("step") == pytest.approx(1, abs=1e-8)
        assert entry.relative < 1e-12
        assert {part for part, amount in entry.terms.items() if amount.any()} == {"step"}


def test_the_eps_of_a_batch_normalization_is_accounted_for() -> None:
    """⟨w, g⟩ = γ g_γ ε/(v + ε), with v the variance over the batch: this, times −2η, is the part eps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, eps=0.1), nn.ReLU(), nn.Linear(4, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03)
    x = torch.randn(6, 3, dtype=torch.float64)
    with conservation(model, optimizer, x) as ledger:
        expected = torch.zeros(4, dtype=torch.float64)
        for _ in range(3):
            optimizer.zero_grad()
            squared(model, x).backward()
            gamma = model[1].weight
            variance = model[0](x).var(0, correction=0).detach()
            expected += -2 * 0.03 * (gamma * gamma.grad).detach() * 0.1 / (variance + 0.1)
            optimizer.step()
        entry = ledger.read()["0"]
    assert entry.law == "norm"
    torch.testing.assert_close(entry.terms["eps"], expected, rtol=1e-10, atol=1e-14)
    assert entry.terms["eps"].abs().max() > 1e-5
    assert entry.relative < 1e-13


def test_accumulation_and_clipping_by_norm_leave_no_rest() -> None:
    model, x = build("convolutional")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with conservation(model, optimizer, x) as ledger:
        for _ in range(5):
            optimizer.zero_grad()
            for _ in range(3):
                (squared(model, x + torch.randn_like(x)) / 3).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        assert ledger.read().holds


def test_value_clipping_and_a_loss_penalty_are_named() -> None:
    model, x = build("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with conservation(model, optimizer, x) as ledger:
        train(model, optimizer, x, 3)
        optimizer.zero_grad()
        (squared(model, x) + 0.1 * model[0].weight.square().sum()).backward()  # type: ignore[index]
        optimizer.step()
        first, second = ledger.read().entries
        assert (first.first_flag, second.first_flag) == (4, None)
        optimizer.zero_grad()
        squared(model, x).backward()
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        optimizer.step()
        assert ledger.read().entries[1].first_flag == 5


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_changes_outside_the_optimizer_are_found_with_their_step(make: Any) -> None:
    model, x = build("mlp")
    optimizer = make(model.parameters())
    with conservation(model, optimizer, x) as ledger:
        train(model, optimizer, x, 4)
        with torch.no_grad():
            model[0].weight.data[2] *= 1.001  # type: ignore[index]
        train(model, optimizer, x, 3)
        reading = ledger.read()
    first, second = reading.entries
    assert not reading.holds
    assert first.first_flag == 5
    assert first.flagged.tolist() == [-1, -1, 5, -1, -1, -1, -1, -1]
    assert int(first.worst_step[2]) == 5
    assert second.holds
    assert "residual at step 5" in str(reading)


def test_conservation_that_was_not_checked_is_not_reported() -> None:
    """No step; weights changed since the last one; a ledger that was closed; another optimizer that trains the model."""
    model, x = build("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with conservation(model, optimizer, x) as ledger:
        assert not ledger.read().holds
        assert "no step to check yet" in str(ledger.read())
        train(model, optimizer, x, 3)
        assert ledger.read().holds
        with torch.no_grad():
            model[0].weight[2] *= 1.001  # type: ignore[index]
        first, second = ledger.read().entries
        assert (first.holds, first.first_flag, second.holds) == (False, 4, True)
        assert "changed after step 3, not by the optimizer" in str(ledger.read())
        train(model, optimizer, x, 1)
        assert ledger.read()["0"].flagged.tolist() == [-1, -1, 4, -1, -1, -1, -1, -1]
        assert "residual at step 4" in str(ledger.read())
    for closed in (True, False):
        model, x = build("mlp")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with conservation(model, optimizer, x) as ledger:
            train(model, optimizer, x, 2)
            if closed:
                ledger.close()
            train(model, torch.optim.SGD(model.parameters(), lr=0.05) if not closed else optimizer, x, 2)
            reading = ledger.read()
        assert (reading.steps, reading.holds) == (2, False)
        assert "changed after step 2" in str(reading)


def test_an_optimizer_without_a_known_formula_is_measured() -> None:
    """Its own update can break no law that is checked; changes outside it are found all the same."""
    model, x = build("mlp")
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-3)
    with conservation(model, optimizer, x) as ledger:
        train(model, optimizer, x, 5)
        reading = ledger.read()
        assert (reading.rule, reading.holds, reading["0"].state) == ("measured", False, "not checked")
        assert "not checked: no formula predicts the update of NAdam from the gradient" in str(reading)
        assert reading["0"].share("update") == pytest.approx(1, abs=0.01)
        with torch.no_grad():
            model[0].weight[0] += 0.1  # type: ignore[index]
        train(model, optimizer, x, 1)
        assert (ledger.read()["0"].first_flag, ledger.read()["0"].state) == (6, "flagged")


def test_learning_rates_and_decays_by_group() -> None:
    model, x = build("mlp")
    weights = [p for k, p in model.named_parameters() if "weight" in k]
    biases = [p for k, p in model.named_parameters() if "bias" in k]
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        optimizer = kind(
            [{"params": weights[:1], "lr": 0.03}, {"params": weights[1:], "weight_decay": 0.1}, {"params": biases}],
            lr=0.01,
        )
        with conservation(model, optimizer, x) as ledger:
            train(model, optimizer, x, 5)
            optimizer.param_groups[0]["lr"] = 0.02  # a schedule
            train(model, optimizer, x, 5)
            reading = ledger.read()
        assert reading.holds
        assert all(entry.relative < 1e-12 for entry in reading.entries)
        assert reading["0"].terms["rates"].abs().max() > 1e-5
        assert not reading["2"].terms["rates"].abs().max() > 1e-12
        assert reading["2"].terms["decay"].abs().max() > 1e-5


def test_frozen_layers_have_no_law_and_later_freezing_is_flagged() -> None:
    model, x = build("mlp")
    model[0].weight.requires_grad_(False)  # type: ignore[index]
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    with conservation(model, optimizer, x) as ledger:
        train(model, optimizer, x, 4)
        reading = ledger.read()
        assert [entry.name for entry in reading.entries] == ["2"]
        assert [(u.name, u.why) for u in reading.unchecked] == [("0", "0.weight does not train")]
        assert reading.holds
        model[4].weight.requires_grad_(False)  # type: ignore[index]
        train(model, optimizer, x, 1)
        assert ledger.read()["2"].first_flag == 5


@pytest.mark.slow
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_resumed_ledger_is_the_same_to_the_last_bit(make: Any, tmp_path: Any) -> None:
    def run(stop: int | None) -> Any:
        model, x = build("resnet-norm")
        optimizer = make(model.parameters())
        ledger = conservation(model, optimizer, x, off_diagonal=True)
        for step in range(6):
            if step == stop:
                parts = {"model": model, "optimizer": optimizer, "ledger": ledger}
                torch.save({key: part.state_dict() for key, part in parts.items()}, tmp_path / "all.pt")
                ledger.close()
                model, _ = build("resnet-norm", seed=1)
                optimizer = make(model.parameters())
                ledger = conservation(model, optimizer, x, off_diagonal=True)
                saved = torch.load(tmp_path / "all.pt")
                for key, part in {"model": model, "optimizer": optimizer, "ledger": ledger}.items():
                    part.load_state_dict(saved[key])
            train(model, optimizer, x, 1, seed=step)
        return ledger.read()

    whole, resumed = run(None), run(3)
    assert resumed.steps == whole.steps == 6
    for one, other in zip(whole.entries, resumed.entries):
        for name in ("value", "start", "drift", "residual", "scale", "worst", "worst_step", "flagged"):
            assert torch.equal(getattr(one, name), getattr(other, name)), name
        assert all(torch.equal(one.terms[part], other.terms[part]) for part in one.terms)
        if one.off_diagonal is not None:
            assert torch.equal(one.off_diagonal.step, other.off_diagonal.step)
    assert whole.holds


def test_books_about_other_laws_are_refused() -> None:
    ledgers = []
    for name in ("mlp", "convolutional"):
        model, x = build(name)
        ledgers.append(conservation(model, torch.optim.SGD(model.parameters(), lr=0.1), x))
    with pytest.raises(InputError, match="other laws"):
        ledgers[0].load_state_dict(ledgers[1].state_dict())


def test_precision_is_stated_and_bounds_the_rest() -> None:
    found = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        model, x = build("mlp")
        model, x = model.to(dtype), x.to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with conservation(model, optimizer, x) as ledger:
            generator = torch.Generator().manual_seed(0)
            for _ in range(50):
                optimizer.zero_grad()
                (model(torch.randn(4, 5, generator=generator).to(dtype)) - 1).square().mean().backward()
                optimizer.step()
            reading = ledger.read()
        assert reading.precision == dtype
        assert reading.holds
        found[dtype] = max(entry.relative for entry in reading.entries)
    assert found[torch.float64] < 1e-14 < found[torch.float32] < 1e-5 < found[torch.bfloat16] < 1


def test_mixed_precision() -> None:
    """Weights in float32, the passes in bfloat16: a gradient then obeys the law to bfloat16 only."""
    model, x = build("convolutional")
    model, x = model.float(), x.float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    with conservation(model, optimizer, x) as ledger:
        for _ in range(20):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = (model(x).float() - 1).square().mean()
            loss.backward()
            optimizer.step()
        reading = ledger.read()
    assert reading.precision == torch.float32
    assert 1e-7 < max(entry.relative for entry in reading.entries) < 1e-3


def test_a_gradient_scaler_and_a_step_that_it_skips() -> None:
    """Gradients are scaled back before the optimizer sees them; a step with an overflow is not made and not counted."""
    model, x = build("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with conservation(model, optimizer, x) as ledger:
        for step in range(6):
            optimizer.zero_grad()
            loss = squared(model, x) * (float("inf") if step == 3 else 1)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        reading = ledger.read()
    assert (reading.steps, reading.holds) == (5, True)
    assert all(entry.relative < 1e-13 for entry in reading.entries)


def test_optimizer_and_model_that_do_not_match() -> None:
    model, x = build("mlp")
    other, _ = build("mlp", seed=1)
    with pytest.raises(InputError, match="holds no parameter of this model"):
        conservation(model, torch.optim.SGD(other.parameters(), lr=0.1), x)
    part = conservation(model, torch.optim.SGD(model[2].parameters(), lr=0.1), x)  # type: ignore[index]
    assert {u.name: u.why for u in part.read().unchecked} == {
        "0": "0.weight is not in the optimizer",
        "2": "4.weight is not in the optimizer",
    }
    assert not part.read().holds  # nothing was checked
    with pytest.raises(InputError, match=r"expected a torch\.optim\.Optimizer; got int"):
        conservation(model, 3, x)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="an example batch or a wiring"):
        conservation(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for widths, match in (
        ((5, 9, 1), r"0\.weight, and here it has shape \(8, 5\)"),
        ((5, 8, 6, 1, 1), r"6\.weight, and there is none"),
    ):
        layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
        wiring = excite.trace(nn.Sequential(*layers[:-1]).double(), x)
        with pytest.raises(InputError, match=f"the wiring is that of another model: it has {match}"):
            conservation(model, torch.optim.SGD(model.parameters(), lr=0.1), wiring=wiring)


def test_shapes_that_change_and_weights_that_are_not_finite() -> None:
    model, x = build("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with conservation(model, optimizer, x) as ledger:
        train(model, optimizer, x, 1)
        with torch.no_grad():
            model[0].weight[0, 0] = float("nan")  # type: ignore[index]
        train(model, optimizer, x, 1)
        entry = ledger.read()["0"]
        assert not entry.holds
        assert entry.first_flag == 2
        assert "not finite since step 2" in str(ledger.read())
        model[2].weight.data = torch.zeros(3, 3, dtype=torch.float64)  # type: ignore[index]
        optimizer.zero_grad()
        optimizer.step()  # goes on
        with pytest.raises(ModelError, match=r"2\.weight had shape \(6, 8\) and now has \(3, 3\)"):
            ledger.read()
    model, x = build("mlp")
    with conservation(model, torch.optim.SGD(model.parameters(), lr=0.1), x) as ledger:
        model[0] = nn.Linear(5, 8).double()  # type: ignore[index]
        with pytest.raises(ModelError, match=r"0\.weight is no longer the parameter it was"):
            ledger.read()


def test_training_is_not_changed_and_nothing_stays_behind() -> None:
    for make in OPTIMIZERS.values():
        states = []
        for kept in (False, True):
            model, x = build("dropout")
            optimizer = make(model.parameters())
            torch.manual_seed(0)
            if kept:
                with conservation(model, optimizer, x, off_diagonal=True) as ledger:
                    train(model, optimizer, x, 5)
                    ledger.read()
            else:
                train(model, optimizer, x, 5)
            assert not optimizer._optimizer_step_pre_hooks
            assert not optimizer._optimizer_step_post_hooks
            states.append(state_of(model))
        assert same_state(*states)
