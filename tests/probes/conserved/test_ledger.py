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
from excite.probes import Conservation, Every, Loss, conservation
from excite.probes.conserved.update_terms import PARTS as ALL_PARTS
from models import CASES, build, same_state, state_of

PARTS = ("step", "decay", "momentum", "rescaling")
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "squared": lambda f, y: (f - y).square().mean(),
    "logistic": lambda f, y: F.softplus(-y * f).mean(),
    "exponential": lambda f, y: (-y * f).exp().mean(),
    "absolute": lambda f, y: (f - y).abs().mean(),
}


def hidden_laws(model: nn.Sequential, weights: dict[str, Tensor]) -> list[Tensor]:
    """diag(W₁W₁' + b b') − diag(W₂'W₂) between consecutive linear layers, from the matrices themselves."""
    names = [name for name, m in model.named_children() if isinstance(m, nn.Linear)]
    laws = []
    for one, other in pairwise(names):
        w = weights[f"{one}.weight"]
        made = w @ w.T
        if f"{one}.bias" in weights:
            made = made + torch.outer(weights[f"{one}.bias"], weights[f"{one}.bias"])
        laws.append((made - weights[f"{other}.weight"].T @ weights[f"{other}.weight"]).diagonal())
    return laws


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


def snapshot(model: nn.Module, grads: bool = False) -> dict[str, Tensor]:
    return {k: (p.grad if grads else p).detach().clone() for k, p in model.named_parameters()}  # type: ignore[union-attr]


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
    for i, (entry, value) in enumerate(zip(reading.entries, hidden_laws(model, snapshot(model)))):
        scale = entry.scale
        assert torch.all((entry.value - value).abs() <= 1e-12 * scale)
        assert torch.all((entry.drift - (value - start[i])).abs() <= 1e-12 * scale)
        for part in PARTS:
            assert torch.all((entry.parts[part] - sums[part][i]).abs() <= 1e-11 * scale), part
        assert entry.relative < 1e-12
        parts = sum(entry.parts.values())
        torch.testing.assert_close(parts + entry.rest, entry.drift, rtol=0, atol=1e-13 * float(scale.max()))
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


@settings(max_examples=12)
@RANDOM
def test_every_part_equals_explicit_matrices(**drawn: Any) -> None:
    parts_equal_explicit_matrices(**drawn)


@pytest.mark.slow
@settings(max_examples=200)
@RANDOM
def test_every_part_equals_explicit_matrices_on_many_networks(**drawn: Any) -> None:
    parts_equal_explicit_matrices(**drawn)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, steps: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        noise = torch.randn(x.shape, generator=generator).to(x.dtype) if x.is_floating_point() else 0
        optimizer.zero_grad()
        squared(model, x + noise).backward()
        optimizer.step()


def squared(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    parts = out.values() if isinstance(out, dict) else out if isinstance(out, tuple) else [out]
    return sum(((part - 1).square().mean() for part in parts), torch.zeros((), dtype=torch.float64))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.02),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.01, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True, weight_decay=0.01),
}


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
        assert {part for part, amount in entry.parts.items() if amount.any()} == {"step"}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_laws_of_products_sum_rows_for_each_of_them_and_as_often_as_they_count(make: Any) -> None:
    """relu(W₁x) · (W₂x), read by W₃, whose output is squared and read by W₄."""
    for penalty in (0.0, 0.01):
        model, x = build("gated")
        optimizer = make(model.parameters())
        with conservation(model, optimizer, x) as ledger:
            for _ in range(4):
                optimizer.zero_grad()
                (squared(model, x) + penalty * model.head.weight.abs().sum()).backward()
                optimizer.step()
            reading = ledger.read()
        w = snapshot(model)
        rows = {k: w[f"{k}.weight"].square().sum(1) + w[f"{k}.bias"].square() for k in ("gate", "up", "down")}
        read = {k: w[f"{k}.weight"].square().sum(0) for k in ("down", "head")}
        expected = {"gate": rows["gate"] - read["down"], "up": rows["up"] - read["down"]}
        expected["down"] = rows["down"] - 2 * read["head"]
        for name, value in expected.items():
            torch.testing.assert_close(reading[name].value, value, rtol=1e-12, atol=1e-12)
            assert reading[name].holds == (penalty == 0 or name != "down")
            assert reading[name].relative < 1e-12 or not reading[name].holds


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
    torch.testing.assert_close(entry.parts["eps"], expected, rtol=1e-10, atol=1e-14)
    assert entry.parts["eps"].abs().max() > 1e-5
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


def test_clipping_by_value_and_a_penalty_in_the_loss_break_the_law_and_are_named() -> None:
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
def test_parameters_changed_outside_the_optimizer_are_found_and_the_step_named(make: Any) -> None:
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
    assert "rest at step 5" in str(reading)


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
        assert "rest at step 4" in str(ledger.read())
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


def test_an_optimizer_without_a_known_formula_is_measured_and_says_so() -> None:
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
        assert reading["0"].parts["rates"].abs().max() > 1e-5
        assert not reading["2"].parts["rates"].abs().max() > 1e-12
        assert reading["2"].parts["decay"].abs().max() > 1e-5


def test_what_decay_does_through_the_momentum_buffer_counts_as_decay() -> None:
    """Small weights that the data does not move: all the drift is decay's, with momentum 0.9 nine tenths of it delayed."""
    for setting in ({}, {"dampening": 0.5}, {"nesterov": True}):
        model, x = build("mlp")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1, **setting)  # type: ignore[arg-type]
        with conservation(model, optimizer, x) as ledger:
            for _ in range(40):
                optimizer.zero_grad()
                (0.0 * squared(model, x)).backward()
                optimizer.step()
            for entry in ledger.read().entries:
                assert entry.share("decay") == pytest.approx(1, abs=1e-12)
                assert entry.moved > 1e-2
                assert entry.relative < 1e-13


def test_decay_that_comes_and_goes_and_parameters_that_skip_a_step() -> None:
    """v_d goes on when decay is switched off, and stands still for a parameter without a gradient."""
    model, x = build("mlp")
    last = [p for k, p in model.named_parameters() if k.startswith("4")]
    first = [p for k, p in model.named_parameters() if not k.startswith("4")]
    optimizer = torch.optim.SGD([{"params": first, "weight_decay": 0.2}, {"params": last}], lr=0.02, momentum=0.8)
    names = {id(p): k for k, p in model.named_parameters()}
    v: dict[str, Tensor] = {}
    expected = torch.zeros(6, dtype=torch.float64)
    with conservation(model, optimizer, x) as ledger:
        for step in range(8):
            optimizer.param_groups[0]["weight_decay"] = 0.2 if step < 4 else 0.0
            optimizer.zero_grad()
            squared(model, x).backward()
            if step in (0, 5):
                last[0].grad = None
            w, g = snapshot(model), {k: p.grad for k, p in model.named_parameters()}
            for group in optimizer.param_groups:
                for p in group["params"]:
                    k = names[id(p)]
                    if g[k] is not None:
                        e = group["weight_decay"] * w[k]
                        v[k] = 0.8 * v[k] + e if k in v else e
            still = {k for k in w if g[k] is None}
            plain = {k: w[k] if k in still else w[k] - 0.02 * g[k] for k in w}  # type: ignore[operator]
            decayed = {k: plain[k] if k in still else plain[k] - 0.02 * v[k] for k in w}
            expected += hidden_laws(model, decayed)[1] - hidden_laws(model, plain)[1]  # type: ignore[arg-type]
            optimizer.step()
        entry = ledger.read()["2"]
    torch.testing.assert_close(entry.parts["decay"], expected, rtol=0, atol=1e-13)
    assert expected.abs().max() > 1e-3


def test_frozen_layers_have_no_law_and_a_layer_frozen_later_is_flagged() -> None:
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


def test_a_step_without_gradients_changes_nothing() -> None:
    for make in OPTIMIZERS.values():
        model, x = build("mlp")
        optimizer = make(model.parameters())
        with conservation(model, optimizer, x) as ledger:
            optimizer.step()
            train(model, optimizer, x, 2)
            optimizer.zero_grad()
            optimizer.step()
            assert ledger.read().holds


def test_a_closure_is_understood() -> None:
    for name, make in OPTIMIZERS.items():
        model, x = build("mlp")
        optimizer = make(model.parameters())

        def closure(model: nn.Module = model, optimizer: Any = optimizer, x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss = squared(model, x)
            loss.backward()
            return loss

        with conservation(model, optimizer, x) as ledger:
            for _ in range(4):
                optimizer.step(closure)
            reading = ledger.read()
        # Nesterov's momentum may be added to the gradient in place: then it cannot be read after the step.
        assert {entry.state for entry in reading.entries} == {"not checked" if name == "nesterov" else "holds"}


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
        for name in ("value", "start", "drift", "rest", "scale", "worst", "worst_step", "flagged"):
            assert torch.equal(getattr(one, name), getattr(other, name)), name
        assert all(torch.equal(one.parts[part], other.parts[part]) for part in one.parts)
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


def test_a_model_without_a_law_says_why() -> None:
    model, x = build("tanh")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with conservation(model, optimizer, x) as ledger:
        train(model, optimizer, x, 2)
        reading = ledger.read()
    assert not reading.entries
    assert not reading.holds
    assert "tanh between 0 and 2 is not positively homogeneous" in str(reading)
    model = nn.Sequential(nn.Linear(5, 4), nn.GELU(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1)).double()
    model[4].weight.requires_grad_(False)
    reading = conservation(model, torch.optim.SGD(model.parameters(), lr=0.1), x).read()
    assert [f"{u.name}: {u.why}" for u in reading.unchecked] == [
        "0: gelu between 0 and 2 is not positively homogeneous",
        "2: 4.weight does not train",
    ]
    alone = nn.Linear(5, 1).double()
    assert "nothing to check" in str(conservation(alone, torch.optim.SGD(alone.parameters(), lr=0.1), x).read())


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


def test_the_probe_writes_the_ledger(tmp_path: Any) -> None:
    def watched(folder: str, stop: int) -> Any:
        model, x = build("mlp")
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        probes = [Loss(), Conservation(Every(2), off_diagonal=True)]
        with excite.watch(model, x, tmp_path / folder, optimizer, probes, strict=True) as watch:
            for step in range(6):
                if step == stop:
                    state = watch.state_dict()
                    again = excite.watch(model, x, None, optimizer, [Conservation(Every(2))])
                    again.load_state_dict(state)
                    again.close()
                train(model, optimizer, x, 1, seed=step)
                watch.step(1.0)
        return excite.load_run(tmp_path / folder).frame()

    frame = watched("a", 3)
    last = {row.name: row.value for row in frame.itertuples(index=False)}
    assert last["conservation/rest/0"] < 1e-13 < last["conservation/drift/0"]
    shares = [last.get(f"conservation/{part}/0", 0.0) for part in PARTS]
    assert sum(shares) == pytest.approx(1, abs=1e-9)
    assert last["conservation/off-diagonal/0"] > 1e-4
    assert frame[frame.name == "conservation/drift/2"].step.tolist() == [0, 2, 4, 6]
    model, x = build("mlp")
    with pytest.raises(InputError, match="needs the optimizer"):
        excite.watch(model, x, probes=[Conservation()])


@pytest.mark.parametrize("name", ["mlp", "convolutional", "conv1d"])
def test_the_digest_says_what_the_entries_say(name: str) -> None:
    model, x = build(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    with conservation(model, optimizer, x) as ledger:
        train(model, optimizer, x, 4)
        summary, reading = ledger.summary(), ledger.read()
        assert list(summary.names) == [entry.name for entry in reading.entries]
        for k, entry in enumerate(reading.entries):
            assert float(summary.drift[k]) == pytest.approx(entry.moved, rel=1e-12)
            assert float(summary.rest[k]) == pytest.approx(entry.relative, rel=1e-6, abs=1e-15)
            for row, part in enumerate(ALL_PARTS):
                assert float(summary.shares[row, k]) == pytest.approx(entry.share(part), rel=1e-9, abs=1e-12)
                assert bool(summary.occurs[row, k]) == bool((entry.parts[part] != 0).any())


def test_without_parts_the_probe_writes_the_same_drift_and_does_nothing_between() -> None:
    found = []
    for parts in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 1)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        x = torch.randn(8, 3, dtype=torch.float64)
        probe = Conservation(Every(1), parts=parts)
        values = []
        with excite.watch(model, x, None, optimizer, [probe], strict=True):
            assert bool(optimizer._optimizer_step_post_hooks) is parts
            for _ in range(5):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                assert probe.ledger is not None
                values.append({entry.name: entry.moved for entry in probe.ledger.read().entries})
        found.append(values)
    assert found[0] == found[1]
    assert found[0][-1]["0"] > 0
    with pytest.raises(InputError, match="off_diagonal needs every step"):
        Conservation(parts=False, off_diagonal=True)
