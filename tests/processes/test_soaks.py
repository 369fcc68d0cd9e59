"""What shows only when a program runs on, through the real trial process: each has a finding or a failure of its name."""

from pathlib import Path

import pytest
import soaked_program

from autotune.config import TrainingConfig
from autotune.processes.pool import TrialPool
from autotune.records import Conditions, PhaseTimeouts, TrialRequest
from autotune.workload import workload_from_target
from tests.measurement.programs import holds

PROGRAM = Path(soaked_program.__file__)


@pytest.fixture(scope="module")
def soaked(tmp_path_factory):
    """The answer of a trial that soaks the program with this trouble."""
    with TrialPool(workload_from_target(str(PROGRAM)), tmp_path_factory.mktemp("study")) as pool:

        def run(trouble, blocks=8):
            seed = [one.__name__ for one in soaked_program.TROUBLES].index(trouble)
            request = TrialRequest(
                kind="soak",
                config=TrainingConfig({}),
                conditions=Conditions(device="cpu", global_batch_size=None, seed=seed),
                block_seconds=0.1,
                maximum_blocks=blocks,
                timeouts=PhaseTimeouts(build_seconds=200.0, compile_seconds=200.0, measure_seconds=200.0),
            )
            return pool.run(request)

        yield run


@pytest.mark.parametrize(
    ("trouble", "finding"),
    [
        ("Leaks", "MiB with every step: something keeps tensors of past steps (a leak)"),
        ("Slows", "throughput fell from "),
        ("RefusesEvaluation", "an evaluation without gradients fails with your own settings too (TypeError: "),
        ("RefusesItsState", "a save and load of the state fails with your own settings too (RuntimeError: Missing key"),
    ],
)
def test_findings(soaked, trouble, finding):
    def is_found():
        answer = soaked(trouble)
        assert answer.failure is None
        return any(finding in line for line in answer.soak.findings)

    assert holds(is_found)


def test_a_steady_program_runs_over_the_short_end_of_a_pass_and_has_no_findings(soaked):
    answer = soaked("Steady")
    assert [line for line in answer.soak.findings if "fell" not in line] == []  # which it may on a busy machine
    assert answer.soak.growth_bytes_per_step == 0.0


def test_a_loss_that_is_lost_after_a_hundred_steps(soaked):
    failure = soaked("LosesItself", blocks=100).failure
    assert (failure.kind, failure.phase) == ("numerics", "soak")
    assert failure.message.startswith("the loss was nan after 1")


def test_a_last_batch_that_the_model_does_not_take(soaked):
    failure = soaked("RefusesShortBatches").failure
    assert (failure.kind, failure.phase) == ("user_error", "soak")
    assert failure.message.startswith("RuntimeError: shape '[8, 1]' is invalid for input of size 5 (")
    assert failure.message.endswith("(at the last batch of a pass, of 5 samples; drop_last=True leaves it out)")
