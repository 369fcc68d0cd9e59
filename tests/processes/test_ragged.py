"""Batches of unequal length in a real trial process: tokens per second, recompiles counted and said."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.config import TrainingConfig
from autotune.processes.pool import TrialPool
from autotune.records import Conditions, Trial, TrialRequest
from autotune.report.document import counted
from autotune.report.text import render
from autotune.report.trials import trials_document
from autotune.workload import workload_from_target

RAGGED = """
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset


class Texts(Dataset):
    def __len__(self):
        return 512

    def __getitem__(self, index):
        return torch.arange(4 + 7 * index % 29) % 50


def collate(rows):
    return pad_sequence(rows, batch_first=True), torch.tensor([len(row) for row in rows])


def model_fn():
    return nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50))


def data_fn():
    return DataLoader(Texts(), batch_size=2, collate_fn=collate)


def loss_fn(model, batch):
    tokens, lengths = batch
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten(), reduction="sum")
    return loss, int(lengths.sum())
"""


def test_tokens_are_counted_and_every_graph_that_a_new_shape_takes(tmp_path: Path) -> None:
    path = tmp_path / "ragged.py"
    path.write_text(RAGGED)
    asked = TrialRequest(
        kind="measure",
        config=TrainingConfig({"compile_mode": "default"}),
        conditions=Conditions(device="cpu", global_batch_size=None),
        block_seconds=0.05,
        measure_resident=False,
    )
    logs = tmp_path / "logs"
    logs.mkdir()
    with TrialPool(workload_from_target(str(path)), logs, warm_compiler=True) as pool:
        answer = pool.run(asked)
    measured = answer.measurement
    assert measured is not None, answer.failure
    first, count = 2 * measured.warmup_steps, sum(measured.blocks.samples)
    tokens = sum(4 + 7 * (index % 512) % 29 for index in range(first, first + count)) / count
    assert measured.weight_per_second == pytest.approx(tokens * measured.samples_per_second)
    assert measured.weight_interval is not None
    assert measured.weight_interval[0] <= measured.weight_per_second <= measured.weight_interval[1]
    assert measured.recompiles >= 1
    assert measured.compiled_graphs > measured.recompiles
    trial = Trial(
        number=0, stage="compute", config=asked.config, measurement=measured, started_at=0.0, seconds=answer.seconds,
        machine_identity="0123456789ab",
    )  # fmt: skip
    told = " ".join(render(trials_document([trial], [], None, tmp_path)).split())
    assert f"{counted(measured.recompiles, 'graph')} made after the first step" in told
