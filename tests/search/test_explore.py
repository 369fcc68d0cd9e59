"""The rest of the budget goes to points that may run, and to none twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.config import TrainingConfig
from autotune.search.explore import explore
from tests.knobs.search_facts import cuda_facts
from tests.search.promises import no_point_is_measured_twice, what_did_not_fit_is_left_alone
from tests.search.simulated_machine import Program
from tests.search.simulated_programs import GIB, LANGUAGE_MODEL, SCENARIOS, TABLE_MODEL
from tests.search.simulated_search import Outcome, SimulatedSearch

NewDirectory = Callable[[], Path]
LANGUAGE_FACTS = SCENARIOS["language model"].facts
FREE_FACTS = cuda_facts(batch_held=False, batch_size=32, dataset_length=100_000, largest_batch_size=2048)
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


def test_what_was_said_of_a_knob_holds_until_a_new_value_of_it_is_tried(new_directory: NewDirectory) -> None:
    search = SimulatedSearch(CPU.program, CPU.facts, new_directory(), budget_seconds=1e6, only=("optimizer_impl",))
    with search.begun() as session:
        session.skipped.update({"loader": "num_workers, optimizer_impl: not moved", "other": "num_workers: not moved"})
        explore(session)
        assert session.skipped == {"other": "num_workers: not moved"}


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


def explored(program: Program, directory: Path, **options: Any) -> tuple[SimulatedSearch, list[dict[str, Any]]]:
    """The search, and the changes of what was run beside the baseline."""
    search = SimulatedSearch(program, LANGUAGE_FACTS, directory, budget_seconds=400.0, **options)
    with search.begun() as session:
        explore(session)
        return search, [dict(session.changes(config)) for config in search.machine.asked("measure")[1:]]


@pytest.mark.parametrize("limit_bytes", [16 * GIB, None])
def test_what_only_saves_memory_is_run_where_the_same_does_not_fit_without(
    limit_bytes: int | None, new_directory: NewDirectory
) -> None:
    names = ("activation_checkpointing", "batch_size")
    search, tried = explored(LANGUAGE_MODEL, new_directory(), only=names, memory_limit_bytes=limit_bytes)
    saved = [int(changes.get("batch_size", 32)) for changes in tried if "activation_checkpointing" in changes]
    usable_bytes = limit_bytes or LANGUAGE_FACTS.machine.gpus[0].total_bytes
    assert saved
    assert not any(search.machine.usable(sized(search, size), usable_bytes) for size in saved)


def sized(search: SimulatedSearch, size: int) -> TrainingConfig:
    return search.space.baseline.replace({"batch_size": size})


def test_a_value_that_lost_clearly_is_not_combined_further(new_directory: NewDirectory) -> None:
    search = SimulatedSearch(LANGUAGE_MODEL, LANGUAGE_FACTS, new_directory(), budget_seconds=400.0)
    with search.begun() as session:
        session.measure(search.space.baseline.replace({"precision": "bf16"}), "compute")
        explore(session)
    later = search.machine.asked("measure")[2:]
    assert later
    assert all(config["precision"] != "as_is" for config in later)


def test_a_value_that_lost_clearly_in_one_trial_alone_gets_a_second_one(new_directory: NewDirectory) -> None:
    program = replace(TABLE_MODEL, load_seconds=0.0)
    search = SimulatedSearch(program, CPU.facts, new_directory(), only=("precision",), budget_seconds=400.0)
    with search.begun() as session:
        bf16 = search.space.baseline.replace({"precision": "bf16"})
        lost = session.measure(bf16, "compute", incumbent=session.baseline_trial())
        assert lost.measurement is not None and lost.measurement.stopped_early
        for _ in range(2):
            explore(session)
        best = session.best()
    assert best is not None and best.config == search.space.baseline
    assert search.machine.asked("measure") == [search.space.baseline, bf16, bf16], "and no third one"


def test_what_takes_more_memory_gets_no_second_trial(new_directory: NewDirectory) -> None:
    search = SimulatedSearch(
        LANGUAGE_MODEL, LANGUAGE_FACTS, new_directory(), only=("precision",), objective="memory", budget_seconds=400.0
    )
    with search.begun() as session:
        lean = session.baseline_trial()
        large = session.measure(search.space.baseline.replace({"precision": "bf16"}), "compute")
        assert lean is not None and lean.measurement is not None and large.measurement is not None
        twice = {"peak_allocated_bytes": 2 * lean.measurement.memory.peak_allocated_bytes}
        grown = large.measurement.memory.model_copy(update=twice)
        measurement = large.measurement.model_copy(update={"memory": grown})
        session.trials[-1] = large.model_copy(update={"measurement": measurement})
        explore(session)
    assert search.machine.asked("measure").count(large.config) == 1


def test_what_other_work_held_back_is_tried_beside_the_best(new_directory: NewDirectory) -> None:
    names = ("precision", "optimizer_impl")
    search = SimulatedSearch(LANGUAGE_MODEL, LANGUAGE_FACTS, new_directory(), only=names, budget_seconds=400.0)
    with search.begun() as session:
        own = search.space.baseline
        fused, bf16 = own.replace({"optimizer_impl": "fused"}), own.replace({"precision": "bf16"})
        search.machine.busy_once = ({"optimizer_impl": "fused"}, 0.4)
        for config in (fused, bf16):
            session.measure(config, "compute", incumbent=session.baseline_trial())
        explore(session)
        best = session.best()
    both = bf16.replace({"optimizer_impl": "fused"})
    assert search.machine.asked("measure")[1:5] == [fused, bf16, fused, both]
    assert best is not None and best.config == both
    assert "note: optimizer_impl=fused: measured once more, since a single trial says that it is much slower" in (
        search.watcher.events
    )


def test_what_lost_at_a_small_batch_may_be_drawn_at_a_large_one(new_directory: NewDirectory) -> None:
    """In bf16 the kernels of this program take three times as long to start, and half as long to run."""
    program = Program(
        sample_seconds=1e-4, launch_seconds=0.01,
        sample_speedups={("precision", "bf16"): 2.0}, launch_speedups={("precision", "bf16"): 0.3},
    )  # fmt: skip
    names = ("precision", "batch_size")
    search = SimulatedSearch(program, FREE_FACTS, new_directory(), only=names, budget_seconds=900.0)
    with search.begun() as session:
        own = search.space.baseline
        session.measure(own.replace({"precision": "bf16"}), "compute", incumbent=session.baseline_trial())
        explore(session)
    again, *later = search.machine.asked("measure")[2:]
    assert again == search.machine.asked("measure")[1]
    drawn = [search.space.micro_batch(one) for one in later if one["precision"] == "bf16"]
    assert drawn
    assert min(drawn) >= 2 * search.space.micro_batch(own)


def test_an_update_that_takes_next_to_nothing_is_not_done_otherwise(new_directory: NewDirectory) -> None:
    program = Program(sample_seconds=0.002, update_seconds=0.0005)
    _, tried = explored(program, new_directory(), only=("optimizer_impl",))
    assert tried == []
