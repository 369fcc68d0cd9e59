"""What a dead process left in /dev/shm is removed, and nothing else."""

import os
import time
from pathlib import Path

import pytest

from autotune.processes.shared_memory import remove_left_by


@pytest.fixture
def left():
    path = Path(f"/dev/shm/torch_{os.getpid()}_test_0")
    path.touch()
    yield path
    path.unlink(missing_ok=True)


def test_of_these_processes_alone(left):
    remove_left_by([1], 0.0)
    assert left.exists()
    remove_left_by([os.getpid()], 0.0)
    assert not left.exists()


def test_of_this_trial_alone(left):
    os.utime(left, (time.time() - 60,) * 2)
    remove_left_by([os.getpid()], time.time() - 30)
    assert left.exists()
