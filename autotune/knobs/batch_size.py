"""`batch_size`: samples in one forward and backward; a held global batch is made of several of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, final

from autotune.config import TrainingConfig, Value
from autotune.failure import TrialFailure
from autotune.knobs.base import CodeLines, Knob, TrainingParts, parse_count
from autotune.records import SearchFacts

MOST_CHOICES = 40
MOST_SAMPLES = 2**31 - 1
"""More is a mistake, or a file that somebody has tampered with."""


def micro_batches_per_step(micro_batch_size: int, global_batch_size: int | None) -> int:
    """Micro-batches of one optimizer step.

    A micro-batch of at least the global batch is a step of its own, although a larger one changes what is trained.
    Raises ValueError where the global batch is no multiple of a smaller micro-batch.
    """
    if global_batch_size is None or micro_batch_size >= global_batch_size:
        return 1
    if global_batch_size % micro_batch_size:
        raise ValueError(
            f"micro-batches of {micro_batch_size} do not add up to the global batch of {global_batch_size}; "
            f"use a divisor of {global_batch_size}"
        )
    return global_batch_size // micro_batch_size


@final
class BatchSize(Knob):
    """The micro-batch. With a held global batch the number of micro-batches per step follows from it.

    `exact` holds for a held global batch. Above it, or where none is held, a larger batch trains differently; whoever
    recommends that says so, for the knob cannot see it.
    """

    name = "batch_size"
    summary = "samples in one forward and backward; with a held global batch, gradients are accumulated to reach it"
    effect = "exact"
    stage = "batch"
    memory = "slope"
    cures = frozenset({"launch", "host"})

    def baseline(self, facts: SearchFacts) -> int:
        """The user's batch, or the largest divisor of the global batch that is not larger."""
        own = facts.workload.batch_size
        if facts.global_batch_size is None or facts.workload.batch_fixed_reason is not None:
            return own
        return max(divisor for divisor in _divisors(facts.global_batch_size) if divisor <= own)

    def choices(self, facts: SearchFacts) -> tuple[int, ...]:
        """Ascending, at most `MOST_CHOICES`: powers of two and their 1.5 multiples first, then other divisors."""
        baseline = self.baseline(facts)
        if facts.workload.batch_fixed_reason is not None:
            return (baseline,)
        total = facts.global_batch_size
        grid = _powers_of_two_and_halfway(facts.largest_batch_size)
        divisors = [] if total is None else [d for d in _divisors(total) if d <= facts.largest_batch_size]
        if total is not None:
            grid = [size for size in grid if size >= total or size in divisors]
        by_preference = dict.fromkeys([baseline, *grid, *reversed(divisors)])
        return tuple(sorted(list(by_preference)[:MOST_CHOICES]))

    def refused(self, facts: SearchFacts) -> dict[Value | None, str]:
        reason = facts.workload.batch_fixed_reason
        return {} if reason is None else {None: reason}

    def prior(self, facts: SearchFacts) -> tuple[int, ...]:
        """Larger first: throughput grows with the batch until it saturates."""
        return tuple(reversed(self.choices(facts)))

    def rank(self, value: Value, facts: SearchFacts) -> float:
        """Doublings away from the user's batch."""
        return abs(math.log2(int(value) / self.baseline(facts)))

    def conflict(self, value: Value, others: Mapping[str, Value], facts: SearchFacts) -> str | None:
        size, workload = int(value), facts.workload
        if size == self.baseline(facts):
            return None
        if workload.batch_fixed_reason is not None:
            return f"the batch cannot be changed: {workload.batch_fixed_reason}"
        length = workload.dataset_length
        if length is not None and size > length:
            consequence = "drop_last then leaves no batch at all" if workload.drop_last else "no batch would be full"
            return f"a batch of {size} is larger than the data set of {length} samples: {consequence}"
        if size > facts.largest_batch_size:
            return f"a batch of {size} is above the largest that is tried, {facts.largest_batch_size}"
        try:
            micro_batches_per_step(size, facts.global_batch_size)
        except ValueError as error:
            return str(error)
        return None

    def parse(self, text: str) -> Value:
        return parse_count(self.name, text, 1, MOST_SAMPLES)

    def export(self, value: Value, config: TrainingConfig, facts: SearchFacts) -> CodeLines:
        size = int(value)
        count = micro_batches_per_step(size, facts.global_batch_size)
        return CodeLines(
            loader_arguments={} if size == facts.workload.batch_size else {"batch_size": str(size)},
            micro_batches_per_step=None if count == 1 else str(count),
        )

    def loader_kwargs(self, value: Value, parts: TrainingParts) -> Mapping[str, Any]:
        return {"batch_size": int(value)}

    def transform_model(self, value: Value, parts: TrainingParts) -> None:
        try:
            parts.micro_batches_per_step = micro_batches_per_step(int(value), parts.global_batch_size)
        except ValueError as error:
            raise TrialFailure("conflict", str(error)) from None


def _powers_of_two_and_halfway(largest: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, ... up to `largest`."""
    powers = [2**exponent for exponent in range(largest.bit_length())]
    return [size for power in powers for size in sorted({power, power * 3 // 2}) if size <= largest]


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
