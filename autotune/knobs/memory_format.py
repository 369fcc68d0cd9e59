"""`memory_format`: the order in which the weights of 2-D convolutions, and with them their outputs, lie in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from autotune.config import TrainingConfig, Value
from autotune.knobs.base import AS_IS, CodeLines, Knob, TrainingParts, parse_choice
from autotune.records import SearchFacts

VALUES = (AS_IS, "channels_last")
RANK_2D = 4
RANK_3D = 5


@final
class MemoryFormat(Knob):
    """Weights of rank 4 in channels-last order. A convolution whose weight lies so gives an output that lies so, and
    what follows keeps it (PyTorch's tutorial on channels last), so batches need no change."""

    name = "memory_format"
    summary = "order in which images lie in memory: as they come, or channels last, which tensor cores want"
    effect = "exact"
    stage = "compute"
    memory = "constant"
    cures = frozenset({"compute"})

    def baseline(self, facts: SearchFacts) -> str:
        return AS_IS

    def choices(self, facts: SearchFacts) -> tuple[str, ...]:
        return (AS_IS,) if _useless(facts) is not None else VALUES

    def refused(self, facts: SearchFacts) -> dict[Value | None, str]:
        reason = _useless(facts)
        return {} if reason is None else {None: reason}

    def prior(self, facts: SearchFacts) -> tuple[str, ...]:
        return tuple(reversed(self.choices(facts)))

    def rank(self, value: Value, facts: SearchFacts) -> float:
        return float(VALUES.index(str(value)))

    def conflict(self, value: Value, others: Mapping[str, Value], facts: SearchFacts) -> str | None:
        return None if value == AS_IS else _useless(facts)

    def parse(self, text: str) -> Value:
        return parse_choice(self.name, text, VALUES)

    def export(self, value: Value, config: TrainingConfig, facts: SearchFacts) -> CodeLines:
        if value == AS_IS:
            return CodeLines()
        return CodeLines(imports=("import torch",), model=("model = model.to(memory_format=torch.channels_last)",))

    def transform_model(self, value: Value, parts: TrainingParts) -> None:
        import torch

        if value != AS_IS:
            parts.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _useless(facts: SearchFacts) -> str | None:
    """Why there is nothing to gain, or nothing that can be done, in one sentence; None where there may be."""
    ranks = facts.workload.convolution_ranks
    if RANK_3D in ranks:
        return "the model has 3-D convolutions, and channels last is for models with 2-D ones alone"
    return None if RANK_2D in ranks else "the model has no 2-D convolution"
