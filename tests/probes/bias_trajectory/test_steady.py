"""Steadiness while a run goes on: the same as `excite.bounds.steadiness` says of the updates afterwards."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import excite
from excite.bounds import steadiness
from excite.probes import Every, PowersOfTwo, Trajectory
from excite.probes.bias_trajectory.steady import MAX_BLOCKS, Steady
from excite.probes.bias_trajectory.windows import Sums
from models import build

CPU = torch.device("cpu")
both = pytest.mark.parametrize("plain", [True, False], ids=["numbers", "tensors"])


def curves(length):
    """Updates of runs that calm down, grow, or do neither."""
    generator = np.random.default_rng(0)
    noise = generator.exponential(size=length)
    times = np.arange(length) / length
    return [noise * np.exp(-3 * times), noise * np.exp(3 * times), noise, np.ones(length), np.sort(noise)[::-1]]


def numbers(found):
    return float(found["phi"]), float(found["tau"])


@both
@pytest.mark.parametrize("every", [1, 50])
def test_nothing_is_lost_before_windows_are_merged(plain, every):
    for updates in curves(MAX_BLOCKS):
        steady = Steady(CPU, plain=plain)
        for n in range(1, MAX_BLOCKS + 1):
            phi, tau = numbers(steady.add(n * every, updates[n - 1]))
            expected = steadiness(updates[:n])
            assert (phi, tau) == (expected.phi, expected.tau * every)


@both
def test_merged_windows_are_exact_to_a_block_and_never_too_high(plain):
    for updates in curves(3000):
        steady = Steady(CPU, plain=plain)
        for n in range(1, len(updates) + 1):
            phi, tau = numbers(steady.add(n, updates[n - 1]))
            if n % 37 and n < len(updates):
                continue
            block = 2 ** max(0, math.ceil(math.log2(n / MAX_BLOCKS)))
            assert block <= max(1, n / 128)
            truth = steadiness(updates[:n])
            assert truth.phi <= phi <= truth.after(max(0, n // 2 - block))
            assert truth.since(phi) <= tau < truth.since(phi) + block
            assert tau <= n / 2
            assert updates[int(tau) : n].max() <= phi
        assert len(steady._ends) <= MAX_BLOCKS


@both
def test_windows_without_an_update_do_not_count(plain):
    updates = curves(100)[0]
    gone = np.arange(100) % 3 == 1
    steady = Steady(CPU, plain=plain)
    for n in range(1, 101):
        found = numbers(steady.add(n, math.nan if gone[n - 1] else updates[n - 1]))
    expected = steadiness(np.where(gone, 0.0, updates))
    assert found == (expected.phi, expected.tau)
    steady = Steady(CPU, plain=plain)
    assert all(map(math.isnan, numbers(steady.add(1, math.nan))))  # nothing is known
    assert numbers(steady.add(2, 3.0)) == (3.0, 0)
    for n in range(3, 7):
        found = numbers(steady.add(n, math.nan))
    assert all(map(math.isnan, found))  # nothing in the last half
    assert numbers(steady.add(7, 0.0)) == (0.0, 2)


@both
def test_the_last_half_is_one_of_steps_whatever_the_windows(plain):
    """At powers of two the last half of the steps is one window, not half of the windows."""
    steady = Steady(CPU, plain=plain)
    for step, largest in ((1, 9.0), (2, 5.0), (4, 7.0), (8, 3.0), (16, 4.0)):
        found = numbers(steady.add(step, largest))
    assert found == (4.0, 4)


@both
@pytest.mark.parametrize("other", [True, False])
def test_a_restart_changes_nothing(plain, other):
    """Also from one device to another."""
    updates = curves(1200)[0]
    whole, first = Steady(CPU, plain=plain), Steady(CPU, plain=other)
    for n in range(1, 701):
        whole.add(n, updates[n - 1])
        first.add(n, updates[n - 1])
    second = Steady(CPU, plain=plain)
    second.load_state_dict(first.state_dict())
    for n in range(701, 1201):
        assert numbers(second.add(n, updates[n - 1])) == numbers(whole.add(n, updates[n - 1]))


@pytest.mark.slow
def test_nothing_waits_for_a_device():
    """On "meta" tensors have no values, so whoever asks for one fails."""
    meta = torch.device("meta")
    steady, sums = Steady(meta, plain=False), Sums(meta)
    for n in range(1, MAX_BLOCKS + 3):  # with one merge
        sums.add(torch.ones(4, device=meta), torch.ones(4, device=meta))
        found = steady.add(n, sums.read()["max"])
    assert all(value.device == meta and value.shape == () for value in found.values())
    steady.state_dict()


def run(folder, steps, probe, stop=None):
    """A small training; what was measured by name. `stop`: with a restart after so many steps."""
    model, x = build("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    y = torch.randn(len(x), 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    state, found = None, {}
    for first, last in [(0, stop), (stop, steps)] if stop else [(0, steps)]:
        with excite.watch(model, x, folder / str(first), optimizer, [probe()], strict=True) as watch:
            if state is not None:
                watch.load_state_dict(state)
            for _ in range(first, last):
                optimizer.zero_grad()
                loss = (model(x) - y).square().mean()
                loss.backward()
                optimizer.step()
                watch.step(loss)
            state = watch.state_dict()
        part = excite.load_run(folder / str(first))
        for name in part.names():
            found.setdefault(name, []).append(part.series(name))
    return {name: [np.concatenate(column) for column in zip(*parts)] for name, parts in found.items()}


@pytest.mark.parametrize("passes", ["all", "measured"])
def test_the_probe_writes_what_its_maxima_say(tmp_path, passes):
    series = run(tmp_path / "run", 60, lambda: Trajectory(Every(3), passes=passes))
    steps, maxima = series["trajectory/max/0"]
    for key in ("phi", "tau"):
        assert series[f"trajectory/{key}/0"][0].tolist() == steps.tolist()
    for n in range(1, len(maxima) + 1):
        expected = steadiness(maxima[:n])
        assert series["trajectory/phi/0"][1][n - 1] == expected.phi
        assert series["trajectory/tau/0"][1][n - 1] == 3 * expected.tau
    again = run(tmp_path / "again", 60, lambda: Trajectory(Every(3), passes=passes), stop=31)
    for key in ("phi", "tau"):
        steps, values = again[f"trajectory/{key}/0"]
        assert (
            values[steps != 31].tolist() == series[f"trajectory/{key}/0"][1].tolist()
        )  # 31: measured when the first was closed


def test_watch_measures_it_with_any_schedule(tmp_path):
    model, x = build("mlp")
    with excite.watch(model, x, tmp_path / "run", every=PowersOfTwo()) as watch:
        for _ in range(4):
            loss = model(x).square().mean()
            loss.backward()
            watch.step(loss)
    names = excite.load_run(tmp_path / "run").names()
    assert {"trajectory/phi/0", "trajectory/tau/0"} <= set(names)


def test_checkpoints_of_before_load(tmp_path):
    probe = Trajectory(Every(1))
    model, x = build("mlp")
    with excite.watch(model, x, tmp_path / "run", probes=[probe], strict=True) as watch:
        state = watch.state_dict()
        del state["probes"]["trajectory"]["steady"]
        watch.load_state_dict(state)
        model(x).square().mean().backward()
        watch.step()
    steps, values = excite.load_run(tmp_path / "run").series("trajectory/mean/0")
    assert len(steps) == 1
    assert values[0] > 0
