"""Norm of the gradient, against a slow version, in the ways people train."""

import numpy as np
import pytest
import torch
from torch import nn

import excite
from excite.probes import Every, GradientNorm, StepContext
from excite.report.history import MetricHistory


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2, bias=False)).double()


def slow_norms(model: nn.Module) -> dict[str, float]:
    """Entry by entry, in plain Python."""
    squares: dict[str, float] = {}
    for path, p in model.named_parameters():
        for value in p.grad.flatten().tolist():
            for key in ("gradient/norm", f"gradient/norm/{path.rpartition('.')[0]}"):
                squares[key] = squares.get(key, 0.0) + value * value
    return {key: total**0.5 for key, total in squares.items()}


def at_step(run: str, step: int) -> dict[str, float]:
    frame = excite.load_run(run).frame()
    rows = frame[(frame.step == step) & frame.name.str.startswith("gradient/")]
    return dict(zip(rows.name, rows.value))


@pytest.mark.parametrize("given", [True, False])
def test_norms_are_those_of_a_slow_version(tmp_path, given):
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    expected = {}
    with excite.watch(
        model,
        run=tmp_path / "run",
        optimizer=optimizer if given else None,
        probes=[GradientNorm(Every(2))],
        strict=True,
    ) as watch:
        for step in range(1, 6):
            optimizer.zero_grad()
            model(torch.randn(4, 3).double()).square().mean().backward()
            expected[step] = slow_norms(model)
            optimizer.step()
            if given:
                optimizer.zero_grad()  # before watch.step, as some loops do
            watch.step()
    for step in range(6):
        found = at_step(tmp_path / "run", step)
        measured = step in (2, 4) or (step == 5 and not given)  # at the end only what is still there
        assert found == (pytest.approx(expected[step], rel=1e-12) if measured else {})
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_accumulation_and_clipping_count(tmp_path):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with excite.watch(
        model, run=tmp_path / "run", optimizer=optimizer, probes=[GradientNorm(Every(1))], strict=True
    ) as watch:
        for _ in range(3):  # micro-batches of one step
            (10 * model(torch.randn(4, 3).double()).square().mean()).backward()
        whole = slow_norms(model)["gradient/norm"]
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        watch.step()
    assert whole > 0.5
    assert at_step(tmp_path / "run", 1)["gradient/norm"] == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_are_unscaled_and_skipped_steps_left_out(tmp_path, fused):
    model = network().float()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    expected = {}
    with excite.watch(
        model, run=tmp_path / "run", optimizer=optimizer, probes=[GradientNorm(Every(1))], strict=True
    ) as watch:
        for step in (1, 2):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 3)).square().mean() * (float("inf") if step == 2 else 1.0)
            plain = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            expected[step] = float(torch.stack([g.double().square().sum() for g in plain]).sum().sqrt())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            watch.step(loss)
    assert at_step(tmp_path / "run", 1)["gradient/norm"] == pytest.approx(expected[1], rel=1e-5)
    if not fused:  # a fused optimizer is called, and skips the step inside
        assert at_step(tmp_path / "run", 2) == {}


def test_a_closure_and_sparse_gradients(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 3, sparse=True), nn.Linear(3, 1))
    probe = GradientNorm()
    model(torch.tensor([1, 1, 2])).sum().backward()
    probe.attach(StepContext(model, 0))
    values = probe.measure(StepContext(model, 1))
    assert float(values["norm/0"]) == pytest.approx(float(model[0].weight.grad.to_dense().norm()))

    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    x = torch.randn(4, 3).double()

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    with excite.watch(
        model, run=tmp_path / "run", optimizer=optimizer, probes=[GradientNorm(Every(1))], strict=True
    ) as watch:
        optimizer.step(closure)
        expected = slow_norms(model)
        watch.step()
    assert at_step(tmp_path / "run", 1) == pytest.approx(expected)


def history(**curves):
    series = {name.replace("__", "/"): (np.arange(len(v)), np.array(v, float)) for name, v in curves.items()}
    return MetricHistory(series, series.__getitem__)


def test_findings_name_growth_and_vanishing_layers():
    grown = GradientNorm.findings(history(gradient__norm=[1, 1, 2, 30]))
    assert [f.kind for f in grown] == ["warning"]
    assert "grew from 1 to 30" in grown[0].text
    layers = {"gradient__norm": [1, 1], "gradient__norm__fc1": [1e-6, 1e-6], "gradient__norm__fc2": [1, 1]}
    (vanishing,) = GradientNorm.findings(history(**layers))
    assert vanishing.text.endswith("gradients vanish on their way to fc1.")
    layers["gradient__norm__embed"] = [0.5, 0.5]  # runs first: its gradient has come through all layers
    series = MetricHistory(
        {name.replace("__", "/"): 0 for name in layers}, history(**layers).__getitem__, ("embed", "fc1", "fc2")
    )
    (note,) = GradientNorm.findings(series)
    assert note.kind == "note"
    assert note.text.endswith("all others in between.")
    assert "not finite at step 1" in GradientNorm.findings(history(gradient__norm=[1, np.nan]))[0].text
    assert GradientNorm.findings(history()) == []
