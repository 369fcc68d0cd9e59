"""The orchestrator is killed: everything that it started is gone soon after."""

import os
import subprocess
import sys
import time

import psutil
import pytest

from tests.running_search import DEADLINE_SECONDS, gone, runs

ORCHESTRATOR = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from trial_behaviours import seed_of
from autotune.config import TrainingConfig
from autotune.processes.pool import TrialPool
from autotune.records import Conditions, TrialRequest
from autotune.workload import Workload

names = {role: f"trial_behaviours:{role}" for role in ("model_fn", "data_fn")}
workload = Workload("module", "trial_behaviours", names, None, (sys.argv[1],))
conditions = Conditions(device="cpu", global_batch_size=None, seed=seed_of("leave_children_and_hang"))
request = TrialRequest(kind="soak", config=TrainingConfig({}), conditions=conditions)
with TrialPool(workload, Path(sys.argv[2]), entry="trial_behaviours:answer") as pool:
    if os.environ.get("HELD_OPEN") and os.fork() == 0:
        time.sleep(6000)  # with its copy of our end of the server's connection
    pool.run(request)
"""


@pytest.mark.parametrize("socket_held_by_a_fork", [False, True])
def test_orchestrator_is_killed(tmp_path, socket_held_by_a_fork):
    environment = {**os.environ, **({"HELD_OPEN": "1"} if socket_held_by_a_fork else {})}
    orchestrator = subprocess.Popen(
        [sys.executable, "-c", ORCHESTRATOR, os.path.dirname(__file__), str(tmp_path)], env=environment
    )
    bystanders = []
    try:
        root = psutil.Process(orchestrator.pid)
        deadline = time.monotonic() + DEADLINE_SECONDS
        while len(sleepers(root)) < 3:  # inside the trial's session, outside, and one that forked away from its parent
            assert time.monotonic() < deadline, root.children(recursive=True)
            time.sleep(0.02)
        family = root.children(recursive=True)
        bystanders = [process for process in root.children() if command_of(process)[1:2] == ["-c"]]
        assert len(bystanders) == int(socket_held_by_a_fork)
        orchestrator.kill()
        assert gone(set(family) - set(bystanders))
    finally:
        orchestrator.kill()
        orchestrator.wait()
        for process in filter(runs, bystanders):
            process.kill()


def sleepers(root):
    return [process for process in root.children(recursive=True) if "613" in " ".join(command_of(process))]


def command_of(process):
    try:
        return process.cmdline()
    except psutil.Error:  # it ended while it was looked at
        return []
