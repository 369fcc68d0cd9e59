"""What a search tried beside the settings that it recommends, and what it did not try and why. Pure, from its trials."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from autotune.advice.bottleneck import bottleneck_of_step
from autotune.config import TrainingConfig, Value, settings_text
from autotune.knobs.base import Knob
from autotune.memory_margin import limit_bytes
from autotune.quantities import NO_UPPER_END, format_ratio, format_share
from autotune.records import OUT_OF_MEMORY, Bottleneck, Measurement, Trial
from autotune.search.answers import WORTHWHILE_GAIN, Results, gain_of_update

ShortOf = Literal["time", "trials"]
"""What kept a search from trying more: the budget's seconds, or the number of trials that was asked for."""
VALUES_SHOWN = 3
"""Of each knob, those that came closest."""


def tried_knobs(results: Results) -> frozenset[str]:
    """Names of the knobs of which another value than the baseline's was run, whatever became of it."""
    return frozenset(name for trial in results.trials for name in trial.config.changes_from(results.baseline))


def other_settings(
    results: Results, chosen: TrainingConfig, knobs: Sequence[Knob], *, skipped: Sequence[str], short_of: ShortOf | None
) -> tuple[str, ...]:
    """Sentences: what was tried and is not part of the answer, with what it gave; then what was not tried, and why.

    `skipped` holds what the stages say of knobs that they left alone, each sentence with the names before its colon.
    """
    searched = [knob for knob in knobs if knob.name in results.space.varied]
    left_out = [text for knob in searched for text in _left_out(results, chosen, knob)]
    tried = (
        *_not_taken(results, chosen),
        *((f"tried, and left out, against what is used instead: {', '.join(left_out)}",) if left_out else ()),
    )
    if results.settings.strategy == "exhaustive":
        return (*tried, *skipped)
    told = {name for sentence in skipped for name in knobs_told_of(sentence)}
    return (*tried, *skipped, *_untried(results, chosen, [k for k in searched if k.name not in told], short_of))


def knobs_told_of(sentence: str) -> frozenset[str]:
    """The names before the colon of what a stage says of knobs that it left alone."""
    return frozenset(name.strip() for name in sentence.partition(":")[0].split(","))


# --- what was tried ---------------------------------------------------------------------------------------------------


def _not_taken(results: Results, chosen: TrainingConfig) -> Iterator[str]:
    """Of each configuration that took part in the confirmation beside the answer, how it did there."""
    for config in confirmed_beside(results, chosen):
        value, (low, high) = results.answer(config).speedup.value, results.deciding_interval(config)
        ends = "spread not seen" if high >= NO_UPPER_END else f"{format_ratio(low)} to {format_ratio(high)}"
        shown = settings_text(config.changes_from(results.baseline))
        once = " from one round" if len(results.round_pairs(config)) == 1 else ""
        yield (
            f"measured again beside {results.whose('your settings')}, and not taken: {shown}: {format_ratio(value)} the "
            f"speed (99 % interval{once}, which decides: {ends})"
        )


def confirmed_beside(results: Results, chosen: TrainingConfig) -> list[TrainingConfig]:
    """What took part in the confirmation beside the answer and the baseline, and ran to its end."""
    failed = {trial.config for trial in results.trials if trial.failure is not None}
    took_part = dict.fromkeys(t.config for t in results.trials if t.round is not None and t.config not in failed)
    return [one for one in took_part if one not in (chosen, results.baseline) and results.keeps_the_batch(one)]


def _left_out(results: Results, chosen: TrainingConfig, knob: Knob) -> Iterator[str]:
    """The knob's values that ran and were not taken, those that came closest first, such as `precision=bf16 (0.99x)`.

    Not of what took part in the confirmation, which is told with the figure from there: another one would be one too many.
    """
    confirmed = confirmed_beside(results, chosen)
    single = [t for t in results.trials if t.round is None and t.config not in confirmed]
    kept = [t for t in single if _keeps_the_batch(results, t.config)]
    values = dict.fromkeys(trial.config[knob.name] for trial in kept)
    own = (chosen[knob.name], results.baseline[knob.name])
    seen = [(_gain(results, single, chosen, knob, value), value) for value in values if value not in own]
    seen = [one for one in seen if results.baseline.replace({knob.name: one[1]}) not in confirmed]
    seen.sort(key=lambda one: -1.0 if one[0] is None else one[0], reverse=True)
    for gain, value in seen[:VALUES_SHOWN]:
        yield f"{settings_text({knob.name: value})} ({_outcome(results, knob, value, gain)})"
    if len(seen) > VALUES_SHOWN:
        yield f"{len(seen) - VALUES_SHOWN} more of {knob.name}"


def _keeps_the_batch(results: Results, config: TrainingConfig) -> bool:
    """Where it does not, it is a matter of the second answer. What conflicts has no batch at all, and did not run."""
    return results.space.conflict(config) is None and results.keeps_the_batch(config)


def _gain(results: Results, trials: Sequence[Trial], chosen: TrainingConfig, knob: Knob, value: Value) -> float | None:
    """How many times better these trials were with this value than with the one that was taken, all else alike, at best;
    None where that was not seen."""
    gains = []
    for trial in trials:
        if trial.config[knob.name] != value or trial.measurement is None:
            continue
        other = results.first_measurement(trial.config.replace({knob.name: chosen[knob.name]}))
        if other is not None:
            gains.append(_times_better(results, knob, trial.measurement, other))
    return max(gains, default=None)


def _times_better(results: Results, knob: Knob, one: Measurement, other: Measurement) -> float:
    if results.settings.objective == "memory":
        return other.memory.peak_allocated_bytes / max(1, one.memory.peak_allocated_bytes)
    gain = gain_of_update(one, other) if knob.in_update_only else None
    if gain is not None and gain < WORTHWHILE_GAIN:
        return gain  # by which it was left out; the rates may say something else
    return one.samples_per_second / other.samples_per_second


def _outcome(results: Results, knob: Knob, value: Value, gain: float | None) -> str:
    failures = [t.failure for t in results.trials if t.config[knob.name] == value]
    if all(failure is not None for failure in failures):
        return next(failure.kind for failure in failures if failure is not None)
    if gain is None:
        return "with other changes only"
    return f"{format_share(1 / gain)} of the memory" if results.settings.objective == "memory" else format_ratio(gain)


# --- what was not -----------------------------------------------------------------------------------------------------


def _untried(
    results: Results, chosen: TrainingConfig, knobs: Sequence[Knob], short_of: ShortOf | None
) -> Iterator[str]:
    """One sentence for each reason that there is."""
    tried = tried_knobs(results)
    savers, hopeless, missed = [], [], []
    for_speed = results.settings.objective != "memory"
    for knob in knobs:
        usable = [value for value in _usable(results, chosen, knob) if not _ran(results.trials, knob, value)]
        if knob.name in tried:
            missed += [settings_text({knob.name: value}) for value in _better(results, chosen, knob, usable)]
        elif knob.only_saves_memory and for_speed and not _memory_lacked(results):
            savers.append(knob.name)
        elif usable and for_speed and not _is_count(usable[0]) and not _better(results, chosen, knob, usable):
            hopeless.append(knob.name)
        elif usable:
            missed.append(knob.name)
    if savers:
        yield f"not tried, since all that it saves is memory, which nothing lacked: {', '.join(savers)}"
    if hopeless:
        yield f"not tried, since nothing faster than yours is expected of it here: {', '.join(hopeless)}"
    if missed:
        yield _missed_text(missed, "interrupt" if results.unconfirmed else short_of)


def _usable(results: Results, chosen: TrainingConfig, knob: Knob) -> list[Value]:
    """The knob's other values that do not conflict with the answer, and without which the program fits."""
    needed = {results.space.baseline[knob.name]} if knob.name in results.reference_settings else set()
    return [
        value
        for value in results.space.choices[knob.name]
        if value not in {chosen[knob.name], *needed}
        and results.space.conflict(chosen.replace({knob.name: value})) is None
    ]


def _better(results: Results, chosen: TrainingConfig, knob: Knob, values: Sequence[Value]) -> list[Value]:
    """Those that the knob expects to beat what the answer has; of numbers, which are many, none are named."""
    at_first, now = (_cause(results, config) for config in (results.baseline, chosen))
    hopeful = knob.expected_to_beat(chosen[knob.name], results.space.facts, at_first=at_first, now=now)
    return [value for value in values if value in hopeful and not _is_count(value)]


def _cause(results: Results, config: TrainingConfig) -> Bottleneck | None:
    """What held the step of a configuration back when it was first measured."""
    found = results.first_measurement(config)
    if found is None:
        return None
    facts = results.space.facts
    limit = limit_bytes(results.settings.conditions, facts.machine)
    return bottleneck_of_step(found, device=facts.device, limit_bytes=limit)


def _is_count(value: Value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _ran(trials: Sequence[Trial], knob: Knob, value: Value) -> bool:
    return any(trial.config[knob.name] == value for trial in trials)


def _memory_lacked(results: Results) -> bool:
    ran_out = any(trial.failure is not None and trial.failure.kind in OUT_OF_MEMORY for trial in results.trials)
    return ran_out or bool(results.reference_settings)


def _missed_text(missed: Sequence[str], reason: ShortOf | Literal["interrupt"] | None) -> str:
    names = ", ".join(missed)
    goes_on = "the same command goes on with what is left"
    match reason:
        case "time":
            return f"not tried, for lack of time: {names}; {goes_on}"
        case "trials":
            return f"not tried, since no more trials were asked for: {names}; {goes_on} where --trials allows more"
        case "interrupt":
            return f"not tried before the interruption: {names}; {goes_on}"
        case None:
            return f"not tried: {names}; before it came to that, the search ended, since nothing new was better"
