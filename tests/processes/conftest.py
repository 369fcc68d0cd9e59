"""What the tests of real trial processes share."""

import sys
from pathlib import Path

import psutil
import pytest

from autotune.config import TrainingConfig
from autotune.records import Conditions, PhaseTimeouts, TrialRequest
from autotune.workload import Workload

HERE = str(Path(__file__).parent)
sys.path.insert(0, HERE)  # `trial_behaviours` is importable here as it is in the trial processes


@pytest.fixture(scope="session")
def behaving_workload():
    """The functions of `trial_behaviours`, by name."""
    names = {role: f"trial_behaviours:{role}" for role in ("model_fn", "data_fn")}
    return Workload("module", "trial_behaviours", names, None, (HERE,))


@pytest.fixture(scope="module")
def children():
    """Gives the numbers of all processes that this one has started since the module began.

    A loader's workers of another module's test may end late.
    """
    before = set(psutil.Process().children(recursive=True))
    return lambda: {process.pid for process in psutil.Process().children(recursive=True) if process not in before}


@pytest.fixture(scope="session")
def request_for():
    """Makes the request for a behaviour of `trial_behaviours`."""
    from trial_behaviours import seed_of

    def make(behaviour, measure_seconds=200.0, memory_limit_bytes=None, config=None, said=()):
        return TrialRequest(
            kind="soak",
            blocks=said,  # texts for the behaviour
            config=TrainingConfig(config or {}),
            conditions=Conditions(
                device="cpu",
                global_batch_size=None,
                memory_limit_bytes=memory_limit_bytes,
                seed=seed_of(behaviour),
            ),
            timeouts=PhaseTimeouts(build_seconds=200.0, measure_seconds=measure_seconds),
        )

    return make


@pytest.fixture
def file_workload(tmp_path):
    """Writes a user's file and gives the workload that it is."""

    def make(source):
        path = tmp_path / "train.py"
        path.write_text(source)
        return Workload("file", str(path), {"model_fn": "model_fn", "data_fn": "data_fn"}, None, (HERE, str(tmp_path)))

    return make
