"""`compile_mode`: whether, and how hard, torch.compile works on what `compile_scope` names."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, final

from autotune.config import TrainingConfig, Value
from autotune.knobs.base import (
    AS_IS,
    LONGEST_COMPILE_SECONDS,
    CodeLines,
    CompileTarget,
    Knob,
    TrainingParts,
    parse_choice,
)
from autotune.knobs.batch_size import micro_batches_per_step
from autotune.records import OF_STARTING, Bottleneck, SearchFacts

VALUES = (AS_IS, "default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune")
BEST_FIRST = ("default", "reduce-overhead", AS_IS, "max-autotune-no-cudagraphs", "max-autotune")
CUDA_GRAPHS = frozenset({"reduce-overhead", "max-autotune"})
CPP_COMPILERS = ("g++", "clang++", "c++")


@final
class CompileMode(Knob):
    """The mode of torch.compile. Shapes are left to torch's default: static first, dynamic once they vary."""

    name = "compile_mode"
    summary = "torch.compile and its mode; reduce-overhead and max-autotune use CUDA graphs"
    effect = "rounding"
    stage = "compute"
    memory = "class"
    cures = frozenset({"launch", "host", "compute", "memory"})

    def baseline(self, facts: SearchFacts) -> str:
        return AS_IS

    def choices(self, facts: SearchFacts) -> tuple[str, ...]:
        return tuple(value for value in VALUES if _missing_support(value, facts) is None)

    def refused(self, facts: SearchFacts) -> dict[Value | None, str]:
        return {value: reason for value in VALUES if (reason := _missing_support(value, facts)) is not None}

    def prior(self, facts: SearchFacts) -> tuple[str, ...]:
        return tuple(value for value in BEST_FIRST if _missing_support(value, facts) is None)

    def best_against(self, cause: Bottleneck, facts: SearchFacts) -> tuple[str, ...]:
        """CUDA graphs start a whole step at once; compiling alone leaves a launch for each kernel: 24 narrow layers were
        no faster for it (H200). Where the device computes all the time, graphs gain nothing over `default`."""
        starts_kernels = cause in OF_STARTING and _missing_support("reduce-overhead", facts) is None
        return ("reduce-overhead",) if starts_kernels else ()

    def companions(self, value: Value, facts: SearchFacts) -> dict[str, Value]:
        """The loss in the same graph: compiling the model without it first would be a second cold compilation, 25 s
        for GPT-2 124M, to find what is slower (431 and 481 samples/s, H200)."""
        return {} if value == AS_IS else {"compile_scope": "step"}

    def rank(self, value: Value, facts: SearchFacts) -> float:
        return float(VALUES.index(str(value)))

    def conflict(self, value: Value, others: Mapping[str, Value], facts: SearchFacts) -> str | None:
        missing = _missing_support(str(value), facts)
        if value == AS_IS or missing is not None:
            return missing
        if facts.workload.model_is_compiled:
            return "model_fn compiles the model already"
        if value in CUDA_GRAPHS and _accumulates(others, facts):
            return (
                f"{value} uses CUDA graphs, which overwrite gradients that are accumulated over several micro-batches; "
                f"use a micro-batch of {facts.global_batch_size}, or max-autotune-no-cudagraphs"
            )
        return None

    def first_step_limit_seconds(self, value: Value) -> float | None:
        """25 to 32 s for GPT-2 124M, 168 s with max-autotune (H200)."""
        return None if value == AS_IS else LONGEST_COMPILE_SECONDS

    def compiles_in_evaluation(self, value: Value, config: TrainingConfig) -> bool:
        """A step's graph holds the loss, and leaves the model's own forward as it is."""
        return value != AS_IS and config.get("compile_scope", "model") != "step"

    def parse(self, text: str) -> Value:
        return parse_choice(self.name, text, VALUES)

    def export(self, value: Value, config: TrainingConfig, facts: SearchFacts) -> CodeLines:
        if value == AS_IS:
            return CodeLines()
        scope = config.get("compile_scope", "model")
        if scope == "step":
            wrap: tuple[str, ...] = (f'compute_loss = torch.compile(compute_loss, mode="{value}")',)
        elif scope == "blocks":
            names = ", ".join(repr(name) for name in facts.workload.blocks)
            wrap = (
                f"for name in [{names}]:",
                "    block = model.get_submodule(name)",
                f'    block.forward = torch.compile(block.forward, mode="{value}")',
            )
        else:
            wrap = (f'model.forward = torch.compile(model.forward, mode="{value}")',)
        begin = ("torch.compiler.cudagraph_mark_step_begin()",) if value in CUDA_GRAPHS else ()
        return CodeLines(imports=("import torch",), wrap=wrap, micro_step=begin)

    def wrap_model(self, value: Value, parts: TrainingParts) -> None:
        """Replaces the targets' callables: names of parameters stay, and torch's own classes are compiled too."""
        import torch

        if value == AS_IS:
            return
        parts.expects_compiled_graphs = True
        for target in parts.compile_targets or [CompileTarget(parts.model, "forward")]:
            plain = getattr(target.owner, target.attribute)
            setattr(target.owner, target.attribute, torch.compile(plain, mode=str(value)))

    def step_context(self, value: Value, parts: TrainingParts) -> Callable[[], AbstractContextManager[Any]] | None:
        return _beginning_a_step if value in CUDA_GRAPHS else None


@contextmanager
def _beginning_a_step() -> Iterator[None]:
    """Tells CUDA graphs that outputs of earlier steps are no longer used, so that their memory is taken again."""
    import torch

    torch.compiler.cudagraph_mark_step_begin()
    yield


def _accumulates(others: Mapping[str, Value], facts: SearchFacts) -> bool:
    batch = int(others.get("batch_size", facts.workload.batch_size))
    try:
        return micro_batches_per_step(batch, facts.global_batch_size) > 1
    except ValueError:
        return True


def _missing_support(value: str, facts: SearchFacts) -> str | None:
    """Why this machine cannot compile in mode `value`, in one sentence, or None."""
    if value == AS_IS or facts.device == "cuda":
        return None
    if value in CUDA_GRAPHS:
        return f"{value} uses CUDA graphs, which need a GPU"
    compilers = (os.environ.get("CXX") or "", *CPP_COMPILERS)
    if not any(name and shutil.which(name) for name in compilers):
        return f"compiling for a CPU needs a C++ compiler, and none of {', '.join(CPP_COMPILERS)} is on the PATH"
    return None
