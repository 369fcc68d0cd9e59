"""The user's own program comes first, and where it does not run that is said in a sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.errors import NoAnswerError, UserError
from autotune.records import Failure
from autotune.search.baseline import baseline_error, told_beside
from tests.knobs.search_facts import cuda_facts
from tests.search.simulated_machine import Program
from tests.search.simulated_programs import GIB
from tests.search.simulated_search import SimulatedSearch

NewDirectory = Callable[[], Path]
# 1 GiB and another for each sample.
BY_THE_GIB = Program(sample_seconds=0.001, constant_bytes=GIB, sample_bytes=GIB)


def test_it_is_measured_once_and_is_what_everything_is_compared_with(new_directory: NewDirectory) -> None:
    search = SimulatedSearch(BY_THE_GIB, cuda_facts(global_batch_size=32), new_directory())
    with search.begun() as session:
        assert session.baseline == search.space.baseline
        assert search.machine.asked("measure") == [search.space.baseline]
        assert session.changes(search.space.baseline.replace({"precision": "bf16"})) == {"precision": "bf16"}
        assert search.machine.asked("parity") == [], "it is the reference of every check"


@pytest.mark.parametrize(("limit_gib", "micro_batch"), [(20, 16), (12, 8), (3, 1)])
def test_where_it_does_not_fit_the_largest_divisor_that_does_is_the_reference(
    limit_gib: int, micro_batch: int, new_directory: NewDirectory
) -> None:
    facts = cuda_facts(global_batch_size=32)
    search = SimulatedSearch(BY_THE_GIB, facts, new_directory(), memory_limit_bytes=limit_gib * GIB)
    with search.begun() as session:
        assert session.baseline == search.space.baseline.replace({"batch_size": micro_batch})
        assert search.space.effective_batch(session.baseline) == 32
        assert session.warnings == [
            f"a batch of 32 does not fit here; the reference is a micro-batch of {micro_batch}, with gradients "
            "accumulated to the same batch"
        ]
    assert search.watcher.events[2].startswith("note: your batch of 32 does not fit (")
    assert search.watcher.events[-2:] == [f"note: {session.warnings[0]}", "trial 1"]


def test_where_no_batch_is_held_the_reference_says_that_it_is_smaller(new_directory: NewDirectory) -> None:
    facts = cuda_facts(batch_held=False)
    search = SimulatedSearch(BY_THE_GIB, facts, new_directory(), memory_limit_bytes=20 * GIB)
    with search.begun() as session:
        assert session.baseline == search.space.baseline.replace({"batch_size": 16})
        assert session.warnings[0].endswith("a smaller effective batch, since none is held")


def failure(**changes: object) -> Failure:
    fields: dict[str, object] = {"kind": "crash", "phase": "measure", "message": "the process died"}
    return Failure.model_validate({**fields, **changes})


def test_the_error_names_kind_signal_phase_and_what_happened(tmp_path: Path) -> None:
    output = tmp_path / "trial-0001.log"
    output.write_text("Segmentation fault\n")
    error = baseline_error(failure(signal="SIGSEGV", detail="  File x", output_path=str(output)))
    assert isinstance(error, UserError)
    assert str(error) == ("your own program does not run as it is (crash, SIGSEGV, in phase measure): the process died")
    assert error.detail == f"  File x\nwhat it printed: {output}"


def test_what_another_program_did_is_not_the_users_fault() -> None:
    assert isinstance(baseline_error(failure(kind="memory_not_returned")), NoAnswerError)


def test_an_output_that_is_empty_or_gone_is_not_pointed_to(tmp_path: Path) -> None:
    (tmp_path / "empty.log").touch()
    assert told_beside(failure(output_path=str(tmp_path / "empty.log"))) == ""
    assert told_beside(failure(output_path=str(tmp_path / "removed.log"))) == ""


@pytest.mark.parametrize(
    ("budget_seconds", "started_seconds", "start_seconds", "before", "after"),
    [
        (600.0, 12.0, 1.0, False, False),
        (45.0, 4.0, 0.2, False, False),
        (45.0, 12.0, 0.2, True, True),
        (180.0, 30.0, 1.0, True, False),
        (45.0, 4.0, 4.0, False, True),
    ],
    ids=["ample", "short on a quiet machine", "starting took long", "starting alone took long", "a trial takes long"],
)
def test_what_starting_and_the_baseline_took_shows_that_time_is_short(
    budget_seconds: float,
    started_seconds: float,
    start_seconds: float,
    before: bool,
    after: bool,
    new_directory: NewDirectory,
) -> None:
    program = Program(sample_seconds=0.001, start_seconds=start_seconds)
    search = SimulatedSearch(
        program, cuda_facts(), new_directory(), budget_seconds=budget_seconds, started_seconds=started_seconds
    )
    with search.begun() as session:
        assert (search.machine.requests[0].block_seconds < 0.3) == before
        assert session.pace.hurried == after
        assert session.budget.searched_seconds == session.budget.left()
