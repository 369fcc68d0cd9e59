"""`compile_scope`: which part of the step is compiled, where something is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from autotune.config import TrainingConfig, Value
from autotune.knobs.base import AS_IS, CodeLines, CompileTarget, Knob, TrainingParts, parse_choice
from autotune.records import SearchFacts

VALUES = ("model", "step", "blocks")


@final
class CompileScope(Knob):
    """The model's forward, the forward and the loss in one graph, or each repeated block by itself."""

    name = "compile_scope"
    summary = "what is compiled: the model, the step (model and loss), or each repeated block"
    effect = "rounding"
    stage = "compute"
    # A loss inside the graph has halved the peak (53 and 28.5 GiB for GPT-2 124M).
    memory = "class"
    cures = frozenset({"memory", "compute"})

    def baseline(self, facts: SearchFacts) -> str:
        return "model"

    def choices(self, facts: SearchFacts) -> tuple[str, ...]:
        return VALUES if facts.workload.blocks else ("model", "step")

    def refused(self, facts: SearchFacts) -> dict[Value | None, str]:
        return {} if facts.workload.blocks else {"blocks": _without_blocks(facts)}

    def prior(self, facts: SearchFacts) -> tuple[str, ...]:
        """The step first: the loss over a large vocabulary gains most."""
        return tuple(value for value in ("step", "model", "blocks") if value in self.choices(facts))

    def rank(self, value: Value, facts: SearchFacts) -> float:
        return float(VALUES.index(str(value)))

    def conflict(self, value: Value, others: Mapping[str, Value], facts: SearchFacts) -> str | None:
        if value == "model":
            return None
        if others.get("compile_mode", AS_IS) == AS_IS:
            return f"nothing is compiled, so there is no {value} to compile"
        if value == "blocks" and not facts.workload.blocks:
            return _without_blocks(facts)
        return None

    def parse(self, text: str) -> Value:
        return parse_choice(self.name, text, VALUES)

    def export(self, value: Value, config: TrainingConfig, facts: SearchFacts) -> CodeLines:
        """Nothing: the lines that compile name what they compile."""
        return CodeLines()

    def wrap_model(self, value: Value, parts: TrainingParts) -> None:
        if value == "step":
            parts.compile_targets.append(CompileTarget(parts, "compute_loss"))
        elif value == "blocks":
            blocks = (parts.model.get_submodule(name) for name in parts.blocks)
            parts.compile_targets.extend(CompileTarget(block, "forward") for block in blocks)


def _without_blocks(facts: SearchFacts) -> str:
    return f"{facts.workload.model_class} has no repeated blocks that could be compiled one by one"
