"""Ceilings on a simulated machine: what ran, in few probes, and asked once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from autotune.search.memory import find_ceiling
from tests.knobs.search_facts import cpu_facts, cuda_facts
from tests.search.simulated_machine import RESERVED_OVER_ALLOCATED, Fault, Program
from tests.search.simulated_programs import GIB, MIB
from tests.search.simulated_search import SimulatedSearch

NewDirectory = Callable[[], Path]
PROGRAM = Program(
    sample_seconds=0.0001, constant_bytes=2 * GIB, sample_bytes=700 * MIB,
    memory_shares={("activation_checkpointing", "all"): 0.25},
)  # fmt: skip
FREE = cuda_facts(batch_held=False, dataset_length=100_000, largest_batch_size=4096)


def largest_that_fits(limit_bytes: int, share: float = 1.0) -> int:
    usable = 0.95 * limit_bytes / RESERVED_OVER_ALLOCATED - PROGRAM.constant_bytes
    return int(usable // (PROGRAM.sample_bytes * share))


def test_three_probes_find_the_ceiling_and_none_runs_out_of_memory(new_directory: NewDirectory) -> None:
    search = SimulatedSearch(PROGRAM, FREE, new_directory())
    with search.begun() as session:
        ceiling = find_ceiling(session, search.space.baseline)
    true = largest_that_fits(139 * GIB)
    assert ceiling.largest_batch_size is not None
    assert 0.97 * true <= ceiling.largest_batch_size <= true
    assert ceiling.probes <= 3
    assert ceiling.out_of_memory_count == 0
    assert ceiling.largest_batch_size in {config["batch_size"] for config in search.machine.asked("memory")}
    assert ceiling.bytes_per_sample is not None
    assert abs(ceiling.bytes_per_sample / PROGRAM.sample_bytes - 1) < 0.02
    assert ceiling.peak_allocated_bytes == PROGRAM.peak_bytes(
        search.space.baseline.replace({"batch_size": ceiling.largest_batch_size})
    )


def test_each_memory_class_has_its_own(new_directory: NewDirectory) -> None:
    search = SimulatedSearch(PROGRAM, FREE, new_directory())
    recomputed = search.space.baseline.replace({"activation_checkpointing": "all"})
    with search.begun() as session:
        ceiling = find_ceiling(session, recomputed)
    true = largest_that_fits(139 * GIB, share=0.25)
    assert ceiling.memory_class["activation_checkpointing"] == "all"
    assert ceiling.largest_batch_size is not None
    assert 0.97 * true <= ceiling.largest_batch_size <= true


def test_a_resumed_search_asks_for_no_probe_twice_and_finds_the_same(new_directory: NewDirectory) -> None:
    directory = new_directory()
    with SimulatedSearch(PROGRAM, FREE, directory).begun() as session:
        first = find_ceiling(session, session.space.baseline)
    again = SimulatedSearch(PROGRAM, FREE, directory)
    with again.begun() as session:
        second = find_ceiling(session, session.space.baseline)
    assert again.machine.asked("memory") == []
    assert second.largest_batch_size == first.largest_batch_size


def test_below_a_held_batch_only_its_divisors_are_probed(new_directory: NewDirectory) -> None:
    facts = cuda_facts(global_batch_size=48, batch_size=48, largest_batch_size=4096)
    search = SimulatedSearch(PROGRAM, facts, new_directory(), memory_limit_bytes=20 * GIB)
    with search.begun() as session:
        assert session.baseline is not None
        assert session.baseline["batch_size"] == max(
            size for size in (1, 2, 3, 4, 6, 8, 12, 16, 24, 48) if size <= largest_that_fits(20 * GIB)
        )
    assert all(48 % int(config["batch_size"]) == 0 for config in search.machine.asked("memory"))


def test_what_a_trial_found_too_large_is_the_end_and_keeps_its_kind(new_directory: NewDirectory) -> None:
    search = SimulatedSearch(PROGRAM, FREE, new_directory(), memory_limit_bytes=40 * GIB)
    with search.begun() as session:
        session.measure(search.space.baseline.replace({"batch_size": 128}), "explore")
        ceiling = find_ceiling(session, search.space.baseline)
    assert all(int(config["batch_size"]) < 128 for config in search.machine.asked("memory"))
    assert ceiling.smallest_failed_batch_size == 128
    assert ceiling.failure_kind == "device_oom"


def test_where_memory_has_no_limit_the_data_set_is_the_end(new_directory: NewDirectory) -> None:
    facts = cpu_facts(batch_held=False, dataset_length=500, largest_batch_size=500)
    search = SimulatedSearch(PROGRAM, facts, new_directory())
    with search.begun() as session:
        ceiling = find_ceiling(session, search.space.baseline)
    assert ceiling.largest_batch_size == 500
    assert ceiling.smallest_failed_batch_size is None
    assert ceiling.bytes_per_sample is None, "a CPU process shows no slope"


def test_a_step_that_takes_too_long_ends_the_search_for_larger_batches(new_directory: NewDirectory) -> None:
    facts = cpu_facts(batch_held=False, batch_size=4, dataset_length=5000, largest_batch_size=4096)
    search = SimulatedSearch(Program(sample_seconds=0.05), facts, new_directory(), budget_seconds=100.0)
    with search.begun() as session:
        ceiling = find_ceiling(session, search.space.baseline)
    assert ceiling.largest_batch_size == 64
    assert ceiling.stopped_because == "a step of 64 takes 3.2 s, too long for this budget"


def test_a_size_that_dies_of_something_else_is_no_out_of_memory(new_directory: NewDirectory) -> None:
    program = replace(PROGRAM, faults=(Fault("memory", {"batch_size": 64}, "crash"),))
    facts = cpu_facts(batch_held=False, batch_size=32, dataset_length=500, largest_batch_size=500)
    search = SimulatedSearch(program, facts, new_directory())
    with search.begun() as session:
        ceiling = find_ceiling(session, search.space.baseline)
    assert ceiling.smallest_failed_batch_size == 64
    assert ceiling.failure_kind == "crash"
    assert ceiling.out_of_memory_count == 0
