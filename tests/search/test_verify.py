"""A recommendation held against today's machine and program: every answer that there is, on simulated machines."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.config import Value
from autotune.errors import UserError
from autotune.options import VerifyReport
from autotune.records import Recommendation, SearchFacts
from autotune.search.changes import changes_since
from autotune.search.verify import verify
from tests.knobs.search_facts import H200, cuda_facts
from tests.search.simulated_machine import Fault, Program
from tests.search.simulated_search import REFERENCE, SimulatedSearch, run_search

NewDirectory = Callable[[], Path]
FACTS = cuda_facts(global_batch_size=32, dataset_length=10_000, largest_batch_size=512)
PROGRAM = Program(
    sample_seconds=0.002, update_seconds=0.004, sample_speedups={("precision", "bf16"): 4.0},
    process_spread=0.003, block_spread=0.003,
)  # fmt: skip
BF16: dict[str, Value] = {"precision": "bf16"}


@pytest.fixture(scope="module")
def claimed(empty_simulated_study: Path, tmp_path_factory: pytest.TempPathFactory) -> Recommendation:
    directory = tmp_path_factory.mktemp("claimed")
    shutil.copy(empty_simulated_study, directory / "study.db")
    return run_search(PROGRAM, FACTS, directory, only=("precision",)).recommendation


def found(new_directory: NewDirectory, program: Program = PROGRAM, **options: Any) -> Recommendation:
    outcome = run_search(program, FACTS, new_directory(), only=("precision",), **options)
    return outcome.recommendation


def today(
    claimed: Recommendation, new_directory: NewDirectory, program: Program = PROGRAM, facts: SearchFacts = FACTS,
    **options: Any,
) -> tuple[VerifyReport, SimulatedSearch]:  # fmt: skip
    search = SimulatedSearch(program, facts, new_directory(), preset="thorough", seed=9, **options)
    session = search.session()
    try:
        return verify(session, claimed, ("torch: 2.11 then, 2.12 now",)), search
    finally:
        session.study.close()


def test_it_holds_where_nothing_changed(claimed: Recommendation, new_directory: NewDirectory) -> None:
    assert dict(claimed.best.config.changes_from(claimed.baseline.config)) == BF16
    report, search = today(claimed, new_directory)
    assert report.outcome == "holds" and report.holds
    assert report.verdict.startswith("It holds: precision=bf16 is 3.")
    assert report.verdict.endswith(f"{claimed.best.speedup.value:.2f} times when it was found.")
    assert report.changed == ("torch: 2.11 then, 2.12 now",)
    assert report.best is not None and report.best.confirmed_rounds == 3
    assert report.parity is not None and report.parity.passed
    base, best = search.space.baseline, claimed.best.config
    assert search.machine.asked("measure") == [base, *[base, best] * 3], "in turn, after the first look at the program"
    assert search.machine.asked("parity") == [best]


def test_another_gain_is_told_beside_the_old_one(claimed: Recommendation, new_directory: NewDirectory) -> None:
    report, _ = today(claimed, new_directory, replace(PROGRAM, sample_speedups={("precision", "bf16"): 1.6}))
    assert report.outcome == "holds_differently" and report.holds
    assert report.verdict.startswith("It holds, but the speed-up is now 1.5")
    assert f"instead of {claimed.best.speedup.value:.2f}: precision=bf16 is" in report.verdict


def test_what_is_not_certain_any_more_is_told_with_the_interval_that_decides(
    claimed: Recommendation, new_directory: NewDirectory
) -> None:
    """By the 95 % interval alone, 1.01 to 1.12, it would be faster."""
    program = replace(PROGRAM, sample_speedups={("precision", "bf16"): 1.06}, process_spread=0.04)
    report, _ = today(claimed, new_directory, program)
    assert report.outcome == "no_longer_better"
    assert report.best is not None and report.best.speedup.interval[0] > 1
    assert (
        "is no longer faster for certain: 1.06 times the speed of your settings (99 % interval, which decides, 0.98 to"
        in (report.verdict)
    )


def test_what_gains_nothing_any_more_does_not_hold(claimed: Recommendation, new_directory: NewDirectory) -> None:
    for speedup in (1.0, 0.7):
        report, _ = today(claimed, new_directory, replace(PROGRAM, sample_speedups={("precision", "bf16"): speedup}))
        assert report.outcome == "no_longer_better" and not report.holds
        assert report.verdict.startswith("It no longer holds: precision=bf16 is no longer faster: ")
        assert report.verdict.endswith("Search again.")


def test_a_machine_too_noisy_to_tell_is_called_that(new_directory: NewDirectory) -> None:
    small = replace(PROGRAM, sample_speedups={("precision", "bf16"): 1.15})
    claimed = found(new_directory, small)
    assert not claimed.keep
    report, search = today(claimed, new_directory, replace(small, process_spread=0.25, block_spread=0.2))
    assert report.outcome == "unclear" and not report.holds
    assert report.verdict.startswith("It is not clear whether it holds: precision=bf16 is ")
    assert "--budget" in report.verdict
    assert len(search.machine.asked("measure")) == 1 + 2 * 6, "every round that there is"


def test_what_trains_differently_is_not_measured_for_long(claimed: Recommendation, new_directory: NewDirectory) -> None:
    report, search = today(claimed, new_directory, replace(PROGRAM, wrong=(BF16,)))
    assert report.outcome == "trains_differently"
    assert report.verdict == (
        "It no longer holds: precision=bf16 trains differently now: the gradient is 40 % off. Search again."
    )
    assert report.parity is not None and not report.parity.passed
    assert search.machine.asked("measure") == [search.space.baseline]


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (Fault("measure", BF16, "device_oom"), "no longer runs: device_oom in measure: it fails with"),
        (Fault("measure", BF16, "crash", after=1), "no longer runs: crash in measure: it fails with"),
        (Fault("parity", BF16, "timeout", "parity"), "precision=bf16: it could not be checked: it fails with"),
    ],
)
def test_what_fails_is_told_with_its_failure(
    fault: Fault, told: str, claimed: Recommendation, new_directory: NewDirectory
) -> None:
    report, _ = today(claimed, new_directory, replace(PROGRAM, faults=(fault,)))
    assert report.outcome == "no_longer_runs"
    assert told in report.verdict
    assert report.failure is not None and report.failure.kind == fault.failure


def test_what_does_not_fit_or_is_not_offered_here_is_not_run(
    claimed: Recommendation, new_directory: NewDirectory
) -> None:
    larger = claimed.model_copy(
        update={"best": claimed.best.model_copy(update={"config": claimed.best.config.replace({"batch_size": 128})})}
    )
    smaller_data = cuda_facts(global_batch_size=None, batch_held=False, dataset_length=100, largest_batch_size=100)
    report, search = today(larger, new_directory, facts=smaller_data)
    assert report.outcome == "no_longer_runs"
    assert (
        "cannot be used here: batch_size: a batch of 128 is larger than the data set of 100 samples" in report.verdict
    )
    assert search.machine.asked("measure") == [search.space.baseline]
    fused = claimed.best.config.replace({"optimizer_impl": "fused"})
    report, _ = today(
        claimed.model_copy(update={"best": claimed.best.model_copy(update={"config": fused})}), new_directory,
        facts=cuda_facts(global_batch_size=32, dataset_length=10_000, largest_batch_size=512, optimizer_variants=()),
    )  # fmt: skip
    assert report.outcome == "no_longer_runs"
    assert "cannot be used here: optimizer_impl: " in report.verdict


def test_another_batch_of_a_step_is_another_training(claimed: Recommendation, new_directory: NewDirectory) -> None:
    halved = cuda_facts(global_batch_size=16, batch_size=16, dataset_length=10_000, largest_batch_size=512)
    report, _ = today(claimed, new_directory, facts=halved)
    assert report.outcome == "trains_differently"
    assert "an optimizer step takes 32 samples with it, and 16 are to be held" in report.verdict


def test_settings_that_were_to_be_kept_are_run_once(new_directory: NewDirectory) -> None:
    nothing_helps = replace(PROGRAM, sample_speedups={})
    claimed = found(new_directory, nothing_helps)
    assert claimed.keep
    report, search = today(claimed, new_directory, nothing_helps)
    assert report.outcome == "holds" and report.best is None
    assert report.verdict.startswith(
        "It holds as far as is seen without a search: your settings were to be kept, and they run ("
    )
    assert report.verdict.endswith(
        " then). There is nothing to compare: whether others are better by now, a search tells."
    )
    assert search.machine.asked("measure") == [search.space.baseline]
    slower = replace(
        nothing_helps, sample_seconds=2 * PROGRAM.sample_seconds, update_seconds=2 * PROGRAM.update_seconds
    )
    report, _ = today(claimed, new_directory, slower)
    assert report.outcome == "holds_differently"
    assert report.verdict.startswith(
        "It holds, but your program runs at 0.50 times the speed of then: your settings were to be kept, and they run ("
    )


def test_settings_to_be_kept_for_their_memory_are_held_against_it(new_directory: NewDirectory) -> None:
    claimed = found(new_directory, objective="memory")
    assert claimed.keep
    report, _ = today(claimed, new_directory, objective="memory")
    assert report.outcome == "holds" and " at most, " in report.verdict
    grown = replace(PROGRAM, constant_bytes=4 * PROGRAM.constant_bytes)
    report, _ = today(claimed, new_directory, grown, objective="memory")
    assert report.outcome == "holds_differently" and " times the memory of then: your settings" in report.verdict


def test_settings_that_became_the_users_own_are_run_once(claimed: Recommendation, new_directory: NewDirectory) -> None:
    adopted = claimed.model_copy(
        update={"best": claimed.best.model_copy(update={"config": claimed.baseline.config}), "keep": False}
    )
    report, search = today(adopted, new_directory)
    assert report.outcome == "holds_differently", "they run as fast as before, and not as what was recommended"
    assert "times the speed of then: your settings are what was recommended, and they run (" in report.verdict
    assert search.machine.asked("measure") == [search.space.baseline]


def test_a_program_that_does_not_run_is_no_answer(claimed: Recommendation, new_directory: NewDirectory) -> None:
    with pytest.raises(UserError, match="your own program does not run as it is"):
        today(claimed, new_directory, replace(PROGRAM, faults=(Fault("measure", {}, "user_error"),)))


def test_less_memory_is_held_against_less_memory(new_directory: NewDirectory) -> None:
    saving = replace(PROGRAM, memory_shares={("precision", "bf16"): 0.5}, sample_bytes=2**26)
    claimed = found(new_directory, saving, objective="memory")
    assert not claimed.keep
    report, _ = today(claimed, new_directory, saving, objective="memory")
    assert (report.outcome, report.verdict.split(";")[0]) == (
        "holds", "It holds: precision=bf16 needs 52 % of the peak memory of your settings",
    )  # fmt: skip
    other = replace(saving, memory_shares={("precision", "bf16"): 0.8})
    assert today(claimed, new_directory, other, objective="memory")[0].outcome == "holds_differently"
    none = replace(saving, memory_shares={})
    assert today(claimed, new_directory, none, objective="memory")[0].outcome == "no_longer_better"


def test_little_time_means_one_round(claimed: Recommendation, new_directory: NewDirectory) -> None:
    report, search = today(claimed, new_directory, budget_seconds=5.0)
    assert report.best is not None and report.best.confirmed_rounds == 1
    assert len(search.machine.asked("measure")) == 3


# --- what changed -----------------------------------------------------------------------------------------------------


def changed(claimed: Recommendation, facts: SearchFacts, **reference: str) -> tuple[str, ...]:
    return changes_since(claimed, facts, REFERENCE.model_copy(update=reference), claimed.autotune_version)


def test_what_changed_is_named_with_both_values(claimed: Recommendation) -> None:
    assert changed(claimed, FACTS) == ()
    machine = FACTS.machine.model_copy(update={"torch_version": "2.14", "driver_version": "999", "usable_cores": 2})
    assert changed(claimed, FACTS.model_copy(update={"machine": machine})) == (
        "GPU driver: none then, 999 now", "torch: 2.13 then, 2.14 now", "usable cores: 16 then, 2 now",
    )  # fmt: skip
    other_card = H200.model_copy(update={"name": "NVIDIA B200"})
    machine = FACTS.machine.model_copy(update={"gpus": (other_card,), "identity": "1" * 12})
    assert changed(claimed, FACTS.model_copy(update={"machine": machine})) == (
        "GPU: NVIDIA H200 then, NVIDIA B200 now",
    )


def test_another_card_of_the_same_kind_and_other_shapes_are_noticed(claimed: Recommendation) -> None:
    machine = FACTS.machine.model_copy(update={"identity": "1" * 12})
    workload = FACTS.workload.model_copy(update={"fingerprint": "changed"})
    assert changed(claimed, FACTS.model_copy(update={"machine": machine, "workload": workload})) == (
        "machine: another one of the same kind", "model: names or shapes of its parameters, or its blocks",
    )  # fmt: skip


def test_the_program_is_compared_too(claimed: Recommendation) -> None:
    larger = FACTS.workload.model_copy(update={"parameter_count": 20, "num_workers": 4, "prefetch_factor": 8})
    assert changed(claimed, FACTS.model_copy(update={"workload": larger}), source_hash="ffff") == (
        "model: Net with 10 parameters then, Net with 20 parameters now",
        "loader workers: 0 then, 4 now",
        "batches that a worker holds ready: 2 then, 8 now",
        "the source of train.py",
    )
    assert changed(claimed, FACTS, location="other.py") == ("program: train.py then, other.py now",)
    by_value = claimed.model_copy(update={"reference": claimed.reference.model_copy(update={"form": "value"})})
    assert changed(by_value, FACTS, source_hash="ffff") == (), "functions then, and their whole file now"
    of_package = {"form": "value", "location": "/home/me/net/train.py"}
    by_value = claimed.model_copy(update={"reference": claimed.reference.model_copy(update=of_package)})
    assert changed(by_value, FACTS, form="module", location="net.train") == ()
    assert changed(by_value, FACTS, form="module", location="other.train") != ()
