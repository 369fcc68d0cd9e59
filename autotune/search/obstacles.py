"""`Obstacles`: what failed trials and probes say about configurations that did not run yet."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.config import TrainingConfig, Value
from autotune.knobs.registry import KNOBS
from autotune.records import OUT_OF_MEMORY, FailureKind, Trial, TrialAnswer
from autotune.space import SearchSpace


@dataclass(frozen=True)
class TooLarge:
    """A micro-batch that did not fit."""

    micro_batch_size: int
    failure_kind: FailureKind | None
    """None: it ran, without leaving the margin."""


class Obstacles:
    """Learns from every trial and every memory probe, in whatever order."""

    def __init__(self, space: SearchSpace) -> None:
        self._space = space
        self._too_large: dict[tuple[tuple[str, Value], ...], TooLarge] = {}
        self._wrong: dict[int, Trial] = {}
        self._largest_that_ran = 0

    def learn_trial(self, trial: Trial) -> None:
        """A finished trial, or what became of it later."""
        self._wrong.pop(trial.number, None)
        if trial.failure is None:
            self._ran(trial.config)
        elif trial.failure.kind in OUT_OF_MEMORY and trial.failure.phase != "parity":
            self._did_not_fit(trial.config, trial.failure.kind)
        elif trial.failure.kind == "numerics":
            self._wrong[trial.number] = trial

    def learn_memory_probe(self, config: TrainingConfig, answer: TrialAnswer) -> None:
        """A configuration that was run for its memory alone."""
        if answer.failure is not None and answer.failure.kind in OUT_OF_MEMORY:
            self._did_not_fit(config, answer.failure.kind)
        elif answer.memory is not None and not answer.memory.fits:
            self._did_not_fit(config, None)
        elif answer.memory is not None:
            self._ran(config)

    def too_large(self, config: TrainingConfig) -> TooLarge | None:
        """The smallest micro-batch that did not fit with the memory settings of this configuration."""
        return self._too_large.get(self._space.memory_class(config))

    def is_bold(self, config: TrainingConfig) -> bool:
        """Whether the micro-batch is more than twice the largest that ran with any settings: likely not to fit."""
        return self._space.micro_batch(config) > 2 * self._largest_that_ran

    def reason(self, config: TrainingConfig, baseline: TrainingConfig | None) -> str | None:
        """Why this configuration is not worth running: a conflict, a size that does not fit, or wrong numerics."""
        conflict = self._space.conflict(config)
        if conflict is not None:
            return conflict
        known = self.too_large(config)
        if known is not None and self._space.micro_batch(config) >= known.micro_batch_size:
            return f"a batch of {known.micro_batch_size} does not fit with the same memory settings"
        return None if baseline is None else self._trains_differently(config, baseline)

    def _trains_differently(self, config: TrainingConfig, baseline: TrainingConfig) -> str | None:
        """What was seen to train differently blames all that it changes in the step, and whatever changes that too."""
        for trial in self._wrong.values():
            changed = {
                knob.name: trial.config[knob.name]
                for knob in KNOBS
                if knob.stage != "loader" and trial.config[knob.name] != baseline[knob.name]
            }
            if changed and all(config[name] == value for name, value in changed.items()):
                assert trial.failure is not None
                return f"trains differently: {trial.failure.message}"
        return None

    def _ran(self, config: TrainingConfig) -> None:
        self._largest_that_ran = max(self._largest_that_ran, self._space.micro_batch(config))

    def _did_not_fit(self, config: TrainingConfig, kind: FailureKind | None) -> None:
        memory_class, size = self._space.memory_class(config), self._space.micro_batch(config)
        known = self._too_large.get(memory_class)
        if known is None or size < known.micro_batch_size:
            self._too_large[memory_class] = TooLarge(size, kind)
