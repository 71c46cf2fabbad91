"""Critical sharpness, against the Hessian along the update."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import excite
from excite.probes import CriticalSharpness, Every
from excite.probes.base import StepContext
from excite.probes.vital_signs.critical_sharpness import critical_factor, default_loss
from transformer_zoo import NAMES, make


def quadratic(output, batch):
    return output.square().mean()


def test_sharpness_is_the_curvature_of_a_quadratic_loss():
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2, bias=False).double(), torch.randn(2, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    probe = CriticalSharpness(Every(1), loss=quadratic)
    probe.attach(StepContext(model, 0, example=x, optimizer=optimizer))
    found = {}
    for step in range(1, 4):  # until the multiples bracket the factor
        probe.announce(True)
        start = model.weight.detach().clone()
        optimizer.zero_grad()
        quadratic(model(x), x).backward()
        gradient = model.weight.grad.clone()
        optimizer.step()
        found = probe.measure(StepContext(model, step, example=x, optimizer=optimizer))
        hessian = torch.autograd.functional.hessian(lambda w: quadratic(F.linear(x, w), x), start).reshape(6, 6)
        update = (model.weight.detach() - start).flatten()
        slope = float(gradient.flatten() @ update)
        factor = -2 * slope / float(update @ hessian @ update)
        if "factor" in found:
            break
    assert found["factor"] == pytest.approx(factor, rel=1e-10)
    assert found["critical"] == pytest.approx(2 / (0.3 * factor), rel=1e-10)
    assert found["limit"] == 2 / 0.3
    assert "adam_limit" not in found


def test_adam_has_the_limit_of_38_over_the_rate():
    zoo = make("gpt2")
    optimizer = torch.optim.AdamW(zoo.model.parameters(), lr=0.001)
    probe = CriticalSharpness(Every(1))
    ctx = StepContext(zoo.model, 1, example=zoo.example, optimizer=optimizer)
    probe.attach(ctx)
    before = {path: p.detach().clone() for path, p in zoo.model.named_parameters()}
    probe.announce(True)
    zoo.model(zoo.example, labels=zoo.example).loss.backward()
    optimizer.step()
    state = {path: p.detach().clone() for path, p in zoo.model.state_dict().items()}
    found = probe.measure(ctx)
    assert found["adam_limit"] == pytest.approx(38 / 0.001)
    assert all(torch.equal(state[path], p) for path, p in zoo.model.state_dict().items())  # the model is not touched

    def loss(c):
        moved = {path: old + c * (state[path] - old) for path, old in before.items()}
        with torch.no_grad():
            zoo.model.eval()
            logits = torch.func.functional_call(zoo.model, moved, (zoo.example[:2],)).logits
            zoo.model.train()
        return float(F.cross_entropy(logits[:, :-1].flatten(0, 1), zoo.example[:2, 1:].flatten()))

    multiples = [0.5, 1.25, 3.125, 7.8125]
    expected = critical_factor(multiples, [loss(c) - loss(0) for c in multiples])
    assert found.get("factor") == (None if expected is None else pytest.approx(expected, rel=1e-8))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_factor_is_that_of_a_slow_version(name):
    zoo = make(name)
    batch = zoo.example[:2]

    def loss(output, given):
        return (output if isinstance(output, torch.Tensor) else output.logits).square().mean()

    def at(c):
        moved = {path: old + c * (new[path] - old) for path, old in before.items()}
        with torch.no_grad():
            return float(loss(torch.func.functional_call(zoo.model, moved, (batch,)), batch))

    zoo.model.eval()
    optimizer = torch.optim.SGD(zoo.model.parameters(), lr=1e-3)
    probe = CriticalSharpness(Every(1), loss=loss)
    probe.attach(StepContext(zoo.model, 0, example=zoo.example, optimizer=optimizer))
    measured = {}
    for step in range(1, 9):  # until the multiples bracket the factor
        probe.announce(True)
        before = {path: p.detach().clone() for path, p in zoo.model.named_parameters()}
        optimizer.zero_grad()
        loss(zoo.model(batch), batch).backward()
        optimizer.step()
        new, multiples = dict(zoo.model.named_parameters()), [probe._factor * c for c in (0.25, 0.625, 1.5625, 3.90625)]
        measured = probe.measure(StepContext(zoo.model, step, example=zoo.example, optimizer=optimizer))
        if "factor" in measured:
            break
    expected = critical_factor(multiples, [at(c) - at(0) for c in multiples])
    assert measured["factor"] == pytest.approx(expected, rel=1e-10)
    assert measured["critical"] == pytest.approx(2 / (1e-3 * expected), rel=1e-10)


def test_a_factor_that_is_not_bracketed_is_none():
    assert critical_factor([1.0, 2.0], [-1.0, -2.0]) is None
    assert critical_factor([1.0, 2.0], [1.0, 2.0]) is None
    assert critical_factor([1.0, 2.0], [float("nan"), 2.0]) is None


def test_the_own_loss_of_a_model_is_used():
    zoo = make("bert")
    example = {"input_ids": zoo.example, "labels": zoo.example}
    output = zoo.model(**example)
    assert torch.equal(default_loss(zoo.model, example)(output, example), output.loss)


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_without_a_loss_the_probe_says_so(name):
    zoo = make(name)
    with pytest.raises(excite.InputError, match="loss=function"):
        CriticalSharpness().attach(StepContext(zoo.model, 0, example=zoo.example))


def test_a_loss_that_is_no_function_is_refused():
    with pytest.raises(excite.InputError, match="expected a function of output and batch; got 3"):
        CriticalSharpness(loss=3)
