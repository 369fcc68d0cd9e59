"""Trial processes on the GPU, one pool for each program."""

from pathlib import Path

import pytest

from autotune.config import TrainingConfig
from autotune.knobs.registry import KNOBS
from autotune.machine import read_machine_facts
from autotune.nvml import gpu_used_bytes
from autotune.processes.pool import TrialPool
from autotune.records import Conditions, PhaseTimeouts, SearchFacts, TrialRequest
from autotune.workload import Workload

ROOT = str(Path(__file__).parents[2])


class Program:
    """A program in its pool, and what its facts make of it."""

    def __init__(self, pool, facts):
        self.pool, self.facts = pool, facts
        self.baseline = TrainingConfig({knob.name: knob.baseline(facts) for knob in KNOBS})

    def run(self, kind, changes=None, timeouts=None, **conditions):
        """One trial: the baseline with these changes, under these conditions."""
        request = TrialRequest(
            kind=kind,
            config=self.baseline.replace(changes or {}),
            conditions=Conditions(device="cuda", global_batch_size=self.facts.global_batch_size, **conditions),
            blocks=self.facts.workload.blocks,
            block_seconds=0.1,
            maximum_blocks=4,
            timeouts=timeouts or PhaseTimeouts(),
        )
        return self.pool.run(request)


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """Makes a `Program` of functions of `programs.py`; its processes end with the module."""
    pools = []

    def make(
        loss_name,
        model_name="perceptron_model",
        data_name="perceptron_data",
        module="tests.gpu.programs",
        compiles=False,
    ):
        names = {"model_fn": model_name, "data_fn": data_name, "loss_fn": loss_name}
        workload = Workload("module", module, {role: f"{module}:{name}" for role, name in names.items()}, None, (ROOT,))
        pool = TrialPool(workload, tmp_path_factory.mktemp("study"), warm_compiler=True, gpu_used_bytes=gpu_used_bytes)
        pools.append(pool)
        pool.start()
        conditions = Conditions(device="cuda", global_batch_size=None)
        answer = pool.run(TrialRequest(kind="facts", config=TrainingConfig({}), conditions=conditions))
        assert answer.facts is not None, answer.failure
        facts = SearchFacts(
            machine=read_machine_facts(),
            workload=answer.facts,
            device="cuda",
            global_batch_size=answer.facts.batch_size,
            largest_batch_size=4096,
        )
        return Program(pool, facts)

    yield make
    for pool in pools:
        pool.close()
