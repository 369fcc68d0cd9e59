"""A search that measured what it was told, and confirmed what came of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from autotune.config import TrainingConfig, Value
from autotune.search.confirm import confirm
from tests.knobs.search_facts import cuda_facts
from tests.search.simulated_machine import Program
from tests.search.simulated_search import SimulatedSearch

NewDirectory = Callable[[], Path]
FACTS = cuda_facts(global_batch_size=32, dataset_length=10_000, largest_batch_size=512)
PROGRAM = Program(
    sample_seconds=0.002, update_seconds=0.004,
    sample_speedups={("precision", "bf16"): 4.0, ("precision", "fp16"): 3.9, ("precision", "tf32"): 2.0},
    update_speedups={("optimizer_impl", "fused"): 1.2}, process_spread=0.003, block_spread=0.003,
)  # fmt: skip
BF16: dict[str, Value] = {"precision": "bf16"}
FP16: dict[str, Value] = {"precision": "fp16"}
TF32: dict[str, Value] = {"precision": "tf32"}


def confirmed(
    directory: Path, *changes: dict[str, Value], program: Program = PROGRAM, **options: Any
) -> SimulatedSearch:
    """A search that measured these changes, and confirmed what came of it."""
    search = SimulatedSearch(program, FACTS, directory, **options)
    with search.begun() as session:
        for one in changes:
            session.measure(search.space.baseline.replace(one), "compute")
        confirm(session)
    search.finished = session  # type: ignore[attr-defined]  # for the tests below
    return search


def rounds_of(search: SimulatedSearch, changes: dict[str, Value]) -> int:
    config = search.space.baseline.replace(changes)
    return sum(r.config == config and r.kind == "measure" and not r.measure_resident for r in search.machine.requests)


def best(search: SimulatedSearch) -> TrainingConfig:
    found: TrainingConfig = search.finished.results().best().config  # type: ignore[attr-defined]
    return found
