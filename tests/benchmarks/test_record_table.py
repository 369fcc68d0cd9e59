"""A table is recorded whole, whatever interrupts it, and holds what a replayed search asks for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.config import TrainingConfig
from autotune.errors import UserError
from autotune.processes.table import Table, read_table, table_space
from autotune.records import OUT_OF_MEMORY
from autotune.space import build_space
from benchmarks.record_table import (
    HERE,
    PACE,
    REPEATS,
    Recording,
    groups_of,
    points_of,
    read_parts,
    write_hull,
)
from tests.knobs.search_facts import cpu_facts, cuda_facts
from tests.search.simulated_machine import SimulatedMachine
from tests.search.simulated_programs import SCENARIOS
from tests.search.simulated_search import SimulatedSearch

NewDirectory = Callable[[], Path]
SCENARIO = SCENARIOS["language model"]
PARTS = [
    {"batch_size": (16, 128), "precision": ("as_is", "bf16"), "num_workers": (0, 2)},
    {"compile_mode": ("default",), "precision": ("bf16",), "optimizer_impl": ("as_is", "fused"), "num_workers": (0, 2)},
]
POINTS = 13
"""The baseline, eight and four."""
REPEATED = 6
"""Fewer of the best than a whole table has, so that some of these points run once."""
SIZES = {"gpt2": 100, "resnet50": 100, "slow_loader": 100, "small": 100, "small_cpu": 60}


@pytest.fixture(autouse=True)
def some_points_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.record_table.REPEATED", REPEATED)


def recording(directory: Path, seconds: float = 1e6) -> tuple[Recording, SimulatedMachine]:
    """One that has not run; the caller closes its session's study."""
    asked = SimulatedSearch(
        SCENARIO.program,
        SCENARIO.facts,
        directory,
        preset=str(write_hull(directory / "space.toml", PARTS)),
        strategy="exhaustive",
        budget_seconds=seconds,
    )
    session = asked.session()
    session.pace = PACE
    return Recording(session, PARTS, directory / "table.jsonl.gz", "a command"), asked.machine


def recorded(directory: Path, **options: Any) -> tuple[Table, SimulatedMachine]:
    one, machine = recording(directory, **options)
    with one.session.study:
        one.run()
        one.write()
    return read_table(one.path), machine


def measured(table: Table) -> Counter[TrainingConfig]:
    return Counter(one.config for one in table.trials if one.kind == "measure")


def test_a_whole_table_holds_what_a_replayed_search_asks_for(new_directory: NewDirectory) -> None:
    table, machine = recorded(new_directory())
    every_point_is_measured_and_the_best_run_in_further_processes(table)
    each_way_to_compute_a_gradient_is_checked_once_and_each_loader_timed(table)
    assert not machine.asked("soak")


def every_point_is_measured_and_the_best_run_in_further_processes(table: Table) -> None:
    counts = measured(table)
    assert len(counts) == POINTS == table.head.planned_points
    assert Counter(counts.values()) == {1: POINTS - REPEATED - 1, 1 + REPEATS: REPEATED + 1}
    space = table_space(table)
    assert space.points == set(counts) and not space.unchecked
    assert counts[space.baseline] == 1 + REPEATS
    failures = [one.answer.failure for one in table.trials if one.kind == "measure" and one.answer.failure]
    assert {failure.kind in OUT_OF_MEMORY for failure in failures} == {True}
    assert all(len(a.blocks.seconds) >= 4 for one in table.trials if (a := one.answer.measurement))
    assert not any(a.stopped_early for one in table.trials if (a := one.answer.measurement))


def each_way_to_compute_a_gradient_is_checked_once_and_each_loader_timed(table: Table) -> None:
    space = table_space(table)
    checked = Counter(space.gradient_key(one.config) for one in table.trials if one.kind == "parity")
    ran = {space.gradient_key(config) for config in measured(table) if not space.conflict(config)}
    failed = {space.gradient_key(one.config) for one in table.trials if one.kind == "measure" and one.answer.failure}
    assert set(checked) == ran - (failed - set(checked))
    assert set(checked.values()) == {1}
    loaders = {(one.config["batch_size"], one.config["num_workers"]) for one in table.trials if one.kind == "loader"}
    assert loaders == {(16, 2), (32, 2), (128, 2)}


def test_what_is_interrupted_goes_on_and_loses_what_was_in_flight_alone(new_directory: NewDirectory) -> None:
    directory = new_directory()
    one, machine = recording(directory)
    machine.interrupt_at = 9
    with one.session.study, pytest.raises(KeyboardInterrupt):
        one.run()
    again, second = recording(directory)
    with again.session.study:
        again.run()
        again.write()
    table = read_table(again.path)
    assert set(measured(table)) == set(again.points)
    assert len(table.trials) == POINTS + REPEATS * (REPEATED + 1) + len(
        [t for t in table.trials if t.kind != "measure"]
    )
    # A parity check that was interrupted takes the trial with it, of which it is a part.
    assert len(machine.requests) - 1 + len(second.requests) - len(table.trials) in (0, 1)


def test_it_ends_with_its_time_and_the_same_command_goes_on(new_directory: NewDirectory) -> None:
    directory = new_directory()
    first, _ = recorded(directory, seconds=45.0)
    assert 1 < len(measured(first)) < POINTS
    assert first.head.planned_points == POINTS
    whole, _ = recorded(directory)
    assert len(measured(whole)) == POINTS
    assert set(measured(first)) < set(measured(whole))


@pytest.mark.parametrize("name", SIZES)
def test_the_space_files_name_enough_points(name: str, tmp_path: Path) -> None:
    workload: dict[str, Any] = {"dataset_length": 50_000, "optimizer_variants": ("for_loop", "fused")}
    facts = {
        "gpt2": cuda_facts(largest_batch_size=4096, **workload),
        "resnet50": cuda_facts(
            global_batch_size=64, batch_size=64, convolution_ranks=(4,), largest_batch_size=4096, **workload
        ),
        "slow_loader": cuda_facts(global_batch_size=64, batch_size=64, largest_batch_size=4096, **workload),
        "small": cuda_facts(global_batch_size=128, batch_size=128, largest_batch_size=4096, **workload),
        "small_cpu": cpu_facts(batch_size=128, largest_batch_size=4096, **workload),
    }[name]
    parts = read_parts(HERE / "tables" / f"{name}.toml")
    space = build_space(facts, preset=str(write_hull(tmp_path / "space.toml", parts)))
    points = points_of(space, parts)
    assert len(points) == len(set(points)) >= SIZES[name]
    assert points[0] == space.baseline
    compiled = [config for config in points if config["compile_mode"] != "as_is"]
    assert len(compiled) >= 8
    graphs = {
        tuple(one[knob] for knob in one if knob not in ("num_workers", "optimizer_impl", "pin_memory"))
        for one in compiled
    }
    assert len(graphs) <= 14, "each of them is compiled cold"


def test_points_that_share_a_compilation_are_neighbours(new_directory: NewDirectory) -> None:
    one, _ = recording(new_directory())
    with one.session.study:
        groups = list(groups_of(one.session.space, one.points))
    assert sum(map(len, groups)) == POINTS
    compiled = [group for group in groups if group[0]["compile_mode"] != "as_is"]
    assert [len(group) for group in compiled] == [4]
    moved = [config.changes_from(group[0]) for group in groups for config in group]
    assert {name for changes in moved for name in changes} == {"num_workers", "optimizer_impl"}


@pytest.mark.parametrize(
    "text",
    ["", "[[parts]]\nprecision = 3", '[[parts]]\nprecision = ["int4"]', '[[parts]]\nspeed = ["high"]', "parts ="],
)
def test_a_space_file_that_names_no_points_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=r"odd\.toml names no points: "):
        read_parts(path)
