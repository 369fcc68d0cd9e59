"""Under a real limit of memory, through real trial processes: a ceiling that is named runs again and more does not, and a
program that fits at no batch is made to fit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from autotune.errors import UserError
from autotune.options import SearchOptions
from autotune.records import ParityResult, TrialAnswer, TrialRequest
from autotune.search.baseline import run_baseline
from autotune.search.memory import find_ceiling
from autotune.search.watcher import QuietWatcher
from autotune.sessions import open_session
from autotune.workload import workload_from_target
from tests.running_search import DEADLINE_SECONDS

MIB = 2**20
LIMIT_MIB = 700
SAMPLE_MIB = 64
PROGRAM = f"""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        # The limit counts what is taken; what is never written to costs the machine nothing.
        ctx.save_for_backward(torch.empty(len(x), {SAMPLE_MIB * MIB}, dtype=torch.uint8))
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        (kept,) = ctx.saved_tensors
        return gradient + 0 * kept[:, :1]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        return Keep.apply(self.layer(x))


def model_fn():
    return Model()


def data_fn():
    x = torch.randn(16, 4)
    return DataLoader(TensorDataset(x, x[:, :1]), batch_size=4)


def loss_fn(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])
"""


def test_the_size_that_is_named_runs_again_in_fresh_processes(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    workload = workload_from_target(str(tmp_path / "program.py"))
    options = SearchOptions(study=tmp_path / "study", free_batch=True, memory_limit_bytes=LIMIT_MIB * MIB)
    with open_session(workload, options, QuietWatcher()) as opened:
        session = opened.session
        session.baseline = session.space.baseline
        ceiling = find_ceiling(session, session.baseline)
        size = ceiling.largest_batch_size
        assert size is not None

        def again(batch_size: int, margin: float) -> TrialAnswer:
            config = session.space.baseline.replace({session.space.batch_name: batch_size})
            conditions = session.settings.conditions.model_copy(update={"memory_margin": margin})
            return opened.pool.run(TrialRequest(kind="memory", config=config, conditions=conditions))

        answers = [again(size, options.memory_margin) for _ in range(3)]
        too_large = [again(size + 1, options.memory_margin), again(size, 0.5)]
    # Threads and the interpreter take the rest, which is not much more than a sample or two.
    assert (LIMIT_MIB // SAMPLE_MIB) - 3 <= size <= LIMIT_MIB // SAMPLE_MIB
    assert (ceiling.smallest_failed_batch_size, ceiling.failure_kind) == (size + 1, "host_oom")
    assert ceiling.out_of_memory_count >= 1
    for answer in answers:
        assert answer.failure is None
        assert answer.memory is not None and answer.memory.fits
    for answer in too_large:
        assert answer.failure is not None and answer.failure.kind == "host_oom"


BLOCKS = 8
LAYERS = f"""
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return x + Keep.apply(torch.tanh(self.layer(x)))


def model_fn():
    return nn.Sequential(nn.Sequential(*[Block() for _ in range({BLOCKS})]), nn.Linear(4, 1))
"""
DEEP_PROGRAM = PROGRAM[: PROGRAM.index("class Model")] + LAYERS + PROGRAM[PROGRAM.index("def data_fn") :]
"""Keeps so much of each sample in every block."""


def test_a_program_that_fits_at_no_batch_runs_with_the_lightest_recomputation_that_does(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(DEEP_PROGRAM)
    workload = workload_from_target(str(tmp_path / "program.py"))
    # Less than the blocks keep of one sample, and more than half of that.
    limit_bytes = (BLOCKS - 1) * SAMPLE_MIB * MIB
    options = SearchOptions(study=tmp_path / "study", memory_limit_bytes=limit_bytes)
    with open_session(workload, options, QuietWatcher()) as opened:
        session = opened.session
        assert not session.facts.workload.step_fits
        assert session.facts.workload.blocks == tuple(f"0.{index}" for index in range(BLOCKS))
        run_baseline(session)
        assert session.baseline is not None
        assert session.space.beside_own(session.baseline) == {"activation_checkpointing": "alternate"}
        assert session.space.effective_batch(session.baseline) == 4
        recomputed = session.baseline.replace({"activation_checkpointing": "all", session.space.batch_name: 4})
        checked = session.parity(recomputed)
        assert isinstance(checked, ParityResult) and checked.passed, checked
        assert "your step was run with activation_checkpointing=alternate" in checked.notes[0]


def test_a_program_of_which_nothing_fits_is_told_what_was_tried(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(DEEP_PROGRAM)
    workload = workload_from_target(str(tmp_path / "program.py"))
    options = SearchOptions(study=tmp_path / "study", memory_limit_bytes=SAMPLE_MIB * MIB // 2)
    with (
        pytest.raises(
            UserError, match="host_oom, in phase compile.*neither does a step of 2 or 1 samples, nor their forward"
        ),
        open_session(workload, options, QuietWatcher()),
    ):
        pass


READY_BATCHES = """
import torch
from torch.utils.data import DataLoader, IterableDataset

class Batches(IterableDataset):
    def __iter__(self):
        while True:
            yield {"input": torch.randn(32, 8)}

def model_fn():
    return torch.nn.Linear(8, 1)

def data_fn():
    return DataLoader(Batches(), batch_size=None)

def loss_fn(model, batch):
    return model(batch["input"]).mean()
"""


def test_no_batch_is_said_to_fit_that_the_program_cannot_be_given(tmp_path: Path) -> None:
    (tmp_path / "ready.py").write_text(READY_BATCHES)
    command = [sys.executable, "-m", "autotune", "memory", str(tmp_path / "ready.py"), "--device", "cpu"]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=DEADLINE_SECONDS).stdout
    assert told.startswith("It fits: your batch is 32, and with your settings up to 32 ran.")
