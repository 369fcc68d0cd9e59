from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from autotune.errors import WorkloadError
from autotune.measurement.clock import LATE_SHARE, BlockClock, Done, endless
from autotune.records import Blocks
from autotune.surgery.loaders import counted
from autotune.training.windows import MicroBatch, Window, WindowLoader
from tests.measurement.programs import pause

CPU = torch.device("cpu")


def test_a_block_is_whole_steps_of_at_least_its_length() -> None:
    clock = BlockClock(CPU)
    for _ in range(2):
        clock.run(lambda: (pause(0.003), Done(5))[1], 0.01)
    for seconds, steps, samples in zip(clock.seconds, clock.steps, clock.samples, strict=True):
        assert 1 <= steps <= 4, "four of 3 ms are long enough, however long they took"
        assert samples == 5 * steps
        assert max(0.01, 0.003 * steps) <= seconds
    assert clock.weights == []
    assert clock.rates() == pytest.approx([s / t for s, t in zip(clock.samples, clock.seconds, strict=True)])


def test_a_step_longer_than_a_block_is_a_block() -> None:
    clock = BlockClock(CPU)
    clock.run(lambda: (pause(0.01), Done(1))[1], 0.001)
    assert clock.steps == [1]


@pytest.mark.parametrize("minimum_seconds", [0.0, 0.01])
def test_a_block_is_a_multiple_of_the_steps_asked_for(minimum_seconds: float) -> None:
    clock = BlockClock(CPU)
    for _ in range(2):
        clock.run(lambda: (pause(0.001), Done(1))[1], minimum_seconds, 7)
    assert all(steps % 7 == 0 for steps in clock.steps)
    assert min(clock.seconds) >= max(0.007, minimum_seconds)


@pytest.mark.parametrize("weight", [2, 2.0, torch.tensor(2)])
def test_weights_are_added_up(weight: object) -> None:
    clock = BlockClock(CPU)
    clock.run(lambda: (pause(0.001), Done(1, weight))[1], 0.005)
    assert clock.weights == [2.0 * clock.steps[0]]


def test_blocks_and_what_is_left_after_forgetting() -> None:
    clock = BlockClock(CPU)
    for _ in range(3):
        clock.run(lambda: Done(1, 3), 0.0)
    assert clock.blocks() == Blocks(
        seconds=tuple(clock.seconds), samples=(1, 1, 1), steps=(1, 1, 1), weights=(3.0, 3.0, 3.0)
    )
    pace = clock.seconds[-1]
    clock.forget()
    assert clock.blocks() == Blocks(seconds=(), samples=(), steps=())
    assert clock.seconds_per_step == pace


def test_the_loss_of_a_blocks_last_step_is_kept() -> None:
    clock, losses = BlockClock(CPU), iter(range(100))
    for _ in range(3):
        clock.run(lambda: Done(1, loss=torch.tensor(float(next(losses)))), 0.0, 4)
    assert clock.losses == [3.0, 7.0, 11.0]


# --- a device that steps are queued for -------------------------------------------------------------------------------


@dataclass
class DeviceMark:
    """A moment of a `Device`."""

    device: Device
    at: float

    def synchronize(self) -> None:
        self.device.now = max(self.device.now, self.at)

    def elapsed_time(self, later: DeviceMark) -> float:
        return 1000 * (later.at - self.at)


@dataclass
class Device:
    """Does what is queued, one after the other, while its host goes on; in seconds that pass by themselves nowhere."""

    host_seconds: float
    """That a step takes before it is queued: loading above all."""
    device_seconds: float
    """That it then takes here."""
    elsewhere_seconds: float = 0.0
    """And in a stream that nobody looks at."""
    now: float = 0.0
    free_at: float = 0.0
    elsewhere_free_at: float = 0.0
    steps: int = 0

    def step(self) -> Done:
        self.now += self.host_seconds
        self.free_at = max(self.free_at, self.now) + self.device_seconds
        self.elsewhere_free_at = max(self.elsewhere_free_at, self.now) + self.elsewhere_seconds
        self.steps += 1
        return Done(8, weight=2, loss=float(self.steps))

    def mark(self) -> DeviceMark:
        return DeviceMark(self, max(self.free_at, self.now))

    def drain(self) -> None:
        self.now = max(self.now, self.free_at, self.elsewhere_free_at)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[BlockClock, Device]]:
    """Blocks of a device: after a warm-up, so many of so many seconds."""

    def run(blocks: int, block_seconds: float, multiple_of: int = 1, **device: float) -> tuple[BlockClock, Device]:
        queue = Device(**device)
        monkeypatch.setattr("autotune.measurement.clock.time.perf_counter", lambda: queue.now)
        clock = BlockClock(CPU, queue=queue)
        for _ in range(4):
            clock.run(queue.step, block_seconds / 2)
        clock.forget()
        for _ in range(blocks):
            clock.run(queue.step, block_seconds, multiple_of)
        clock.finish()
        return clock, queue

    return run


@pytest.mark.parametrize("block_seconds", [0.05, 0.3, 2.0])
@pytest.mark.parametrize(("host", "device"), [(0.03, 0.028), (0.03, 0.001), (0.01, 0.04), (0.02, 0.02), (0.2, 0.3)])
def test_a_queued_step_takes_as_long_as_the_slower_of_host_and_device(
    host: float, device: float, block_seconds: float, timed: Callable[..., tuple[BlockClock, Device]]
) -> None:
    clock, _ = timed(3, block_seconds, host_seconds=host, device_seconds=device)
    expected = max(host, device)
    assert [steps * expected for steps in clock.steps] == pytest.approx(clock.seconds), "waiting for it costs nothing"
    assert min(clock.seconds) >= block_seconds
    assert clock.samples == [8 * steps for steps in clock.steps]
    assert clock.weights == [2.0 * steps for steps in clock.steps]


def test_queued_blocks_are_multiples_too_and_hold_each_step_once(
    timed: Callable[..., tuple[BlockClock, Device]],
) -> None:
    clock, device = timed(3, 0.0, 7, host_seconds=0.01, device_seconds=0.02)
    assert clock.steps == [7, 7, 7]
    assert clock.losses[-1] == device.steps - 1, "one step more was queued, and belongs to no block"
    assert [later - earlier for earlier, later in pairwise(clock.losses)] == [7, 7]


def test_what_is_left_in_other_streams_counts(timed: Callable[..., tuple[BlockClock, Device]]) -> None:
    clock, _ = timed(10, 0.3, host_seconds=0.01, device_seconds=0.001, elsewhere_seconds=0.05)
    assert 0.05 <= sum(clock.seconds) / sum(clock.steps) < 0.06, "what the warm-up left there included"


def test_a_stream_that_ends_a_little_later_does_not(timed: Callable[..., tuple[BlockClock, Device]]) -> None:
    clock, _ = timed(10, 0.3, host_seconds=0.03, device_seconds=0.01, elsewhere_seconds=0.015)
    assert LATE_SHARE * sum(clock.seconds) > 0.005
    assert sum(clock.seconds) == pytest.approx(0.03 * sum(clock.steps))


def test_after_the_end_blocks_begin_anew(timed: Callable[..., tuple[BlockClock, Device]]) -> None:
    clock, device = timed(1, 0.1, host_seconds=0.01, device_seconds=0.01)
    device.now += 100.0
    clock.run(device.step, 0.1)
    assert clock.seconds[-1] < 1.0


@pytest.mark.parametrize("queued", [False, True])
def test_a_block_that_is_dropped_takes_the_step_after_it_along(queued: bool) -> None:
    device = Device(host_seconds=0.0, device_seconds=1.0)
    clock = BlockClock(CPU, queue=device if queued else None)
    for _ in range(2):
        clock.run(device.step, 0.0, 3)
    clock.drop_last()
    clock.run(device.step, 0.0, 3)
    assert (clock.samples, clock.steps, clock.weights) == ([24, 24], [3, 3], [6.0, 6.0])
    assert clock.losses == [3.0, 10.0 if queued else 9.0]
    assert len(clock.seconds) == 2


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
