"""Why a configuration is recommended, and what it costs, each as sentences with the trials that show it."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.config import TrainingConfig, value_text
from autotune.knobs.base import Knob
from autotune.quantities import format_bytes, format_duration, format_error, format_ratio, format_share, format_spread
from autotune.records import Answer, Trial, WorkloadFacts
from autotune.stats import ratio_from_intervals

NOTICEABLE_MEMORY = 1.05
"""A peak that is higher by less than this is not worth a sentence."""

NOTICEABLE_COMPILE_SECONDS = 1.0


def reasons(
    config: TrainingConfig, baseline: TrainingConfig, trials: Sequence[Trial], knobs: Sequence[Knob]
) -> tuple[str, ...]:
    """A sentence for each knob that differs from the baseline: what it does, and what trials showed of it.

    Evidence is a trial that changes this knob alone from the baseline, or one that is the recommended configuration
    with this knob back at the baseline; of a knob of the update also what the update takes, which it is judged by. A knob
    that was only tried together with others says so. The only change has the figure of the recommendation itself, from all
    rounds: that of two trials would contradict it.
    """
    by_name = {knob.name: knob for knob in knobs}
    changes = config.changes_from(baseline)
    return tuple(
        f"{name}={value_text(value)} ({by_name[name].summary}): {_evidence(by_name[name], config, baseline, trials)}"
        for name, value in changes.items()
    )


def _evidence(knob: Knob, config: TrainingConfig, baseline: TrainingConfig, trials: Sequence[Trial]) -> str:
    name = knob.name
    without = config.replace({name: baseline[name]})
    if without == baseline:
        return "the only change"
    alone = _closest(trials, baseline.replace({name: config[name]}), baseline)
    beside = _closest(trials, config, without)
    seen: list[str] = []
    if alone is not None:
        seen.append(f"{_ratio(*alone)} the speed alone (trial {alone[0].number})")
    if beside is not None:
        seen.append(f"{_ratio(*beside)} beside the other changes (trial {beside[1].number} is without it)")
    if knob.in_update_only and (update := _update_evidence(name, config, baseline, trials)):
        seen.append(update)
    return " and ".join(seen) or "tried only together with other changes"


def _update_evidence(name: str, config: TrainingConfig, baseline: TrainingConfig, trials: Sequence[Trial]) -> str:
    """What the optimizer's update took in the first two trials that differ in this alone; empty where there are none."""
    seen = [
        (trial, trial.measurement.update_share)
        for trial in trials
        if trial.measurement is not None and trial.measurement.update_share is not None
    ]
    for trial, share in seen:
        if trial.config[name] != config[name]:
            continue
        without = trial.config.replace({name: baseline[name]})
        for other, its_share in seen:
            if other.config == without:
                return (
                    f"the update takes {format_share(share)} of a step instead of {format_share(its_share)} "
                    f"(trials {trial.number} and {other.number})"
                )
    return ""


def _closest(trials: Sequence[Trial], config: TrainingConfig, other: TrainingConfig) -> tuple[Trial, Trial] | None:
    """A measurement of each, of those that ran next to each other the latest: a machine is not the same an hour later."""
    own, others = ([t for t in trials if t.config == one and t.measurement is not None] for one in (config, other))
    pairs = [(one, another) for one in own for another in others]
    return min(pairs, key=lambda pair: (abs(pair[0].number - pair[1].number), -pair[0].number), default=None)


def _ratio(faster: Trial, slower: Trial) -> str:
    assert faster.measurement is not None and slower.measurement is not None
    a, b = faster.measurement, slower.measurement
    value, interval = ratio_from_intervals(a.samples_per_second, a.interval, b.samples_per_second, b.interval)
    return f"{format_ratio(value)} ({format_spread(value, interval)})"


def prices(answer: Answer, baseline: Answer, workload: WorkloadFacts, knobs: Sequence[Knob]) -> tuple[str, ...]:
    """What a person gives for the speed, one sentence each; none where it is free."""
    changes = answer.config.changes_from(baseline.config)
    changed = [knob for knob in knobs if knob.name in changes]
    return (
        *_batch_prices(answer, baseline, workload),
        *(
            f"{knob.name}={value_text(changes[knob.name])} changes what is trained: {knob.summary}"
            for knob in changed
            if knob.effect == "training" and knob.stage != "batch"  # the batch has its own sentences above
        ),
        *_rounding_price(answer, [knob.name for knob in changed if knob.effect == "rounding"]),
        *_compile_price(answer),
        *_memory_price(answer, baseline),
    )


def _batch_prices(answer: Answer, baseline: Answer, workload: WorkloadFacts) -> tuple[str, ...]:
    sentences: list[str] = []
    if answer.effective_batch_size != baseline.effective_batch_size:
        sentences.append(
            f"an optimizer step takes {answer.effective_batch_size:,} samples instead of "
            f"{baseline.effective_batch_size:,}: that is another training, whose learning rate and schedule have to be "
            "chosen anew"
        )
    if workload.has_batch_norm and answer.micro_batch_size != baseline.micro_batch_size:
        sentences.append(
            f"BatchNorm sees {answer.micro_batch_size:,} samples at a time instead of {baseline.micro_batch_size:,}"
        )
    elif workload.has_tracking_instance_norm and answer.micro_batch_size != baseline.micro_batch_size:
        sentences.append(
            f"InstanceNorm's running statistics are moved by {answer.micro_batch_size:,} samples at a time instead of "
            f"{baseline.micro_batch_size:,}"
        )
    return tuple(sentences)


def _rounding_price(answer: Answer, names: list[str]) -> tuple[str, ...]:
    if not names:
        return ()
    subject = f"{' and '.join(names)} {'round' if len(names) > 1 else 'rounds'} differently"
    if answer.parity is None:
        return (f"{subject}, and how much was not checked",)
    error, floor = format_error(answer.parity.relative_error), format_error(answer.parity.floor)
    return (f"{subject}: the gradient is {error} off your step in fp32, where rounding alone gives {floor}",)


def _compile_price(answer: Answer) -> tuple[str, ...]:
    if answer.compile_seconds < NOTICEABLE_COMPILE_SECONDS:
        return ()
    at_least = "at least " if answer.compile_was_cached else ""
    cold = f"the first step takes {at_least}{format_duration(answer.compile_seconds)} longer where nothing is cached"
    if answer.compile_pays_after_steps is None:
        return (f"{cold}, which no number of steps pays back",)
    return (f"{cold}, paid back after {answer.compile_pays_after_steps:,} steps",)


def _memory_price(answer: Answer, baseline: Answer) -> tuple[str, ...]:
    if answer.peak_allocated_bytes <= NOTICEABLE_MEMORY * baseline.peak_allocated_bytes:
        return ()
    return (
        f"the peak memory is {format_bytes(answer.peak_allocated_bytes)} instead of "
        f"{format_bytes(baseline.peak_allocated_bytes)}",
    )
