"""`activation_checkpointing`: blocks that forget what they computed and compute it again in the backward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

from autotune.config import TrainingConfig, Value
from autotune.knobs.base import AS_IS, CodeLines, Knob, TrainingParts, parse_choice
from autotune.records import SearchFacts

if TYPE_CHECKING:
    from torch import nn

VALUES = (AS_IS, "alternate", "all")


@final
class ActivationCheckpointing(Knob):
    """Recomputation of the repeated blocks: all of them, or every second one."""

    name = "activation_checkpointing"
    summary = "recompute blocks in the backward pass instead of keeping their activations"
    effect = "exact"
    stage = "compute"
    memory = "class"
    cures = frozenset({"memory"})

    def baseline(self, facts: SearchFacts) -> str:
        return AS_IS

    def choices(self, facts: SearchFacts) -> tuple[str, ...]:
        return VALUES if facts.workload.blocks else (AS_IS,)

    def saving(self, facts: SearchFacts) -> tuple[str, ...]:
        return VALUES[1:] if facts.workload.blocks else ()

    def refused(self, facts: SearchFacts) -> dict[Value | None, str]:
        return {} if facts.workload.blocks else {None: _without_blocks(facts)}

    def rank(self, value: Value, facts: SearchFacts) -> float:
        return float(VALUES.index(str(value)))

    def conflict(self, value: Value, others: Mapping[str, Value], facts: SearchFacts) -> str | None:
        if value == AS_IS or facts.workload.blocks:
            return None
        return _without_blocks(facts)

    def parse(self, text: str) -> Value:
        return parse_choice(self.name, text, VALUES)

    def export(self, value: Value, config: TrainingConfig, facts: SearchFacts) -> CodeLines:
        if value == AS_IS:
            return CodeLines()
        imports: tuple[str, ...] = ("import torch", "from torch.utils.checkpoint import checkpoint")
        keeps_statistics = facts.workload.has_batch_norm or facts.workload.has_tracking_instance_norm
        if keeps_statistics:
            imports = ("import contextlib", *imports)
        lines = _RECOMPUTE_WITH_STATISTICS if keeps_statistics else _RECOMPUTE
        names = ", ".join(repr(name) for name in recomputed(facts.workload.blocks, str(value)))
        loop = (f"for name in [{names}]:", "    recompute(model.get_submodule(name))")
        return CodeLines(imports=imports, wrap=(*lines.strip("\n").split("\n"), "", "", *loop))

    def wrap_model(self, value: Value, parts: TrainingParts) -> None:
        for name in recomputed(parts.blocks, str(value)):
            block = parts.model.get_submodule(name)
            block.forward = _recomputing(block)


def _without_blocks(facts: SearchFacts) -> str:
    return f"{facts.workload.model_class} has no repeated blocks that could be recomputed"


def recomputed(blocks: Sequence[str], value: str) -> tuple[str, ...]:
    """Which of the blocks a value recomputes."""
    step = {AS_IS: None, "alternate": 2, "all": 1}[value]
    return () if step is None else tuple(blocks[::step])


def _recomputing(block: nn.Module) -> Callable[..., Any]:
    """The block's forward, recomputed in the backward pass where there will be one.

    Running statistics are updated once. Under torch.compile the compiler sees to that itself: what it recomputes has no
    side effects.
    """
    import torch
    from torch.nn.modules.batchnorm import _NormBase
    from torch.utils.checkpoint import checkpoint

    forward = block.forward
    norms = [module for module in block.modules() if isinstance(module, _NormBase) and module.track_running_stats]

    @functools.wraps(forward)
    def recomputing(*args: Any, **kwargs: Any) -> Any:
        if not (block.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        ran_before: list[bool] = []

        def run(*args: Any, **kwargs: Any) -> Any:
            if not norms or torch.compiler.is_compiling():
                return forward(*args, **kwargs)
            if ran_before:
                with _statistics_kept(norms):
                    return forward(*args, **kwargs)
            ran_before.append(True)
            return forward(*args, **kwargs)

        return checkpoint(run, *args, use_reentrant=False, **kwargs)

    return recomputing


@contextmanager
def _statistics_kept(norms: Sequence[Any]) -> Iterator[None]:
    """Normalizes by the batch's statistics and leaves the running ones alone.

    Neither copied back nor switched off: a copy would change tensors that autograd has saved, and without them the
    recomputation would save fewer tensors than the forward did, which torch refuses.
    """
    before = [(norm, norm.momentum, _count(norm)) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:  # torch ends a recomputation by an exception once it has what it needs
        for norm, momentum, count in before:
            norm.momentum = momentum
            if count is not None:
                norm.num_batches_tracked.copy_(count)


def _count(norm: Any) -> Any:
    return None if norm.num_batches_tracked is None else norm.num_batches_tracked.clone()


_RECOMPUTE = """
def recompute(block):
    forward = block.forward

    def recomputing(*args, **kwargs):
        if not (block.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    block.forward = recomputing
"""

_RECOMPUTE_WITH_STATISTICS = """
@contextlib.contextmanager
def statistics_kept(norms):
    before = [(norm, norm.momentum, norm.num_batches_tracked.clone()) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:  # torch ends a recomputation by an exception once it has what it needs
        for norm, momentum, count in before:
            norm.momentum = momentum
            norm.num_batches_tracked.copy_(count)


def recompute(block):
    forward = block.forward
    norms = [m for m in block.modules() if getattr(m, "num_batches_tracked", None) is not None]

    def recomputing(*args, **kwargs):
        if not (block.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        ran_before = []

        def run(*args, **kwargs):
            if torch.compiler.is_compiling():
                return forward(*args, **kwargs)
            if ran_before:  # the running statistics have been updated already
                with statistics_kept(norms):
                    return forward(*args, **kwargs)
            ran_before.append(True)
            return forward(*args, **kwargs)

        return checkpoint(run, *args, use_reentrant=False, **kwargs)

    block.forward = recomputing
"""
