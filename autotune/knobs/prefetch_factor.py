"""`prefetch_factor`: batches that each loader worker holds ready."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from autotune.config import TrainingConfig, Value
from autotune.knobs.base import CodeLines, Knob, TrainingParts, parse_count
from autotune.knobs.num_workers import no_room
from autotune.records import SearchFacts

OFFERED = (2, 4, 8)
MOST_PREFETCHED = 1024
"""More is a mistake, or a file that somebody has tampered with."""


@final
class PrefetchFactor(Knob):
    """More batches in advance bridge loads of unequal length; they cost shared memory."""

    name = "prefetch_factor"
    summary = "batches that each loader worker holds ready"
    effect = "exact"
    stage = "loader"
    memory = "none"
    cures = frozenset({"loader"})

    def baseline(self, facts: SearchFacts) -> int:
        return facts.workload.prefetch_factor

    def choices(self, facts: SearchFacts) -> tuple[int, ...]:
        if facts.workload.workers_fixed_reason is not None:
            return (self.baseline(facts),)
        return tuple(sorted({self.baseline(facts), *OFFERED}))

    def refused(self, facts: SearchFacts) -> dict[Value | None, str]:
        reason = facts.workload.workers_fixed_reason
        return {} if reason is None else {None: reason}

    def prior(self, facts: SearchFacts) -> tuple[int, ...]:
        return tuple(sorted(self.choices(facts), reverse=True))

    def rank(self, value: Value, facts: SearchFacts) -> float:
        """The user's number is simplest, then the fewest."""
        return 0.0 if value == self.baseline(facts) else 1.0 + int(value)

    def conflict(self, value: Value, others: Mapping[str, Value], facts: SearchFacts) -> str | None:
        if value == self.baseline(facts):
            return None
        reason = facts.workload.workers_fixed_reason
        if reason is not None:
            return f"the workers cannot be changed: {reason}"
        workers = int(others.get("num_workers", facts.workload.num_workers))
        if workers == 0:
            return "nothing is loaded in advance without workers"
        return no_room(workers, int(value), others, facts)

    def parse(self, text: str) -> Value:
        return parse_count(self.name, text, 1, MOST_PREFETCHED)

    def export(self, value: Value, config: TrainingConfig, facts: SearchFacts) -> CodeLines:
        if value == self.baseline(facts):
            return CodeLines()
        return CodeLines(loader_arguments={"prefetch_factor": str(int(value))})

    def loader_kwargs(self, value: Value, parts: TrainingParts) -> Mapping[str, Any]:
        """DataLoader refuses the argument where it has no workers."""
        return {"prefetch_factor": int(value)} if int(parts.config.get("num_workers", 0)) > 0 else {}
