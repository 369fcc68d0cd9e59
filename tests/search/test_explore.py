"""The rest of the budget goes to points that may run, and to none twice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from autotune.search.explore import explore
from tests.search.promises import no_point_is_measured_twice, what_did_not_fit_is_left_alone
from tests.search.simulated_programs import SCENARIOS
from tests.search.simulated_search import Outcome, SimulatedSearch

NewDirectory = Callable[[], Path]
CPU, SMALL_CARD = SCENARIOS["tables on a CPU"], SCENARIOS["language model in 16 GiB"]


def test_proposals_run_until_the_reserve(new_directory: NewDirectory) -> None:
    search = SimulatedSearch(CPU.program, CPU.facts, new_directory(), budget_seconds=200.0, preset="quick")
    with search.begun() as session:
        session.budget.reserved_seconds = 80.0
        count = explore(session)
    assert count == len(search.machine.asked("measure")) - 1 > 10
    assert 100 < search.machine.now_seconds < 121


def test_a_space_that_is_used_up_ends_it(new_directory: NewDirectory) -> None:
    search = SimulatedSearch(CPU.program, CPU.facts, new_directory(), budget_seconds=1e6, only=("optimizer_impl",))
    with search.begun() as session:
        explore(session)
    assert len(search.machine.asked("measure")) == len(search.space.choices["optimizer_impl"])


def test_nothing_to_vary_is_no_endless_loop(new_directory: NewDirectory) -> None:
    search = SimulatedSearch(
        CPU.program, CPU.facts, new_directory(), budget_seconds=1e6, only=("batch_size",), fixed={"batch_size": 16}
    )
    with search.begun() as session:
        assert explore(session) == 0


def test_no_more_trials_than_allowed(new_directory: NewDirectory) -> None:
    search = SimulatedSearch(CPU.program, CPU.facts, new_directory(), budget_seconds=1e6, trials=4)
    with search.begun() as session:
        assert explore(session) == 3


def test_the_region_that_does_not_fit_is_approached_from_below(new_directory: NewDirectory) -> None:
    search = SimulatedSearch(
        SMALL_CARD.program, SMALL_CARD.facts, new_directory(), memory_limit_bytes=SMALL_CARD.memory_limit_bytes,
        budget_seconds=400.0,
    )  # fmt: skip
    with search.begun() as session:
        explore(session)
        outcome = Outcome(search, session, None, None, False)  # type: ignore[arg-type]  # what the checks below read
        no_point_is_measured_twice(outcome)
        what_did_not_fit_is_left_alone(outcome)
    largest = 4
    for request, answer in list(zip(search.machine.requests, search.machine.answers, strict=True)):
        if request.kind == "measure" and search.space.micro_batch(request.config) != 32:
            assert search.space.micro_batch(request.config) <= 2 * largest
        if answer.failure is None:
            largest = max(largest, search.space.micro_batch(request.config))


def test_what_an_earlier_call_left_running_comes_first(new_directory: NewDirectory) -> None:
    directory = new_directory()
    first = SimulatedSearch(CPU.program, CPU.facts, directory)
    lost = first.space.baseline.replace({"num_workers": 3, "batch_size": 48})
    session = first.session()
    session.study.begin(lost)
    session.study.close()
    again = SimulatedSearch(CPU.program, CPU.facts, directory, budget_seconds=30.0)
    with again.begun() as session:
        explore(session)
    assert again.machine.asked("measure")[1] == lost
