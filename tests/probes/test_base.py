"""The context that probes measure in, and earlier names of the protocol."""

import pytest
import torch
from torch import nn

import excite
from excite.errors import InputError
from excite.probes import Every, Probe, StepContext, base


def test_layers_are_captured_once_for_all_probes() -> None:
    calls = []
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    model.register_forward_hook(lambda *_: calls.append(1))
    ctx = StepContext(model, 0, example=torch.randn(5, 3))
    assert [signal.layer for signal in ctx.signals] == ["0", "2"]
    assert ctx.signals is ctx.signals
    assert torch.equal(ctx.output, model(ctx.example))
    assert len(calls) == 2


def test_parameters_are_named_once_for_all_probes() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    ctx = StepContext(torch.compile(model), 0)  # type: ignore[arg-type]
    assert list(ctx.parameters) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert ctx.parameters is ctx.parameters
    assert ctx.parameters["0.weight"] is model[0].weight


def test_without_an_example_there_are_no_layers() -> None:
    ctx = StepContext(nn.Linear(2, 1), 0)
    for read in (lambda: ctx.signals, ctx.wiring):
        with pytest.raises(InputError, match="needs an example batch"):
            read()


def test_earlier_names_still_work() -> None:
    for module, old, new in ((excite.probes, "Moment", StepContext), (base, "Moment", StepContext)):
        with pytest.warns(DeprecationWarning, match="StepContext"):
            assert getattr(module, old) is new
    with pytest.warns(DeprecationWarning, match="LedgerReport"):
        assert excite.probes.Reading is excite.probes.LedgerReport
    with pytest.raises(AttributeError, match="no attribute"):
        _ = excite.probes.Instant


def test_a_probe_has_to_measure() -> None:
    class Empty(Probe):
        name = "empty"

    with pytest.raises(NotImplementedError, match="Empty has to define measure"):
        Empty(Every(2)).measure(StepContext(nn.Linear(2, 1), 0))
