from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from autotune.measurement.measure import measure
from autotune.measurement.passes import BlockPlan, block_plan
from tests.measurement.programs import WIDTH, agrees, no_phase, program, request


def plan(steps_in_pass: int | None, seconds_per_step: float = 0.01, *, starts_workers: bool = False) -> BlockPlan:
    return block_plan(
        steps_in_pass=steps_in_pass,
        starts_workers=starts_workers,
        seconds_per_step=seconds_per_step,
        block_seconds=1.0,
        minimum_blocks=4,
        maximum_blocks=8,
    )


@pytest.mark.parametrize("steps_in_pass", [None, 801, 10**9])
def test_a_pass_that_is_unknown_or_longer_than_the_measurement_changes_nothing(steps_in_pass: int | None) -> None:
    assert plan(steps_in_pass) == BlockPlan((1,), 1.0, 4, 8)


@pytest.mark.parametrize("steps_in_pass", [1, 30, 100])
def test_a_short_pass_is_repeated_in_every_block(steps_in_pass: int) -> None:
    assert plan(steps_in_pass) == BlockPlan((steps_in_pass,), 1.0, 4, 8)


@pytest.mark.parametrize("steps_in_pass", [101, 170, 250, 333, 500, 799])
def test_a_longer_pass_is_cut_into_blocks_of_the_least_length_and_is_timed_to_its_end(steps_in_pass: int) -> None:
    found = plan(steps_in_pass)
    pieces = len(found.multiples)
    assert sum(found.multiples) == steps_in_pass
    assert min(found.multiples) >= 100
    assert max(found.multiples) - min(found.multiples) <= 1
    assert found.minimum_blocks % pieces == found.maximum_blocks % pieces == 0
    assert 4 <= found.minimum_blocks < 4 + pieces
    assert found.minimum_blocks <= found.maximum_blocks <= 8
    assert [found.multiple(block) for block in range(2 * pieces)] == list(found.multiples) * 2
    assert [block for block in range(1, 2 * pieces + 1) if found.ends_round(block)] == [pieces, 2 * pieces]


def test_steps_longer_than_a_block_are_blocks_of_their_own() -> None:
    assert plan(3, seconds_per_step=2.0) == BlockPlan((1, 1, 1), 0.0, 6, 6)


def test_where_workers_start_anew_a_pass_of_twice_the_length_is_timed_to_its_end_too() -> None:
    found = plan(1599, starts_workers=True)
    assert (found.minimum_blocks, found.maximum_blocks, sum(found.multiples)) == (15, 15, 1599)
    assert plan(1601, starts_workers=True) == BlockPlan((1,), 1.0, 4, 8)


SAMPLES = 160


class Sleepy(Dataset[Any]):
    """Workers that sleep need no core: more of them than there are cores are as much faster."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.003)
        x = torch.full((WIDTH,), index / SAMPLES)
        return x, x[:1]


class Noting(nn.Module):
    """Notes when each of its steps began."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(WIDTH, 1)
        self.begun: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.begun.append(time.perf_counter())
        return self.net(x)


def loader() -> DataLoader[Any]:
    return DataLoader(Sleepy(), batch_size=4)


def seconds_of_a_pass() -> float:
    begin = time.perf_counter()
    for _ in DataLoader(Sleepy(), batch_size=4, num_workers=4):
        pass
    return time.perf_counter() - begin


@pytest.mark.parametrize("passes_in_block", [0.4, 1.5])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_workers_that_start_anew_for_every_pass_cost_what_they_cost_in_the_long_run(passes_in_block: float) -> None:
    """Whole passes are timed, by the clock of the model itself; a third of each is spent on starting the workers."""

    def compared() -> float:
        made: list[Noting] = []

        def model_fn() -> Noting:
            made.append(Noting())
            return made[-1]

        block_seconds = passes_in_block * seconds_of_a_pass()
        result = measure(
            program(model_fn, loader),
            request(
                "measure", batch_size=4, num_workers=4, block_seconds=block_seconds, minimum_blocks=3, maximum_blocks=5
            ),
            no_phase,
        )
        samples = sum(result.blocks.samples)
        if samples % SAMPLES:  # the machine became so busy that one pass took longer than the measurement may
            return math.nan
        begun = made[-1].begun[-1 - sum(result.blocks.steps) :]
        return result.samples_per_second * (begun[-1] - begun[0]) / samples

    assert agrees(compared, 0.05)
