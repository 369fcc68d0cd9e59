"""Memory marks: what a step takes, read from torch's allocator on CUDA and from the kernel on CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from autotune.records import MemoryMarks
from autotune.training.training import Training
from autotune.training.windows import Window

_STATUS = Path("/proc/self/status")
_CLEAR_REFERENCES = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
"""What the kernel takes to set the peak of the resident size back (proc(5), clear_refs)."""

FEWEST_NOTES = 4
LEAST_GROWTH_BYTES = 4 * 2**20
STEADY_GROWTH = 0.5
"""Of a leak, the slowest growth between two notes reaches this share of the fastest."""


def resident_bytes(field_name: str = "VmRSS") -> int:
    """The process's resident size, or with `VmHWM` its peak, in bytes; 0 where the kernel does not say."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field_name + ":"):
            return int(line.split()[1]) * 1024
    return 0


@dataclass
class MemoryMeter:
    """Reads memory around the steps of one training. Make it before the model is built."""

    device: torch.device
    start_bytes: int = 0
    live_bytes: list[int] = field(default_factory=list)
    live_steps: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.device.type == "cpu":
            self.start_bytes = resident_bytes()

    def reset_peak(self) -> None:
        """From here on peaks are counted anew."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            try:
                _CLEAR_REFERENCES.write_text(_RESET_PEAK)
            except OSError:
                return  # not allowed in some containers: the peak since the start is then told, which is no less

    def peak_bytes(self) -> int:
        """Peak since the last reset."""
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device))
        return max(0, resident_bytes("VmHWM") - self.start_bytes)

    def note_live(self, steps: int) -> None:
        """Remembers what is held now, after `steps` steps in all; call it between steps."""
        if self.device.type == "cuda":
            self.live_bytes.append(int(torch.cuda.memory_allocated(self.device)))
        else:
            self.live_bytes.append(resident_bytes())
        self.live_steps.append(steps)

    def growth_bytes_per_step(self) -> float:
        """Bytes that each step adds to what is held, seen over all notes; 0 unless the growth is a leak's.

        A leak adds about as much with every step. An allocator that settles, or a cache that fills, adds much between
        some notes and little between others; and a process grows by a few MiB for reasons of its own.
        """
        if len(self.live_bytes) < FEWEST_NOTES or self.live_bytes[-1] - self.live_bytes[0] < LEAST_GROWTH_BYTES:
            return 0.0
        added = [later - earlier for earlier, later in pairwise(self.live_bytes)]
        steps = [max(1, later - earlier) for earlier, later in pairwise(self.live_steps)]
        rates = [more / count for more, count in zip(added, steps, strict=True)]
        return sum(added) / sum(steps) if min(rates) >= STEADY_GROWTH * max(rates) else 0.0

    def marks(self, peaks: StepPeaks) -> MemoryMarks:
        """The marks of the steps since the last reset, with the phases of one watched step."""
        if self.device.type == "cpu":
            return MemoryMarks(
                peak_allocated_bytes=self.peak_bytes(), growth_bytes_per_step=self.growth_bytes_per_step()
            )
        statistics = torch.cuda.memory_stats(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        return MemoryMarks(
            peak_allocated_bytes=max(self.peak_bytes(), peaks.forward_backward, peaks.optimizer_step),
            allocated_after_forward_bytes=peaks.after_forward,
            peak_forward_backward_bytes=peaks.forward_backward,
            peak_optimizer_step_bytes=peaks.optimizer_step,
            reserved_bytes=int(torch.cuda.max_memory_reserved(self.device)),
            driver_used_bytes=int(total - free),
            allocator_retries=int(statistics.get("num_alloc_retries", 0)),
            growth_bytes_per_step=self.growth_bytes_per_step(),
        )


@dataclass
class StepPeaks:
    """Bytes at the phases of one step."""

    after_forward: int = 0
    forward_backward: int = 0
    optimizer_step: int = 0


def watched_step(training: Training, window: Window, meter: MemoryMeter) -> StepPeaks:
    """Trains on one window and reads the peak of each phase (CUDA; zeros on CPU, where phases are too short to see)."""
    peaks = StepPeaks()
    if meter.device.type == "cpu":
        training.step(window)
        return peaks

    def note_forward() -> None:
        peaks.after_forward = max(peaks.after_forward, int(torch.cuda.memory_allocated(meter.device)))

    meter.reset_peak()
    with after_each_forward(training, note_forward):
        training.accumulate(window)
    torch.cuda.synchronize(meter.device)
    peaks.forward_backward = meter.peak_bytes()
    meter.reset_peak()
    training.update()
    torch.cuda.synchronize(meter.device)
    peaks.optimizer_step = meter.peak_bytes()
    return peaks


@contextmanager
def after_each_forward(training: Training, note: Callable[[], None]) -> Iterator[None]:
    """Calls `note` between the loss of each micro-batch and its backward pass."""
    original = training.parts.compute_loss

    def watched(model: Any, batch: Any) -> Any:
        result = original(model, batch)
        note()
        return result

    training.parts.compute_loss = watched
    try:
        yield
    finally:
        training.parts.compute_loss = original
