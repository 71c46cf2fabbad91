"""Budget: how often a share of the training time pays for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from excite import InputError
from excite.probes import Budget, Every, PowersOfTwo
from excite.probes.schedules import as_schedule


def simulate(budget, step_time, cost, steps):
    """Steps measured, and the seconds that training and measuring took; costs are functions of the step."""
    measured, spent, trained = [], 0.0, 0.0
    for step in range(steps + 1):
        trained += step_time(step) if step else 0.0
        if budget.due(step):
            measured.append(step)
            now = cost(step)
            spent += now
            budget.next = budget.plan(step, step, now, spent, trained)
    return measured, spent, trained


@pytest.mark.slow
@given(
    share=st.floats(0.005, 0.3), step_time=st.floats(1e-4, 1.0), relative=st.floats(0.001, 20.0),
)  # fmt: skip
def test_the_share_is_kept(share, step_time, relative):
    cost = relative * step_time
    measured, spent, trained = simulate(Budget(share, max_steps=10**6), lambda _: step_time, lambda _: cost, 5000)
    assert measured[:2] == [0, 1]
    # One measurement may be too much at the start: the one before training and the one that tells what a step takes.
    assert spent <= share * trained + 2 * cost + 1e-9
    # And it is used: no fewer measurements than the share pays for, but for the rounding up of each wait.
    assert len(measured) >= min(5000, share * trained / cost) * share * step_time / (cost + share * step_time) * 0.5 - 3


@pytest.mark.parametrize("slow", [1, 3, 8])
def test_slow_first_steps_pay_for_nothing(slow):
    """Compiling and choosing kernels are no training: but for one measurement at each of these steps, when nothing else is
    known yet, what is spent is what a training without them pays for."""
    measured, spent, _trained = simulate(
        Budget(0.05), lambda step: 10.0 if 0 < step <= slow else 0.01, lambda _: 0.01, 2000
    )
    assert spent <= 0.05 * 2000 * 0.01 + (2 + 2 * slow) * 0.01
    assert sum(step <= 100 for step in measured) <= 2 + 2 * slow + 100 * 0.05
    assert len(measured) >= 0.5 * 0.05 * 2000, "and it is used"


def test_a_long_pause_pays_for_nothing_and_slower_steps_for_more():
    pause, _, _ = simulate(Budget(0.05), lambda step: 600.0 if step == 500 else 0.01, lambda _: 0.01, 2000)
    assert sum(500 <= step < 600 for step in pause) <= 6
    slower, _, _ = simulate(Budget(0.05), lambda step: 0.01 if step < 100 else 0.1, lambda _: 0.01, 3000)
    assert sum(step > 2000 for step in slower) >= 300, "of 500 that they pay for"


def test_a_budget_that_is_used_again_forgets_the_training_before():
    budget = Budget(0.05)
    simulate(budget, lambda _: 10.0, lambda _: 0.01, 50)
    budget.next = 0
    _measured, spent, trained = simulate(budget, lambda _: 0.01, lambda _: 0.01, 2000)
    assert spent <= 0.05 * trained + 3 * 0.01


def test_however_expensive_there_is_a_minimum():
    measured, _, _ = simulate(Budget(0.01, max_steps=100), lambda _: 0.001, lambda _: 60.0, 1000)
    assert measured == [0, *range(1, 1001, 100)]


def test_schedules_are_checked():
    for share in (0, 1, -0.1, "3%", True):
        with pytest.raises(InputError, match="expected a fraction of the training time"):
            Budget(share)
    assert as_schedule(5) == Every(5)
    assert as_schedule(PowersOfTwo()) == PowersOfTwo()
    for wrong in ("often", True, Budget, 2.5):
        with pytest.raises(InputError, match="every: expected a number of steps or a schedule"):
            as_schedule(wrong)
