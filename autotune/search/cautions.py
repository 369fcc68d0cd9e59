"""What should make a person doubt the figures beyond their intervals. Pure, from what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autotune.config import TrainingConfig
from autotune.quantities import format_rate, format_share
from autotune.records import Measurement
from autotune.search.answers import PROCESS_SPREAD, Results

FEW_ROUNDS = 1
"""So many do not show how far processes differ: their interval comes from what is expected of a quiet machine."""
NOTABLE_MOVE = 1 + 4 * PROCESS_SPREAD
"""Two measurements of the same settings that are further apart than this, and than both their intervals, want a reason."""
REFUTED = 1.5
"""A first measurement that its confirmation differs from by so much was one of something else."""


def few_rounds(results: Results, named: Mapping[str, TrainingConfig], more: str) -> tuple[str, ...]:
    """The warning where configurations were measured beside the baseline once at most. `more` says how to know better."""
    counts = {whose: len(results.round_pairs(config)) for whose, config in named.items() if config != results.baseline}
    few = {whose: rounds for whose, rounds in counts.items() if rounds <= FEW_ROUNDS}
    if not few:
        return ()
    subject = f"{' and '.join(few)} {'were' if len(few) > 1 else 'was'}"
    seen = (
        f"measured again beside {results.whose('your settings')} only once"
        if any(few.values())
        else "not measured again"
    )
    return (
        f"{subject} {seen}: how much processes differ on this machine was not seen, so the interval is that of a quiet "
        f"machine, and other work on it makes it wrong; {more}",
    )


def moved(results: Results, config: TrainingConfig, whose: str) -> tuple[str, ...]:
    """The warning where measurements of one configuration are further apart than their intervals let expect."""
    found = [one for rounds in (False, True) for one in results.measurements(config, rounds=rounds)]
    ends = _ends([one for one in found if not one.stopped_early])
    if ends is None:
        return ()
    slow, fast = ends
    more = format_share(fast.samples_per_second / slow.samples_per_second - 1)
    return (
        f"{whose} ran at {format_rate(slow.samples_per_second)} samples/s in one measurement and at "
        f"{format_rate(fast.samples_per_second)} in another, {more} more, which is further apart than either spreads: other "
        "work on this machine? What differs by less than that is not certain",
    )


def refuted(results: Results) -> bool:
    """Whether the user's own program ran at quite another speed when it was measured again: what the search saw of it first
    explains nothing then."""
    first = results.first_measurement(results.baseline)
    if first is None or not results.measurements(results.baseline, rounds=True):
        return False
    change = results.answer(results.baseline).samples_per_second / first.samples_per_second
    return max(change, 1 / change) > REFUTED


def refutation(results: Results) -> tuple[str, ...]:
    """The warning for that."""
    if not refuted(results):
        return ()
    return (
        "the search compared with a measurement of your program that did not hold when it was repeated, so what is told of "
        "other settings may be wrong: search again with --fresh (fresh=True) on an idle machine",
    )


def _ends(measurements: Sequence[Measurement]) -> tuple[Measurement, Measurement] | None:
    """The slowest and the fastest, where nothing but a change of the machine explains both."""
    if len(measurements) < 2:
        return None
    slow = min(measurements, key=lambda one: one.samples_per_second)
    fast = max(measurements, key=lambda one: one.samples_per_second)
    apart = slow.interval[1] < fast.interval[0]
    return (slow, fast) if apart and fast.samples_per_second > NOTABLE_MOVE * slow.samples_per_second else None
