"""The budget counts seconds of its clock and trials, and keeps the reserve."""

from __future__ import annotations

import pytest

from autotune.search.budget import Budget


class Clock:
    """Stands where it is put."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_time_counts_from_the_beginning_and_may_be_overrun() -> None:
    clock = Clock()
    budget = Budget(60.0, None, clock)
    clock.now += 45
    assert (budget.elapsed(), budget.left()) == (45.0, 15.0)
    clock.now += 20
    assert budget.left() == -5.0
    assert not budget.allows(0.0)


@pytest.mark.parametrize(("seconds", "allowed"), [(29.0, True), (31.0, False)])
def test_the_reserve_is_kept_free(seconds: float, allowed: bool) -> None:
    budget = Budget(60.0, None, Clock())
    budget.reserved_seconds = 30.0
    assert budget.allows(seconds) == allowed


def test_no_trial_is_allowed_beyond_the_number() -> None:
    budget = Budget(60.0, 2, Clock())
    for _ in range(2):
        assert budget.allows(1.0)
        budget.spend_trial()
    assert not budget.allows(1.0)
    budget.spend_trial()
    assert not budget.allows(1.0), "more trials than allowed are in the study already"


def test_without_a_number_trials_are_not_counted() -> None:
    budget = Budget(60.0, None, Clock())
    for _ in range(100):
        budget.spend_trial()
    assert budget.allows(1.0)
