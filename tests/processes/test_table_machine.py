"""Answers drawn from a recorded table: never invented, noisy as the machine was, and at the price that was paid."""

from __future__ import annotations

import math
from typing import Any

import pytest

from autotune.config import TrainingConfig
from autotune.processes.replay import RecordedTrial
from autotune.processes.table import Table, table_space
from autotune.processes.table_machine import TableHole, TableMachine
from autotune.records import Blocks, Measurement, TrialAnswer, TrialKind, TrialRequest
from tests.processes.simulated_table import LANGUAGE_MODEL, conditions_of, simulated_table

TABLE, SIMULATED = simulated_table(repeated=2)
SPACE = table_space(TABLE)
BASELINE = SPACE.baseline
BF16 = BASELINE.replace({"precision": "bf16"})
COMPILED = BF16.replace({"compile_mode": "default", "compile_scope": "step"})
TOO_LARGE = BASELINE.replace({"batch_size": 128})
PARITY = next(one.answer.parity for one in TABLE.trials if one.answer.parity is not None)


def machine(seed: int = 0, table: Table = TABLE) -> TableMachine:
    return TableMachine(table, table_space(table), seed=seed)


def ask(
    one: TableMachine, config: TrainingConfig = BASELINE, kind: TrialKind = "measure", **fields: Any
) -> TrialAnswer:
    return one.run(TrialRequest(kind=kind, config=config, conditions=conditions_of(LANGUAGE_MODEL), **fields))


def recorded(config: TrainingConfig, kind: TrialKind = "measure") -> list[TrialAnswer]:
    return [trial.answer for trial in TABLE.trials if trial.kind == kind and trial.config == config]


def test_the_same_seed_gives_the_same_answers_and_another_others() -> None:
    def answers(seed: int) -> list[TrialAnswer]:
        one = machine(seed)
        return [ask(one, config) for config in (BASELINE, BF16, COMPILED, BASELINE)]

    assert answers(1) == answers(1)
    assert answers(1) != answers(2)
    assert answers(1)[0] != answers(1)[3]


@pytest.mark.parametrize("block_seconds", [0.05, 0.3, 1.0])
def test_blocks_are_put_together_of_recorded_ones_until_they_are_long_enough(block_seconds: float) -> None:
    measured = ask(machine(), BF16, block_seconds=block_seconds, minimum_blocks=3, maximum_blocks=6).measurement
    assert measured is not None
    raw = [blocks for answer in recorded(BF16) if answer.measurement for blocks in answer.measurement.blocks.seconds]
    assert 3 <= len(measured.blocks.seconds) <= 6
    assert min(measured.blocks.seconds) > 0.8 * block_seconds
    per_step = [taken / steps for taken, steps in zip(measured.blocks.seconds, measured.blocks.steps, strict=True)]
    steps = measured.blocks.steps[0] if block_seconds < 0.1 else 1
    assert min(raw) / 2 < steps * min(per_step) < max(raw)
    assert measured.samples_per_second == pytest.approx(sum(measured.blocks.samples) / sum(measured.blocks.seconds))


@pytest.mark.parametrize("block_seconds", [0.1, 0.3, 1.0])
def test_whole_passes_over_the_data_are_drawn_as_a_whole(block_seconds: float) -> None:
    """Each ends with a block of workers that start anew, which is as slow as all before it."""
    steps, seconds = (10, 10, 10, 10, 11) * 2, (0.1, 0.11, 0.12, 0.1, 0.5) + (0.12, 0.1, 0.1, 0.11, 0.6)
    size = SPACE.effective_batch(BF16)
    blocks = Blocks(seconds=seconds, samples=tuple(size * count for count in steps), steps=steps)
    trials = [
        one.model_copy(update={"answer": one.answer.model_copy(update={"measurement": with_blocks(one, blocks)})})
        if one.kind == "measure" and one.config == BF16
        else one
        for one in TABLE.trials
    ]
    workload = TABLE.head.workload.model_copy(update={"dataset_length": 51 * size - 1})
    table = Table(TABLE.head.model_copy(update={"workload": workload}), tuple(trials))
    for seed in range(8):
        asked = ask(machine(seed, table), BF16, block_seconds=block_seconds, minimum_blocks=3, maximum_blocks=6)
        assert asked.measurement is not None
        found = asked.measurement.blocks
        assert sum(found.steps) % 51 == 0
        assert min(found.seconds) >= min(block_seconds, 0.93)
        assert 51 * size / 1.03 <= asked.measurement.samples_per_second <= 51 * size / 0.93
    other = ask(machine(0, table), BASELINE, block_seconds=block_seconds, minimum_blocks=3, maximum_blocks=3)
    assert other.measurement is not None
    assert len(other.measurement.blocks.seconds) == 3, "of what was not cut into passes, blocks are drawn"


def with_blocks(trial: RecordedTrial, blocks: Blocks) -> Measurement:
    assert trial.answer.measurement is not None
    return trial.answer.measurement.model_copy(update={"blocks": blocks})


def test_processes_are_drawn_where_there_were_several() -> None:
    peaks = [answer.measurement.samples_per_second for answer in recorded(BF16) if answer.measurement]
    one = machine()
    rates = [
        answer.measurement.samples_per_second for answer in (ask(one, BF16) for _ in range(40)) if answer.measurement
    ]
    nearest = [min(range(2), key=lambda index: abs(math.log(rate / peaks[index]))) for rate in rates]
    assert {0, 1} == set(nearest)


def test_what_failed_fails() -> None:
    assert ask(machine(), TOO_LARGE) == recorded(TOO_LARGE)[0]
    assert ask(machine(), TOO_LARGE, "memory").failure == recorded(TOO_LARGE)[0].failure


def test_a_memory_probe_tells_what_the_measurement_took() -> None:
    probed = ask(machine(), BASELINE, "memory").memory
    measured = recorded(BASELINE)[0].measurement
    assert probed is not None and measured is not None
    assert probed.memory == measured.memory
    assert probed.fits
    assert probed.limit_bytes == LANGUAGE_MODEL.facts.machine.gpus[0].total_bytes


def test_a_loader_probe_is_that_of_the_loader_whatever_the_step() -> None:
    config = COMPILED.replace({"num_workers": 2})
    probed, alone = ask(machine(), config, "loader").loader, recorded(BASELINE.replace({"num_workers": 2}), "loader")
    assert probed is not None and alone[0].loader is not None
    assert probed.samples_per_second == pytest.approx(alone[0].loader.samples_per_second, rel=0.1)


def test_parity_is_its_own_or_that_of_the_same_way_to_compute_a_gradient() -> None:
    def errors(*configs: TrainingConfig) -> list[float]:
        """With the check of each marked by an error of its own."""
        trials = [one for one in TABLE.trials if one.kind != "parity"]
        trials += [
            RecordedTrial(kind="parity", config=config, answer=TrialAnswer(parity=PARITY.model_copy(update=marked)))
            for number, config in enumerate(configs)
            if (marked := {"relative_error": float(number)})
        ]
        found = ask(machine(table=Table(TABLE.head, tuple(trials))), BF16, "parity").parity
        return [found.relative_error] if found is not None else []

    loaded_otherwise, fused = BF16.replace({"num_workers": 0}), BF16.replace({"optimizer_impl": "fused"})
    assert errors(fused, loaded_otherwise) == [1.0]
    assert errors(COMPILED, fused) == [1.0]


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (BASELINE.replace({"precision": "fp16"}), "measure"),
        (BASELINE.replace({"batch_size": 33}), "memory"),
        (BASELINE.replace({"precision": "fp16"}), "parity"),
        (BASELINE.replace({"num_workers": 4}), "loader"),
        (BASELINE.replace({"precision": "fp16"}), "soak"),
        (BASELINE, "facts"),
    ],
)
def test_a_hole_is_an_error_that_says_what_is_missing(config: TrainingConfig, kind: TrialKind) -> None:
    with pytest.raises(TableHole, match=r"^the table simulated (has no record of a|answers no)"):
        ask(machine(), config, kind)


def test_the_first_of_those_that_compile_the_same_pays_for_it() -> None:
    one = machine()
    cold, cached, other = (
        ask(one, config).measurement
        for config in (
            COMPILED.replace({"optimizer_impl": "fused", "num_workers": 2}),
            COMPILED,
            COMPILED.replace({"compile_scope": "model"}),
        )
    )
    assert cold is not None and cached is not None and other is not None
    assert cold.first_step_seconds > 20 > 10 > cached.first_step_seconds
    assert other.first_step_seconds > 20


def test_the_clock_moves_by_what_the_trials_took() -> None:
    one = machine()
    answers = [ask(one, config, kind) for config, kind in ((BASELINE, "measure"), (BF16, "parity"), (BF16, "memory"))]  # type: ignore[arg-type]
    assert one.clock() == pytest.approx(sum(answer.seconds for answer in answers))
    short, long = (ask(machine(), BF16, block_seconds=seconds, minimum_blocks=6).seconds for seconds in (0.1, 1.0))
    assert long > short + 5 * 0.9


def test_what_is_out_of_the_race_is_stopped_early() -> None:
    def asked(**race: float) -> Any:
        return ask(machine(), BASELINE, minimum_blocks=3, maximum_blocks=6, relative_precision=0.0, **race).measurement

    whole, beaten = asked(), asked(rate_to_beat=1e6)
    assert (len(whole.blocks.seconds), whole.stopped_early, whole.resident_blocks is None) == (6, False, False)
    assert (len(beaten.blocks.seconds), beaten.stopped_early, beaten.resident_blocks) == (3, True, None)
    rival = asked(rate_to_beat=1e6, resident_rate_to_beat=1.0)
    assert not rival.stopped_early and rival.resident_blocks is not None
    assert asked(rate_to_beat=1e6, resident_rate_to_beat=1e6).stopped_early


def test_a_soak_runs_as_long_as_asked_and_finds_what_the_measurement_shows() -> None:
    soak = ask(machine(), BF16, "soak", block_seconds=0.3, maximum_blocks=20).soak
    measured = recorded(BF16)[0].measurement
    assert soak is not None and measured is not None
    assert soak.block_count == 20
    assert soak.growth_bytes_per_step == measured.memory.growth_bytes_per_step
    assert soak.last_samples_per_second == pytest.approx(measured.samples_per_second, rel=0.1)


def test_true_rates_are_those_of_what_fits_and_trains_the_same() -> None:
    rates = machine().true_rates()
    limit = LANGUAGE_MODEL.facts.machine.gpus[0].total_bytes
    assert set(rates) == {config for config in SPACE.points if SIMULATED.usable(config, limit)}
    assert len(SPACE.points) == 120 and TOO_LARGE in SPACE.points
    for config, found in rates.items():
        assert found == pytest.approx(SIMULATED.true_rate(config), rel=0.05)
    wrong = [
        one.model_copy(update={"answer": TrialAnswer(parity=one.answer.parity.model_copy(update={"passed": False}))})
        if one.answer.parity is not None and one.config["precision"] == "bf16"
        else one
        for one in TABLE.trials
    ]
    left = machine(table=Table(TABLE.head, tuple(wrong))).true_rates()
    assert set(left) == {config for config in rates if config["precision"] == "as_is"}


def test_other_conditions_are_not_answered_for() -> None:
    request = TrialRequest(kind="measure", config=BASELINE, conditions=conditions_of(LANGUAGE_MODEL))
    with pytest.raises(AssertionError, match="other conditions"):
        machine().run(request.model_copy(update={"conditions": request.conditions.model_copy(update={"seed": 1})}))
