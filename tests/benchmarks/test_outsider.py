"""Two clocks on one program, and when they are said to agree."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.outsider import CHILD, Sides
from tests.measurement.programs import agrees, request

PROGRAM = """
import time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def model_fn():
    return nn.Linear(16, 1)

def data_fn():
    return DataLoader(TensorDataset(torch.randn(64, 16), torch.randn(64, 1)), batch_size=8)

def loss_fn(model, batch):
    time.sleep(0.01)
    return nn.functional.mse_loss(model(batch[0]), batch[1])
"""
SCRIPT = """
def train():
    model = model_fn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    while True:
        for batch in data_fn():
            loss = loss_fn(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss
"""


def turns(tmp_path: Path) -> dict[str, list[tuple[int, float]]]:
    """Samples and seconds of each turn, as the child prints them."""
    program, script = tmp_path / "program.py", tmp_path / "script.py"
    program.write_text(PROGRAM)
    script.write_text(PROGRAM + SCRIPT)
    order = {
        "turns": 2,
        "script": str(script),
        "steps_per_epoch": 8,
        "samples_per_epoch": 64,
        "batch": 8,
        "seconds": 0.3,
        "target": str(program),
        "request": request("measure").model_dump(mode="json"),
    }
    finished = subprocess.run(
        [sys.executable, str(CHILD), json.dumps(order)], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    found: dict[str, list[tuple[int, float]]] = json.loads(finished.stdout.splitlines()[-1])
    return found


def test_both_clocks_time_whole_passes_of_the_same_program(tmp_path: Path) -> None:
    def ratios() -> Iterator[float]:
        while True:
            found = turns(tmp_path)
            assert [samples % 64 for samples, _ in found["autotune"]] == [0, 0]
            assert [samples for samples, _ in found["autotune"]] == [samples for samples, _ in found["outsider"]]
            yield from (
                own / outside for (_, own), (_, outside) in zip(found["autotune"], found["outsider"], strict=True)
            )

    compared = ratios()
    assert agrees(lambda: next(compared), 0.1)


@pytest.mark.parametrize(
    ("own", "verdict"),
    [
        ([1.0, 1.01, 0.99, 1.0], "within 2 %"),
        ([1.05, 1.06, 1.05, 1.06], "not within 2 %"),
        ([0.9, 1.1, 0.95, 1.05], "undecided"),
    ],
)
def test_they_agree_where_the_interval_says_so(own: list[float], verdict: str) -> None:
    sides = Sides(answer=None)  # type: ignore[arg-type]  # it is not run
    assert sides.verdict() == "undecided"
    half = len(own) // 2
    for part in (own[:half], own[half:]):
        sides.rounds.append({"autotune": [(1000 * rate, 10.0) for rate in part], "outsider": [(1000, 10.0)] * half})
    assert sides.verdict() == verdict
