"""`precision`: the type in which matrix products and convolutions are computed; weights stay in float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, final

from autotune.config import TrainingConfig, Value
from autotune.knobs.base import AS_IS, CodeLines, Knob, TrainingParts, parse_choice
from autotune.records import SearchFacts

if TYPE_CHECKING:
    import torch

VALUES = (AS_IS, "tf32", "bf16", "fp16")
BEST_FIRST = ("bf16", "tf32", "fp16", AS_IS)
DTYPE_NAMES = {"bf16": "bfloat16", "fp16": "float16"}
DOUBLE = "all parameters of the model are float64, which autocast and TF32 leave as it is"
AMPERE = (8, 0)
"""The first compute capability with TF32 and bfloat16 units."""


@final
class Precision(Knob):
    """TF32 by a global setting, bf16 and fp16 by autocast; fp16 with a gradient scaler."""

    name = "precision"
    summary = "type of matrix products: tf32, or autocast to bf16 or fp16 (with a gradient scaler)"
    effect = "rounding"
    stage = "compute"
    memory = "class"
    cures = frozenset({"compute", "memory"})

    def baseline(self, facts: SearchFacts) -> str:
        return AS_IS

    def choices(self, facts: SearchFacts) -> tuple[str, ...]:
        return tuple(value for value in VALUES if _missing_support(value, facts) is None)

    def refused(self, facts: SearchFacts) -> dict[Value | None, str]:
        if facts.workload.parameters_are_double:
            return {None: DOUBLE}
        return {value: reason for value in VALUES if (reason := _missing_support(value, facts)) is not None}

    def prior(self, facts: SearchFacts) -> tuple[str, ...]:
        return tuple(value for value in BEST_FIRST if _missing_support(value, facts) is None)

    def saving(self, facts: SearchFacts) -> tuple[str, ...]:
        """Half as much for what is kept of most operations. TF32 keeps it in float32."""
        available = [value for value in ("bf16", "fp16") if _missing_support(value, facts) is None]
        return tuple(available[:1])

    def rank(self, value: Value, facts: SearchFacts) -> float:
        return float(VALUES.index(str(value)))

    def conflict(self, value: Value, others: Mapping[str, Value], facts: SearchFacts) -> str | None:
        return _missing_support(str(value), facts)

    def parse(self, text: str) -> Value:
        return parse_choice(self.name, text, VALUES)

    def export(self, value: Value, config: TrainingConfig, facts: SearchFacts) -> CodeLines:
        if value == AS_IS:
            return CodeLines()
        if value == "tf32":
            return CodeLines(
                imports=("import torch",),
                process=('torch.set_float32_matmul_precision("high")', "torch.backends.cudnn.allow_tf32 = True"),
            )
        return CodeLines(
            imports=("import torch",),
            context=f"torch.autocast(device.type, dtype=torch.{DTYPE_NAMES[str(value)]})",
            scaler="torch.amp.GradScaler(device.type)" if value == "fp16" else None,
        )

    def rounds_to(self, value: Value) -> Literal["bfloat16", "float16", "tf32"] | None:
        return {"bf16": "bfloat16", "fp16": "float16", "tf32": "tf32"}.get(str(value))  # type: ignore[return-value]

    def configure_process(self, value: Value, device: torch.device) -> None:
        import torch

        if value == "tf32":
            torch.set_float32_matmul_precision("high")
            torch.backends.cudnn.allow_tf32 = True

    def set_optimizer(self, value: Value, parts: TrainingParts) -> None:
        import torch

        if value == "fp16":
            parts.scaler = torch.amp.GradScaler(parts.device.type)

    def step_context(self, value: Value, parts: TrainingParts) -> Callable[[], AbstractContextManager[Any]] | None:
        import torch

        if value not in DTYPE_NAMES:
            return None
        device_type, dtype = parts.device.type, getattr(torch, DTYPE_NAMES[str(value)])
        return lambda: torch.autocast(device_type, dtype=dtype)

    def backward(self, value: Value, parts: TrainingParts) -> Callable[[torch.Tensor], torch.Tensor] | None:
        return None if parts.scaler is None else parts.scaler.scale


def _missing_support(value: str, facts: SearchFacts) -> str | None:
    """Why this program cannot be computed in `value` on this device, in one sentence, or None."""
    if value == AS_IS:
        return None
    if facts.workload.parameters_are_double:
        return DOUBLE
    if facts.device == "cpu":
        return None if value == "bf16" else f"{value} needs a GPU"
    if value == "fp16":
        return None
    capability = facts.machine.gpus[0].compute_capability if facts.machine.gpus else None
    if capability is None:
        return f"{value} needs a GPU of compute capability 8.0, and this GPU's is not known"
    if capability < AMPERE:
        return f"{value} needs a GPU of compute capability 8.0, and this one has {capability[0]}.{capability[1]}"
    return None
