"""All knobs, in the order in which they are applied."""

from __future__ import annotations

from autotune.config import TrainingConfig
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


def first_step_limit_seconds(config: TrainingConfig) -> float | None:
    """The longest that any of its values asks for; None where nothing is compiled or tuned in the first step."""
    named = [candidate for candidate in KNOBS if candidate.name in config]
    limits = [candidate.first_step_limit_seconds(config[candidate.name]) for candidate in named]
    return max((limit for limit in limits if limit is not None), default=None)


def slow_to_start(config: TrainingConfig) -> bool:
    """Whether something is compiled or tuned in the first step."""
    return first_step_limit_seconds(config) is not None


def compiles_in_evaluation(config: TrainingConfig) -> bool:
    """Whether an evaluation compiles a graph of its own, beside what the first step compiled."""
    return any(knob.compiles_in_evaluation(config[knob.name], config) for knob in KNOBS if knob.name in config)


def batch_knob() -> Knob:
    """The knob that moves the micro-batch: the one that the search moves in the batch stage."""
    return next(candidate for candidate in KNOBS if candidate.stage == "batch")
