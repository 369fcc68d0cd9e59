"""A program that fits at no batch: the lightest settings with which it does are looked for, and are the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import UserError
from autotune.search.verify import verify
from tests.knobs.search_facts import cuda_facts
from tests.search.promises import hold_promises
from tests.search.simulated_machine import Fault, Program
from tests.search.simulated_programs import GIB
from tests.search.simulated_search import Outcome, SimulatedSearch

NewDirectory = Callable[[], Path]
LEAN_UPDATE = {("optimizer_impl", "fused"): 0.5}
RECOMPUTED = {("activation_checkpointing", "all"): 0.1, ("activation_checkpointing", "alternate"): 0.6}
PAIR = Program(
    sample_seconds=0.01, sample_speedups={("precision", "bf16"): 3.0},
    constant_bytes=2 * GIB, constant_shares=LEAN_UPDATE, sample_bytes=GIB,
    memory_shares={**RECOMPUTED, ("precision", "bf16"): 0.55},
)  # fmt: skip
"""2 GiB of which a leaner update gives back one, and 1 GiB a sample of which recomputation leaves a tenth."""
LIMIT_BYTES = int(1.7 * GIB)
"""Neither alone fits into that, at whatever batch."""
NEITHER_ALONE = {"optimizer_impl": "fused", "activation_checkpointing": "all"}


def started(directory: Path, program: Program = PAIR, step_fits: bool = False, **options: Any) -> SimulatedSearch:
    facts = cuda_facts(global_batch_size=32, step_fits=step_fits)
    return SimulatedSearch(program, facts, directory, **{"memory_limit_bytes": LIMIT_BYTES, **options})


@pytest.mark.parametrize("step_fits", [False, True], ids=["no step fitted", "a step left no margin"])
def test_where_only_a_pair_fits_it_is_the_reference_at_the_largest_batch_that_does(
    step_fits: bool, new_directory: NewDirectory
) -> None:
    search = started(new_directory(), step_fits=step_fits)
    with search.begun() as session:
        assert session.baseline == search.space.baseline.replace({**NEITHER_ALONE, "batch_size": 4})
        (warning,) = session.warnings
    assert warning.startswith(
        "your program fits at no batch here; the reference is your program with activation_checkpointing=all, "
        "optimizer_impl=fused, at a micro-batch of 4, with gradients accumulated to the same batch"
    )
    notes = [event for event in search.watcher.events if event.startswith("note")]
    assert "note: your program fits at no batch as it is" in notes[-2], "told before anything is looked for"
    assert notes[-1] == f"note: {warning}"


def test_one_change_is_tried_before_two_and_what_rounds_comes_last(
    new_directory: NewDirectory,
) -> None:
    search = started(new_directory())
    with search.begun() as session:
        tried = [config.changes_from(search.space.baseline) for config in search.machine.asked("memory")]
        smallest = {"batch_size": 1}
        assert tried[:5] == [
            {**smallest, "optimizer_impl": "fused"},
            {**smallest, "activation_checkpointing": "all"},
            {**smallest, "precision": "bf16"},
            {**smallest, **NEITHER_ALONE},
            {**smallest, **NEITHER_ALONE, "activation_checkpointing": "alternate"},
        ], "and at last what is lighter than the pair that fits"
        assert session.baseline is not None


def test_the_lighter_value_of_a_knob_is_enough_where_it_fits(new_directory: NewDirectory) -> None:
    light = replace(PAIR, constant_bytes=GIB, constant_shares={})
    search = started(new_directory(), light, memory_limit_bytes=int(1.8 * GIB))
    with search.begun() as session:
        assert session.baseline is not None
        assert search.space.beside_own(session.baseline) == {"activation_checkpointing": "alternate"}


def test_a_program_that_fits_by_a_leaner_update_alone_may_still_grow(new_directory: NewDirectory) -> None:
    """What did not fit with the user's own update says nothing of it with a leaner one."""
    search = started(new_directory(), memory_limit_bytes=6 * GIB, program=replace(PAIR, constant_bytes=6 * GIB))
    with search.begun() as session:
        assert session.baseline is not None
        assert search.space.beside_own(session.baseline) == {"optimizer_impl": "fused"}
        assert search.space.micro_batch(session.baseline) == 2


def finished(search: SimulatedSearch) -> Outcome:
    outcome = search.run()
    hold_promises(outcome)
    return outcome


def test_everything_is_told_against_the_reference_and_nothing_of_what_never_ran(new_directory: NewDirectory) -> None:
    outcome = finished(started(new_directory(), trials=8))
    found = outcome.recommendation
    assert found.reference_settings == NEITHER_ALONE
    assert found.baseline.config == outcome.session.baseline
    assert not found.keep
    assert found.best.speedup.value > 1.2
    assert "optimizer_impl=fused" in found.verdict and "your program fits at no batch as it is" in found.verdict
    assert "times the speed (95 % interval" in found.verdict
    assert "of activation_checkpointing=all, batch_size=4, optimizer_impl=fused, for your program" in found.verdict
    assert any("with activation_checkpointing=all, optimizer_impl=fused it does" in one for one in found.best.reasons)
    checks = [request for request in outcome.machine.requests if request.kind == "parity"]
    assert checks and all(dict(request.reference) == NEITHER_ALONE for request in checks)


def test_where_nothing_is_faster_the_reference_is_what_to_use(new_directory: NewDirectory) -> None:
    # Only the batch could move, and no larger one fits.
    options = {"only": ("optimizer_impl", "activation_checkpointing"), "trials": 4}
    found = finished(started(new_directory(), **options)).recommendation
    assert found.best.config == found.baseline.config
    assert not found.keep, "there is nothing to keep: it does not run"
    assert found.verdict == (
        "Use activation_checkpointing=all, batch_size=4, optimizer_impl=fused: your program fits at no batch as it is, "
        "and nothing that was measured beats this."
    )


def test_a_larger_batch_with_more_recomputation_is_tried_where_a_small_one_is_slow(new_directory: NewDirectory) -> None:
    light = replace(PAIR, launch_seconds=0.1, constant_bytes=GIB, constant_shares={}, memory_shares=RECOMPUTED)
    outcome = finished(started(new_directory(), light, trials=6, memory_limit_bytes=int(2.0 * GIB)))
    assert outcome.recommendation.reference_settings == {"activation_checkpointing": "alternate"}
    assert outcome.config["activation_checkpointing"] == "all"
    assert outcome.recommendation.best.micro_batch_size == 8


def test_a_search_that_goes_on_has_the_same_reference_and_measures_nothing_of_it_again(
    new_directory: NewDirectory,
) -> None:
    directory = new_directory()
    first = started(directory, trials=2).run()
    again = started(directory, trials=6)
    with again.begun() as session:
        assert session.baseline == first.session.baseline
        assert again.machine.requests == []
    assert again.run().recommendation.reference_settings == NEITHER_ALONE


def test_it_is_verified_against_the_same_reference(new_directory: NewDirectory) -> None:
    claimed = started(new_directory(), preset="quick", memory_limit_bytes=int(3.2 * GIB), trials=6).run()
    assert claimed.recommendation.reference_settings == {"optimizer_impl": "fused"}
    today = started(new_directory(), preset="thorough", memory_limit_bytes=int(3.2 * GIB))
    session = today.session()
    try:
        report = verify(session, claimed.recommendation, ())
    finally:
        session.study.close()
    assert report.holds, report.verdict
    assert report.reference_settings == {"optimizer_impl": "fused"}
    assert "the speed of your program with optimizer_impl=fused" in report.verdict


COPIES = replace(PAIR, memory_shares={**RECOMPUTED, ("precision", "bf16"): 2.0})
"""Autocast keeps a copy of the weights, which takes more than it saves at so small a batch."""
TIGHT_BYTES = int(1.18 * GIB)
"""Of that the pair reserves 98 % at a micro-batch of 1; nothing else runs."""
SHORT_OF_MARGIN = (
    "nothing that makes your program fit leaves 5 % of the memory free (optimizer_impl=fused, "
    "activation_checkpointing=all took 1,183 MiB of 1,208 MiB): all that runs counts as fitting here, and a longer run may "
    "run out of memory"
)


def test_where_nothing_leaves_the_margin_what_runs_is_the_reference_and_is_not_refused_for_it(
    new_directory: NewDirectory,
) -> None:
    outcome = finished(started(new_directory(), COPIES, memory_limit_bytes=TIGHT_BYTES, trials=8))
    found = outcome.recommendation
    assert found.reference_settings == NEITHER_ALONE
    assert found.baseline.micro_batch_size == 1
    assert SHORT_OF_MARGIN in found.warnings
    assert outcome.session.obstacle(outcome.session.baseline) is None
    assert any(trial.failure is None and trial.config != outcome.session.baseline for trial in outcome.session.trials)
    assert not any(trial.failure is not None and "margin" in trial.failure.message for trial in outcome.session.trials)


def test_a_search_without_margin_that_goes_on_comes_to_the_same(new_directory: NewDirectory) -> None:
    directory = new_directory()
    first = started(directory, COPIES, memory_limit_bytes=TIGHT_BYTES, trials=2).run()
    again = started(directory, COPIES, memory_limit_bytes=TIGHT_BYTES, trials=6)
    with again.begun() as session:
        assert session.baseline == first.session.baseline
        assert SHORT_OF_MARGIN in session.warnings
        assert again.machine.requests == []


def test_a_larger_micro_batch_may_leave_no_margin_either(new_directory: NewDirectory) -> None:
    flat = replace(COPIES, memory_shares={("activation_checkpointing", "all"): 0.004, ("precision", "bf16"): 9.0})
    with started(new_directory(), flat, memory_limit_bytes=int(1.1 * GIB)).begun() as session:
        assert session.baseline is not None
        assert session.space.beside_own(session.baseline) == NEITHER_ALONE
        assert session.space.micro_batch(session.baseline) == 8


def test_the_users_own_program_is_the_reference_where_nothing_leaves_a_margin_and_it_runs(
    new_directory: NewDirectory,
) -> None:
    heavy = Program(sample_seconds=0.01, constant_bytes=GIB, sample_bytes=2**20)
    search = started(new_directory(), heavy, step_fits=True, memory_limit_bytes=int(1.1 * GIB))
    with search.begun() as session:
        assert session.baseline == search.space.baseline.replace({"batch_size": 32})
        assert session.measured(session.baseline) is not None
        (warning,) = session.warnings
    assert "(your own settings took 1,076 MiB of 1,126 MiB)" in warning


def test_a_reference_that_bears_no_measurement_at_its_largest_batch_is_made_smaller(
    new_directory: NewDirectory,
) -> None:
    fault = Fault("measure", {**NEITHER_ALONE, "batch_size": 4}, "device_oom")
    with started(new_directory(), replace(PAIR, faults=(fault,))).begun() as session:
        assert session.baseline is not None
        assert session.space.beside_own(session.baseline) == NEITHER_ALONE
        assert session.space.micro_batch(session.baseline) == 2


def test_where_nothing_fits_that_is_said_with_what_was_tried(new_directory: NewDirectory) -> None:
    with pytest.raises(UserError) as raised:
        started(new_directory(), memory_limit_bytes=GIB).run()
    assert str(raised.value) == (
        "your program fits at no batch, not even at a micro-batch of 1, nor in any of 7 ways to save memory, up to "
        "precision=bf16, optimizer_impl=fused, activation_checkpointing=all: no step of it fits. Use a smaller model, or a "
        "larger card"
    )


def test_what_fails_otherwise_than_for_its_memory_is_named(new_directory: NewDirectory) -> None:
    faulty = replace(PAIR, sample_bytes=GIB // 8, faults=(Fault("memory", {"optimizer_impl": "fused"}, "cuda_error"),))
    with pytest.raises(UserError, match=r"; optimizer_impl=fused ended as cuda_error; .*: no step of it fits"):
        started(new_directory(), faulty).run()


def test_knobs_that_may_not_move_are_left_alone(new_directory: NewDirectory) -> None:
    with pytest.raises(UserError, match="and no setting that saves memory may be moved here: no step of it fits"):
        started(new_directory(), only=("num_workers",)).run()
