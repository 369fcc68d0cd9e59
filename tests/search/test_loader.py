"""Workers are predicted from the loader alone, and as few are taken as give as much."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.search.loader import search_loader
from tests.knobs.search_facts import cpu_facts
from tests.search.simulated_machine import Fault, Program
from tests.search.simulated_search import SimulatedSearch

NewDirectory = Callable[[], Path]
QUIET = {"process_spread": 0.002, "block_spread": 0.002}


def moved(
    program: Program, directory: Path, *, cores: int, workers: int = 0, **options: Any
) -> tuple[int, list[int], list[str]]:
    """The number that leads in the end, those that were run, and what was said of what was not."""
    facts = cpu_facts(global_batch_size=32, num_workers=workers, machine_changes={"usable_cores": cores})
    search = SimulatedSearch(program, facts, directory, **options)
    with search.begun() as session:
        start = session.baseline_trial()
        assert start is not None
        leader = search_loader(session, start)
        ran = [int(config["num_workers"]) for config in search.machine.asked("measure")[1:]]
        return int(leader.config["num_workers"]), ran, list(session.skipped.values())


def test_as_many_as_the_step_needs_in_few_trials(new_directory: NewDirectory) -> None:
    """A step takes 1000 samples a second and one worker gives 270."""
    best, ran, _ = moved(Program(sample_seconds=0.001, load_seconds=1 / 270, **QUIET), new_directory(), cores=16)
    assert best == 4
    assert len(ran) <= 4
    assert 1 not in ran, "one alone is known not to be enough"


def test_no_more_are_tried_where_one_is_plenty(new_directory: NewDirectory) -> None:
    """A step takes 1000 samples a second and one worker gives 1800: all that it gains is that batches are made beside the
    step. On a noisy machine a second one seems to gain now and then."""
    program = Program(sample_seconds=0.001, load_seconds=1 / 1800, process_spread=0.1, block_spread=0.02)
    for seed in range(5):
        best, ran, _ = moved(program, new_directory(), cores=16, seed=seed)
        assert best in (0, 1)
        assert ran in ([], [1])


@pytest.mark.parametrize(("load_seconds", "expected"), [(1 / 270, [6]), (1e-4, [])])
def test_time_kept_for_the_confirmation_goes_into_workers_only_where_they_are_sure_to_gain_much(
    load_seconds: float, expected: list[int], new_directory: NewDirectory
) -> None:
    program = Program(sample_seconds=0.001, load_seconds=load_seconds, **QUIET)
    search = SimulatedSearch(program, cpu_facts(machine_changes={"usable_cores": 16}), new_directory())
    with search.begun() as session:
        start = session.baseline_trial()
        assert start is not None
        session.probe("loader", start.config.replace({"num_workers": 1}))
        session.budget.reserved_seconds = session.budget.left()
        search_loader(session, start)
        assert [config["num_workers"] for config in search.machine.asked("measure")[1:]] == expected


def test_where_the_loader_keeps_up_nothing_is_tried(new_directory: NewDirectory) -> None:
    best, ran, skipped = moved(Program(sample_seconds=0.001, load_seconds=1e-6, **QUIET), new_directory(), cores=16)
    assert (best, ran) == (0, [])
    assert skipped == ["num_workers: nothing further was tried, since the loader gives 100 % of what the step takes"]


def test_fewer_are_taken_where_they_give_as_much(new_directory: NewDirectory) -> None:
    """The user has 12; the step waits a little because they crowd the cores, and 2 would do."""
    program = Program(sample_seconds=0.001, load_seconds=1 / 900, **QUIET)
    best, _, _ = moved(program, new_directory(), cores=4, workers=12)
    assert best in (2, 3)


def test_workers_that_only_crowd_the_cores_are_left(new_directory: NewDirectory) -> None:
    program = Program(sample_seconds=0.01, load_seconds=0.0006, **QUIET)
    best, _, _ = moved(program, new_directory(), cores=1)
    assert best in (0, 1)


def test_a_loader_that_cannot_run_alone_is_left_as_it_is_and_said(new_directory: NewDirectory) -> None:
    fault = Fault("loader", {"num_workers": 1}, "user_error")
    program = replace(Program(sample_seconds=0.001, load_seconds=0.004), faults=(fault,))
    best, ran, skipped = moved(program, new_directory(), cores=4)
    assert (best, ran) == (0, [])
    assert skipped == ["num_workers: it fails with {'num_workers': 1}"]


def test_workers_that_die_leave_what_worked(new_directory: NewDirectory) -> None:
    fault = Fault("measure", {"num_workers": 6}, "shared_memory")
    program = replace(Program(sample_seconds=0.001, load_seconds=1 / 270, **QUIET), faults=(fault,))
    best, ran, _ = moved(program, new_directory(), cores=16)
    assert best == 4
    assert max(ran) == 6, "more of what failed is not tried"


def test_for_less_memory_no_worker_is_tried(new_directory: NewDirectory) -> None:
    program = Program(sample_seconds=0.001, load_seconds=0.004)
    assert moved(program, new_directory(), cores=4, objective="memory") == (0, [], [])


def test_what_is_known_of_the_loader_is_told_once(new_directory: NewDirectory) -> None:
    program = Program(sample_seconds=0.001, load_seconds=1 / 270, **QUIET)
    facts = cpu_facts(global_batch_size=32, machine_changes={"usable_cores": 2})
    search = SimulatedSearch(program, facts, new_directory())
    with search.begun() as session:
        start = session.baseline_trial()
        assert start is not None
        leader = search_loader(session, start)
        told = list(search.watcher.events)
        assert sum("to try" in event for event in told) == 1
        search_loader(session, leader)
        assert search.watcher.events == [*told, "stage: loader"]
