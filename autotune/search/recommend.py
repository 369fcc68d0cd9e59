"""From trials to a recommendation: pure, so that the same trials always give the same answer."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.advice.bottleneck import bottleneck, explain
from autotune.advice.reasons import prices, reasons
from autotune.config import TrainingConfig
from autotune.knobs.base import Knob
from autotune.records import (
    OUT_OF_MEMORY,
    Answer,
    Ceiling,
    Failure,
    Measurement,
    ParityResult,
    Ratio,
    Recommendation,
    SearchFacts,
    Settings,
    Trial,
    WorkloadReference,
)
from autotune.search.session import WORTHWHILE_GAIN
from autotune.space import SearchSpace
from autotune.stats import rate, ratio, ratio_from_intervals


@dataclass(frozen=True)
class Evidence:
    """All that a recommendation is made of."""

    trials: Sequence[Trial]
    baseline: TrainingConfig
    parity_results: dict[str, ParityResult | Failure]
    """Numerics key to the outcome of the check."""
    ceilings: tuple[Ceiling, ...]
    space: SearchSpace
    facts: SearchFacts
    settings: Settings
    reference: WorkloadReference
    knobs: Sequence[Knob]
    memory_limit_bytes: int | None
    warnings: tuple[str, ...]
    skipped: tuple[str, ...]
    search_seconds: float
    autotune_version: str
    unconfirmed: bool = False
    """The search was interrupted: what was measured once counts, and says that it was not confirmed."""


def recommend(evidence: Evidence) -> Recommendation:
    """The best confirmed configuration that keeps the held batch, or the baseline; and the same with the batch free."""
    answers = _Answers(evidence)
    baseline = answers.answer(evidence.baseline)
    held = evidence.settings.conditions.global_batch_size
    confirmed = answers.confirmed()
    keeping = [one for one in confirmed if held is None or one.effective_batch_size == held]
    best = answers.choose(keeping, baseline)
    freer = answers.choose(confirmed, baseline) if held is not None else baseline
    gains_more = _gain(evidence, freer, baseline) >= WORTHWHILE_GAIN * _gain(evidence, best, baseline)
    free = freer if freer.effective_batch_size != best.effective_batch_size and gains_more else None
    cause_measurement = answers.first_measurement(evidence.baseline)
    cause = (
        bottleneck(cause_measurement, device=evidence.facts.device, limit_bytes=evidence.memory_limit_bytes)
        if cause_measurement is not None
        else None
    )
    keep = best.config == evidence.baseline
    return Recommendation(
        machine=evidence.facts.machine,
        workload=evidence.facts.workload,
        reference=evidence.reference,
        settings=evidence.settings,
        keep=keep,
        verdict=_verdict(evidence, best, baseline, keep),
        baseline=answers.with_hours(baseline, 0.0),
        best=answers.explained(best, baseline, cause, cause_measurement),
        free_batch=answers.explained(free, baseline, cause, cause_measurement) if free is not None else None,
        bottleneck=cause,
        ceilings=_ceilings(evidence, [evidence.baseline, best.config, freer.config]),
        trial_count=sum(trial.round is None for trial in evidence.trials),
        failure_counts=dict(Counter(trial.failure.kind for trial in evidence.trials if trial.failure is not None)),
        rejected=_rejected(evidence, baseline),
        warnings=(*_growth(cause_measurement), *answers.cached(best.config), *evidence.warnings),
        search_seconds=evidence.search_seconds,
        autotune_version=evidence.autotune_version,
    )


def _gain(evidence: Evidence, answer: Answer, baseline: Answer) -> float:
    """How many times better than the baseline, by the objective."""
    if evidence.settings.objective == "memory":
        return baseline.peak_allocated_bytes / max(1, answer.peak_allocated_bytes)
    return answer.speedup.value


class _Answers:
    """Answers from the trials of each configuration."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence

    def trials_of(self, config: TrainingConfig, *, rounds: bool) -> list[Trial]:
        return [
            trial
            for trial in self.evidence.trials
            if trial.config == config and trial.measurement is not None and (trial.round is not None) == rounds
        ]

    def first_measurement(self, config: TrainingConfig) -> Measurement | None:
        first = self.trials_of(config, rounds=False)
        return first[-1].measurement if first else None

    def confirmed(self) -> list[Answer]:
        """Configurations that were re-measured beside the baseline and have no failure of any kind."""
        failed = {trial.config.key for trial in self.evidence.trials if trial.failure is not None}
        configs = {
            trial.config.key: trial.config
            for trial in self.evidence.trials
            if (trial.round is not None or (self.evidence.unconfirmed and self._checked(trial)))
            and trial.config.key not in failed
            and trial.config != self.evidence.baseline
        }
        return [self.answer(config) for config in configs.values()]

    def _checked(self, trial: Trial) -> bool:
        """Whether the trial computes what the baseline does, or passed the check."""
        space = self.evidence.space
        key = space.numerics_key(trial.config)
        found = self.evidence.parity_results.get(key)
        return key == space.numerics_key(self.evidence.baseline) or (isinstance(found, ParityResult) and found.passed)

    def choose(self, answers: list[Answer], baseline: Answer) -> Answer:
        """The best that is certainly worthwhile; ties go to the simpler configuration and the smaller batch."""
        evidence = self.evidence
        worthwhile = [one for one in answers if self._certainly_better(one, baseline)]
        if not worthwhile:
            return baseline
        top = max(_gain(evidence, one, baseline) for one in worthwhile)
        near = [one for one in worthwhile if _gain(evidence, one, baseline) * WORTHWHILE_GAIN >= top]
        return min(near, key=lambda one: (one.effective_batch_size, evidence.space.rank(one.config)))

    def _certainly_better(self, answer: Answer, baseline: Answer) -> bool:
        if _gain(self.evidence, answer, baseline) < WORTHWHILE_GAIN:
            return False
        return self.evidence.settings.objective == "memory" or answer.speedup.interval[0] > 1

    def answer(self, config: TrainingConfig) -> Answer:
        """One configuration with its evidence; reasons and prices are added to those that are shown."""
        evidence = self.evidence
        confirmations = self.trials_of(config, rounds=True)
        every = confirmations + self.trials_of(config, rounds=False)
        measurements = [trial.measurement for trial in every if trial.measurement is not None]
        counted = [trial.measurement for trial in confirmations if trial.measurement is not None] or measurements
        value, interval = _joint_rate(counted)
        weights = [one.weight_per_second for one in counted if one.weight_per_second is not None]
        reserved = [one.memory.reserved_bytes for one in measurements if one.memory.reserved_bytes is not None]
        parity = self.evidence.parity_results.get(evidence.space.numerics_key(config))
        return Answer(
            config=config,
            effective_batch_size=evidence.space.effective_batch(config),
            micro_batch_size=evidence.space.micro_batch(config),
            micro_batches_per_step=evidence.space.micro_batches(config),
            samples_per_second=value,
            interval=interval,
            weight_per_second=sum(weights) / len(weights) if weights else None,
            speedup=self._speedup(config),
            computes_the_same=evidence.space.numerics_key(config) == evidence.space.numerics_key(evidence.baseline),
            confirmed_rounds=len(confirmations),
            peak_allocated_bytes=max(one.memory.peak_allocated_bytes for one in measurements),
            reserved_bytes=max(reserved, default=None),
            compile_seconds=0.0,
            compile_pays_after_steps=None,
            parity=parity if isinstance(parity, ParityResult) else None,
        )

    def _speedup(self, config: TrainingConfig) -> Ratio:
        if config == self.evidence.baseline:
            return Ratio(value=1.0, interval=(1.0, 1.0))
        own = {trial.round: trial.measurement for trial in self.trials_of(config, rounds=True)}
        base = {trial.round: trial.measurement for trial in self.trials_of(self.evidence.baseline, rounds=True)}
        pairs = [(own[n], base[n]) for n in own if base.get(n) is not None]
        rates = [(a.samples_per_second, b.samples_per_second) for a, b in pairs if a is not None and b is not None]
        if len(rates) >= 2:
            value, interval = ratio([a for a, _ in rates], [b for _, b in rates])
            return Ratio(value=value, interval=interval)
        first, reference = (
            pairs[0] if pairs else (self.first_measurement(config), self.first_measurement(self.evidence.baseline))
        )
        assert first is not None and reference is not None
        value, interval = ratio_from_intervals(
            first.samples_per_second, first.interval, reference.samples_per_second, reference.interval
        )
        return Ratio(value=value, interval=interval)

    def explained(
        self, answer: Answer, baseline: Answer, cause: str | None, cause_measurement: Measurement | None
    ) -> Answer:
        """The answer with compile time, hours, reasons and prices."""
        evidence = self.evidence
        seconds = self._compile_seconds(answer.config)
        saved = answer.effective_batch_size * (1 / baseline.samples_per_second - 1 / answer.samples_per_second)
        pays = math.ceil(seconds / saved) if saved > 0 and seconds > 0 else None
        answer = self.with_hours(answer, seconds)
        answer = answer.model_copy(update={"compile_seconds": seconds, "compile_pays_after_steps": pays})
        why = list(reasons(answer.config, evidence.baseline, evidence.trials, evidence.knobs))
        if cause is not None and cause_measurement is not None:
            movable = [knob for knob in evidence.knobs if knob.name in evidence.space.varied]
            why = [*explain(cause, cause_measurement, movable), *why]  # type: ignore[arg-type]  # a Bottleneck
        return answer.model_copy(
            update={
                "reasons": (*why, *evidence.skipped),
                "prices": prices(answer, baseline, evidence.facts.workload, evidence.knobs),
            }
        )

    def cached(self, config: TrainingConfig) -> tuple[str, ...]:
        """The warning where every compilation of it was found in the compiler's cache."""
        own = [t.measurement for t in self.trials_of(config, rounds=False) + self.trials_of(config, rounds=True)]
        if all(one is not None and one.compile_was_cached for one in own):
            return (
                "the compiler's output was in its cache: where it is not, the first step takes longer than is told",
            )
        return ()

    def with_hours(self, answer: Answer, compile_seconds: float) -> Answer:
        """The answer with the hours that the whole training takes, where the user said how long it is."""
        samples = self.evidence.settings.train_samples
        if samples is None:
            return answer
        seconds = samples / answer.samples_per_second + compile_seconds
        return answer.model_copy(update={"training_hours": seconds / 3600})

    def _compile_seconds(self, config: TrainingConfig) -> float:
        """The longest first step beyond the baseline's: the later ones find what is cached."""
        own = [t.measurement for t in self.trials_of(config, rounds=False) + self.trials_of(config, rounds=True)]
        base = [
            t.measurement
            for t in self.trials_of(self.evidence.baseline, rounds=False)
            + self.trials_of(self.evidence.baseline, rounds=True)
        ]
        if not any(one is not None and one.compiled_graphs for one in own):
            return 0.0
        longest = max(one.first_step_seconds for one in own if one is not None)
        return max(0.0, longest - min(one.first_step_seconds for one in base if one is not None))


def _joint_rate(measurements: Sequence[Measurement]) -> tuple[float, tuple[float, float]]:
    """Over several processes each is one block; within one, its own interval."""
    if len(measurements) == 1:
        return measurements[0].samples_per_second, measurements[0].interval
    return rate([sum(one.blocks.samples) for one in measurements], [sum(one.blocks.seconds) for one in measurements])


def _ceilings(evidence: Evidence, configs: Sequence[TrainingConfig]) -> tuple[Ceiling, ...]:
    """Those that probes found, and for the other classes that are told of, what their trials ran."""
    space = evidence.space
    found = {tuple(ceiling.memory_class.items()): ceiling for ceiling in evidence.ceilings}
    for config in configs:
        memory_class = space.memory_class(config)
        if memory_class in found:
            continue
        alike = [trial for trial in evidence.trials if space.memory_class(trial.config) == memory_class]
        ran = {
            space.micro_batch(t.config): t.measurement for t in alike if t.failure is None and t.measurement is not None
        }
        failed = [t for t in alike if t.failure is not None and t.failure.kind in OUT_OF_MEMORY]
        smallest = min(failed, key=lambda trial: space.micro_batch(trial.config), default=None)
        largest = max(ran, default=None)
        measurement = ran[largest] if largest is not None else None
        found[memory_class] = Ceiling(
            memory_class=dict(memory_class),
            largest_batch_size=largest,
            smallest_failed_batch_size=space.micro_batch(smallest.config) if smallest is not None else None,
            failure_kind=smallest.failure.kind if smallest is not None and smallest.failure is not None else None,
            peak_allocated_bytes=measurement.memory.peak_allocated_bytes if measurement is not None else None,
            bytes_per_sample=None,
            probes=0,
            out_of_memory_count=len(failed),
            stopped_because="the search tried no larger one; `autotune memory` finds the end",
        )
    return tuple(found.values())


def _verdict(evidence: Evidence, best: Answer, baseline: Answer, keep: bool) -> str:
    if keep:
        aim = "needs at least 2 % less memory" if evidence.settings.objective == "memory" else "is at least 2 % faster"
        return f"Keep your settings: nothing that was measured {aim} for certain."
    changes = ", ".join(f"{name}={_shown(value)}" for name, value in best.config.changes_from(baseline.config).items())
    low, high = best.speedup.interval
    faster = f"{best.speedup.value:.2f} times the speed (95 % interval {low:.2f} to {high:.2f})"
    if evidence.settings.objective == "memory":
        share = best.peak_allocated_bytes / max(1, baseline.peak_allocated_bytes)
        return f"Use {changes}: {share:.0%} of the peak memory, at {faster}.".replace("%", " %", 1)
    return f"Use {changes}: {faster}."


LEAK_BYTES_PER_STEP = 16 * 2**10
"""Growth below this is the allocator's or the interpreter's own."""


def _growth(measurement: Measurement | None) -> tuple[str, ...]:
    """The warning for a program that holds more memory with every step."""
    growth = measurement.memory.growth_bytes_per_step if measurement is not None else 0.0
    if growth < LEAK_BYTES_PER_STEP:
        return ()
    return (
        f"your program's memory grows by {growth / 2**20:.2f} MiB with every step: something keeps tensors of past steps "
        "(a leak), and no ceiling holds for long",
    )


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _rejected(evidence: Evidence, baseline: Answer) -> tuple[str, ...]:
    """What ran faster than the baseline and trains differently, or failed later."""
    sentences = []
    for trial in evidence.trials:
        if trial.failure is None or trial.measurement is None or trial.round is not None:
            continue
        changes = ", ".join(
            f"{name}={_shown(value)}" for name, value in trial.config.changes_from(baseline.config).items()
        )
        times = trial.measurement.samples_per_second / baseline.samples_per_second
        wrong = "and wrong" if trial.failure.kind == "numerics" else "and not usable"
        sentences.append(f"{changes or 'your settings'}: {times:.2f} times the speed, {wrong}: {trial.failure.message}")
    return tuple(dict.fromkeys(sentences))
