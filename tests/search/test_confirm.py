"""Finalists in turn with the baseline, until it is clear; whoever fails gives way; the winner runs on for longer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.config import Value
from autotune.search.confirm import confirm, fewest_seconds, reserve_seconds
from autotune.search.soak import LATE_SECONDS
from autotune.stats import FEWEST_ROUNDS
from tests.search.confirmed_search import BF16, FACTS, FP16, PROGRAM, TF32, NewDirectory, best, confirmed, rounds_of
from tests.search.simulated_machine import Fault, Program
from tests.search.simulated_search import SimulatedSearch


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
    hurried = confirmed(new_directory(), BF16, fused, program=program, budget_seconds=30.0)
    assert rounds_of(hurried, BF16) > rounds_of(hurried, fused) == 0


def test_a_single_change_that_noise_may_have_made_is_confirmed_all_the_same(new_directory: NewDirectory) -> None:
    small = replace(
        PROGRAM, sample_speedups={("precision", "bf16"): 1.06}, process_spread=0.0, block_spread=0.03,
    )  # fmt: skip
    assert rounds_of(confirmed(new_directory(), BF16, program=small, budget_seconds=1000.0), BF16) >= 3


@pytest.mark.parametrize(
    ("beside", "program", "budget_seconds"),
    [
        ({"optimizer_impl": "fused"}, replace(PROGRAM, update_speedups={("optimizer_impl", "fused"): 0.85}), 90.0),
        ({"batch_size": 128}, PROGRAM, 70.0),
    ],
    ids=["second finalist", "second answer"],
)
def test_a_second_one_is_checked_only_where_there_is_time_to_measure_it(
    beside: dict[str, Value], program: Program, budget_seconds: float, new_directory: NewDirectory
) -> None:
    """Its parity check would take what the rounds of the first need, and be for nothing: ResNet-50 in 290 s (H200) had 46 s
    for that of a larger batch, and a single round of its answer."""
    second = {**BF16, **beside}
    program = replace(program, check_seconds=20.0)
    hurried = confirmed(new_directory(), BF16, second, program=program, budget_seconds=budget_seconds)
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


def test_where_nothing_is_better_the_baseline_is_measured_again_once_and_soaked(new_directory: NewDirectory) -> None:
    search = confirmed(new_directory(), {"activation_checkpointing": "all"})
    assert rounds_of(search, {}) == 1
    assert search.machine.asked("soak") == [search.space.baseline]
    assert best(search) == search.space.baseline


def test_no_time_means_one_round_of_the_best_and_no_soak(new_directory: NewDirectory) -> None:
    close = replace(PROGRAM, sample_speedups={("precision", "bf16"): 4.0, ("precision", "fp16"): 3.85})
    search = confirmed(new_directory(), BF16, FP16, program=close, budget_seconds=12.0)
    assert rounds_of(search, BF16) == 1
    assert rounds_of(search, FP16) == 0
    assert search.machine.asked("soak") == []
    warnings = search.finished.warnings  # type: ignore[attr-defined]
    (warning,) = warnings
    assert warning.startswith("no time was left for a soak of the recommendation: it ran for its measurements only; ")


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


def test_an_answer_that_an_earlier_call_left_with_one_round_is_no_second_finalist(new_directory: NewDirectory) -> None:
    """Its round went well and its first measurement did not, so that another comes first; there is time for one of them."""
    speedups = {("precision", "bf16"): 4.0, ("precision", "fp16"): 4.1}
    program = replace(PROGRAM, sample_speedups=speedups, process_spread=0.03, block_spread=0.01)
    search = SimulatedSearch(program, FACTS, new_directory(), seed=11, budget_seconds=90.0)
    base, bf16, fp16 = (search.space.baseline.replace(changes) for changes in ({}, BF16, FP16))
    with search.begun() as session:
        for config in (bf16, fp16):
            session.measure(config, "compute")
        for number, taking_part in enumerate([(base, bf16, fp16), (base, bf16), (base, bf16)]):
            for config in taking_part:
                session.measure_again(config, "confirm", confirm_round=number)
        best = session.results().best()
        assert (best.config, best.confirmed_rounds) == (fp16, 1)
        assert session.candidates()[0].config == bf16
        confirm(session)
        assert session.results().best().confirmed_rounds >= 3
        assert session.skipped == {}


def test_the_reserve_grows_with_what_a_round_takes_and_leaves_most_of_the_budget(new_directory: NewDirectory) -> None:
    search = SimulatedSearch(PROGRAM, FACTS, new_directory(), budget_seconds=1000.0)
    with search.begun() as session:
        eager = reserve_seconds(session)
        session.measure(search.space.baseline.replace({**BF16, "compile_mode": "default"}), "compute")
        held = reserve_seconds(session)
        assert eager < held < reserve_seconds(session, frees_the_batch=True) <= 450.0
        leader = session.best()
        freer = session.measure(leader.config.replace({"batch_size": 2 * FACTS.global_batch_size}), "explore")
        assert session.candidates(free=True)[0] == freer
        assert reserve_seconds(session) == reserve_seconds(session, frees_the_batch=True)  # one is there, and leads
        before = reserve_seconds(session)
        session.parity_results.clear()  # it was checked when it came to lead
        assert reserve_seconds(session) == pytest.approx(before + leader.seconds)
    short = SimulatedSearch(PROGRAM, FACTS, new_directory(), budget_seconds=30.0)
    with short.begun() as session:
        assert reserve_seconds(session) == 0.45 * session.budget.left()


def test_where_blocks_of_a_busy_machine_never_agree_all_of_them_are_kept_time_for(new_directory: NewDirectory) -> None:
    quiet, busy = (
        SimulatedSearch(replace(PROGRAM, block_spread=spread), FACTS, new_directory(), budget_seconds=1000.0)
        for spread in (0.003, 0.3)
    )
    with quiet.begun() as before, busy.begun() as after:
        assert reserve_seconds(after) - reserve_seconds(before) > 2 * FEWEST_ROUNDS * before.pace.confirm_block_seconds


def test_rounds_that_may_still_tell_come_before_a_soak_of_the_users_own_program(new_directory: NewDirectory) -> None:
    """A gain that two noisy rounds do not show for certain, in a budget that has no time for both."""
    program = replace(PROGRAM, sample_speedups={("precision", "bf16"): 1.3}, process_spread=0.1, start_seconds=3.0)
    search = confirmed(new_directory(), BF16, program=program, budget_seconds=45.0, seed=1)
    rounds = rounds_of(search, BF16)
    left = search.finished.budget.left()  # type: ignore[attr-defined]
    assert rounds >= 3
    assert left > -LATE_SECONDS


@pytest.mark.parametrize("started_seconds", [12.0, 20.0, 26.0])
def test_the_least_that_a_search_does_is_known_before(started_seconds: float, new_directory: NewDirectory) -> None:
    """One candidate and one round, after a baseline that took a third of what is left and more."""
    program = replace(PROGRAM, start_seconds=2.5)
    search = SimulatedSearch(program, FACTS, new_directory(), budget_seconds=45.0, started_seconds=started_seconds)
    with search.begun() as session:
        expected, began = fewest_seconds(session), search.machine.now_seconds
        assert expected < 3 * session.baseline_trial().seconds
        config = search.space.baseline.replace(BF16)
        session.measure(config, "compute")
        checks = sum(answer.seconds for (kind, _), answer in session.probes.items() if kind == "parity")
        for one in (search.space.baseline, config):
            session.measure_again(one, "confirm", confirm_round=0)
        assert search.machine.now_seconds - began - checks <= 1.1 * expected
