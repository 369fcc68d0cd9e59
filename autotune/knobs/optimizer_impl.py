"""`optimizer_impl`: by which of torch's implementations the user's optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast, final

from autotune.config import TrainingConfig, Value
from autotune.knobs.base import AS_IS, CodeLines, Knob, TrainingParts, parse_choice
from autotune.records import SearchFacts

VALUES = (AS_IS, "fused", "foreach", "for_loop")
"""Simplest first. `as_is` is one of the others, which one depends on the device and the user's flags."""


@final
class OptimizerImpl(Knob):
    """The flags `foreach` and `fused` of the user's own optimizer, edited in place."""

    name = "optimizer_impl"
    summary = "how the optimizer steps: one kernel per parameter, grouped kernels, or one fused kernel"
    effect = "exact"
    stage = "compute"
    memory = "constant"
    cures = frozenset({"launch", "host", "memory"})
    in_update_only = True

    def baseline(self, facts: SearchFacts) -> str:
        return AS_IS

    def choices(self, facts: SearchFacts) -> tuple[str, ...]:
        return tuple(value for value in VALUES if _not_switchable(value, facts) is None)

    def refused(self, facts: SearchFacts) -> dict[Value | None, str]:
        if facts.workload.optimizer_fixed_reason is not None:
            return {None: facts.workload.optimizer_fixed_reason}
        return {value: reason for value in VALUES if (reason := _not_switchable(value, facts)) is not None}

    def prior(self, facts: SearchFacts) -> tuple[str, ...]:
        """fused, then what torch chose by itself, then the rest."""
        expected = ("fused", AS_IS, "foreach", "for_loop")
        return tuple(value for value in expected if _not_switchable(value, facts) is None)

    def saving(self, facts: SearchFacts) -> tuple[str, ...]:
        """Grouped kernels make copies of all parameters at once, a fused one makes none."""
        others = facts.workload.optimizer_variants
        if "fused" in others:
            return ("fused",)
        return ("for_loop",) if "for_loop" in others and "foreach" not in others else ()

    def rank(self, value: Value, facts: SearchFacts) -> float:
        return float(VALUES.index(str(value)))

    def conflict(self, value: Value, others: Mapping[str, Value], facts: SearchFacts) -> str | None:
        return _not_switchable(str(value), facts)

    def parse(self, text: str) -> Value:
        return parse_choice(self.name, text, VALUES)

    def export(self, value: Value, config: TrainingConfig, facts: SearchFacts) -> CodeLines:
        if value == AS_IS:
            return CodeLines()
        foreach, fused = value == "foreach", value == "fused"
        lines = [
            "for settings in (*optimizer.param_groups, optimizer.defaults):",
            f'    flags = {{"foreach": {foreach}, "fused": {fused}}}',
            "    settings.update({flag: on for flag, on in flags.items() if flag in settings})",
            f"optimizer._step_supports_amp_scaling = {fused}  # asked by torch.amp.GradScaler",
        ]
        if fused:
            lines += [
                "for parameter, state in optimizer.state.items():  # filled where an optimizer makes its state early",
                '    if "step" in state:',
                '        state["step"] = state["step"].to(parameter.device)',
            ]
        return CodeLines(optimizer=tuple(lines))

    def set_optimizer(self, value: Value, parts: TrainingParts) -> None:
        if value == AS_IS:
            return
        from autotune.surgery.optimizers import Variant, set_variant

        assert parts.optimizer is not None
        set_variant(parts.optimizer, cast(Variant, value))


def _not_switchable(value: str, facts: SearchFacts) -> str | None:
    workload = facts.workload
    if value == AS_IS or value in workload.optimizer_variants:
        return None
    if workload.optimizer_fixed_reason is not None:
        return workload.optimizer_fixed_reason
    others = ", ".join(workload.optimizer_variants) or "nothing else"
    return (
        f"{workload.optimizer_class} on {facts.device} can be switched to {others}, not to {value}, "
        "which it lacks or uses as it is"
    )
