"""What the winner's long run finds, and what follows from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from autotune.config import Value
from autotune.knobs.base import AS_IS
from autotune.records import SearchFacts, SoakResult, TrialAnswer, TrialRequest
from autotune.search.soak import (
    EVALUATION_SHARE,
    LATE_SECONDS,
    PARAMETER_BYTES_PER_SECOND,
    SHORTER_BATCH_SHARE,
    soak_trial_seconds,
    survives,
)
from tests.knobs.search_facts import cuda_facts
from tests.search.confirmed_search import BF16, FACTS, FP16, PROGRAM, NewDirectory, best, confirmed
from tests.search.simulated_machine import Fault, SimulatedMachine
from tests.search.simulated_programs import AS_TIMED
from tests.search.simulated_search import SimulatedSearch, run_search

CLOSE = replace(PROGRAM, sample_speedups={("precision", "bf16"): 4.0, ("precision", "fp16"): 3.8})
LEAK = {"growth_bytes_per_step": 2.0 * 2**20, "findings": ("memory grows by 2.00 MiB with every step",)}


def finding(monkeypatch: Any, of: Callable[[TrialRequest, SoakResult], dict[str, Any]]) -> None:
    """Soaks of the simulated machine show what `of` gives beside what they would show."""
    answered = SimulatedMachine._answered

    def altered(self: SimulatedMachine, request: TrialRequest, noise: Any) -> TrialAnswer:
        answer = answered(self, request, noise)
        if answer.soak is None:
            return answer
        return answer.model_copy(update={"soak": answer.soak.model_copy(update=of(request, answer.soak))})

    monkeypatch.setattr(SimulatedMachine, "_answered", altered)


def is_bf16(request: TrialRequest) -> bool:
    return request.config["precision"] == "bf16"


def warnings_of(search: SimulatedSearch) -> list[str]:
    found: list[str] = search.finished.warnings  # type: ignore[attr-defined]
    return found


def message_of(search: SimulatedSearch, changes: dict[str, Value]) -> str:
    """How the configuration was recorded as failed."""
    config = search.space.baseline.replace(changes)
    trials = search.finished.trials  # type: ignore[attr-defined]
    messages = [trial.failure.message for trial in trials if trial.config == config and trial.failure is not None]
    return messages[0] if messages else ""


def test_a_leak_of_the_winner_alone_gives_way_to_the_next(new_directory: NewDirectory, monkeypatch: Any) -> None:
    finding(monkeypatch, lambda request, soak: LEAK if is_bf16(request) else {})
    search = confirmed(new_directory(), BF16, FP16, program=CLOSE, budget_seconds=1000.0)
    base = search.space.baseline
    assert search.machine.asked("soak") == [base.replace(BF16), base, base.replace(FP16)]
    assert best(search) == base.replace(FP16)
    assert message_of(search, BF16) == (
        "in the soak: memory grows by 2.00 MiB with every step: something keeps tensors of past steps (a leak), and your "
        "own settings show none"
    )
    assert warnings_of(search) == []


def test_a_leak_of_the_users_own_program_is_told_and_not_held_against_the_winner(
    new_directory: NewDirectory, monkeypatch: Any
) -> None:
    finding(monkeypatch, lambda request, soak: LEAK)
    search = confirmed(new_directory(), BF16, FP16, program=CLOSE, budget_seconds=1000.0)
    assert best(search) == search.space.baseline.replace(BF16)
    assert warnings_of(search) == ["memory grows by 2.00 MiB with every step"]


LOST = {"lost_gradients": ("trunk.weight",), "findings": ("trunk.weight had a gradient at first, and has none",)}


def test_a_part_that_the_winner_alone_leaves_out_later_gives_way_to_the_next(
    new_directory: NewDirectory, monkeypatch: Any
) -> None:
    finding(monkeypatch, lambda request, soak: LOST if is_bf16(request) else {})
    search = confirmed(new_directory(), BF16, FP16, program=CLOSE, budget_seconds=1000.0)
    assert best(search) == search.space.baseline.replace(FP16)
    assert "trunk.weight had a gradient at first and has none after 400 steps, which it keeps with your" in message_of(
        search, BF16
    )


def test_a_part_that_the_users_own_program_leaves_out_later_too_is_told(
    new_directory: NewDirectory, monkeypatch: Any
) -> None:
    finding(monkeypatch, lambda request, soak: LOST)
    search = confirmed(new_directory(), BF16, FP16, program=CLOSE, budget_seconds=1000.0)
    assert best(search) == search.space.baseline.replace(BF16)
    assert warnings_of(search) == ["trunk.weight had a gradient at first, and has none"]


def test_what_takes_less_memory_may_be_slower_than_the_baseline(new_directory: NewDirectory, monkeypatch: Any) -> None:
    split: dict[str, Value] = {"batch_size": 8}
    slow = {"last_samples_per_second": 50.0}
    finding(monkeypatch, lambda request, soak: slow if request.config["batch_size"] == 8 else {})
    search = confirmed(new_directory(), split, program=CLOSE, budget_seconds=1000.0, objective="memory")
    config = search.space.baseline.replace(split)
    assert config in search.machine.asked("soak")
    measured = [trial for trial in search.finished.trials if trial.config == config]  # type: ignore[attr-defined]
    assert all(trial.failure is None for trial in measured)


def test_a_rate_that_falls_below_the_baselines_gives_way_to_the_next(
    new_directory: NewDirectory, monkeypatch: Any
) -> None:
    finding(monkeypatch, lambda request, soak: {"last_samples_per_second": 50.0} if is_bf16(request) else {})
    search = confirmed(new_directory(), BF16, FP16, program=CLOSE, budget_seconds=1000.0)
    assert best(search) == search.space.baseline.replace(FP16)
    assert message_of(search, BF16).startswith("in the soak: it slowed down to 50 samples/s, below the 4")


def test_a_rate_that_falls_and_stays_above_the_baselines_is_told(new_directory: NewDirectory, monkeypatch: Any) -> None:
    fell = {"last_samples_per_second": 900.0, "findings": ("throughput fell",)}
    finding(monkeypatch, lambda request, soak: fell if is_bf16(request) else {})
    search = confirmed(new_directory(), BF16, FP16, program=CLOSE, budget_seconds=1000.0)
    assert best(search) == search.space.baseline.replace(BF16)
    assert search.machine.asked("soak") == [best(search)], "the user's own program is not asked"
    assert warnings_of(search) == ["throughput fell"]


def test_a_rate_that_falls_on_a_busy_machine_is_not_held_against_the_winner(
    new_directory: NewDirectory, monkeypatch: Any
) -> None:
    finding(monkeypatch, lambda request, soak: {"last_samples_per_second": 60.0 if is_bf16(request) else 40.0})
    search = confirmed(new_directory(), BF16, FP16, program=CLOSE, budget_seconds=1000.0)
    assert best(search) == search.space.baseline.replace(BF16)


def test_a_soak_that_a_short_budget_cuts_short_says_so(new_directory: NewDirectory, monkeypatch: Any) -> None:
    finding(monkeypatch, few_steps)
    directory = new_directory()
    short = confirmed(directory, BF16, budget_seconds=200.0)
    told = ["the soak was cut short for lack of time: it ran 150 steps"]
    assert warnings_of(short) == told
    assert warnings_of(confirmed(new_directory(), BF16, budget_seconds=1000.0)) == []
    assert warnings_of(confirmed(directory, BF16, budget_seconds=1000.0)) == told, "it is not soaked again"


def few_steps(request: TrialRequest, soak: SoakResult) -> dict[str, Any]:
    return {"steps": 150, "samples_per_second": 150 * 32 / soak_seconds(request)}


def soak_seconds(request: TrialRequest) -> float:
    return request.block_seconds * request.maximum_blocks


def test_a_soak_that_is_shortened_does_not_shorten_the_next(new_directory: NewDirectory) -> None:
    launching = replace(PROGRAM, launch_seconds=0.05)
    larger = {**BF16, "batch_size": 128}
    search = SimulatedSearch(launching, FACTS, new_directory(), budget_seconds=1000.0)
    base = search.space.baseline
    with search.begun() as session:
        for changes in (BF16, larger):
            session.measure(base.replace(changes), "compute")
        whole = session.pace
        session.budget.seconds = search.machine.now_seconds + 12.0
        assert survives(session, base.replace(BF16))
        assert session.pace == whole
        session.budget.seconds = search.machine.now_seconds + 1000.0
        assert survives(session, base.replace(larger))
    short, long = (soak_seconds(request) for request in search.machine.requests if request.kind == "soak")
    assert short < 12 < 19 < long


def test_a_soak_of_the_users_own_program_takes_no_more_than_is_left(
    new_directory: NewDirectory, monkeypatch: Any
) -> None:
    finding(monkeypatch, lambda request, soak: LEAK if is_bf16(request) else {})
    search = SimulatedSearch(PROGRAM, FACTS, new_directory())
    winner = search.space.baseline.replace(BF16)
    with search.begun() as session:
        trial = session.measure(winner, "compute")
        session.budget.seconds = search.machine.now_seconds + 26.0
        assert not survives(session, trial.config)
    assert search.machine.asked("soak") == [winner, search.space.baseline]
    assert -session.budget.left() < LATE_SECONDS


def language_model(dataset_length: int) -> SearchFacts:
    """GPT-2 124M, its batch free."""
    return cuda_facts(
        batch_held=False, dataset_length=dataset_length, largest_batch_size=4096, parameter_bytes=498_000_000
    )


GPT2, WITH_A_SHORTER_BATCH = language_model(4096), language_model(1_000_001)
COMPILED: dict[str, Value] = {**BF16, "batch_size": 64, "compile_mode": "default"}
LARGE_STEP: dict[str, Value] = {**COMPILED, "compile_scope": "step"}


@pytest.mark.parametrize(
    ("changes", "facts", "compile_share"),
    [
        (LARGE_STEP, GPT2, 0.0),
        (COMPILED, GPT2, EVALUATION_SHARE),
        (LARGE_STEP, WITH_A_SHORTER_BATCH, SHORTER_BATCH_SHARE),
        (COMPILED, WITH_A_SHORTER_BATCH, EVALUATION_SHARE + SHORTER_BATCH_SHARE),
        ({**LARGE_STEP, "compile_mode": AS_IS, "compile_scope": "model"}, WITH_A_SHORTER_BATCH, 0.0),
        (LARGE_STEP, language_model(101), 0.0),
    ],
    ids=["step", "model", "step and a last batch", "model and a last batch", "eager", "a last batch that was measured"],
)
def test_what_a_soak_takes_is_known(
    changes: dict[str, Value], facts: SearchFacts, compile_share: float, new_directory: NewDirectory
) -> None:
    search = SimulatedSearch(AS_TIMED, facts, new_directory())
    with search.begun() as session:
        trial = session.measure(search.space.baseline.replace(changes), "compute")
        assert trial.measurement is not None
        beside = 1.25 * 8.0 + session.start_seconds(trial) + 498e6 / PARAMETER_BYTES_PER_SECOND
        compiling = compile_share * trial.measurement.first_step_seconds
        assert soak_trial_seconds(session, trial, 8.0) == pytest.approx(beside + compiling)
        expected = soak_trial_seconds(session, trial, session.pace.soak_seconds)
        spared = expected - session.probe("soak", trial.config).seconds
    assert -0.5 < spared < 8, "no longer than expected; shorter where a pass ends early"


def test_with_twelve_seconds_left_the_soak_of_a_large_model_ends_a_few_seconds_late(
    new_directory: NewDirectory,
) -> None:
    search = SimulatedSearch(AS_TIMED, GPT2, new_directory())
    with search.begun() as session:
        trial = session.measure(search.space.baseline.replace(LARGE_STEP), "compute")
        session.budget.seconds = search.machine.now_seconds + 12.0
        assert survives(session, trial.config)
    assert search.machine.asked("soak") == [trial.config]
    assert 0 < -session.budget.left() < LATE_SECONDS


def test_a_soak_that_there_is_no_time_for_is_left_to_the_next_call(new_directory: NewDirectory) -> None:
    directory = new_directory()
    first = SimulatedSearch(AS_TIMED, GPT2, directory)
    config = first.space.baseline.replace(LARGE_STEP)
    with first.begun() as session:
        session.measure(config, "compute")
        session.budget.seconds = first.machine.now_seconds + 5.0
        assert survives(session, config)
        assert session.warnings == [
            "no time was left for a soak of the recommendation: it ran for its measurements only; the same command goes on "
            "with it"
        ]
    again = SimulatedSearch(AS_TIMED, GPT2, directory)
    with again.begun() as session:
        assert survives(session, config)
        session.budget.seconds = again.machine.now_seconds
        assert survives(session, config), "what is known takes no time"
        assert session.warnings == []
    assert (first.machine.asked("soak"), again.machine.asked("soak")) == ([], [config])


@pytest.mark.parametrize(("budget_seconds", "length"), [(120.0, 4096), (180.0, 4096), (240.0, 100_001)])
def test_a_search_with_dear_soaks_ends_near_its_budget(
    budget_seconds: float, length: int, new_directory: NewDirectory
) -> None:
    outcome = run_search(
        AS_TIMED, language_model(length), new_directory(), budget_seconds=budget_seconds, started_seconds=12.0
    )
    assert outcome.machine.now_seconds <= budget_seconds + 1.0
    assert outcome.config in outcome.machine.asked("soak")


def test_a_failure_that_the_users_own_program_has_too_is_told(new_directory: NewDirectory) -> None:
    breaking = replace(CLOSE, faults=(Fault("soak", {}, "user_error", "soak"),))
    search = confirmed(new_directory(), BF16, FP16, program=breaking, budget_seconds=1000.0)
    assert search.machine.asked("soak") == [search.space.baseline.replace(BF16), search.space.baseline]
    assert best(search) == search.space.baseline.replace(BF16)
    (warning,) = warnings_of(search)
    assert warning.startswith("your own program fails too when it runs on for longer: it fails with ")


def test_a_loss_that_only_the_winner_loses_gives_way_to_the_next(new_directory: NewDirectory) -> None:
    diverging = replace(CLOSE, faults=(Fault("soak", BF16, "numerics", "soak"),))
    search = confirmed(new_directory(), BF16, FP16, program=diverging, budget_seconds=1000.0)
    base = search.space.baseline
    assert search.machine.asked("soak") == [base.replace(BF16), base, base.replace(FP16)]
    assert best(search) == base.replace(FP16)


def test_a_failure_that_is_the_users_own_alone_is_told(new_directory: NewDirectory) -> None:
    """Nothing is better than the baseline, and the baseline does not last."""
    dying = replace(PROGRAM, faults=(Fault("soak", {}, "device_oom", "soak"),))
    search = confirmed(new_directory(), {"activation_checkpointing": "all"}, program=dying)
    assert best(search) == search.space.baseline
    (warning,) = warnings_of(search)
    assert warning.startswith("your own program failed when it ran on for longer: it fails with ")


def test_what_dies_in_its_soak_gives_way_to_the_next(new_directory: NewDirectory) -> None:
    close = {("precision", "bf16"): 4.0, ("precision", "fp16"): 3.8}
    dying = replace(PROGRAM, sample_speedups=close, faults=(Fault("soak", BF16, "device_oom", "soak"),))
    search = confirmed(new_directory(), BF16, FP16, program=dying, budget_seconds=1000.0)
    assert search.machine.asked("soak") == [search.space.baseline.replace(BF16), search.space.baseline.replace(FP16)]
    assert best(search) == search.space.baseline.replace(FP16)


def test_what_fits_by_retries_only_is_not_recommended(new_directory: NewDirectory, monkeypatch: Any) -> None:
    answered = SimulatedMachine._answered

    def thrashing(self: SimulatedMachine, request: Any, noise: Any) -> Any:
        answer = answered(self, request, noise)
        if request.kind == "soak" and request.config["precision"] == "bf16":
            return answer.model_copy(update={"soak": answer.soak.model_copy(update={"allocator_retries": 3})})
        return answer

    monkeypatch.setattr(SimulatedMachine, "_answered", thrashing)
    close = {("precision", "bf16"): 4.0, ("precision", "fp16"): 3.85}
    search = confirmed(
        new_directory(), BF16, FP16, program=replace(PROGRAM, sample_speedups=close), budget_seconds=1000.0
    )
    assert best(search) == search.space.baseline.replace(FP16)


def test_both_answers_are_soaked(new_directory: NewDirectory) -> None:
    launching = replace(PROGRAM, launch_seconds=0.05)
    larger = {**BF16, "batch_size": 128}
    search = confirmed(new_directory(), BF16, larger, program=launching, budget_seconds=1000.0)
    base = search.space.baseline
    assert search.machine.asked("soak") == [base.replace(BF16), base.replace(larger)]


@pytest.mark.parametrize(("changes", "soaked"), [(BF16, True), ({}, False)], ids=["the recommendation", "what is kept"])
def test_only_a_soak_that_decides_something_may_end_late(
    changes: dict[str, Value], soaked: bool, new_directory: NewDirectory
) -> None:
    search = SimulatedSearch(PROGRAM, FACTS, new_directory())
    config = search.space.baseline.replace(changes)
    with search.begun() as session:
        session.measure(config, "compute")
        session.budget.seconds = search.machine.now_seconds + 3.0
        assert survives(session, config)
        assert (search.machine.asked("soak") == [config]) == soaked
