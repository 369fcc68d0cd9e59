"""Recorded tables: the points of a space, each measured on one machine, in one file; and the space that they make."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from autotune.config import TrainingConfig, Value
from autotune.knobs.registry import KNOBS, batch_knob
from autotune.processes.replay import RecordedTrial
from autotune.records import SCHEMA_VERSION, Conditions, MachineFacts, Record, SearchFacts, WorkloadFacts
from autotune.space import SearchSpace

NOT_RECORDED = "the table has no record of it"
UNCHECKED = "the table does not say whether it trains the same"


class TableHead(Record):
    """Where a table comes from, and under which conditions its answers hold. The first line of its file."""

    schema_version: int = SCHEMA_VERSION
    name: str
    command: str
    machine: MachineFacts
    workload: WorkloadFacts
    conditions: Conditions
    choices: dict[str, tuple[Value, ...]]
    """The space whose points were to be measured: knob name to values."""
    planned_points: int
    """How many of its points were to be measured; fewer where the recording was cut off."""
    block_seconds: float
    """How long a timed block was made, at least."""
    autotune_version: str


@dataclass(frozen=True)
class Table:
    """All that was recorded. Configurations hold every knob of today: one that came later stands at its baseline."""

    head: TableHead
    trials: tuple[RecordedTrial, ...]

    @property
    def facts(self) -> SearchFacts:
        """What knobs may look at. No batch is larger than the table's largest."""
        return search_facts(self.head, [trial.config for trial in self.trials])


def search_facts(head: TableHead, configs: Iterable[TrainingConfig]) -> SearchFacts:
    """The facts of the machine and workload of a table that holds these configurations."""
    name = batch_knob().name
    return SearchFacts(
        machine=head.machine,
        workload=head.workload,
        device=head.conditions.device,
        global_batch_size=head.conditions.global_batch_size,
        largest_batch_size=max([int(config[name]) for config in configs], default=head.workload.batch_size),
    )


# --- the file ---------------------------------------------------------------------------------------------------------


def write_table(path: Path, table: Table) -> None:
    """Gzip'd JSON, one object a line: the head, then what was recorded. The file is there whole or not at all."""
    lines = [table.head.model_dump(mode="json")]
    lines += [
        {
            "kind": one.kind,
            "config": dict(one.config),
            "answer": one.answer.model_dump(mode="json", exclude_defaults=True),
        }
        for one in table.trials
    ]
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f"{path.name}.part")
    written.write_bytes(gzip.compress(text.encode(), mtime=0))
    os.replace(written, path)


def read_table(path: Path) -> Table:
    """What `write_table` wrote. Raises ValueError that says up to where it can be read."""
    try:
        lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no recorded table: {error}") from error
    recorded: list[RecordedTrial] = []
    try:
        head = TableHead.model_validate_json(lines[0])
        for line in lines[1:]:
            recorded.append(RecordedTrial.model_validate_json(line))
    except (ValueError, IndexError) as error:
        raise ValueError(f"{path} is no recorded table after {len(recorded)} trials: {error}") from error
    baseline = _baseline(search_facts(head, [trial.config for trial in recorded]))
    whole = (one.model_copy(update={"config": TrainingConfig({**baseline, **one.config})}) for one in recorded)
    return Table(head, tuple(whole))


def _baseline(facts: SearchFacts) -> TrainingConfig:
    return TrainingConfig({knob.name: knob.baseline(facts) for knob in KNOBS})


# --- its space --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TableSpace(SearchSpace):
    """The space that a table can answer for: whatever else a search thinks of conflicts, and is counted in `holes`."""

    points: frozenset[TrainingConfig] = frozenset()
    unchecked: frozenset[TrainingConfig] = frozenset()
    """Measured, and not among the points, since no parity check says what their rates are worth."""
    holes: dict[TrainingConfig, str] = field(default_factory=dict, compare=False)
    """What was asked for and is no point, with the reason; grows while a search runs."""

    def conflict(self, config: TrainingConfig) -> str | None:
        """As in the space that was recorded, and also where nothing was."""
        if config in self.points:
            return None
        reason = super().conflict(config)
        if reason is None:
            reason = self.holes[config] = UNCHECKED if config in self.unchecked else NOT_RECORDED
        return reason

    def probe_sizes(self, config: TrainingConfig) -> Sequence[int]:
        """Those that were recorded: what lies between them is not known."""
        beside = (config.replace({self.batch_name: size}) for size in self.batch_sizes)
        return [self.micro_batch(one) for one in beside if one in self.points]


def table_space(table: Table) -> TableSpace:
    """The space of a table's points: what was measured, and is known to train the same or not to.

    Raises ValueError where the user's own program is not among them.
    """
    facts = table.facts
    baseline = _baseline(facts)
    plain = SearchSpace(facts=facts, choices={}, baseline=baseline, start=baseline)
    checked = {plain.gradient_key(one.config) for one in table.trials if one.kind == "parity"}
    measured = [one for one in table.trials if one.kind == "measure"]
    ran = {one.config for one in measured if one.answer.measurement is not None}
    own = plain.numerics_key(baseline)
    unchecked = frozenset(
        one for one in ran if plain.gradient_key(one) not in checked and plain.numerics_key(one) != own
    )
    points = frozenset(one.config for one in measured) - unchecked
    if baseline not in points:
        raise ValueError(f"the table {table.head.name} has no record of the user's own program: {dict(baseline)}")
    return TableSpace(
        facts=facts,
        choices=_choices(points, facts),
        baseline=baseline,
        start=baseline,
        points=points,
        unchecked=unchecked,
    )


def _choices(points: Iterable[TrainingConfig], facts: SearchFacts) -> dict[str, tuple[Value, ...]]:
    """Of every knob the values that occur: numbers ascending, others simplest first."""
    found: dict[str, tuple[Value, ...]] = {}
    for knob in KNOBS:
        values = {config[knob.name] for config in points}
        if all(type(value) is int for value in values):
            found[knob.name] = tuple(sorted(values, key=int))
        else:
            found[knob.name] = tuple(sorted(values, key=lambda value: knob.rank(value, facts)))
    return found
