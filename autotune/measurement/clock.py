"""Timing whole steps in blocks, with the loader in them or on batches that already lie there.

On CUDA nothing waits for the device between blocks. A step is queued while the one before it runs, and whoever waits gives
that up once: a block of three steps would tell of a loop that nobody runs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple, Protocol, Self

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


class Mark(Protocol):
    """A place in what is queued for a device, as a `torch.cuda.Event` is one."""

    def synchronize(self) -> None:
        """Waits until the device has come there."""

    def elapsed_time(self, later: Self, /) -> float:
        """Milliseconds from here to a later mark by the device's clock; it has come to both."""


class Queue(Protocol):
    """What a device works on in turn."""

    def mark(self) -> Mark:
        """The end of what is queued by now."""

    def drain(self) -> None:
        """Waits for the whole device."""


class _Stream:
    """The current stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def drain(self) -> None:
        synchronize(self._device)


class Done(NamedTuple):
    """What a step says of itself when it is done, or queued."""

    samples: int
    weight: Any = None
    """Of its loss, a number or a tensor; None where the loss is a mean."""
    loss: Any = None
    """A number or a tensor; None where nobody reads it."""


LATE_SHARE = 0.02
"""Of all blocks: by so much a device may be done later with what lies in other streams than the one that is timed."""


@dataclass
class BlockClock:
    """Collects blocks of whole steps, one after the other without a gap."""

    device: torch.device
    seconds: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    """Of each block's last step."""
    seconds_per_step: float | None = None
    """By which the length of the next block is set: that of the last one."""
    queue: Queue | None = None
    """Of the device; None on a CPU, whose steps are done when they return."""
    _begin: Mark | None = None
    """Where the last block ended and the next one begins."""
    _ahead: Done | None = None
    """The next block's first step."""

    def __post_init__(self) -> None:
        if self.queue is None and self.device.type == "cuda":
            self.queue = _Stream(self.device)

    def run(self, step: Callable[[], Done], minimum_seconds: float, multiple_of: int = 1) -> None:
        """Adds one block: `step` until `minimum_seconds` have passed and it was called a multiple of so many times.

        Of a device that steps are queued for, the block has as many steps as that should take by the block before it, and
        lasts from the end of that block to its own by the device's clock. The end is waited for when one step more is
        queued, so that the device has something to do meanwhile.
        """
        goal_steps = multiple_of * math.ceil(self._steps_for(minimum_seconds) / multiple_of)
        if self.queue is None:
            self._run_at_once(step, goal_steps, minimum_seconds, multiple_of)
        else:
            self._run_queued(self.queue, step, goal_steps)

    def _run_at_once(self, step: Callable[[], Done], goal_steps: int, minimum_seconds: float, multiple_of: int) -> None:
        block = _Block()
        start = time.perf_counter()
        while block.steps < goal_steps or block.steps % multiple_of or time.perf_counter() - start < minimum_seconds:
            block.add(step())
        self._keep(block, time.perf_counter() - start)

    def _run_queued(self, queue: Queue, step: Callable[[], Done], goal_steps: int) -> None:
        begin = self._begin or queue.mark()
        block = _Block()
        block.add(self._ahead or step())
        while block.steps < goal_steps:
            block.add(step())
        block.send()
        self._begin = queue.mark()
        self._ahead = step()
        self._begin.synchronize()
        self._keep(block, begin.elapsed_time(self._begin) / 1000)

    def _keep(self, block: _Block, seconds: float) -> None:
        self.seconds.append(seconds)
        self.samples.append(block.samples)
        self.steps.append(block.steps)
        self.seconds_per_step = seconds / block.steps
        if block.weight is not None:
            self.weights.append(float(block.weight))
        if block.loss is not None:
            self.losses.append(float(block.loss))

    def _steps_for(self, minimum_seconds: float) -> int:
        if self.queue is None or self.seconds_per_step is None:
            return 1
        # 5 % more than needed, so that a block is not short of its minimum by a little.
        return max(1, int(1.05 * minimum_seconds / max(self.seconds_per_step, 1e-6)) + 1)

    def finish(self) -> None:
        """Waits for the device after the last block. The next one, if any, begins anew.

        Work that a step leaves in a stream of its own, and that nothing waits for, is no part of any block: where the
        device is busy with it for long after all steps, that is spread over the blocks.
        """
        if self.queue is None or self._begin is None:
            return
        self.queue.mark().synchronize()
        start = time.perf_counter()
        self.queue.drain()
        late_seconds, all_seconds = time.perf_counter() - start, sum(self.seconds)
        if late_seconds > LATE_SHARE * all_seconds:
            self.seconds[:] = [seconds * (1 + late_seconds / all_seconds) for seconds in self.seconds]
        self._begin = self._ahead = None

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
        """Drops all blocks. The next one goes on where the last one ended, and has the right length by its pace."""
        for values in self._kept():
            values.clear()

    def drop_last(self) -> None:
        """Drops the last block. The next one begins anew, without the step that is queued already."""
        self.finish()
        for values in self._kept():
            del values[-1:]

    def _kept(self) -> tuple[list[Any], ...]:
        return self.seconds, self.samples, self.steps, self.weights, self.losses


@dataclass
class _Block:
    """What the steps of a block add up to."""

    samples: int = 0
    steps: int = 0
    weight: Any = None
    loss: Any = None
    """Of the last step."""

    def add(self, done: Done) -> None:
        self.samples += done.samples
        self.steps += 1
        self.loss = done.loss
        if done.weight is not None:
            self.weight = done.weight if self.weight is None else self.weight + done.weight

    def send(self) -> None:
        """Has the device copy what will be read: whoever reads it from there waits for all that is queued by then."""
        self.weight, self.loss = (
            value.detach().to("cpu", non_blocking=True) if isinstance(value, torch.Tensor) else value
            for value in (self.weight, self.loss)
        )
