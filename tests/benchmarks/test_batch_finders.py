"""What is measured beside other finders of batch sizes: the same program, the same limits, and sizes that run again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset

from benchmarks.batch_finder_child import Limits, batches, largest_to_try, loader_of
from benchmarks.batch_finders import line

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
FILES = sorted(RESULTS.glob("*/batch_finders*.json"))
ROWS = TensorDataset(torch.arange(100.0)[:, None])


def test_every_finder_gets_the_programs_own_loader_with_another_batch_size() -> None:
    def collate(rows: list[Any]) -> torch.Tensor:
        return torch.stack([row for (row,) in rows])

    own = DataLoader(ROWS, batch_size=8, collate_fn=collate, drop_last=True)
    other = loader_of(own, 30)
    assert (other.batch_size, other.collate_fn, other.drop_last) == (30, collate, True)
    assert isinstance(other.sampler, SequentialSampler)
    assert [len(batch) for batch in batches(other, 5)] == [30, 30, 30, 30, 30], "over two passes"
    assert loader_of(ROWS, 30).batch_size == 30


def test_no_finder_starts_above_what_autotune_may_try() -> None:
    assert largest_to_try(DataLoader(ROWS, batch_size=1), Limits("cpu", 2**30)) == 100
    many = TensorDataset(torch.zeros(10_000, 1))
    assert largest_to_try(DataLoader(many, batch_size=16), Limits("cpu", 2**30)) == 512
    assert largest_to_try(many, Limits("cpu", 2**30)) == 1024


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_what_autotune_named_ran_every_time(path: Path) -> None:
    content = json.loads(path.read_text())
    own = [found for found in content["found"] if found["finder"] == "autotune"]
    assert own
    for found in own:
        assert found["batch_size"] in found["tried"], "the answer itself was run"
        assert found["again"]["ran"] == found["again"]["times"] == content["checks"]


def test_a_finder_that_died_has_a_row_too() -> None:
    dead = {
        "target": "a.py",
        "finder": "power",
        "batch_size": None,
        "probes": 4,
        "out_of_memory": 1,
        "seconds": 3.21,
        "ended": "RuntimeError: no",
        "again": None,
    }
    assert line(dead).split() == ["a.py", "power", "none", "-", "4", "1", "3.2", "RuntimeError:", "no"]
