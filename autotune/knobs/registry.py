"""All knobs, in the order in which they are applied."""

from __future__ import annotations

from autotune.knobs.activation_checkpointing import ActivationCheckpointing
from autotune.knobs.base import Knob
from autotune.knobs.batch_size import BatchSize
from autotune.knobs.compile_mode import CompileMode
from autotune.knobs.compile_scope import CompileScope
from autotune.knobs.cudnn_benchmark import CudnnBenchmark
from autotune.knobs.memory_format import MemoryFormat
from autotune.knobs.num_workers import NumWorkers
from autotune.knobs.optimizer_impl import OptimizerImpl
from autotune.knobs.pin_memory import PinMemory
from autotune.knobs.precision import Precision
from autotune.knobs.prefetch_factor import PrefetchFactor

KNOBS: tuple[Knob, ...] = (
    BatchSize(),
    NumWorkers(),
    PrefetchFactor(),
    PinMemory(),
    Precision(),
    MemoryFormat(),
    CudnnBenchmark(),
    OptimizerImpl(),
    ActivationCheckpointing(),
    CompileScope(),
    CompileMode(),
)
"""Recomputation comes before compilation, so that it is compiled too; the scope says what the mode compiles."""


def knob(name: str) -> Knob:
    """The knob of that name. Raises ValueError that lists the known ones."""
    for candidate in KNOBS:
        if candidate.name == name:
            return candidate
    raise ValueError(f"there is no knob {name!r}; known are {', '.join(candidate.name for candidate in KNOBS)}")


def batch_knob() -> Knob:
    """The knob that moves the micro-batch: the one that the search moves in the batch stage."""
    return next(candidate for candidate in KNOBS if candidate.stage == "batch")
