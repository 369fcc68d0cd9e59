"""`Obstacles`: what failed trials and probes say about configurations that did not run yet."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.config import TrainingConfig, Value
from autotune.knobs.registry import KNOBS, slow_to_start
from autotune.records import OUT_OF_MEMORY, Failure, FailureKind, Trial, TrialAnswer
from autotune.space import MemoryClass, SearchSpace

CHANGES_FAIL: frozenset[FailureKind] = frozenset(
    {"numerics", "user_error", "compile_error", "cuda_error", "launch_limit"}
)
"""What fails so fails again with the same changes."""
CHANGES_FAIL_FURTHER: frozenset[FailureKind] = frozenset({"timeout", "crash", "file_limit", "shared_memory"})
"""What fails so also fails with more of the same: larger batches, more workers. Finding that out each time would be dear."""
LEAN_KNOBS = tuple(knob.name for knob in KNOBS if knob.memory == "constant" and "memory" in knob.cures)
"""They make no memory class, since what they take does not grow with the batch; but it may decide whether any fits."""
LOADER_KNOBS = frozenset(knob.name for knob in KNOBS if knob.stage == "loader")


@dataclass(frozen=True)
class TooLarge:
    """A micro-batch that did not fit."""

    micro_batch_size: int
    failure_kind: FailureKind | None
    """None: it ran, without leaving the margin."""


Leanness = tuple[Value, ...]
"""The values of `LEAN_KNOBS`."""


class Obstacles:
    """Learns from every trial and every probe, in whatever order."""

    def __init__(self, space: SearchSpace) -> None:
        self._space = space
        self._too_large: dict[MemoryClass, dict[Leanness, TooLarge]] = {}
        self._largest_that_fit: dict[MemoryClass, dict[Leanness, int]] = {}
        self._failed: dict[tuple[str, object], tuple[TrainingConfig, Failure]] = {}
        self._largest_that_ran = 0

    def learn_trial(self, trial: Trial) -> None:
        """A finished trial, or what became of it later."""
        self._failed.pop(("trial", trial.number), None)
        if trial.failure is None:
            self._ran(trial.config)
        else:
            self._learn_failure(("trial", trial.number), trial.config, trial.failure)

    def learn_probe(self, kind: str, config: TrainingConfig, answer: TrialAnswer) -> None:
        """A configuration that was run for its memory alone, or whose loader was run alone."""
        if answer.failure is not None:
            self._learn_failure((kind, config), config, answer.failure)
        elif answer.memory is not None and not answer.memory.fits:
            self._did_not_fit(config, None)
        elif answer.memory is not None:
            self._ran(config)

    def learn_misfit(self, config: TrainingConfig) -> None:
        """A configuration of which it is known, from elsewhere, that it does not fit."""
        self._did_not_fit(config, "device_oom" if self._space.facts.device == "cuda" else "host_oom")

    def too_large(self, config: TrainingConfig) -> TooLarge | None:
        """The smallest micro-batch that did not fit with the memory settings of this configuration."""
        return self._smallest(self._space.memory_class(config), _leanness(config))

    def misfits(self) -> dict[MemoryClass, int]:
        """The smallest micro-batch that did not fit, for each class of memory settings in which one did not."""
        smallest = {memory_class: self._smallest(memory_class, None) for memory_class in self._too_large}
        return {memory_class: known.micro_batch_size for memory_class, known in smallest.items() if known is not None}

    def _smallest(self, memory_class: MemoryClass, leanness: Leanness | None) -> TooLarge | None:
        """A failure tells of the whole class, unless as large a batch ran with other values of `LEAN_KNOBS`; it always
        tells of its own."""
        fit = self._largest_that_fit.get(memory_class, {})

        def tells(own: Leanness, known: TooLarge) -> bool:
            others = [size for other, size in fit.items() if other != own]
            return own == leanness or known.micro_batch_size > max(others, default=0)

        failed = self._too_large.get(memory_class, {}).items()
        told = [known for own, known in failed if tells(own, known)]
        return min(told, key=lambda known: known.micro_batch_size, default=None)

    def is_bold(self, config: TrainingConfig) -> bool:
        """Whether the micro-batch is more than twice the largest that ran with any settings: likely not to fit."""
        return self._space.micro_batch(config) > 2 * self._largest_that_ran

    def reason(self, config: TrainingConfig, baseline: TrainingConfig | None) -> str | None:
        """Why this configuration is not worth running: a conflict, a size that does not fit, or what failed before."""
        conflict = self._space.conflict(config)
        if conflict is not None:
            return conflict
        known = self.too_large(config)
        if known is not None and self._space.micro_batch(config) >= known.micro_batch_size:
            return f"a batch of {known.micro_batch_size} does not fit with the same memory settings"
        return None if baseline is None else self._failed_alike(config, baseline)

    def _failed_alike(self, config: TrainingConfig, baseline: TrainingConfig) -> str | None:
        """A failure blames all that its configuration changes, and whatever changes that too."""
        for failed, failure in self._failed.values():
            changed = failed.changes_from(baseline)
            names = [name for name in changed if not (name in LOADER_KNOBS and _is_of_the_step(failed, failure))]
            further = failure.kind in CHANGES_FAIL_FURTHER or _is_of_workers(failure)
            if names and all(_as_far(config[name], failed[name], baseline[name], further) for name in names):
                what = "trains differently" if failure.kind == "numerics" else f"failed alike ({failure.kind})"
                return f"{what}: {failure.message}"
        return None

    def _learn_failure(self, key: tuple[str, object], config: TrainingConfig, failure: Failure) -> None:
        if failure.phase == "parity" and failure.kind != "numerics":
            return  # of the check, not of the configuration
        if failure.kind in OUT_OF_MEMORY:
            self._did_not_fit(config, failure.kind)
        elif failure.kind in CHANGES_FAIL | CHANGES_FAIL_FURTHER:
            self._failed[key] = config, failure

    def _ran(self, config: TrainingConfig) -> None:
        size = self._space.micro_batch(config)
        self._largest_that_ran = max(self._largest_that_ran, size)
        fit = self._largest_that_fit.setdefault(self._space.memory_class(config), {})
        fit[_leanness(config)] = max(fit.get(_leanness(config), 0), size)

    def _did_not_fit(self, config: TrainingConfig, kind: FailureKind | None) -> None:
        failed, size = self._too_large.setdefault(self._space.memory_class(config), {}), self._space.micro_batch(config)
        known = failed.get(_leanness(config))
        if known is None or size < known.micro_batch_size:
            failed[_leanness(config)] = TooLarge(size, kind)


def _leanness(config: TrainingConfig) -> Leanness:
    return tuple(config[name] for name in LEAN_KNOBS)


def _is_of_the_step(config: TrainingConfig, failure: Failure) -> bool:
    """Whether it comes from what the step computes, or from compiling that: how batches are loaded is not to blame."""
    hangs_in_compiler = failure.kind == "timeout" and failure.phase == "compile" and slow_to_start(config)
    computed = failure.kind in ("numerics", "compile_error") and not _is_of_workers(failure)
    return computed or hangs_in_compiler


def _is_of_workers(failure: Failure) -> bool:
    """Whether loader workers, however many, give other samples."""
    return failure.kind == "numerics" and failure.phase == "loader"


def _as_far(value: Value, failed: Value, base: Value, further: bool) -> bool:
    """Whether a value is the one that failed or, with `further`, a number that lies beyond it as seen from the baseline."""
    if further and all(type(one) is int for one in (value, failed, base)):
        return int(value) >= int(failed) if int(failed) > int(base) else int(value) <= int(failed)
    return value == failed
