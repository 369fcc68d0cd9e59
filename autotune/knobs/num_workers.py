"""`num_workers`: processes that load batches beside the training."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, final

from autotune.config import TrainingConfig, Value
from autotune.knobs.base import CodeLines, Knob, TrainingParts, parse_count
from autotune.records import SearchFacts

MOST_WORKERS = 1024
"""More processes than the largest machines have cores: a mistake, or a file that somebody has tampered with."""
LEAST_OFFERED = 4
CREDIT_BEYOND_CORES = 0.93
"""The third worker on two cores: loading that waits gains a third by it, loading that computes nothing but noise."""
FILES_OF_A_PROCESS = 48
"""What a training process has open before any worker: a rough upper figure for torch without CUDA."""
FILES_PER_WORKER = 4
"""Pipes and the sentinel of each worker, in the training process."""


@final
class NumWorkers(Knob):
    """How many processes the user's DataLoader gets."""

    name = "num_workers"
    summary = "processes that load batches beside the training; 0 loads between the steps"
    effect = "exact"
    stage = "loader"
    memory = "none"
    cures = frozenset({"loader"})
    adds_up = True

    def baseline(self, facts: SearchFacts) -> int:
        return facts.workload.num_workers

    def choices(self, facts: SearchFacts) -> tuple[int, ...]:
        """0, 1, 2, 3, 4, 6, 8, 12, ... up to the usable cores, and the user's own number."""
        if facts.workload.workers_fixed_reason is not None:
            return (self.baseline(facts),)
        # On small machines more workers than cores are offered, for loading may be waiting (disk, network) rather than
        # computing; the measurement decides.
        most = max(facts.machine.usable_cores, LEAST_OFFERED)
        grid = [0, *(size for exponent in range(most.bit_length()) for size in (2**exponent, 3 * 2**exponent // 2))]
        return tuple(sorted({self.baseline(facts), *(count for count in grid if count <= most)}))

    def refused(self, facts: SearchFacts) -> dict[Value | None, str]:
        reason = facts.workload.workers_fixed_reason
        return {} if reason is None else {None: reason}

    def prior(self, facts: SearchFacts) -> tuple[int, ...]:
        """Half of the usable cores first: below it workers may starve the step, above it they take its cores."""
        middle = facts.machine.usable_cores / 2
        return tuple(sorted(self.choices(facts), key=lambda count: (abs(count - middle), count)))

    def rank(self, value: Value, facts: SearchFacts) -> float:
        """The user's number is simplest, then the fewest."""
        return 0.0 if value == self.baseline(facts) else 1.0 + int(value)

    def credit(self, value: Value, facts: SearchFacts) -> float:
        """More workers than cores gain only where loading waits instead of computing, and then they gain much."""
        crowded = int(value) > facts.machine.usable_cores and value != self.baseline(facts)
        return CREDIT_BEYOND_CORES if crowded else 1.0

    def conflict(self, value: Value, others: Mapping[str, Value], facts: SearchFacts) -> str | None:
        workers, workload = int(value), facts.workload
        if workers == self.baseline(facts):
            return None
        if workload.workers_fixed_reason is not None:
            return f"the number of workers cannot be changed: {workload.workers_fixed_reason}"
        return no_room(workers, int(others.get("prefetch_factor", workload.prefetch_factor)), others, facts)

    def parse(self, text: str) -> Value:
        return parse_count(self.name, text, 0, MOST_WORKERS)

    def export(self, value: Value, config: TrainingConfig, facts: SearchFacts) -> CodeLines:
        if value == self.baseline(facts):
            return CodeLines()
        return CodeLines(loader_arguments={"num_workers": str(int(value))})

    def loader_kwargs(self, value: Value, parts: TrainingParts) -> Mapping[str, Any]:
        return {"num_workers": int(value)}


def no_room(workers: int, prefetch_factor: int, others: Mapping[str, Value], facts: SearchFacts) -> str | None:
    """Why shared memory or the limit of open files does not hold what so many workers keep ready; None where they do."""
    batch = int(others.get("batch_size", facts.workload.batch_size))
    ready = prefetch_factor * workers
    needed = ready * batch * facts.workload.sample_bytes
    if needed > facts.machine.shared_memory_bytes:
        return (
            f"{workers} workers keep {ready} batches of {batch} samples ready, "
            f"{_mebibytes(needed)}, and shared memory has {_mebibytes(facts.machine.shared_memory_bytes)}; "
            "enlarge /dev/shm or use fewer"
        )
    tensors = tensors_in_batch(facts.workload.batch_structure)
    files = FILES_OF_A_PROCESS + FILES_PER_WORKER * workers + (ready + 1) * tensors
    # Refused before it runs: beyond the limit torch's workers may hang without a word.
    if workers and files > facts.machine.open_files_limit:
        return (
            f"{workers} workers with {tensors} tensors a batch need about {files} open files, and the limit is "
            f"{facts.machine.open_files_limit}; raise it with `ulimit -n` or use fewer"
        )
    return None


def tensors_in_batch(batch_structure: str) -> int:
    """Tensors that a batch is made of, counted roughly from its description; at least 1.

    Each takes a file descriptor while it is in shared memory. Containers of like items are described by one of them, long
    ones of others by their length alone.
    """
    shown = batch_structure.count("[")
    counted = sum(int(count) for count in re.findall(r"\bof (\d+) Tensor", batch_structure))
    alike: list[tuple[str, str]] = re.findall(r"\bof (\d+) (\([^()]*\)|[^,:()]*\[[^\]]*\])", batch_structure)
    not_shown = sum((int(count) - 1) * item.count("[") for count, item in alike)
    return max(1, shown + counted + not_shown)


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
