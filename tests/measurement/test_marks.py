from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import pytest
import torch

from autotune.measurement import marks
from autotune.measurement.marks import LEAST_GROWTH_BYTES, MemoryMeter, StepPeaks, resident_bytes
from tests.measurement.programs import holds

CPU = torch.device("cpu")
MEBIBYTE = 2**20


def meter_of(live: list[int], steps: list[int]) -> MemoryMeter:
    return MemoryMeter(CPU, live_bytes=live, live_steps=steps)


GROWTH = LEAST_GROWTH_BYTES


def notes(*added: float) -> list[int]:
    """What is held at each note, from multiples of the least growth that counts, added between them."""
    return [int(GROWTH * value) for value in accumulate(added, initial=1.0)]


def test_growth_that_is_about_the_same_with_every_step_is_a_leak() -> None:
    live = notes(1, 1.2, 0.9, 1, 1.1, 1)
    steps = [0, 10, 20, 30, 40, 50, 60]
    assert meter_of(live, steps).growth_bytes_per_step() == pytest.approx((live[-1] - live[0]) / 60)


def test_growth_counts_by_steps_and_not_by_notes() -> None:
    live, steps = notes(1, 2, 1, 3, 1, 1), [0, 10, 30, 40, 70, 80, 90]
    assert meter_of(live, steps).growth_bytes_per_step() == pytest.approx(GROWTH / 10, rel=0.01)


@pytest.mark.parametrize(
    "live",
    [
        notes(0, 0, 0, 0, 0, 0),
        notes(3, 0, 0, 0, 0, 0),  # a cache that has filled
        notes(1, 1, -1, 1, 1, 1),  # an allocator that gives back
        notes(4, 2, 1, 0.5, 0.2, 0.1),  # one that settles
        notes(*[0.01] * 6),  # what a process grows by for reasons of its own
        notes(1, 1),  # too few notes to tell
        notes(),
        [],
    ],
)
def test_what_does_not_grow_with_every_step_is_no_leak(live: list[int]) -> None:
    assert meter_of(live, list(range(len(live)))).growth_bytes_per_step() == 0.0


def test_the_peak_counts_from_the_meters_start_and_is_reset() -> None:
    def is_so() -> bool:
        meter = MemoryMeter(CPU)
        held = torch.ones(48 * MEBIBYTE // 4)
        del held
        high = meter.peak_bytes()
        meter.reset_peak()
        is_reset = meter.peak_bytes() < high - 30 * MEBIBYTE
        return high >= 44 * MEBIBYTE and is_reset and meter.marks(StepPeaks()).peak_allocated_bytes < high

    assert holds(is_so)


def test_notes_see_what_is_held_between_steps() -> None:
    """What the kernel takes back meanwhile of what else this process has hides it."""

    def sees_it() -> bool:
        meter, held = MemoryMeter(CPU), []
        for step in range(8):
            meter.note_live(step)
            held.append(torch.ones(40 * MEBIBYTE // 4))
        told = (meter.growth_bytes_per_step(), meter.marks(StepPeaks()).growth_bytes_per_step)
        return told == pytest.approx((40 * MEBIBYTE, 40 * MEBIBYTE), rel=0.1)

    assert holds(sees_it)


def test_where_the_peak_cannot_be_reset_the_one_since_the_start_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    meter = MemoryMeter(CPU)
    del_me = torch.ones(48 * MEBIBYTE // 4)
    del del_me
    high = meter.peak_bytes()
    monkeypatch.setattr(marks, "_CLEAR_REFERENCES", tmp_path / "no" / "such" / "file")
    meter.reset_peak()
    assert meter.peak_bytes() >= high


def test_resident_bytes_are_read_from_the_kernel() -> None:
    assert 10 * MEBIBYTE < resident_bytes() <= resident_bytes("VmHWM")
    assert resident_bytes("NoSuchField") == 0
