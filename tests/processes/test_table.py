"""The file of a recorded table, and the space of what it can answer for."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from autotune.config import TrainingConfig
from autotune.processes.replay import RecordedTrial
from autotune.processes.table import NOT_RECORDED, UNCHECKED, Table, read_table, table_space, write_table
from tests.processes.simulated_table import simulated_table

FEW = {"batch_size": (16, 32, 64), "precision": ("as_is", "bf16"), "num_workers": (0, 2)}
TABLE, _ = simulated_table(values=FEW)
BASELINE = table_space(TABLE).baseline


def lines_of(path: Path) -> list[str]:
    return gzip.decompress(path.read_bytes()).decode().splitlines()


def with_trials(trials: list[RecordedTrial]) -> Table:
    return Table(TABLE.head, tuple(trials))


def test_a_table_is_read_as_it_was_written_and_written_as_it_was_read(tmp_path: Path) -> None:
    path, again = tmp_path / "deep" / "one.jsonl.gz", tmp_path / "two.jsonl.gz"
    write_table(path, TABLE)
    assert read_table(path) == TABLE
    write_table(again, read_table(path))
    assert again.read_bytes() == path.read_bytes()
    assert sorted(tmp_path.rglob("*.part")) == []


def test_raw_blocks_and_memory_marks_are_in_every_line_that_ran(tmp_path: Path) -> None:
    write_table(tmp_path / "t.jsonl.gz", TABLE)
    measured = [json.loads(line) for line in lines_of(tmp_path / "t.jsonl.gz")[1:] if '"measurement"' in line]
    assert len(measured) == 12
    for line in measured:
        assert len(line["answer"]["measurement"]["blocks"]["seconds"]) >= 4
        assert line["answer"]["measurement"]["memory"]["peak_allocated_bytes"] > 0


@pytest.mark.parametrize("cut", [0, 40, 2000])
def test_half_a_file_is_refused(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "t.jsonl.gz"
    write_table(path, TABLE)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ValueError, match=r"t\.jsonl\.gz is no recorded table"):
        read_table(path)


def test_a_line_that_is_none_says_up_to_where_the_file_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    write_table(path, TABLE)
    lines = lines_of(path)
    path.write_bytes(gzip.compress("\n".join([*lines[:3], "{}", *lines[3:]]).encode()))
    with pytest.raises(ValueError, match="is no recorded table after 2 trials"):
        read_table(path)


def test_a_knob_that_came_after_the_recording_stands_at_its_baseline(tmp_path: Path) -> None:
    def older(config: TrainingConfig) -> TrainingConfig:
        return TrainingConfig({name: value for name, value in config.items() if name != "prefetch_factor"})

    trials = [trial.model_copy(update={"config": older(trial.config)}) for trial in TABLE.trials]
    write_table(tmp_path / "t.jsonl.gz", with_trials(trials))
    assert read_table(tmp_path / "t.jsonl.gz") == TABLE


def test_the_space_is_that_of_what_was_measured() -> None:
    space = table_space(TABLE)
    assert {name: space.choices[name] for name in space.varied} == FEW
    assert len(space.points) == 12
    assert all(space.conflict(config) is None for config in space.points)
    assert space.facts.largest_batch_size == 64


def test_what_was_not_recorded_is_refused_and_counted() -> None:
    hole = BASELINE.replace({"precision": "bf16", "batch_size": 64})
    space = table_space(with_trials([one for one in TABLE.trials if one.config != hole]))
    assert space.conflict(hole) == NOT_RECORDED
    assert space.conflict(hole.replace({"compile_scope": "step"})) is not None
    assert space.holes == {hole: NOT_RECORDED}
    assert space.probe_sizes(hole) == [16, 32]
    assert space.probe_sizes(BASELINE) == [16, 32, 64]


def test_a_rate_without_a_parity_check_is_no_point() -> None:
    bf16 = BASELINE.replace({"precision": "bf16"})
    without = [one for one in TABLE.trials if one.kind != "parity" or one.config["precision"] == "as_is"]
    space = table_space(with_trials(without))
    assert space.conflict(bf16) == UNCHECKED
    assert space.unchecked == {config for config in table_space(TABLE).points if config["precision"] == "bf16"}
    assert space.choices["precision"] == ("as_is",)
    assert space.conflict(BASELINE.replace({"num_workers": 0})) is None


def test_a_table_without_the_users_own_program_is_refused() -> None:
    with pytest.raises(ValueError, match="the table simulated has no record of the user's own program"):
        table_space(with_trials([one for one in TABLE.trials if one.config != BASELINE]))
