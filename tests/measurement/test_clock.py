from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from autotune.errors import WorkloadError
from autotune.measurement.clock import BlockClock, endless
from autotune.records import Blocks
from autotune.surgery.loaders import counted
from autotune.training.windows import MicroBatch, Window, WindowLoader
from tests.measurement.programs import pause

CPU = torch.device("cpu")


def test_a_block_is_whole_steps_of_at_least_its_length() -> None:
    clock = BlockClock(CPU)
    for _ in range(2):
        clock.run(lambda: (pause(0.003), (5, None))[1], 0.01)
    for seconds, steps, samples in zip(clock.seconds, clock.steps, clock.samples, strict=True):
        assert 1 <= steps <= 4, "four of 3 ms are long enough, however long they took"
        assert samples == 5 * steps
        assert max(0.01, 0.003 * steps) <= seconds
    assert clock.weights == []
    assert clock.rates() == pytest.approx([s / t for s, t in zip(clock.samples, clock.seconds, strict=True)])


def test_a_step_longer_than_a_block_is_a_block() -> None:
    clock = BlockClock(CPU)
    clock.run(lambda: (pause(0.01), (1, None))[1], 0.001)
    assert clock.steps == [1]


@pytest.mark.parametrize("minimum_seconds", [0.0, 0.01])
def test_a_block_is_a_multiple_of_the_steps_asked_for(minimum_seconds: float) -> None:
    clock = BlockClock(CPU)
    for _ in range(2):
        clock.run(lambda: (pause(0.001), (1, None))[1], minimum_seconds, 7)
    assert all(steps % 7 == 0 for steps in clock.steps)
    assert min(clock.seconds) >= max(0.007, minimum_seconds)


@pytest.mark.parametrize("weight", [2, 2.0, torch.tensor(2)])
def test_weights_are_added_up(weight: object) -> None:
    clock = BlockClock(CPU)
    clock.run(lambda: (pause(0.001), (1, weight))[1], 0.005)
    assert clock.weights == [2.0 * clock.steps[0]]


def test_blocks_and_what_is_left_after_forgetting() -> None:
    clock = BlockClock(CPU)
    for _ in range(3):
        clock.run(lambda: (1, 3), 0.0)
    assert clock.blocks() == Blocks(
        seconds=tuple(clock.seconds), samples=(1, 1, 1), steps=(1, 1, 1), weights=(3.0, 3.0, 3.0)
    )
    pace = clock.seconds[-1]
    clock.forget()
    assert clock.blocks() == Blocks(seconds=(), samples=(), steps=())
    assert clock.seconds_per_step == pace


def test_endless_goes_round() -> None:
    loader = WindowLoader(counted(DataLoader(TensorDataset(torch.arange(3)), batch_size=2)), 1)
    windows = endless(loader)
    assert [next(windows)[0].samples for _ in range(5)] == [2, 1, 2, 1, 2]


def test_a_pass_without_a_window_is_an_error_and_not_an_endless_loop() -> None:
    class Empty:
        def __iter__(self) -> Iterator[Window]:
            return iter(())

    with pytest.raises(WorkloadError, match="the loader gives not one full optimizer step: .* use a smaller batch, or"):
        next(endless(Empty()))


def test_a_loader_that_runs_dry_after_its_first_pass_is_an_error_too() -> None:
    class Once:
        def __init__(self) -> None:
            self.windows: list[Window] = [[MicroBatch(1, None)]]

        def __iter__(self) -> Iterator[Window]:
            while self.windows:
                yield self.windows.pop()

    windows = endless(Once())
    next(windows)
    with pytest.raises(WorkloadError, match="in its first pass and none in a later one: .* begin anew each time"):
        next(windows)
