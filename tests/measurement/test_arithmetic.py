"""Rates held against arithmetic: programs that wait a known time; what the rest of a step costs is measured beside."""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from autotune.measurement.measure import measure
from autotune.records import Measurement, Phase
from tests.measurement.programs import WIDTH, program, request

TOLERANCE = 0.03
ATTEMPTS = 40
MOST_WORKERS = 4


class Waiting:
    """Sleeps, and keeps how long that took: where others hold the cores, a sleep is longer than it was asked to be.

    What is kept lies in shared memory, a row for this process and one for each worker.
    """

    def __init__(self) -> None:
        self.kept = torch.zeros(MOST_WORKERS + 1, 2, dtype=torch.float64).share_memory_()

    @torch.compiler.disable
    def wait(self, seconds: float, *, ends_batch: bool) -> None:
        begin = time.perf_counter()
        if seconds:
            time.sleep(seconds)
        worker = get_worker_info()
        row = self.kept[0 if worker is None else worker.id + 1]
        row += torch.tensor([time.perf_counter() - begin, float(ends_batch)], dtype=torch.float64)

    def seconds_per_batch(self) -> float:
        seconds, batches = self.kept.sum(0).tolist()
        return seconds / batches


@dataclass(frozen=True)
class Waits:
    """Seconds for each micro-batch, and for each sample in it."""

    batch: float
    sample: float


NOTHING = Waits(0.0, 0.0)
LOADING = Waits(0.024, 0.012)
COMPUTING = Waits(0.016, 0.010)
"""So long that what a sleep leaves colder, about 1 ms a step, is little beside them."""


class Recordings(Dataset[Any]):
    """Waits for each sample where it is loaded, and for each batch where it is collated."""

    def __init__(self, waits: Waits) -> None:
        self.waits, self.waiting = waits, Waiting()

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> Any:
        self.waiting.wait(self.waits.sample, ends_batch=False)
        x = torch.full((WIDTH,), (index % 97) / 97)
        return x, x[:1]

    def collate(self, rows: list[Any]) -> Any:
        self.waiting.wait(self.waits.batch, ends_batch=True)
        return default_collate(rows)


class Model(nn.Module):
    """Waits in its forward."""

    def __init__(self, waits: Waits, waiting: Waiting) -> None:
        super().__init__()
        self.waits, self.waiting = waits, waiting
        self.net = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.waiting.wait(self.waits.batch + len(x) * self.waits.sample, ends_batch=True)
        return self.net(x)


@dataclass(frozen=True)
class Case:
    """Where a program waits, and how it is run."""

    loading: Waits
    computing: Waits
    micro_batch: int
    workers: int
    accumulation: int

    def measured(self, **how: Any) -> tuple[Measurement, float, float]:
        """And what a micro-batch was waited for while it was measured, in the loader and in the step."""
        data, waiting = Recordings(self.loading), Waiting()

        def phase(name: Phase) -> None:
            if name == "measure":
                for one in (data.waiting, waiting):
                    one.kept.zero_()

        functions = program(
            lambda: Model(self.computing, waiting),
            lambda: DataLoader(data, batch_size=self.micro_batch, collate_fn=data.collate),
        )
        asked = request(
            "measure",
            batch_size=self.micro_batch,
            global_batch_size=self.micro_batch * self.accumulation,
            num_workers=self.workers,
            **how,
        )
        measured = measure(functions, asked, phase)
        assert (measured.micro_batch_size, measured.micro_batches_per_step) == (self.micro_batch, self.accumulation)
        return measured, data.waiting.seconds_per_batch(), waiting.seconds_per_batch()

    def seconds(self, load_seconds: float, compute_seconds: float, ordinary: tuple[float, float]) -> float:
        """Of one optimizer step, from what a micro-batch is waited for and what a step costs without any waiting."""
        load = self.accumulation * load_seconds + ordinary[0]
        compute = self.accumulation * compute_seconds + ordinary[1]
        return load + compute if self.workers == 0 else max(load / self.workers, compute)

    def ordinary_cost(self) -> tuple[float, float]:
        """Seconds a step without any waiting: to load, and to compute. Workers add what handing over a batch takes."""
        waitless = dataclasses.replace(self, loading=NOTHING, computing=NOTHING)
        samples = self.micro_batch * self.accumulation
        if self.workers:
            rates = [
                dataclasses.replace(waitless, workers=workers).measured(block_seconds=0.03)[0].samples_per_second
                for workers in (1, self.workers)
            ]
            return samples / rates[0], samples / rates[1]
        alone = waitless.measured(block_seconds=0.03, measure_resident=True)[0]
        assert alone.resident_samples_per_second is not None
        resident = samples / alone.resident_samples_per_second
        return max(0.0, samples / alone.samples_per_second - resident), resident


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(LOADING, NOTHING, 2, 0, 1), id="loader"),
        pytest.param(Case(LOADING, NOTHING, 2, 1, 2), id="loader, 1 worker, 2 micro-batches"),
        pytest.param(Case(LOADING, NOTHING, 4, 2, 1), id="loader, 2 workers"),
        pytest.param(Case(LOADING, NOTHING, 4, 4, 1), id="loader, 4 workers"),
        pytest.param(Case(NOTHING, COMPUTING, 2, 0, 2), id="step, 2 micro-batches"),
        pytest.param(Case(NOTHING, COMPUTING, 4, 2, 4), id="step, 2 workers, 4 micro-batches"),
        pytest.param(Case(LOADING, COMPUTING, 2, 0, 4), id="both, 4 micro-batches"),
        pytest.param(Case(LOADING, COMPUTING, 2, 1, 1), id="both, 1 worker"),
        pytest.param(Case(LOADING, COMPUTING, 4, 2, 2), id="both, 2 workers, 2 micro-batches"),
        pytest.param(Case(LOADING, COMPUTING, 2, 4, 1), id="both, 4 workers"),
    ],
)
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_rate_is_what_arithmetic_says(case: Case) -> None:
    asked = [waits.batch + case.micro_batch * waits.sample for waits in (case.loading, case.computing)]
    least = (1 - TOLERANCE) * case.seconds(*asked, (0.0, 0.0))
    ratios: list[float] = []
    while len(ratios) < ATTEMPTS and not any(abs(ratio - 1) <= TOLERANCE for ratio in ratios):
        measured, *waited = case.measured(block_seconds=0.1, maximum_blocks=4)
        seconds = case.micro_batch * case.accumulation / measured.samples_per_second
        # Whoever else runs here takes time from the ordinary cost too, and not the same in both readings: then both are
        # taken again. That can hide no error: one that adds time is in every attempt, and one that leaves time out fails
        # here, since others can only add to what was asked for. Only where workers went on while this process waited for
        # a core may the first batches have been ready, in this attempt.
        assert seconds > least or case.workers
        ratios.append(seconds / case.seconds(*waited, case.ordinary_cost()) if seconds > least else math.nan)
    assert any(abs(ratio - 1) <= TOLERANCE for ratio in ratios), ratios
