"""Rates, ratios and comparisons hold what they promise, for any numbers and for simulated noise."""

from __future__ import annotations

import json
import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.stats import (
    UNKNOWN,
    faster,
    is_precise,
    out_of_the_race,
    rate,
    ratio,
    ratio_from_intervals,
    student_t,
    warmed_up,
)

positive = st.floats(min_value=1e-3, max_value=1e6)
blocks = st.lists(st.tuples(st.integers(1, 10_000), st.floats(1e-3, 1e3)), min_size=1, max_size=20)
pairs = st.lists(st.tuples(positive, positive), min_size=2, max_size=12)


@pytest.mark.parametrize(
    ("confidence", "degrees", "expected"),
    [
        (0.95, 1, 12.7062),
        (0.95, 2, 4.30265),
        (0.95, 5, 2.57058),
        (0.99, 3, 5.84091),
        (0.99, 8, 3.35539),
        (0.999, 6, 5.95882),
        (0.95, 1000, 1.96234),
    ],
)
def test_student_t_agrees_with_the_printed_tables(confidence: float, degrees: int, expected: float) -> None:
    assert student_t(confidence, degrees) == pytest.approx(expected, rel=2e-6)


@given(st.floats(0.5, 0.999), st.integers(1, 300))
def test_student_t_falls_with_degrees_towards_the_normal_value(confidence: float, degrees: int) -> None:
    normal = statistics.NormalDist().inv_cdf((1 + confidence) / 2)
    assert student_t(confidence, degrees) > student_t(confidence, degrees + 1) > normal


@pytest.mark.parametrize(("confidence", "degrees"), [(0.0, 3), (1.0, 3), (0.95, 0)])
def test_student_t_refuses_what_has_no_value(confidence: float, degrees: int) -> None:
    with pytest.raises(ValueError, match="Student's t needs"):
        student_t(confidence, degrees)


@given(blocks)
def test_a_rate_is_total_over_total_inside_a_finite_positive_interval(data: list[tuple[int, float]]) -> None:
    samples, seconds = zip(*data, strict=True)
    value, (low, high) = rate(samples, seconds)
    assert value == pytest.approx(sum(samples) / sum(seconds))
    assert 0 <= low <= value * (1 + 1e-12) and value <= high * (1 + 1e-12)
    assert json.loads(json.dumps([low, high], allow_nan=False)) == [low, high]


@given(blocks, st.floats(1e-2, 1e2))
def test_a_rate_scales_with_its_unit(data: list[tuple[int, float]], scale: float) -> None:
    samples, seconds = zip(*data, strict=True)
    value, interval = rate(samples, seconds)
    scaled, scaled_interval = rate(samples, [one / scale for one in seconds])
    assert scaled == pytest.approx(value * scale)
    if interval[1] < 1e300 and len(data) > 1 and interval[0] > 1e-300:
        assert scaled_interval == pytest.approx((interval[0] * scale, interval[1] * scale), rel=1e-6)


def test_a_rare_stall_belongs_to_the_rate() -> None:
    steps = [0.006] * 9 + [0.086]
    per_block = [sum(steps[(start + i) % 10] for i in range(25)) for start in range(0, 60, 5)]
    value, (low, high) = rate([8 * 25] * len(per_block), per_block)
    assert value == pytest.approx(8 / 0.014, rel=0.02)
    assert low < 8 / 0.014 < high


def test_one_block_claims_nothing_and_equal_blocks_have_no_width() -> None:
    assert rate([10], [2.0]) == (5.0, UNKNOWN)
    value, (low, high) = rate([10, 20], [2.0, 4.0])
    assert low == pytest.approx(value) == pytest.approx(high)


@pytest.mark.parametrize(("samples", "seconds"), [([], []), ([1, 2], [1.0]), ([1], [0.0]), ([0], [1.0])])
def test_a_rate_of_nothing_is_refused(samples: list[int], seconds: list[float]) -> None:
    with pytest.raises(ValueError, match="a rate needs"):
        rate(samples, seconds)


def test_the_interval_of_a_rate_holds_the_truth_as_often_as_it_says() -> None:
    dice = random.Random(3)
    inside = 0
    for _ in range(2000):
        seconds = [0.3 * math.exp(dice.gauss(0, 0.03)) for _ in range(5)]
        _, (low, high) = rate([30] * 5, seconds)
        inside += low <= 100 / math.exp(0.03**2 / 2) <= high
    assert 0.93 <= inside / 2000 <= 0.97


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ([], False),
        ([5.0], False),
        ([100.0, 96.0], True),
        ([96.0, 100.0], True),
        ([100.0, 94.0], False),
        ([10.0, 50.0, 100.0, 101.0], True),
        ([100.0, 100.0, 50.0], False),
        ([0.0, 0.0], False),
        ([100.0, 80.0, 120.0, 90.0, 110.0], True),
        ([80.0, 120.0, 90.0], False),
        ([40.0, 60.0, 80.0, 100.0], False),
        ([100.0, 80.0, 60.0, 40.0], False),
        ([0.0, 100.0, 0.0, 50.0], False),
    ],
)
def test_warm_means_that_the_last_two_agree_or_go_to_and_fro_as_those_before(
    rates: list[float], expected: bool
) -> None:
    assert warmed_up(rates) is expected


@given(pairs)
def test_a_ratio_turned_round_is_its_inverse(rates: list[tuple[float, float]]) -> None:
    ours, theirs = zip(*rates, strict=True)
    value, (low, high) = ratio(ours, theirs)
    inverse, (inverse_low, inverse_high) = ratio(theirs, ours)
    assert inverse == pytest.approx(1 / value)
    assert low <= value <= high
    if UNKNOWN not in ((low, high), (inverse_low, inverse_high)) and low > 1e-200:
        assert (inverse_low, inverse_high) == pytest.approx((1 / high, 1 / low), rel=1e-6)


@given(pairs, st.lists(st.floats(0.5, 2.0), min_size=12, max_size=12))
def test_a_slow_round_that_slows_both_changes_nothing(rates: list[tuple[float, float]], slowness: list[float]) -> None:
    ours, theirs = zip(*rates, strict=True)
    drifted = [(a * s, b * s) for (a, b), s in zip(rates, slowness, strict=False)]
    our_drift, their_drift = zip(*drifted, strict=True)
    assert ratio(our_drift, their_drift)[0] == pytest.approx(ratio(ours, theirs)[0])


def test_one_round_has_a_ratio_and_no_interval() -> None:
    value, interval = ratio([20.0], [10.0])
    assert value == pytest.approx(2.0)
    assert interval == UNKNOWN


@pytest.mark.parametrize(("ours", "theirs"), [([], []), ([1.0], [1.0, 2.0]), ([0.0], [1.0]), ([1.0], [-1.0])])
def test_a_ratio_of_nothing_is_refused(ours: list[float], theirs: list[float]) -> None:
    with pytest.raises(ValueError, match="a ratio needs"):
        ratio(ours, theirs)


@given(positive, positive, st.floats(0.0, 0.5), st.floats(0.0, 0.5))
def test_intervals_combine_in_quadrature(rate_a: float, rate_b: float, wide_a: float, wide_b: float) -> None:
    value, (low, high) = ratio_from_intervals(
        rate_a,
        (rate_a * math.exp(-wide_a), rate_a * math.exp(wide_a)),
        rate_b,
        (rate_b * math.exp(-wide_b), rate_b * math.exp(wide_b)),
    )
    assert value == pytest.approx(rate_a / rate_b)
    assert math.log(high / value) == pytest.approx(math.hypot(wide_a, wide_b), abs=1e-6)
    assert math.log(value / low) == pytest.approx(math.hypot(wide_a, wide_b), abs=1e-6)


def test_an_unknown_interval_makes_an_unknown_ratio() -> None:
    assert ratio_from_intervals(2.0, UNKNOWN, 1.0, (0.9, 1.1)) == (2.0, UNKNOWN)
    with pytest.raises(ValueError, match="positive rates"):
        ratio_from_intervals(0.0, (0.0, 1.0), 1.0, (0.9, 1.1))


def _decide(dice: random.Random, speedup: float, rounds: int) -> str:
    """Interleaved rounds, asked after each, with 2 % from process to process and 3 % from block to block."""

    def one_process(true_rate: float) -> float:
        here = true_rate * math.exp(dice.gauss(0, 0.02))
        seconds = [100 / here * math.exp(dice.gauss(0, 0.03)) for _ in range(6)]
        return rate([100] * 6, seconds)[0]

    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(rounds):
        ours.append(one_process(100 * speedup))
        theirs.append(one_process(100))
        decision = faster(ours, theirs)
        if decision != "undecided":
            return decision
    return "undecided"


def test_equal_configurations_are_told_apart_at_most_three_times_in_a_hundred() -> None:
    dice = random.Random(11)
    decisions = [_decide(dice, 1.0, rounds=10) for _ in range(3000)]
    assert sum(decision in ("faster", "slower") for decision in decisions) <= 90


def test_a_real_gain_is_seen_and_its_loss_too() -> None:
    dice = random.Random(12)
    assert sum(_decide(dice, 1.3, rounds=8) == "faster" for _ in range(300)) >= 290
    assert sum(_decide(dice, 1 / 1.3, rounds=8) == "slower" for _ in range(300)) >= 290


def test_a_gain_below_the_minimum_is_the_same_once_that_is_certain() -> None:
    theirs = [100.0, 100.1, 99.9, 100.0]
    ours = [101.0, 101.1, 101.0, 100.9]
    assert ratio(ours, theirs)[1][0] > 1
    assert faster(ours, theirs) == "same"
    assert faster(ours, theirs, minimum_gain=0.005) == "faster"
    assert faster(theirs, ours, minimum_gain=0.005) == "slower"


def test_only_what_is_certainly_and_clearly_slower_is_out_of_the_race() -> None:
    steady = [1.0, 1.01, 0.99]
    assert out_of_the_race([10] * 3, steady, 20.0)
    assert not out_of_the_race([10] * 3, steady, 14.5)  # at 69 %, by less than can be told from three blocks
    assert not out_of_the_race([10] * 3, steady, 10.0)
    assert not out_of_the_race([10] * 3, [0.8, 1.0, 1.2], 20.0)
    assert not out_of_the_race([10], [1.0], 1000.0)
    assert not out_of_the_race([10] * 3, steady, None)


def test_precise_is_what_blocks_agree_on() -> None:
    assert is_precise([10] * 3, [1.0, 1.001, 1.0], 0.01)
    assert not is_precise([10] * 3, [1.0, 1.5, 0.8], 0.01)
    assert not is_precise([10], [1.0], 0.5)


def test_two_rounds_decide_nothing() -> None:
    assert faster([200.0, 200.1], [100.0, 100.1]) == "undecided"
    assert faster([200.0, 200.1, 200.0], [100.0, 100.1, 100.2]) == "faster"
