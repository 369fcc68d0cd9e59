"""What was tried beside the answer is told with what it gave, and what was not tried with the reason."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from autotune.config import TrainingConfig
from tests.knobs.search_facts import cpu_facts, cuda_facts
from tests.search.simulated_machine import Fault, Program
from tests.search.simulated_programs import SCENARIOS, TWO_CORES
from tests.search.simulated_search import SimulatedSearch, run_search
from tests.search.test_recommend import BF16, recommended, started

NewDirectory = Callable[[], Path]
TABLES = SCENARIOS["tables on a CPU"]
QUIET = {"process_spread": 0.002, "block_spread": 0.002}
FACTS = cpu_facts(global_batch_size=32, machine_changes=TWO_CORES)


def starting(sentences: tuple[str, ...], beginning: str) -> str:
    """The sentence that begins so; none, and the test fails."""
    return next(one for one in sentences if one.startswith(beginning))


def test_a_short_budget_says_what_it_did_not_reach_and_a_long_one_reaches_it(new_directory: NewDirectory) -> None:
    directory = new_directory()
    short = run_search(TABLES.program, TABLES.facts, directory, budget_seconds=45.0).recommendation
    missed = starting(short.other_settings, "not tried, for lack of time: ")
    assert "compile_mode" in missed
    assert missed.endswith("; the same command goes on with what is left")
    again = run_search(TABLES.program, TABLES.facts, directory, budget_seconds=200.0)
    assert any("compile_mode" in again.session.changes(trial.config) for trial in again.session.trials)
    missed_again = [one for one in again.recommendation.other_settings if one.startswith("not tried, for lack of time")]
    assert not any("compile_mode" in one for one in missed_again)


def test_trials_that_were_counted_out_are_the_reason_where_they_are(new_directory: NewDirectory) -> None:
    found = run_search(TABLES.program, TABLES.facts, new_directory(), trials=3).recommendation
    assert "precision" in starting(found.other_settings, "not tried, since no more trials were asked for: ")


def test_an_update_that_was_left_out_is_told_with_the_gain_that_it_was_left_out_for(
    new_directory: NewDirectory,
) -> None:
    """By rates of processes that differ by 15 %, it would be another one each time."""
    program = Program(sample_seconds=0.001, update_seconds=0.01, process_spread=0.15, update_spread=0.001)
    for seed in range(3):
        found = run_search(program, FACTS, new_directory(), seed=seed, only=("optimizer_impl",), budget_seconds=30.0)
        told = re.findall(r"optimizer_impl=\w+ \(([\d.]+)x\)", " ".join(found.recommendation.other_settings))
        assert set(told) == {"1.00"}


def test_an_update_whose_gain_the_loader_hides_is_told_with_what_is_left_of_it(new_directory: NewDirectory) -> None:
    program = Program(
        sample_seconds=0.0002,
        update_seconds=0.01,
        load_seconds=0.002,
        update_speedups={("optimizer_impl", "fused"): 3.0},
    )
    told = run_search(
        program, FACTS, new_directory(), only=("optimizer_impl",), fixed={"num_workers": 1}, budget_seconds=30.0
    ).recommendation.other_settings
    (gain,) = re.findall(r"optimizer_impl=fused \(([\d.]+)x\)", " ".join(told))
    assert float(gain) < 1.05


def test_what_was_tried_and_left_out_is_told_with_what_it_gave(new_directory: NewDirectory) -> None:
    program = Program(
        sample_seconds=0.001, load_seconds=1e-6, sample_speedups={("precision", "bf16"): 0.5},
        faults=(Fault("measure", {"compile_mode": "default"}, "compile_error", "compile"),), **QUIET,
    )  # fmt: skip
    found = run_search(program, FACTS, new_directory(), only=("precision", "compile_mode")).recommendation
    assert found.keep
    assert found.other_settings == (
        "tried, and left out, against what is used instead: precision=bf16 (0.50x), compile_mode=default (compile_error)",
    )


class Crowded(Program):
    """Whatever a worker loads, it takes from the step."""

    def samples_per_second(self, config: TrainingConfig, micro_batches: int, cores: int) -> float:
        return 250.0


def test_workers_that_do_not_help_a_step_that_waits_are_no_cure(new_directory: NewDirectory) -> None:
    program = Crowded(sample_seconds=0.002, load_seconds=0.00195, process_spread=0.001, block_spread=0.001)
    kept = run_search(program, FACTS, new_directory(), only=("num_workers",)).recommendation
    assert kept.keep
    assert kept.bottleneck == "loader"
    assert "tried against that, without a certain gain: num_workers" in kept.best.reasons
    assert not any("what helps" in reason for reason in kept.best.reasons)
    assert "num_workers=2 (1.00x)" in starting(
        kept.other_settings, "tried, and left out, against what is used instead: "
    )


def test_what_only_saves_memory_is_not_tried_where_there_is_enough(new_directory: NewDirectory) -> None:
    only = ("precision", "activation_checkpointing")
    roomy = run_search(Program(sample_seconds=0.001, load_seconds=1e-6), cuda_facts(), new_directory(), only=only)
    told = "not tried, since all that it saves is memory, which nothing lacked: activation_checkpointing"
    tried = any("activation_checkpointing" in roomy.session.changes(t.config) for t in roomy.session.trials)
    assert (told in roomy.recommendation.other_settings) != tried


def test_what_was_confirmed_and_not_taken_is_told_with_its_interval() -> None:
    """Once 3 times as fast, then hardly faster: that is no answer, and must not look like one."""
    found = recommended(started().rounds(BF16, [3000, 1100], [1000, 1000]))
    assert found.keep
    told = starting(found.other_settings, "measured again beside your settings, and not taken: precision=bf16: 1.82x")
    assert "decides: 0." in told
    assert not any(
        "not taken" in one for one in recommended(started().rounds(BF16, [3000] * 2, [1000] * 2)).other_settings
    )


def test_what_was_confirmed_by_itself_is_told_with_that_figure_alone() -> None:
    once = started().add(BF16, 1660.0)
    assert any("used instead: precision=bf16" in one for one in recommended(once).other_settings)
    again = recommended(started().add(BF16, 1660.0).rounds(BF16, [910], [1000])).other_settings
    told = [one.partition(":")[0] for one in again if "bf16" in one]
    assert told == ["measured again beside your settings, and not taken"]


def test_an_interrupted_search_says_what_it_had_not_come_to(new_directory: NewDirectory) -> None:
    search = SimulatedSearch(TABLES.program, TABLES.facts, new_directory())
    search.machine.interrupt_at = 5
    outcome = search.run()
    assert outcome.interrupted
    assert "compile_mode" in starting(outcome.recommendation.other_settings, "not tried before the interruption: ")


def test_a_part_of_what_was_confirmed_and_not_taken_has_no_better_figure_of_its_own() -> None:
    both = {**BF16, "optimizer_impl": "fused"}
    alone = started().add(BF16, 1000.0).add(both, 1190.0)
    assert any("optimizer_impl=fused (1.19x)" in one for one in recommended(alone).other_settings)
    told = recommended(started().add(BF16, 1000.0).add(both, 1190.0).rounds(both, [950], [1000])).other_settings
    assert starting(told, "measured again beside your settings, and not taken: ").count("fused") == 1
    assert starting(told, "tried, and left out, ").endswith(": precision=bf16 (1.00x)")


def test_where_less_memory_is_the_aim_what_saves_it_is_missed_for_lack_of_time() -> None:
    told = recommended(started(), objective="memory").other_settings
    assert "activation_checkpointing" in starting(told, "not tried, for lack of time: ")
    assert not any(one.startswith("not tried, since nothing faster") for one in told)
