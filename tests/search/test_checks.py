"""What is checked, stopped and blamed along the way, on a simulated machine."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from autotune.knobs.registry import KNOBS
from autotune.records import Phase, TrialAnswer, TrialRequest
from autotune.search.loader import search_loader
from autotune.search.memory import find_ceiling
from autotune.search.recommend import Evidence, recommend
from tests.knobs.search_facts import cpu_facts
from tests.search.simulated_machine import Fault, Program, SimulatedMachine
from tests.search.simulated_search import REFERENCE, SimulatedSearch

NewDirectory = Callable[[], Path]


def test_a_slow_value_that_trains_wrong_is_seen_when_it_is_first_tried(new_directory: NewDirectory) -> None:
    program = Program(
        sample_seconds=0.001, sample_speedups={("precision", "bf16"): 0.8}, wrong=({"precision": "bf16"},)
    )
    facts = cpu_facts(batch_size=8, dataset_length=1000, largest_batch_size=64)
    outcome = SimulatedSearch(program, facts, new_directory(), trials=5, only=("precision", "batch_size")).run()
    wrong = [trial for trial in outcome.session.trials if trial.config["precision"] == "bf16"]
    assert [trial.failure.kind for trial in wrong if trial.failure is not None] == ["numerics"]
    assert len(wrong) == 1


def test_a_way_to_save_memory_that_never_runs_is_probed_once(new_directory: NewDirectory) -> None:
    recomputing = {"activation_checkpointing": "all"}
    program = Program(sample_seconds=0.001, faults=(Fault("memory", recomputing, "user_error"),))
    facts = cpu_facts(batch_size=8, dataset_length=1000, largest_batch_size=64)
    search = SimulatedSearch(program, facts, new_directory())
    session = search.session()
    ceiling = find_ceiling(session, search.space.baseline.replace(recomputing))
    session.study.close()
    assert (ceiling.largest_batch_size, ceiling.probes) == (None, 1)
    assert ceiling.stopped_because.startswith("it does not run, whatever the batch: ")


def test_a_batch_that_hangs_ends_the_search_for_larger_ones(new_directory: NewDirectory) -> None:
    program = Program(sample_seconds=0.001, faults=(Fault("memory", {"batch_size": 32}, "timeout"),))
    facts = cpu_facts(batch_size=8, dataset_length=1000, largest_batch_size=64)
    search = SimulatedSearch(program, facts, new_directory())
    session = search.session()
    ceiling = find_ceiling(session, search.space.baseline)
    session.study.close()
    assert (ceiling.largest_batch_size, ceiling.smallest_failed_batch_size, ceiling.failure_kind) == (16, 32, "timeout")
    assert ceiling.stopped_because.startswith("a batch of 32 hung")


def test_a_step_that_is_compiled_in_pieces_is_recommended_with_a_warning(new_directory: NewDirectory) -> None:
    facts = cpu_facts(batch_size=8, dataset_length=1000, largest_batch_size=64)
    outcome = SimulatedSearch(
        Program(sample_seconds=0.001), facts, new_directory(), budget_seconds=60, only=("precision",)
    ).run()
    results = outcome.session.results()
    in_pieces = [
        trial.model_copy(
            update={"measurement": trial.measurement and trial.measurement.model_copy(update={"graph_breaks": 4})}
        )
        for trial in results.trials
    ]
    evidence = Evidence(
        results=dataclasses.replace(results, trials=in_pieces), ceilings=(), reference=REFERENCE, knobs=KNOBS,
        memory_limit_bytes=None, warnings=(), skipped=(), short_of=None, earlier_trial_count=0, search_seconds=1.0,
        stage_seconds={}, autotune_version="0",
    )  # fmt: skip
    assert any(text.startswith("the compiler left the step 4 times") for text in recommend(evidence).warnings)
    assert not any("compiler left" in text for text in outcome.recommendation.warnings)


class DearToSend(SimulatedMachine):
    """Items cost next to nothing to make, and much to send from one process to another."""

    def run(self, request: TrialRequest, on_phase: Callable[[Phase], None] | None = None) -> TrialAnswer:
        answer = super().run(request, on_phase)
        if answer.loader is None:
            return answer
        return answer.model_copy(update={"loader": answer.loader.model_copy(update={"samples_per_second": 100.0})})


def test_workers_that_cannot_reach_what_the_step_does_without_are_not_tried(new_directory: NewDirectory) -> None:
    facts = cpu_facts(batch_size=8, dataset_length=1000, largest_batch_size=64)
    program = Program(sample_seconds=0.0001, load_seconds=0.00002)
    search = SimulatedSearch(program, facts, new_directory(), trials=2, only=("num_workers",))
    search.machine = DearToSend(program, search.space)
    with search.begun() as session:
        start = session.baseline_trial()
        assert start is not None
        assert search_loader(session, start) is start
        assert session.trials == [start]
        assert [one[:22] for one in session.skipped.values()] == ["num_workers: not moved"]


def test_workers_that_the_limit_of_open_files_forbids_are_said_to_be_so(new_directory: NewDirectory) -> None:
    structure = "mapping of 60: " + ", ".join(f"k{n}: float32 [8, 4]" for n in range(60))
    facts = cpu_facts(
        machine_changes={"open_files_limit": 128}, batch_size=8, dataset_length=1000, batch_structure=structure
    )
    search = SimulatedSearch(Program(sample_seconds=0.001, load_seconds=0.01), facts, new_directory(), trials=2)
    told = search.run().recommendation.other_settings
    assert any(text.startswith("num_workers: 1 was not tried, since ") and "the limit is 128" in text for text in told)


def test_workers_and_precision_that_pay_only_together_are_found_before_time_goes_into_compiling(
    new_directory: NewDirectory,
) -> None:
    program = Program(
        sample_seconds=0.005, launch_seconds=0.0012, load_seconds=0.00375, sample_speedups={("precision", "bf16"): 4.0}
    )
    facts = cpu_facts(global_batch_size=16, batch_size=16, num_workers=1, dataset_length=1024, largest_batch_size=64)
    outcome = SimulatedSearch(program, facts, new_directory(), trials=6).run()
    best = outcome.recommendation.best
    assert (best.config["precision"], int(best.config["num_workers"]) >= 3) == ("bf16", True)
    assert best.speedup.value > 3


def test_a_loader_that_was_seen_to_give_less_is_not_tried_again_with_a_faster_step(new_directory: NewDirectory) -> None:
    program = Program(
        sample_seconds=0.0002, load_seconds=0.001, sample_speedups={("precision", "bf16"): 2.0}, process_spread=0.001
    )
    facts = cpu_facts(
        machine_changes={"usable_cores": 2}, batch_size=8, num_workers=0, dataset_length=1000, largest_batch_size=64
    )
    search = SimulatedSearch(program, facts, new_directory(), trials=12, only=("num_workers", "precision"))
    outcome = search.run()
    loader = [trial.config for trial in outcome.session.trials if trial.stage == "loader"]
    workers = [config["num_workers"] for config in loader]
    assert len(workers) == len(set(workers)), f"each number of workers once: {workers}"
    assert len(outcome.machine.asked("loader")) == 1
