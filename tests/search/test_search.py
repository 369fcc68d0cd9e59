"""A whole search finds what is best by the formulas of a simulated machine, and keeps its promises on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import NoAnswerError, UserError
from tests.knobs.search_facts import cpu_facts, cuda_facts
from tests.search.promises import hold_promises
from tests.search.simulated_machine import Fault, Program, true_optimum
from tests.search.simulated_programs import (
    AS_TIMED,
    FLAT,
    FLAT_ON_A_CPU,
    GIB,
    GPT2_IN_THREE_MINUTES,
    LANGUAGE_MODEL,
    RESNET_IN_FIVE_MINUTES,
    SCENARIOS,
    SMALL_IN_TWO_MINUTES,
    TABLE_MODEL,
    TWO_CORES,
    WORKERS_AND_PRECISION,
    Scenario,
)
from tests.search.simulated_search import Outcome, SimulatedSearch, run_search

NewDirectory = Callable[[], Path]
CPU = SCENARIOS["tables on a CPU"]
SEEDS = range(2)


def run(scenario: Scenario, directory: Path, **options: Any) -> Outcome:
    chosen = {
        "budget_seconds": scenario.budget_seconds,
        "memory_limit_bytes": scenario.memory_limit_bytes,
        **options,
    }
    return run_search(scenario.program, scenario.facts, directory, **chosen)


def best_rate_of(scenario: Scenario, outcome: Outcome) -> float:
    """By the formulas, without noise: the same for every seed, and it takes as long as some searches."""
    space, held = outcome.asked.space, scenario.facts.global_batch_size
    return true_optimum(outcome.machine, space, held=held, limit_bytes=scenario.usable_bytes)[1]


# --- what it finds ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCENARIOS)
def test_it_finds_what_is_nearly_the_best_of_the_whole_space(name: str, new_directory: NewDirectory) -> None:
    scenario = SCENARIOS[name]
    shares, best_rate = [], 0.0
    for seed in SEEDS:
        outcome = run(scenario, new_directory(), seed=seed)
        hold_promises(outcome)
        best_rate = best_rate or best_rate_of(scenario, outcome)
        shares.append(outcome.machine.true_rate(outcome.config) / best_rate)
    assert min(shares) > 0.9
    assert sorted(shares)[len(shares) // 2] > 0.95


def test_other_work_beside_the_first_trial_of_a_value_loses_it_not(new_directory: NewDirectory) -> None:
    """A fused update gains a tenth here, and a trial at 40 % of its rate looks like one that is out of the race."""
    scenario = SCENARIOS["language model"]
    asked = SimulatedSearch(scenario.program, scenario.facts, new_directory(), budget_seconds=300.0)
    asked.machine.busy_once = ({"optimizer_impl": "fused"}, 0.4)
    outcome = asked.run()
    assert asked.machine.busy_once is None
    assert outcome.changes["optimizer_impl"] == "fused"


def test_a_short_budget_on_a_busy_machine_is_enough_to_try_what_the_loader_needs(new_directory: NewDirectory) -> None:
    """Of 45 s, 16 s go by before the baseline, a trial takes 3 s beside its blocks, and no two blocks agree."""
    program = Program(
        sample_seconds=0.002, load_seconds=0.008, start_seconds=3.0, check_seconds=3.0, compile_seconds=40.0,
        process_spread=0.1, block_spread=0.2,
    )  # fmt: skip
    facts = cpu_facts(dataset_length=100_000, global_batch_size=16, batch_size=16, usable_cores=2)
    found = []
    for seed in range(6):
        outcome = run_search(program, facts, new_directory(), seed=seed, budget_seconds=45.0, started_seconds=16.0)
        assert outcome.machine.now_seconds < 1.15 * 45.0
        assert not any(trial.config["compile_mode"] != "as_is" for trial in outcome.session.trials)
        assert any(trial.config["num_workers"] != 0 for trial in outcome.session.trials)
        found.append(outcome.changes.get("num_workers", 0))
    assert sum(workers != 0 for workers in found) >= 4, found


def test_five_minutes_are_enough_for_a_language_model(new_directory: NewDirectory) -> None:
    facts = cuda_facts(batch_held=False, dataset_length=100_000, largest_batch_size=4096, parameter_bytes=498_000_000)
    scenario, best_rate = Scenario(AS_TIMED, facts, 300.0), 0.0
    for seed in SEEDS:
        outcome = run(scenario, new_directory(), seed=seed)
        hold_promises(outcome, overrun=1.0)
        best_rate = best_rate or best_rate_of(scenario, outcome)
        assert outcome.machine.true_rate(outcome.config) > 0.95 * best_rate
        assert outcome.recommendation.best.confirmed_rounds >= 3


def test_two_minutes_are_enough_for_a_step_that_only_starts_kernels(new_directory: NewDirectory) -> None:
    """On a noisy machine, with the seconds that its trials take on an H200; and the free batch is found as well."""
    scenario, near, best_rate = SMALL_IN_TWO_MINUTES, 0, 0.0
    for seed in range(12):
        outcome = run(scenario, new_directory(), seed=seed, started_seconds=13.0)
        hold_promises(outcome)
        best_rate = best_rate or best_rate_of(scenario, outcome)
        near += outcome.machine.true_rate(outcome.config) > 0.95 * best_rate
        free = outcome.recommendation.free_batch
        assert free is not None
        assert outcome.machine.true_rate(free.config) > outcome.machine.true_rate(outcome.config)
        assert outcome.config["optimizer_impl"] == "fused"
    assert near >= 11


def test_five_minutes_are_enough_for_convolutions_that_a_slow_host_hides(new_directory: NewDirectory) -> None:
    """On a noisy machine; the precision, the order in memory, graphs and the loader pay together."""
    shares = []
    for seed in range(6):
        outcome = run(RESNET_IN_FIVE_MINUTES, new_directory(), seed=seed, started_seconds=13.0)
        hold_promises(outcome)
        _, best_rate = true_optimum(outcome.machine, outcome.asked.space, held=64, limit_bytes=None)
        shares.append(outcome.machine.true_rate(outcome.config) / best_rate)
        assert outcome.recommendation.best.confirmed_rounds >= 3
    assert min(shares) > 0.7
    assert sorted(shares)[3] > 0.9


def test_repeated_searches_find_the_same_where_rates_say_too_little(new_directory: NewDirectory) -> None:
    """What a fused update gains is as large as what is worthwhile: by rates, every second search would take it."""
    found = []
    for seed in range(6):
        outcome = run(GPT2_IN_THREE_MINUTES, new_directory(), seed=seed, started_seconds=23.0)
        hold_promises(outcome)
        found.append(outcome.changes)
    assert found[0]["optimizer_impl"] == "fused"
    assert all(changes == found[0] for changes in found)


def test_where_nothing_helps_it_says_keep(new_directory: NewDirectory) -> None:
    for seed in range(5):
        outcome = run(FLAT_ON_A_CPU, new_directory(), seed=seed)
        hold_promises(outcome)
        assert outcome.recommendation.keep
        assert outcome.recommendation.free_batch is None
        assert outcome.recommendation.verdict.startswith("Keep your settings")


def test_workers_that_pay_only_beside_a_precision_are_found(new_directory: NewDirectory) -> None:
    facts = cpu_facts(global_batch_size=16, batch_size=16, num_workers=1, machine_changes={"usable_cores": 4})
    for seed in range(4):
        outcome = run_search(WORKERS_AND_PRECISION, facts, new_directory(), seed=seed, budget_seconds=120.0)
        hold_promises(outcome)
        assert outcome.config["precision"] == "bf16"
        assert int(outcome.config["num_workers"]) >= 3
        assert outcome.true_speedup() > 3.5


def test_of_equal_ones_the_simpler_is_recommended(new_directory: NewDirectory) -> None:
    """fused gains; workers, compiling and recomputation cost nothing and give nothing."""
    program = Program(
        sample_seconds=0.001, update_seconds=0.05, update_speedups={("optimizer_impl", "fused"): 3.0},
        process_spread=0.004, block_spread=0.004,
    )  # fmt: skip
    facts = cpu_facts(global_batch_size=32, machine_changes={"usable_cores": 4})
    for seed in range(3):
        outcome = run_search(program, facts, new_directory(), seed=seed, budget_seconds=200.0)
        assert outcome.changes == {"optimizer_impl": "fused"}


def test_the_smallest_batch_within_two_percent_is_recommended(new_directory: NewDirectory) -> None:
    """Batch 32 to 128 gains a half; from there on, each doubling less than one per cent."""
    program = Program(sample_seconds=0.001, launch_seconds=0.1, process_spread=0.002, block_spread=0.002)
    facts = cpu_facts(batch_held=False, batch_size=32, dataset_length=5000, largest_batch_size=1024)
    outcome = run_search(program, facts, new_directory(), only=("batch_size",), budget_seconds=300.0)
    hold_promises(outcome)
    best = max(outcome.asked.space.batch_sizes, key=lambda size: outcome.machine.true_rate(with_batch(outcome, size)))
    assert int(outcome.config["batch_size"]) in (96, 128)
    assert outcome.true_speedup() > outcome.true_speedup(with_batch(outcome, best)) / 1.02


def with_batch(outcome: Outcome, size: int) -> Any:
    return outcome.recommendation.baseline.config.replace({"batch_size": size})


# --- a batch that is held ---------------------------------------------------------------------------------------------


def test_the_held_batch_is_kept_and_a_freer_one_is_a_second_answer(new_directory: NewDirectory) -> None:
    outcome = run(SCENARIOS["small model"], new_directory())
    hold_promises(outcome)
    best, free = outcome.recommendation.best, outcome.recommendation.free_batch
    assert best.effective_batch_size == 256
    assert free is not None
    assert free.effective_batch_size > 256
    assert free.samples_per_second > 1.02 * best.samples_per_second
    assert any("learning rate" in price for price in free.prices)


# --- fast and wrong, or dying ------------------------------------------------------------------------------------------


def test_what_is_fast_and_wrong_is_never_recommended(new_directory: NewDirectory) -> None:
    scenario = SCENARIOS["language model"]
    wrong = replace(scenario.program, wrong=({"precision": "bf16"}, {"precision": "fp16"}))
    for seed in SEEDS:
        outcome = run(replace(scenario, program=wrong), new_directory(), seed=seed)
        hold_promises(outcome)
        assert outcome.config["precision"] == "tf32"
        assert outcome.recommendation.failure_counts["numerics"] >= 1
        assert any("precision=bf16" in one and "and wrong" in one for one in outcome.recommendation.rejected)
        wrong_runs = [config for config in outcome.machine.asked("measure") if config["precision"] == "bf16"]
        assert len(wrong_runs) == 1, "once is enough to know"


def test_what_is_wrong_only_together_is_found_out_before_it_is_recommended(new_directory: NewDirectory) -> None:
    """No check of a single knob sees it; the finalist's own does, and gives way to the next."""
    wrong = replace(
        SCENARIOS["language model"].program,
        wrong=tuple({"precision": value, "optimizer_impl": "fused"} for value in ("bf16", "fp16", "tf32")),
    )
    scenario = replace(SCENARIOS["language model"], program=wrong, budget_seconds=200.0)
    outcome = run(scenario, new_directory(), only=("precision", "optimizer_impl"))
    hold_promises(outcome)
    assert outcome.changes == {"precision": "bf16"}
    assert set(outcome.recommendation.failure_counts) == {"numerics"}


def test_a_step_that_hangs_when_compiled_costs_its_timeout_once(new_directory: NewDirectory) -> None:
    hangs = Fault("measure", {"compile_mode": "default"}, "timeout", "compile")
    program = replace(TABLE_MODEL, faults=(hangs,))
    outcome = run(
        replace(CPU, program=program, budget_seconds=200.0), new_directory(), only=("compile_mode", "num_workers")
    )
    hold_promises(outcome)
    assert outcome.recommendation.failure_counts == {"timeout": 1}
    assert outcome.changes == {"num_workers": 2}


@pytest.mark.parametrize("failure", ["crash", "compile_error", "user_error", "cuda_error"])
def test_trials_that_die_are_recorded_and_passed_by(failure: Any, new_directory: NewDirectory) -> None:
    program = replace(TABLE_MODEL, faults=(Fault("measure", {"optimizer_impl": "fused"}, failure),))
    outcome = run(replace(CPU, program=program), new_directory(), preset="quick")
    hold_promises(outcome)
    assert outcome.config["optimizer_impl"] != "fused"
    assert outcome.recommendation.failure_counts[failure] >= 1
    assert outcome.changes["num_workers"] == 2


# --- memory -----------------------------------------------------------------------------------------------------------


def test_a_smaller_card_gets_another_answer_that_fits(new_directory: NewDirectory) -> None:
    scenario = SCENARIOS["language model in 16 GiB"]
    outcome = run(scenario, new_directory())
    hold_promises(outcome)
    assert outcome.machine.usable(outcome.config, 16 * GIB)
    assert outcome.recommendation.best.micro_batch_size < 32
    assert outcome.recommendation.best.effective_batch_size == 32


def test_a_baseline_that_does_not_fit_is_told_first_and_replaced(new_directory: NewDirectory) -> None:
    scenario = SCENARIOS["language model in 16 GiB"]
    outcome = run(scenario, new_directory(), preset="quick", budget_seconds=200.0)
    events = outcome.asked.watcher.events
    assert events[:3] == [
        "stage: baseline",
        "trial 0",
        "note: your batch of 32 does not fit (53.20 GiB do not fit into 16.00 GiB); looking for the largest that does",
    ]
    reference = outcome.recommendation.baseline
    fits = [size for size in (1, 2, 4, 8, 16, 32) if outcome.machine.usable(with_batch(outcome, size), 16 * GIB)]
    assert reference.micro_batch_size == max(fits)
    assert reference.effective_batch_size == 32
    assert any("a batch of 32 does not fit here" in one for one in outcome.recommendation.warnings)


def test_a_program_that_fits_at_no_batch_is_the_users_to_change(new_directory: NewDirectory) -> None:
    search = SimulatedSearch(
        LANGUAGE_MODEL, cuda_facts(global_batch_size=32), new_directory(), memory_limit_bytes=2 * GIB
    )
    with pytest.raises(
        UserError, match="fits at no batch, not even at a micro-batch of 1, nor in any of 7 ways to save"
    ):
        search.run()


def test_the_memory_objective_trades_speed_for_memory(new_directory: NewDirectory) -> None:
    scenario = SCENARIOS["language model"]
    outcome = run(scenario, new_directory(), objective="memory")
    hold_promises(outcome)
    best, baseline = outcome.recommendation.best, outcome.recommendation.baseline
    assert best.peak_allocated_bytes < 0.1 * baseline.peak_allocated_bytes
    assert best.effective_batch_size == 32
    assert "of the peak memory" in outcome.recommendation.verdict


# --- what the user narrows --------------------------------------------------------------------------------------------


def test_only_the_named_knobs_move(new_directory: NewDirectory) -> None:
    outcome = run(
        SCENARIOS["language model"], new_directory(), only=("precision", "optimizer_impl"), budget_seconds=200.0
    )
    hold_promises(outcome)
    assert outcome.changes == {"precision": "bf16", "optimizer_impl": "fused"}
    moved = {name for config in outcome.machine.asked("measure") for name in outcome.session.changes(config)}
    assert moved == {"precision", "optimizer_impl"}


def test_what_is_fixed_stays_fixed_and_is_compared_with_the_users_own(new_directory: NewDirectory) -> None:
    outcome = run(SCENARIOS["language model"], new_directory(), fixed={"precision": "tf32"}, budget_seconds=300.0)
    hold_promises(outcome)
    assert outcome.recommendation.baseline.config["precision"] == "as_is"
    others = [config for config in outcome.machine.asked("measure") if config != outcome.recommendation.baseline.config]
    assert {config["precision"] for config in others} == {"tf32"}
    assert outcome.true_speedup() > 3.5


def test_what_is_fixed_and_does_not_run_moves_nothing_else(new_directory: NewDirectory) -> None:
    program = replace(TABLE_MODEL, faults=(Fault("measure", {"optimizer_impl": "fused"}, "crash"),))
    outcome = run(replace(CPU, program=program), new_directory(), fixed={"optimizer_impl": "fused"})
    hold_promises(outcome)
    assert outcome.recommendation.keep
    assert any("what is fixed does not run" in one for one in outcome.recommendation.warnings)
    others = [config for config in outcome.machine.asked("measure") if config != outcome.recommendation.baseline.config]
    assert {config["optimizer_impl"] for config in others} == {"fused"}


def test_a_fixed_batch_that_does_not_fit_is_tried_with_less_memory(new_directory: NewDirectory) -> None:
    scenario = SCENARIOS["language model in 16 GiB"]
    options = {"fixed": {"batch_size": 16}, "budget_seconds": 300.0}
    outcome = run(scenario, new_directory(), **options)
    hold_promises(outcome)
    assert outcome.config["batch_size"] == 16
    assert outcome.machine.usable(outcome.config, 16 * GIB)


def test_where_nothing_can_be_moved_the_answer_is_keep(new_directory: NewDirectory) -> None:
    facts = cpu_facts(
        batch_fixed_reason="a batch_sampler of its own", workers_fixed_reason="no sharding", optimizer_variants=(),
        optimizer_fixed_reason="of its own", blocks=(), block_class=None, model_is_compiled=True,
    )  # fmt: skip
    outcome = run_search(TABLE_MODEL, facts, new_directory(), preset="quick", only=("batch_size",), budget_seconds=60.0)
    assert outcome.recommendation.keep
    assert outcome.recommendation.best.confirmed_rounds == 1


# --- little time, few trials ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trials", [1, 2, 3])
def test_no_more_trials_run_than_allowed_and_the_answer_is_still_confirmed(
    trials: int, new_directory: NewDirectory
) -> None:
    outcome = run(CPU, new_directory(), trials=trials)
    hold_promises(outcome)
    assert sum(trial.round is None for trial in outcome.session.trials) == trials == outcome.recommendation.trial_count
    assert outcome.recommendation.keep == (trials == 1)


def test_a_budget_that_ends_in_any_stage_leaves_an_answer(new_directory: NewDirectory) -> None:
    for budget_seconds in (6, 12, 20, 35, 50, 80):
        outcome = run(CPU, new_directory(), budget_seconds=float(budget_seconds), preset="quick")
        # The baseline and its confirmation run in any case.
        hold_promises(outcome, overrun=max(1.25, 18 / budget_seconds))


def test_without_a_resident_rate_nothing_is_claimed_of_the_loader(
    new_directory: NewDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = SimulatedSearch(TABLE_MODEL, CPU.facts, new_directory(), preset="quick", budget_seconds=60.0)
    answered = search.machine.run

    def without_resident_rate(*arguments: Any) -> Any:
        answer = answered(*arguments)
        if answer.measurement is None:
            return answer
        changes = {"resident_samples_per_second": None, "resident_blocks": None}
        return answer.model_copy(update={"measurement": answer.measurement.model_copy(update=changes)})

    monkeypatch.setattr(search.machine, "run", without_resident_rate)
    outcome = search.run()
    hold_promises(outcome)
    assert not any("the loader gives" in reason for reason in outcome.recommendation.other_settings)


# --- the user's own program fails ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failure", "error"),
    [("user_error", UserError), ("crash", UserError), ("timeout", UserError), ("memory_not_returned", NoAnswerError)],
)
def test_a_program_that_does_not_run_ends_the_search_at_once(
    failure: Any, error: type[Exception], new_directory: NewDirectory
) -> None:
    program = replace(FLAT, faults=(Fault("measure", {"precision": "as_is"}, failure),))
    search = SimulatedSearch(program, FLAT_ON_A_CPU.facts, new_directory())
    with pytest.raises(error, match=f"your own program does not run as it is \\({failure}, in phase measure"):
        search.run()
    assert len(search.machine.requests) == 1


def test_a_program_that_failed_once_is_tried_again_by_the_next_call(new_directory: NewDirectory) -> None:
    directory = new_directory()
    program = replace(TABLE_MODEL, faults=(Fault("measure", {"precision": "as_is"}, "timeout"),))
    with pytest.raises(UserError):
        run(replace(CPU, program=program), directory)
    outcome = run(CPU, directory)
    hold_promises(outcome)
    assert not outcome.recommendation.keep
    assert outcome.recommendation.failure_counts == {"timeout": 1}


# --- interrupted and gone on with --------------------------------------------------------------------------------------


def test_a_search_that_is_interrupted_anywhere_goes_on_without_repeating_itself(new_directory: NewDirectory) -> None:
    whole = run(CPU, new_directory(), preset="quick", budget_seconds=60.0)
    for at in range(1, len(whole.machine.requests), 4):
        directory = new_directory()
        first = SimulatedSearch(CPU.program, CPU.facts, directory, preset="quick", budget_seconds=60.0)
        first.machine.interrupt_at = at
        outcome = first.run()
        assert outcome.interrupted
        hold_promises(outcome)
        if outcome.recommendation.best.confirmed_rounds == 0:
            assert outcome.recommendation.best.config in first.machine.asked("measure")
        second = run(CPU, directory, preset="quick", budget_seconds=80.0)
        stored = {("measure", trial.config) for trial in outcome.session.trials if trial.round is None}
        stored |= {
            (kind, request.config) for request in first.machine.requests[:at] if (kind := request.kind) != "measure"
        }
        again = {(r.kind, r.config) for r in second.machine.requests if r.measure_resident or r.kind != "measure"}
        assert not stored & again
        assert second.true_speedup() > 2
        assert [trial.number for trial in second.session.trials] == sorted(
            {trial.number for trial in second.session.trials}
        )


def test_what_was_running_when_it_was_interrupted_runs_first_thing_in_the_rest(new_directory: NewDirectory) -> None:
    directory = new_directory()
    first = SimulatedSearch(CPU.program, CPU.facts, directory, preset="quick", budget_seconds=60.0)
    first.machine.interrupt_at = 6
    first.run()
    lost = first.machine.requests[6].config
    second = run(CPU, directory, preset="quick", budget_seconds=120.0)
    assert second.session.study.interrupted == [lost]
    assert lost in second.machine.asked("measure")


def test_the_trials_of_an_earlier_call_count(new_directory: NewDirectory) -> None:
    directory = new_directory()
    run(CPU, directory, preset="quick", trials=3)
    again = run(CPU, directory, preset="quick", trials=3)
    assert again.machine.asked("measure") == [] or all(not r.measure_resident for r in again.machine.requests)
    more = run(CPU, directory, preset="quick", trials=5)
    assert sum(r.kind == "measure" and r.measure_resident for r in more.machine.requests) == 2


def test_a_finished_search_that_is_asked_again_says_the_same_sooner(new_directory: NewDirectory) -> None:
    directory = new_directory()
    options = {"only": ("precision", "optimizer_impl"), "budget_seconds": 200.0}
    first = run(SCENARIOS["language model"], directory, **options)
    second = run(SCENARIOS["language model"], directory, **options)
    assert second.config == first.config
    assert second.machine.now_seconds < 0.5 * first.machine.now_seconds


def test_the_same_seed_gives_the_same_search(new_directory: NewDirectory) -> None:
    one, other = (run(CPU, new_directory(), preset="quick", budget_seconds=60.0, seed=7) for _ in range(2))
    assert one.machine.requests == other.machine.requests
    assert one.recommendation == other.recommendation


def test_two_cores_are_enough_to_say_what_a_worker_costs(new_directory: NewDirectory) -> None:
    """Where loading costs nothing, no worker is recommended, whatever the noise."""
    program = Program(sample_seconds=0.002, process_spread=0.02, block_spread=0.02)
    facts = cpu_facts(global_batch_size=32, machine_changes=TWO_CORES)
    for seed in range(4):
        outcome = run_search(program, facts, new_directory(), seed=seed, only=("num_workers",), budget_seconds=60.0)
        assert outcome.recommendation.keep
        assert not outcome.machine.asked("loader")
