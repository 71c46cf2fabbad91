"""Measurements on their way from the probes to the writer."""

import math
import weakref
from collections.abc import Iterator
from threading import Event, get_ident

import pytest
import torch
from torch import nn

from excite._core.background import memoize, submit
from excite.errors import InputError
from excite.monitor.buffer import DeviceScalars, MetricBuffer
from excite.probes import Alignment, Conservation, Every, Probe, Rank, Signs, Trajectory
from excite.probes.base import Deferred, Measurement, StepContext


class Fixed(Probe):
    name = "fixed"


def drained(*measurements: Measurement | None) -> list[object]:
    buffer, probe = MetricBuffer(), Fixed()
    for step, measurement in enumerate(measurements):
        buffer.add(step, probe, measurement)
    buffer.request(len(measurements))
    rows = buffer.drain()
    assert [step for step, _, _ in rows] == list(range(len(rows)))
    return [values for _, _, values in rows]


def test_scalars_are_copies_under_their_full_names() -> None:
    weight = torch.ones(3, requires_grad=True)
    scalars = DeviceScalars.of(Fixed(), {"norm/fc1": weight[0], "count": 3, "share": 0.5})
    with torch.no_grad():
        weight.zero_()
    assert not scalars.on_device
    assert DeviceScalars.fetch([scalars]) == [{"fixed/norm/fc1": 1.0, "fixed/count": 3.0, "fixed/share": 0.5}]


@pytest.mark.parametrize("values", [{"": 1.0}, {"a b\n": 1.0}, {"norm": torch.ones(2)}, {"norm": "large"}])
def test_what_is_not_a_named_number_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(InputError, match="expected"):
        DeviceScalars(values)


def test_rows_keep_the_order_in_which_they_were_added() -> None:
    rows = drained(
        {"a": 1.0}, Deferred(lambda: {"a": 2.0}), Deferred(lambda: {"a": 3.0}, prepare=list), None, {"a": 4.0}
    )
    assert rows == [{"fixed/a": 1.0}, {"fixed/a": 2.0}, {"fixed/a": 3.0}, None, {"fixed/a": 4.0}]


def test_preparation_and_host_work_run_in_the_training_thread() -> None:
    threads: dict[str, int] = {}

    def work(name: str) -> dict[str, float]:
        threads[name] = get_ident()
        return {name: 1.0}

    drained(
        Deferred(lambda: work("background")),
        Deferred(lambda: work("device"), prepare=lambda: work("prepare")),
    )
    drained(Deferred(lambda: work("host"), prepare=list, on_device=False))
    assert threads["prepare"] == threads["host"] == get_ident()
    assert threads["background"] == threads["device"] != get_ident()


def test_an_error_takes_the_place_of_its_values() -> None:
    def fail() -> dict[str, float]:
        raise KeyError("gone")

    kept, *errors = drained({"a": 1.0}, Deferred(fail), Deferred(fail, prepare=list), Deferred(dict, prepare=fail))
    assert kept == {"fixed/a": 1.0}
    assert [type(error) for error in errors] == [KeyError] * 3


def test_fetches_are_due_by_count_steps_or_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock: Iterator[float] = iter([0.0, 0.5, 2.0])
    monkeypatch.setattr("excite.monitor.buffer.time.monotonic", lambda: next(clock))
    buffer, probe = MetricBuffer(), Fixed()
    assert not buffer.due(0)
    buffer.start()
    for _ in range(48):
        buffer.add(1, probe, {"a": 1.0})
    assert buffer.due(1)
    buffer.clear()
    buffer.add(1, probe, {"a": 1.0})
    assert not buffer.due(2)
    assert buffer.due(65)
    assert buffer.due(3)
    assert not buffer.ready(3)
    assert math.isfinite(buffer._time)


def test_memoized_work_is_done_once_and_released() -> None:
    class Big:
        pass

    big = Big()
    held, calls = weakref.ref(big), []

    def work(what: Big = big) -> int:
        calls.append(what.__class__)
        return 3

    get = memoize(work)
    del big, work
    assert held() is not None
    assert [get(), get()] == [3, 3]
    assert len(calls) == 1
    assert held() is None


@pytest.mark.parametrize("probe", [Signs, Rank, Conservation, Alignment, Trajectory])
def test_deferred_values_do_not_hold_the_context(probe: type[Probe], monkeypatch: pytest.MonkeyPatch) -> None:
    """A moment holds the inputs of all layers on the example, and the graph of the loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    one, x, go = probe(Every(1)), torch.randn(6, 4), Event()
    one.attach(StepContext(model, 0, None, x, optimizer))
    model(x).sum().backward()
    optimizer.step()
    now = StepContext(model, 1, torch.ones(()), x, optimizer)
    before = submit(go.wait)  # nothing promised is computed yet
    try:
        with monkeypatch.context() as pretend:  # as on a GPU
            pretend.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
            pretend.setattr("excite.probes.activation_rank.rank.Covariances.apart", True)
            deferred = one.measure(now)
        assert isinstance(deferred, Deferred)
        held = weakref.ref(now)
        del now
        assert held() is None
    finally:
        go.set()
    assert before.result()
    if deferred.prepare is not None:
        deferred.prepare()
    assert deferred.compute()
    one.detach()
