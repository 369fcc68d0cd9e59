"""What is checked, stopped and blamed along the way, on a simulated machine."""

from pathlib import Path

from autotune.search.memory import find_ceiling
from tests.knobs.search_facts import cpu_facts
from tests.search.simulated_machine import Fault, Program
from tests.search.simulated_search import SimulatedSearch


def test_a_slow_value_that_trains_wrong_is_seen_when_it_is_first_tried(tmp_path: Path) -> None:
    program = Program(
        sample_seconds=0.001, sample_speedups={("precision", "bf16"): 0.5}, wrong=({"precision": "bf16"},)
    )
    facts = cpu_facts(batch_size=8, dataset_length=1000, largest_batch_size=64)
    outcome = SimulatedSearch(program, facts, tmp_path, budget_seconds=300, only=("precision", "batch_size")).run()
    wrong = [trial for trial in outcome.session.trials if trial.config["precision"] == "bf16"]
    assert [trial.failure.kind for trial in wrong if trial.failure is not None] == ["numerics"]
    assert len(wrong) == 1


def test_a_way_to_save_memory_that_never_runs_is_probed_once(tmp_path: Path) -> None:
    recomputing = {"activation_checkpointing": "all"}
    program = Program(sample_seconds=0.001, faults=(Fault("memory", recomputing, "user_error"),))
    facts = cpu_facts(batch_size=8, dataset_length=1000, largest_batch_size=64)
    search = SimulatedSearch(program, facts, tmp_path)
    session = search.session()
    ceiling = find_ceiling(session, search.space.baseline.replace(recomputing))
    session.study.close()
    assert (ceiling.largest_batch_size, ceiling.probes) == (None, 1)
    assert ceiling.stopped_because.startswith("it does not run, whatever the batch: ")


def test_a_batch_that_hangs_ends_the_search_for_larger_ones(tmp_path: Path) -> None:
    program = Program(sample_seconds=0.001, faults=(Fault("memory", {"batch_size": 32}, "timeout"),))
    facts = cpu_facts(batch_size=8, dataset_length=1000, largest_batch_size=64)
    search = SimulatedSearch(program, facts, tmp_path)
    session = search.session()
    ceiling = find_ceiling(session, search.space.baseline)
    session.study.close()
    assert (ceiling.largest_batch_size, ceiling.smallest_failed_batch_size, ceiling.failure_kind) == (16, 32, "timeout")
    assert ceiling.stopped_because.startswith("a batch of 32 hung")
