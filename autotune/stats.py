"""Rates, intervals and "is A faster than B": numbers in, numbers out.

Everything is judged on logarithms of rates, where a spread of 3 % means the same for a slow and for a fast
configuration, and every interval stays positive and finite, since a result is written as JSON, which has no infinity.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import cache
from typing import Literal

Interval = tuple[float, float]

UNKNOWN: Interval = (0.0, sys.float_info.max)
"""The interval of a single reading: its spread was not seen, so nothing is claimed."""

WARM_AGREEMENT = 0.05
"""Two blocks agree where the slower reaches 95 % of the faster: a warm-up shows more, blocks of a busy CPU seldom."""


def rate(samples: Sequence[float], seconds: Sequence[float], confidence: float = 0.95) -> tuple[float, Interval]:
    """Samples per second over all blocks, with the interval that the blocks' spread gives.

    The value is total over total, never a median of steps: an epoch is made of the mean, rare stalls included. The
    interval is Student's t on seconds per sample, blocks weighted by their samples (the ratio estimator). One block
    alone gives `UNKNOWN`.

    Raises ValueError without blocks, for lists of unequal length, and for samples or seconds that are not positive.
    """
    if not samples or len(samples) != len(seconds):
        raise ValueError(f"a rate needs as many samples as seconds, at least one: {len(samples)} and {len(seconds)}")
    if min(samples) <= 0 or min(seconds) <= 0:
        raise ValueError("a rate needs positive samples and seconds in every block")
    total_samples, total_seconds = math.fsum(samples), math.fsum(seconds)
    value = total_samples / total_seconds
    blocks = len(samples)
    if blocks == 1:
        return value, UNKNOWN
    residuals = [taken - count / value for count, taken in zip(samples, seconds, strict=True)]
    relative_error = math.sqrt(blocks / (blocks - 1) * math.fsum(r * r for r in residuals)) / total_seconds
    return value, _around(value, student_t(confidence, blocks - 1) * relative_error)


def warmed_up(block_rates: Sequence[float]) -> bool:
    """Whether the last two blocks agree within `WARM_AGREEMENT`, or lie between the slowest and the fastest before them:
    what gets faster, or slower, leaves that range, and what other work disturbs goes to and fro in it and never agrees.
    One block alone is not enough."""
    if len(block_rates) < 2:
        return False
    slower, faster_one = sorted(block_rates[-2:])
    if slower <= 0:
        return False
    earlier = block_rates[:-2]
    is_within = bool(earlier) and min(earlier) <= slower and faster_one <= max(earlier)
    return is_within or slower >= (1 - WARM_AGREEMENT) * faster_one


OUT_OF_THE_RACE = 0.7
"""A rate that is certainly below this share of the one to beat is no rival, whatever else is measured of it."""


def out_of_the_race(samples: Sequence[float], seconds: Sequence[float], rate_to_beat: float | None) -> bool:
    """Whether the blocks' 99 % interval lies wholly below `OUT_OF_THE_RACE` of the rate to beat.

    Never where there is none to beat. Raises ValueError as `rate` does.
    """
    if rate_to_beat is None:
        return False
    _, (_, high) = rate(samples, seconds, 0.99)
    return high < OUT_OF_THE_RACE * rate_to_beat


def is_precise(samples: Sequence[float], seconds: Sequence[float], relative_precision: float) -> bool:
    """Whether the half-width of the blocks' 95 % interval is at most `relative_precision` of their rate.

    Raises ValueError as `rate` does.
    """
    value, (low, high) = rate(samples, seconds)
    return (high - low) / 2 <= relative_precision * value


def ratio(
    candidate_rates: Sequence[float], baseline_rates: Sequence[float], confidence: float = 0.95
) -> tuple[float, Interval]:
    """How many times faster the candidate is, from interleaved rounds of fresh processes.

    The rates are paired by round, so that a machine that slows down for a while slows both. The value is the geometric
    mean of the rounds' ratios, the interval Student's t on their logarithms. One round alone gives `UNKNOWN`: use
    `ratio_from_intervals` there.

    Raises ValueError without rounds, for lists of unequal length, and for rates that are not positive.
    """
    if not candidate_rates or len(candidate_rates) != len(baseline_rates):
        raise ValueError(
            f"a ratio needs as many candidate as baseline rates, at least one each: "
            f"{len(candidate_rates)} and {len(baseline_rates)}"
        )
    if min(candidate_rates) <= 0 or min(baseline_rates) <= 0:
        raise ValueError("a ratio needs positive rates in every round")
    logs = [math.log(a) - math.log(b) for a, b in zip(candidate_rates, baseline_rates, strict=True)]
    rounds = len(logs)
    mean = math.fsum(logs) / rounds
    if rounds == 1:
        return math.exp(mean), UNKNOWN
    error = math.sqrt(math.fsum((one - mean) ** 2 for one in logs) / (rounds - 1) / rounds)
    return math.exp(mean), _around(math.exp(mean), student_t(confidence, rounds - 1) * error)


def ratio_from_intervals(
    rate_a: float, interval_a: Interval, rate_b: float, interval_b: Interval
) -> tuple[float, Interval]:
    """How many times faster A is than B, from one process each and the intervals seen inside them.

    The half-widths are added in quadrature, as logarithms. What differs from process to process (some 2 %) is in
    neither interval, so this one is too narrow by that: good for a first look, not for a promise.

    Raises ValueError for rates that are not positive.
    """
    if rate_a <= 0 or rate_b <= 0:
        raise ValueError(f"a ratio needs positive rates, not {rate_a} and {rate_b}")
    value = rate_a / rate_b
    below = math.hypot(_log_distance(interval_a[0], rate_a), _log_distance(rate_b, interval_b[1]))
    above = math.hypot(_log_distance(rate_a, interval_a[1]), _log_distance(interval_b[0], rate_b))
    return value, (_around(value, below)[0], _around(value, above)[1])


FEWEST_ROUNDS = 3
"""Below this the spread itself is hardly known: with two rounds only a difference of several times could be told."""

Comparison = Literal["faster", "slower", "same", "undecided"]


def faster(
    candidate_rates: Sequence[float],
    baseline_rates: Sequence[float],
    confidence: float = 0.99,
    minimum_gain: float = 0.02,
) -> Comparison:
    """What the rounds so far say of the candidate; ask again after each round until it is not `undecided`.

    `faster`: the interval lies above 1 and the ratio reaches 1 + `minimum_gain`; `slower` likewise, the other way
    round; `same`: the interval leaves room for neither gain nor loss of `minimum_gain`. Fewer than `FEWEST_ROUNDS`
    are always `undecided`.

    One look spends half of the error that `confidence` leaves, since it is asked again and again: between equal
    configurations that differ by 2 % from process to process and 3 % from block to block, asking after every round up
    to the tenth ends in `faster` or `slower` less than three times in a hundred.

    Raises ValueError as `ratio` does.
    """
    value, (low, high) = ratio(candidate_rates, baseline_rates, 1 - (1 - confidence) / 2)
    gain = 1 + minimum_gain
    if len(candidate_rates) < FEWEST_ROUNDS:
        return "undecided"
    if low > 1 and value >= gain:
        return "faster"
    if high < 1 and value <= 1 / gain:
        return "slower"
    if low > 1 / gain and high < gain:
        return "same"
    return "undecided"


@cache
def student_t(confidence: float, degrees: int) -> float:
    """The t for which a Student variable of so many degrees of freedom lies within -t and t with that probability.

    The distribution function has a closed form for whole degrees (Abramowitz and Stegun 26.7.3 and 26.7.4); it is
    inverted by bisection over the angle atan(t / sqrt(degrees)), to the last bits of a float.

    Raises ValueError for a confidence outside (0, 1) or fewer than one degree.
    """
    if not 0 < confidence < 1 or degrees < 1:
        raise ValueError(f"Student's t needs a confidence within (0, 1) and a degree or more: {confidence}, {degrees}")
    low, high = 0.0, math.pi / 2
    for _ in range(200):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (middle, high) if _probability_within(middle, degrees) < confidence else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


def _probability_within(angle: float, degrees: int) -> float:
    """P(|T| <= t) for t = sqrt(degrees) * tan(angle)."""
    cosine_squared = math.cos(angle) ** 2
    odd = degrees % 2
    total, term = 0.0, math.cos(angle) if odd else 1.0
    for power in range(odd, degrees - 1, 2):
        total += term
        term *= cosine_squared * (power + 1) / (power + 2)
    if odd:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total


def _around(value: float, log_half_width: float) -> Interval:
    """The interval of that half-width on the logarithm, kept finite."""
    if log_half_width > 600:
        return UNKNOWN
    return value * math.exp(-log_half_width), min(value * math.exp(log_half_width), UNKNOWN[1])


def _log_distance(low: float, high: float) -> float:
    """log(high / low), infinite where `low` is 0."""
    return math.log(high) - math.log(low) if low > 0 else math.inf
