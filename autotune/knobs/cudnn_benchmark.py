"""`cudnn_benchmark`: cuDNN tries its algorithms on each new shape and keeps the fastest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, final

from autotune.config import TrainingConfig, Value
from autotune.knobs.base import AS_IS, CodeLines, Knob, parse_choice
from autotune.records import SearchFacts

if TYPE_CHECKING:
    import torch

VALUES = (AS_IS, "on")


@final
class CudnnBenchmark(Knob):
    """The flag of `torch.backends.cudnn`, where the user's program leaves it off."""

    name = "cudnn_benchmark"
    summary = "let cuDNN try its convolution algorithms in the first step and keep the fastest"
    effect = "rounding"  # another algorithm adds in another order
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
        return CodeLines(imports=("import torch",), process=("torch.backends.cudnn.benchmark = True",))

    def first_step_limit_seconds(self, value: Value) -> float | None:
        """It took 132 s for one ResNet-50 in fp32 (H200), and every process of a training would wait for it again."""
        return None if value == AS_IS else 60.0

    def configure_process(self, value: Value, device: torch.device) -> None:
        import torch

        if value != AS_IS:
            torch.backends.cudnn.benchmark = True


def _useless(facts: SearchFacts) -> str | None:
    """Why there is nothing to try, in one sentence; None where there is."""
    if facts.device != "cuda":
        return "cuDNN runs on a GPU alone"
    if not facts.workload.convolution_ranks:
        return "the model has no convolution"
    if facts.workload.process_settings.get("cudnn_benchmark_set"):
        return "your program turns it on itself"
    if facts.workload.process_settings.get("deterministic_algorithms"):
        return "your program asks for deterministic algorithms, and the fastest may be another at each start"
    return None
