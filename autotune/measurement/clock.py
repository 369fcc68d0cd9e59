"""Timing whole steps: blocks between two synchronisations, with the loader in them or on batches that already lie there."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch

from autotune.errors import WorkloadError
from autotune.records import Blocks
from autotune.training.windows import Window


def synchronize(device: torch.device) -> None:
    """Waits until the device has done all that was queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def endless(loader: Iterable[Window]) -> Iterator[Window]:
    """The loader's windows, pass after pass. Raises `WorkloadError` for a pass without one."""
    for number in count():
        empty = True
        for window in loader:
            empty = False
            yield window
        if empty and number:
            raise WorkloadError(
                "the loader gives batches in its first pass and none in a later one: have the data set's __iter__ (or the "
                "sampler's) begin anew each time, instead of returning an iterator that was made once"
            )
        if empty:
            raise WorkloadError(
                "the loader gives not one full optimizer step: the data set is empty, or it holds fewer samples than the "
                "batch and drop_last is set; use a smaller batch, or drop_last=False"
            )


@dataclass
class BlockClock:
    """Collects blocks: whole numbers of steps between two synchronisations."""

    device: torch.device
    seconds: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    seconds_per_step: float | None = None
    """By which the length of the next block is set: that of the last one."""

    def run(self, step: Callable[[], tuple[int, Any]], minimum_seconds: float, multiple_of: int = 1) -> None:
        """Adds one block: `step` until `minimum_seconds` have passed and it was called a multiple of so many times.

        `step` returns its samples and its weight or None.

        On CUDA steps are only queued, so the host's clock runs ahead of the device; the number of steps of the next
        block is corrected by what the last block really took.
        """
        goal_steps = multiple_of * math.ceil(self._steps_for(minimum_seconds) / multiple_of)
        samples, steps, weight = 0, 0, None
        synchronize(self.device)
        start = time.perf_counter()
        while (
            steps < goal_steps
            or steps % multiple_of
            or (self.device.type == "cpu" and time.perf_counter() - start < minimum_seconds)
        ):
            drawn, step_weight = step()
            samples += drawn
            steps += 1
            if step_weight is not None:
                weight = step_weight if weight is None else weight + step_weight
        synchronize(self.device)
        self.seconds.append(time.perf_counter() - start)
        self.samples.append(samples)
        self.steps.append(steps)
        self.seconds_per_step = self.seconds[-1] / steps
        if weight is not None:
            self.weights.append(float(weight))

    def _steps_for(self, minimum_seconds: float) -> int:
        if self.device.type == "cpu" or self.seconds_per_step is None:
            return 1
        # 5 % more than needed, so that a block is not short of its minimum by a little.
        return max(1, int(1.05 * minimum_seconds / max(self.seconds_per_step, 1e-6)) + 1)

    def rates(self) -> list[float]:
        """Samples per second of each block."""
        return [drawn / seconds for drawn, seconds in zip(self.samples, self.seconds, strict=True)]

    def blocks(self) -> Blocks:
        """The raw blocks."""
        return Blocks(
            seconds=tuple(self.seconds),
            samples=tuple(self.samples),
            steps=tuple(self.steps),
            weights=tuple(self.weights),
        )

    def forget(self) -> None:
        """Drops all blocks but keeps the pace of the last, so that the next one has the right length."""
        for values in (self.seconds, self.samples, self.steps, self.weights):
            values.clear()
