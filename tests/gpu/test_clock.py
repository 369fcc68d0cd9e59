"""The clock of blocks on a GPU, held against a loop of known length."""

import time

import pytest
import torch

from autotune.measurement.clock import BlockClock, Done

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
HOST_SECONDS = 0.02


@pytest.fixture(scope="module")
def cycles_per_second():
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(100_000_000)  # the clock rises to its own speed
    begin.record()
    torch.cuda._sleep(200_000_000)
    end.record()
    end.synchronize()
    return 200_000_000 / (begin.elapsed_time(end) / 1000)


def seconds_per_step(step, block_seconds=3 * HOST_SECONDS):
    clock = BlockClock(DEVICE)
    for _ in range(4):
        clock.run(step, block_seconds)
    clock.forget()
    for _ in range(8):
        clock.run(step, block_seconds)
    clock.finish()
    return sum(clock.seconds) / sum(clock.steps), clock


@pytest.mark.parametrize("device_share", [0.1, 0.9, 1.5])
def test_host_and_device_overlap_in_the_shortest_blocks(device_share, cycles_per_second):
    cycles = int(device_share * HOST_SECONDS * cycles_per_second)
    count = 0

    def step():
        nonlocal count
        time.sleep(HOST_SECONDS)
        torch.cuda._sleep(cycles)
        count += 1
        # torch.full, since a copy from the host would wait for what is queued
        return Done(1, weight=torch.ones((), device=DEVICE), loss=torch.full((), float(count), device=DEVICE))

    seconds, clock = seconds_per_step(step)
    assert seconds == pytest.approx(HOST_SECONDS * max(1.0, device_share), rel=0.03)
    assert clock.weights == [float(steps) for steps in clock.steps]
    assert clock.losses[-1] == count - 1, "of the last step of the last block: one more was queued"


def test_work_in_a_stream_that_nothing_waits_for_counts(cycles_per_second):
    stream = torch.cuda.Stream()

    def step():
        time.sleep(HOST_SECONDS / 4)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(int(HOST_SECONDS * cycles_per_second))
        return Done(1)

    seconds, _ = seconds_per_step(step)
    assert seconds > 0.95 * HOST_SECONDS
