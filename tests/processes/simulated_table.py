"""Tables of the simulated machine, whose truth is known by its formulas."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from autotune.config import TrainingConfig, Value
from autotune.knobs.registry import KNOBS
from autotune.processes.replay import RecordedTrial
from autotune.processes.table import Table, TableHead
from autotune.records import Conditions, TrialKind, TrialRequest
from autotune.space import build_space
from tests.search.simulated_machine import SimulatedMachine
from tests.search.simulated_programs import SCENARIOS, Scenario

BLOCK_SECONDS = 0.1
LANGUAGE_MODEL = SCENARIOS["language model"]
STEP: Mapping[str, Sequence[Value]] = {
    "batch_size": (8, 16, 32, 64, 128),
    "num_workers": (0, 2),
    "precision": ("as_is", "bf16"),
    "optimizer_impl": ("as_is", "fused"),
    "compile_scope": ("model", "step"),
    "compile_mode": ("as_is", "default"),
}
"""120 points of the language model, of which those in fp32 with the largest batches do not fit."""


def conditions_of(scenario: Scenario) -> Conditions:
    return Conditions(
        device=scenario.facts.device,
        global_batch_size=scenario.facts.global_batch_size,
        memory_limit_bytes=scenario.memory_limit_bytes,
    )


def simulated_table(
    scenario: Scenario = LANGUAGE_MODEL,
    values: Mapping[str, Sequence[Value]] = STEP,
    *,
    without: Mapping[str, Value] | None = None,
    repeated: int = 1,
) -> tuple[Table, SimulatedMachine]:
    """All combinations of these values that do not conflict, without those that have all of `without`.

    Each was run in so many processes; a parity check stands beside it, and its loader alone.
    """
    space = build_space(scenario.facts, preset="default")
    machine = SimulatedMachine(scenario.program, space, seed=7)
    points = [
        space.baseline.replace(dict(zip(values, one, strict=True))) for one in itertools.product(*values.values())
    ]
    trials: list[RecordedTrial] = []

    def record(kind: TrialKind, config: TrainingConfig) -> None:
        request = TrialRequest(
            kind=kind,
            config=config,
            conditions=conditions_of(scenario),
            block_seconds=BLOCK_SECONDS,
            minimum_blocks=4,
            maximum_blocks=8,
        )
        trials.append(RecordedTrial(kind=kind, config=config, answer=machine.run(request)))

    checked = {space.numerics_key(space.baseline)}
    for config in points:
        if space.conflict(config) is not None:
            continue
        if without is not None and all(config[name] == value for name, value in without.items()):
            continue
        for _ in range(repeated):
            record("measure", config)
        loading = {one.name: config[one.name] for one in KNOBS if one.stage in ("loader", "batch")}
        if int(config["num_workers"]) > 0:
            record("loader", space.baseline.replace(loading))
        if trials and space.numerics_key(config) not in checked:
            checked.add(space.numerics_key(config))
            record("parity", config)
    head = TableHead(
        name="simulated",
        command="a command",
        machine=scenario.facts.machine,
        workload=scenario.facts.workload,
        conditions=conditions_of(scenario),
        choices={name: tuple(one) for name, one in values.items()},
        planned_points=len(points),
        block_seconds=BLOCK_SECONDS,
        autotune_version="0",
    )
    return Table(head, tuple(trials)), machine
