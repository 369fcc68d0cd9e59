"""A leak is told from what a process grows by for other reasons."""

import pytest
import torch

from autotune.measurement.marks import MemoryMeter

MIB = 2**20


def growth(live_mib, steps):
    meter = MemoryMeter(torch.device("cpu"))
    meter.live_bytes = [int(one * MIB) for one in live_mib]
    meter.live_steps = list(steps)
    return meter.growth_bytes_per_step()


def test_a_leak_grows_with_the_steps_however_many_a_block_holds():
    assert growth([100, 120, 130, 160], [10, 20, 25, 40]) == pytest.approx(2 * MIB)


@pytest.mark.parametrize(
    "live_mib",
    [
        [100, 130, 130.1, 130.2],  # an allocator that has settled
        [100, 101, 102, 103],  # a process
        [100, 110, 120, 115],  # memory that comes back
        [100, 140, 180],  # too few notes to tell
    ],
)
def test_what_is_no_leak(live_mib):
    assert growth(live_mib, range(0, 10 * len(live_mib), 10)) == 0


def test_tensors_that_are_kept_are_seen_in_the_resident_size():
    meter = MemoryMeter(torch.device("cpu"))
    kept = []
    for step in range(0, 50, 10):
        meter.note_live(step)
        kept.append(torch.ones(10, 2 * MIB // 4))
    assert meter.growth_bytes_per_step() == pytest.approx(2 * MIB, rel=0.1)
