"""From trials to a recommendation: pure, so that the same trials always give the same answer."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autotune.advice.bottleneck import bottleneck, explain
from autotune.advice.reasons import prices, reasons
from autotune.config import TrainingConfig, settings_text
from autotune.knobs.base import Knob
from autotune.memory_margin import leak
from autotune.quantities import format_share, format_spread
from autotune.records import (
    OUT_OF_MEMORY,
    Answer,
    Bottleneck,
    Ceiling,
    Measurement,
    Recommendation,
    Stage,
    WorkloadReference,
)
from autotune.search.answers import Results
from autotune.search.cautions import few_rounds, moved, refutation, refuted
from autotune.search.coverage import ShortOf, confirmed_beside, other_settings, tried_knobs
from autotune.stats import ratio_from_intervals


@dataclass(frozen=True)
class Evidence:
    """All that a recommendation is made of."""

    results: Results
    ceilings: tuple[Ceiling, ...]
    reference: WorkloadReference
    knobs: Sequence[Knob]
    memory_limit_bytes: int | None
    warnings: tuple[str, ...]
    skipped: tuple[str, ...]
    """What stages say of knobs that they left alone."""
    short_of: ShortOf | None
    earlier_trial_count: int
    """Trials that an earlier call of the same command ran."""
    search_seconds: float
    stage_seconds: Mapping[Stage, float]
    """Of them, what the trial processes of each stage took."""
    autotune_version: str


def recommend(evidence: Evidence) -> Recommendation:
    """The best confirmed configuration that keeps the held batch, or the baseline; and the same with the batch free."""
    results = evidence.results
    facts = results.space.facts
    baseline, best, free = results.answer(results.baseline), results.best(), results.free_batch()
    as_it_is = results.first_measurement(results.baseline)
    assert as_it_is is not None
    limit_bytes = evidence.memory_limit_bytes
    cause = None if refuted(results) else bottleneck(as_it_is, device=facts.device, limit_bytes=limit_bytes)
    settings = results.reference_settings
    failures = [trial.failure for trial in results.trials if trial.failure is not None]
    return Recommendation(
        machine=facts.machine,
        workload=facts.workload,
        reference=evidence.reference,
        settings=results.settings,
        keep=best.config == results.baseline and not settings,
        verdict=_verdict(results, best, baseline),
        baseline=_with_hours(evidence, baseline, 0.0),
        reference_settings=settings,
        best=_explained(evidence, best, baseline, cause, as_it_is),
        free_batch=_explained(evidence, free, baseline, cause, as_it_is) if free is not None else None,
        bottleneck=cause,
        ceilings=_ceilings(evidence, [one.config for one in (baseline, best, free) if one is not None]),
        trial_count=sum(trial.round is None for trial in results.trials),
        confirmation_count=sum(trial.round is not None for trial in results.trials),
        earlier_trial_count=evidence.earlier_trial_count,
        failure_counts=dict(Counter(failure.kind for failure in failures)),
        other_settings=other_settings(
            results, best.config, evidence.knobs, skipped=evidence.skipped, short_of=evidence.short_of
        ),
        rejected=_rejected(results, baseline),
        warnings=(
            *_growth(as_it_is),
            *_uncertain(results, best, free),
            *_cached(results, best.config),
            *_compiled_piecemeal(results, best.config),
            *_left_out(results, best.config),
            *_disturbed(results, best.config),
            *evidence.warnings,
        ),
        search_seconds=evidence.search_seconds,
        stage_seconds=dict(evidence.stage_seconds),
        autotune_version=evidence.autotune_version,
    )


def _explained(
    evidence: Evidence, answer: Answer, baseline: Answer, cause: Bottleneck | None, as_it_is: Measurement
) -> Answer:
    """The answer with compile time, hours, reasons and prices."""
    results = evidence.results
    seconds = _compile_seconds(results, answer.config)
    saved = answer.effective_batch_size * (1 / baseline.samples_per_second - 1 / answer.samples_per_second)
    pays = math.ceil(seconds / saved) if saved > 0 and seconds > 0 else None
    answer = _with_hours(evidence, answer, seconds)
    answer = answer.model_copy(
        update={
            "compile_seconds": seconds,
            "compile_was_cached": _was_cached(results, answer.config),
            "compile_pays_after_steps": pays,
        }
    )
    why = [
        *_needed(results, answer.config),
        *reasons(answer.config, results.baseline, results.trials, evidence.knobs),
    ]
    if cause is not None:
        movable = [knob for knob in evidence.knobs if knob.name in results.space.varied]
        changed = answer.config.changes_from(results.baseline).keys()
        why = [*explain(cause, as_it_is, movable, changed=changed, tried=tried_knobs(results)), *why]
    return answer.model_copy(
        update={
            "reasons": tuple(why),
            "prices": prices(answer, baseline, results.space.facts.workload, evidence.knobs),
        }
    )


def _needed(results: Results, config: TrainingConfig) -> tuple[str, ...]:
    """Why it has values of the reference that the user's program has not."""
    settings = results.reference_settings
    needed = {name: value for name, value in settings.items() if config[name] == value}
    if not needed:
        return ()
    fits = f"as it is, your program fits at no batch, and with {settings_text(settings)} it does"
    return (f"{settings_text(needed)}: {fits}",)


def _uncertain(results: Results, best: Answer, free: Answer | None) -> tuple[str, ...]:
    """That the figures of the answers are less sure than their intervals say."""
    more = "the same command goes on, and measures again"
    answers = {"the recommendation": best.config, **({"the second answer": free.config} if free is not None else {})}
    return (
        *few_rounds(results, answers, more),
        *moved(results, results.baseline, results.whose("your own program")),
        *refutation(results),
        *(moved(results, best.config, "the recommendation") if best.config != results.baseline else ()),
        *(
            warning
            for config in confirmed_beside(results, best.config)
            for warning in moved(results, config, settings_text(config.changes_from(results.baseline)))
        ),
    )


def _with_hours(evidence: Evidence, answer: Answer, compile_seconds: float) -> Answer:
    """The answer with the hours that the whole training takes, where the user said how long it is."""
    samples = evidence.results.settings.train_samples
    if samples is None:
        return answer
    seconds = samples / answer.samples_per_second + compile_seconds
    return answer.model_copy(update={"training_hours": seconds / 3600})


def _disturbed(results: Results, best: TrainingConfig) -> tuple[str, ...]:
    """That heat or other processes took part in what is compared here."""
    measured = [
        *_all_measurements(results, results.baseline),
        *(_all_measurements(results, best) if best != results.baseline else []),
    ]
    disturbed = [measurement for measurement in measured if measurement.gpu_notes]
    if not disturbed:
        return ()
    own = results.whose("your settings")
    whose = own if best == results.baseline else f"{own} and the recommendation"
    return (
        f"{len(disturbed)} of the {len(measured)} measurements of {whose} were disturbed, such as the last of them: "
        f"{'; '.join(disturbed[-1].gpu_notes)}",
    )


def _all_measurements(results: Results, config: TrainingConfig) -> list[Measurement]:
    return [*results.measurements(config, rounds=False), *results.measurements(config, rounds=True)]


def _compile_seconds(results: Results, config: TrainingConfig) -> float:
    """The longest first step beyond the baseline's: the later ones find what is cached."""
    own = _all_measurements(results, config)
    if not any(one.compiled_graphs for one in own):
        return 0.0
    base = min(one.first_step_seconds for one in _all_measurements(results, results.baseline))
    return max(0.0, max(one.first_step_seconds for one in own) - base)


def _cached(results: Results, config: TrainingConfig) -> tuple[str, ...]:
    """The warning where every compilation of it was found in the compiler's cache."""
    if _was_cached(results, config):
        return ("the compiler's output was in its cache: where it is not, the first step takes longer than is told",)
    return ()


def _was_cached(results: Results, config: TrainingConfig) -> bool:
    return all(one.compile_was_cached for one in _all_measurements(results, config))


def _compiled_piecemeal(results: Results, config: TrainingConfig) -> tuple[str, ...]:
    """The warning where the compiler had to leave the step, or to compile more of it once it ran."""
    found = _all_measurements(results, config)
    breaks, recompiles = max(one.graph_breaks for one in found), max(one.recompiles for one in found)
    sentences = []
    if breaks:
        sentences.append(f"the compiler left the step {breaks:,} times (graph breaks): `.item()`, printing and such")
    if recompiles:
        sentences.append(
            f"{recompiles:,} graphs were compiled after the first step: shapes vary, and new ones may be compiled again"
        )
    return tuple(sentences)


NOTABLE_LEFT_OUT = 0.01
"""A scaler tries a larger scale every 2,000 steps, and may leave out the next one or two; more is another matter."""


def _left_out(results: Results, config: TrainingConfig) -> tuple[str, ...]:
    """The warning where a gradient scaler left out optimizer steps."""
    found = _all_measurements(results, config)
    left_out, steps = sum(one.skipped_steps for one in found), sum(sum(one.blocks.steps) for one in found)
    if left_out <= NOTABLE_LEFT_OUT * steps:
        return ()
    return (f"the gradient scaler left out {left_out:,} of {steps:,} optimizer steps: their gradients were not finite",)


def _ceilings(evidence: Evidence, configs: Sequence[TrainingConfig]) -> tuple[Ceiling, ...]:
    """Those that probes found, and for the other classes that are told of, what their trials ran."""
    space, trials = evidence.results.space, evidence.results.trials
    found = {tuple(ceiling.memory_class.items()): ceiling for ceiling in evidence.ceilings}
    for config in configs:
        memory_class = space.memory_class(config)
        if memory_class in found:
            continue
        alike = [trial for trial in trials if space.memory_class(trial.config) == memory_class]
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


def _verdict(results: Results, best: Answer, baseline: Answer) -> str:
    saves_memory = results.settings.objective == "memory"
    reference = settings_text(baseline.config.changes_from(results.space.baseline))
    if results.reference_settings and best.config == results.baseline:
        return f"Use {reference}: your program fits at no batch as it is, and nothing that was measured beats this."
    if best.config == results.baseline:
        if all(trial.config == results.baseline or trial.measurement is None for trial in results.trials):
            if not results.space.varied:
                return "Keep your settings: no knob that may be moved has another value here."
            return "Keep your settings for now: no other settings were measured to the end."
        likely = None if saves_memory else results.likely()
        if likely is not None:
            low, high = results.deciding_interval(likely.config)
            looks = f"{_changes_text(likely.config, baseline)} looks {likely.speedup.value:.2f} times as fast"
            return (
                f"Keep your settings for now: {looks}, which is not certain yet (99 % interval {low:.2f} to {high:,.2f}); "
                "the same command measures again."
            )
        aim = "needs at least 2 % less memory" if saves_memory else "is at least 2 % faster"
        return f"Keep your settings: nothing that was measured {aim} for certain."
    own = results.space.baseline if results.reference_settings else baseline.config
    changes = settings_text(best.config.changes_from(own))
    low, high = best.speedup.interval
    faster = f"{best.speedup.value:.2f} times the speed (95 % interval {low:.2f} to {high:.2f})"
    if saves_memory:
        share = best.peak_allocated_bytes / max(1, baseline.peak_allocated_bytes)
        faster = f"{format_share(share)} of the peak memory, at {faster}"
    if results.reference_settings:
        faster = f"{faster} of {reference}, for your program fits at no batch as it is"
    if best.confirmed_rounds == 0:
        return f"So far, and not confirmed: {changes}: {faster}."
    once = "; measured again once" if best.confirmed_rounds == 1 else ""
    return f"Use {changes}: {faster}{once}."


def _growth(measurement: Measurement) -> tuple[str, ...]:
    """The warning for a program that holds more memory with every step."""
    found = leak(measurement.memory.growth_bytes_per_step)
    return (f"your program's {found}, and no ceiling holds for long",) if found else ()


def _rejected(results: Results, baseline: Answer) -> tuple[str, ...]:
    """What ran and trains differently, or failed later."""
    sentences = []
    for trial in results.trials:
        if trial.failure is None or trial.measurement is None or trial.round is not None:
            continue
        changes = _changes_text(trial.config, baseline)
        measured = trial.measurement
        times, interval = ratio_from_intervals(
            measured.samples_per_second, measured.interval, baseline.samples_per_second, baseline.interval
        )
        text = f"{times:.2f} times the speed ({format_spread(times, interval)})"
        wrong = "and wrong" if trial.failure.kind == "numerics" else "and not usable"
        sentences.append(f"{changes or results.whose('your settings')}: {text}, {wrong}: {trial.failure.message}")
    return tuple(dict.fromkeys(sentences))


def _changes_text(config: TrainingConfig, baseline: Answer) -> str:
    return settings_text(config.changes_from(baseline.config))
