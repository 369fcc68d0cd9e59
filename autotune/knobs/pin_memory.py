"""`pin_memory`: batches in page-locked memory, copied to the GPU without waiting."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from autotune.config import TrainingConfig, Value
from autotune.knobs.base import CodeLines, Knob, TrainingParts, parse_choice
from autotune.records import SearchFacts


@final
class PinMemory(Knob):
    """The loader's `pin_memory`, together with copies that do not wait, for which it is needed."""

    name = "pin_memory"
    summary = "load into page-locked memory and copy to the GPU without waiting"
    effect = "exact"
    stage = "loader"
    memory = "none"
    cures = frozenset({"loader", "host"})

    def baseline(self, facts: SearchFacts) -> bool:
        return facts.workload.pin_memory

    def choices(self, facts: SearchFacts) -> tuple[bool, ...]:
        return (self.baseline(facts),) if _fixed_reason(facts) is not None else (False, True)

    def refused(self, facts: SearchFacts) -> dict[Value | None, str]:
        reason = _fixed_reason(facts)
        return {} if reason is None else {None: reason}

    def prior(self, facts: SearchFacts) -> tuple[bool, ...]:
        return tuple(sorted(self.choices(facts), reverse=True))

    def rank(self, value: Value, facts: SearchFacts) -> float:
        return float(value != self.baseline(facts))

    def conflict(self, value: Value, others: Mapping[str, Value], facts: SearchFacts) -> str | None:
        return None if value == self.baseline(facts) else _fixed_reason(facts)

    def parse(self, text: str) -> Value:
        return parse_choice(self.name, text.lower(), ("true", "false")) == "true"

    def export(self, value: Value, config: TrainingConfig, facts: SearchFacts) -> CodeLines:
        arguments = {} if value == self.baseline(facts) else {"pin_memory": str(bool(value))}
        return CodeLines(loader_arguments=arguments, non_blocking=bool(value))

    def loader_kwargs(self, value: Value, parts: TrainingParts) -> Mapping[str, Any]:
        return {"pin_memory": bool(value)}

    def transform_model(self, value: Value, parts: TrainingParts) -> None:
        parts.non_blocking = bool(value)


def _fixed_reason(facts: SearchFacts) -> str | None:
    if facts.device != "cuda":
        return "page-locked memory only helps copies to a GPU"
    workload = facts.workload
    if workload.batch_fixed_reason is not None and workload.workers_fixed_reason is not None:
        return f"the loader cannot be rebuilt: {workload.batch_fixed_reason}"
    return None
