"""Finalists in turn with the baseline, until it is clear; whoever fails gives way; the winner runs on for longer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune.config import TrainingConfig, Value
from autotune.records import SoakResult, TrialAnswer, TrialRequest
from autotune.search.confirm import _survives, confirm, reserve_seconds
from tests.knobs.search_facts import cuda_facts
from tests.search.simulated_machine import Fault, Program, SimulatedMachine
from tests.search.simulated_search import SimulatedSearch

NewDirectory = Callable[[], Path]
FACTS = cuda_facts(global_batch_size=32, dataset_length=10_000, largest_batch_size=512)
PROGRAM = Program(
    sample_seconds=0.002, update_seconds=0.004,
    sample_speedups={("precision", "bf16"): 4.0, ("precision", "fp16"): 3.9, ("precision", "tf32"): 2.0},
    update_speedups={("optimizer_impl", "fused"): 1.2}, process_spread=0.003, block_spread=0.003,
)  # fmt: skip
BF16: dict[str, Value] = {"precision": "bf16"}
FP16: dict[str, Value] = {"precision": "fp16"}
TF32: dict[str, Value] = {"precision": "tf32"}


def confirmed(
    directory: Path, *changes: dict[str, Value], program: Program = PROGRAM, **options: Any
) -> SimulatedSearch:
    """A search that measured these changes, and confirmed what came of it."""
    search = SimulatedSearch(program, FACTS, directory, **options)
    with search.begun() as session:
        for one in changes:
            session.measure(search.space.baseline.replace(one), "compute")
        confirm(session)
    search.finished = session  # type: ignore[attr-defined]  # for the tests below
    return search


def rounds_of(search: SimulatedSearch, changes: dict[str, Value]) -> int:
    config = search.space.baseline.replace(changes)
    return sum(r.config == config and r.kind == "measure" and not r.measure_resident for r in search.machine.requests)


def best(search: SimulatedSearch) -> TrainingConfig:
    found: TrainingConfig = search.finished.results().best().config  # type: ignore[attr-defined]
    return found


def test_finalists_and_baseline_are_measured_in_turn(new_directory: NewDirectory) -> None:
    search = confirmed(new_directory(), BF16, TF32, budget_seconds=1000.0)
    base = search.space.baseline
    rounds = [r.config for r in search.machine.requests if r.kind == "measure" and not r.measure_resident]
    assert rounds == [base, base.replace(BF16)] * 3
    assert best(search) == base.replace(BF16)


def test_those_close_to_the_best_take_part_and_those_far_behind_do_not(new_directory: NewDirectory) -> None:
    close = replace(PROGRAM, sample_speedups={("precision", "bf16"): 4.0, ("precision", "fp16"): 3.85})
    search = confirmed(new_directory(), BF16, FP16, TF32, program=close, budget_seconds=1000.0)
    assert rounds_of(search, BF16) == rounds_of(search, FP16) >= 3
    assert rounds_of(search, TF32) == 0


def test_of_those_that_one_measurement_cannot_tell_apart_the_simplest_takes_part(new_directory: NewDirectory) -> None:
    search = confirmed(new_directory(), BF16, {**BF16, "num_workers": 2}, {**BF16, "pin_memory": True})
    assert rounds_of(search, BF16) >= 3
    assert rounds_of(search, {**BF16, "num_workers": 2}) == rounds_of(search, {**BF16, "pin_memory": True}) == 0


def test_where_there_is_time_for_one_the_simpler_of_two_that_noise_does_not_tell_apart_is_confirmed(
    new_directory: NewDirectory,
) -> None:
    """Compiled it looks 2 % faster, less than processes differ by."""
    compiled = {**BF16, "compile_mode": "default"}
    speedups = {("precision", "bf16"): 4.0, ("compile_mode", "default"): 1.02}
    program = replace(PROGRAM, sample_speedups=speedups, process_spread=0.0, block_spread=0.001)
    hurried = confirmed(new_directory(), BF16, compiled, program=program, budget_seconds=45.0)
    assert rounds_of(hurried, BF16) > rounds_of(hurried, compiled) == 0
    assert best(hurried) == hurried.space.baseline.replace(BF16)
    patient = confirmed(new_directory(), BF16, compiled, program=program, budget_seconds=1000.0)
    assert rounds_of(patient, BF16) == rounds_of(patient, compiled) >= 3


def test_a_part_of_the_best_is_confirmed_first_as_far_as_one_measurement_is_noise(new_directory: NewDirectory) -> None:
    """fused looks 5.6 % faster beside bf16, in measurements that spread by 4.4 and 2.4 %."""
    fused = {**BF16, "optimizer_impl": "fused"}
    program = replace(
        PROGRAM, update_speedups={("optimizer_impl", "fused"): 1.2}, process_spread=0.0, block_spread=0.04
    )
    hurried = confirmed(new_directory(), BF16, fused, program=program, budget_seconds=45.0)
    assert rounds_of(hurried, BF16) > rounds_of(hurried, fused) == 0


def test_a_single_change_that_noise_may_have_made_is_confirmed_all_the_same(new_directory: NewDirectory) -> None:
    small = replace(
        PROGRAM, sample_speedups={("precision", "bf16"): 1.06}, process_spread=0.0, block_spread=0.03,
    )  # fmt: skip
    assert rounds_of(confirmed(new_directory(), BF16, program=small, budget_seconds=1000.0), BF16) >= 3


def test_a_second_finalist_is_checked_only_where_there_is_time_to_measure_it(new_directory: NewDirectory) -> None:
    """Its parity check would take what the rounds of the first need, and be for nothing."""
    second = {**BF16, "optimizer_impl": "fused"}
    program = replace(PROGRAM, update_speedups={("optimizer_impl", "fused"): 0.85}, check_seconds=20.0)
    hurried = confirmed(new_directory(), BF16, second, program=program, budget_seconds=90.0)
    assert rounds_of(hurried, BF16) >= 3
    assert hurried.space.baseline.replace(second) not in hurried.machine.asked("parity")
    told = hurried.finished.skipped.values()  # type: ignore[attr-defined]
    assert [one for one in told if one.endswith("close to the best, and not confirmed, for lack of time")]
    patient = confirmed(new_directory(), BF16, second, program=program, budget_seconds=1000.0)
    assert rounds_of(patient, second) >= 3


def test_more_rounds_where_the_noise_is_larger(new_directory: NewDirectory) -> None:
    noisy = replace(PROGRAM, process_spread=0.05, block_spread=0.05, sample_speedups={("precision", "bf16"): 1.08})
    search = confirmed(new_directory(), BF16, program=noisy, budget_seconds=2000.0)
    assert 3 < rounds_of(search, BF16) <= 6


def test_what_fails_in_a_round_gives_way_to_the_next(new_directory: NewDirectory) -> None:
    dying = replace(PROGRAM, faults=(Fault("measure", BF16, "crash", after=2),))
    search = confirmed(new_directory(), BF16, TF32, program=dying, budget_seconds=1000.0)
    assert rounds_of(search, BF16) == 2
    assert rounds_of(search, TF32) >= 3
    assert best(search) == search.space.baseline.replace(TF32)
    tf32 = [
        trial.measurement
        for trial in search.finished.trials  # type: ignore[attr-defined]
        if trial.config == search.space.baseline.replace(TF32) and trial.round is None
    ]
    assert [one.stopped_early for one in tf32] == [True, False], "it is measured to the end before it takes part"


def test_what_trains_differently_gives_way_to_the_next(new_directory: NewDirectory) -> None:
    fused_and_bf16 = {**BF16, "optimizer_impl": "fused"}
    wrong = replace(PROGRAM, wrong=(fused_and_bf16,))
    search = confirmed(new_directory(), BF16, fused_and_bf16, program=wrong, budget_seconds=1000.0)
    assert rounds_of(search, fused_and_bf16) == 0
    assert best(search) == search.space.baseline.replace(BF16)


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


def test_where_nothing_is_better_the_baseline_is_measured_again_once_and_soaked(new_directory: NewDirectory) -> None:
    search = confirmed(new_directory(), {"activation_checkpointing": "all"})
    assert rounds_of(search, {}) == 1
    assert search.machine.asked("soak") == [search.space.baseline]
    assert best(search) == search.space.baseline


def test_no_time_means_one_round_of_the_best_and_no_soak(new_directory: NewDirectory) -> None:
    close = replace(PROGRAM, sample_speedups={("precision", "bf16"): 4.0, ("precision", "fp16"): 3.85})
    search = confirmed(new_directory(), BF16, FP16, program=close, budget_seconds=18.0)
    assert rounds_of(search, BF16) == 1
    assert rounds_of(search, FP16) == 0
    assert search.machine.asked("soak") == []
    warnings = search.finished.warnings  # type: ignore[attr-defined]
    assert warnings == ["no time was left for a soak of the recommendation: it ran for its measurements only"]


def test_rounds_of_an_earlier_call_are_gone_on_with(new_directory: NewDirectory) -> None:
    directory = new_directory()
    first = SimulatedSearch(PROGRAM, FACTS, directory, budget_seconds=1000.0)
    with first.begun() as session:
        session.measure(first.space.baseline.replace(BF16), "compute")
        first.machine.interrupt_at = len(first.machine.requests) + 3  # in the second round
        try:
            confirm(session)
        except KeyboardInterrupt:
            interrupted = True
    assert interrupted
    again = confirmed(directory, BF16, budget_seconds=1000.0)
    rounds = [trial.round for trial in again.finished.trials if trial.round is not None]  # type: ignore[attr-defined]
    assert rounds == sorted(rounds)
    assert len(again.finished.results().round_pairs(best(again))) == 3  # type: ignore[attr-defined]
    assert rounds_of(again, BF16) == 2


def test_the_reserve_grows_with_what_a_round_takes_and_leaves_most_of_the_budget(new_directory: NewDirectory) -> None:
    search = SimulatedSearch(PROGRAM, FACTS, new_directory(), budget_seconds=1000.0)
    with search.begun() as session:
        eager = reserve_seconds(session)
        session.measure(search.space.baseline.replace({**BF16, "compile_mode": "default"}), "compute")
        assert eager < reserve_seconds(session) <= 450.0
    short = SimulatedSearch(PROGRAM, FACTS, new_directory(), budget_seconds=30.0)
    with short.begun() as session:
        assert reserve_seconds(session) == 0.45 * 30.0


# --- what the soak finds ----------------------------------------------------------------------------------------------

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
        assert _survives(session, base.replace(BF16))
        assert session.pace == whole
        session.budget.seconds = search.machine.now_seconds + 1000.0
        assert _survives(session, base.replace(larger))
    short, long = (soak_seconds(request) for request in search.machine.requests if request.kind == "soak")
    assert short < 12 < 19 < long


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
