"""The ceiling search finds the true ceiling of synthetic memories, and answers only with what ran."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.search.ceiling import EXACT_UP_TO, CeilingResult, CeilingSearch

LIMIT = 80_000_000
MARGIN = 0.05
USABLE = 76_000_000
RESOLUTION = 0.03

Memory = Callable[[int], int]
"""Bytes at the peak of a step, by its batch."""

ceilings = st.integers(0, 300)
caps = st.integers(1, 400)
starts = st.sampled_from([1, 2, 3, 8, 32, 64])
offsets = st.integers(0, 70_000_000)


def affine_memory(ceiling: int, offset: int) -> Memory:
    """Of which `ceiling` samples leave the margin, and one more does not."""
    return lambda batch: offset + (USABLE - offset) * (2 * batch) // (2 * ceiling + 1)


def plateau_memory(ceiling: int, offset: int, constants: int) -> Memory:
    """The same, flat as long as constants exceed what grows with the batch."""
    rising = affine_memory(ceiling, offset)
    return lambda batch: max(constants, rising(batch))


def silent_memory(ceiling: int) -> Memory:
    """Bytes that say nothing before there are too many."""
    return lambda batch: USABLE // 2 if batch <= ceiling else LIMIT + 1


def search(
    peak: Memory,
    *,
    cap: int,
    start: int,
    affine: bool = True,
    allowed: list[int] | None = None,
) -> tuple[CeilingResult, list[int], list[int]]:
    """Runs a search to its end: the result, what ran and what failed.

    What takes more than LIMIT is out of memory; what takes less and leaves no margin shows its bytes.
    """
    steps = CeilingSearch(
        limit_bytes=LIMIT, cap=cap, start=start, margin=MARGIN, allowed=allowed, resolution=RESOLUTION
    )
    ran: list[int] = []
    failed: list[int] = []
    while (batch := steps.next()) is not None:
        assert batch not in ran + failed, "asked twice"
        assert 1 <= batch <= cap
        assert allowed is None or batch in allowed
        fits = peak(batch) <= USABLE
        (ran if fits else failed).append(batch)
        shown = peak(batch) if peak(batch) <= LIMIT else None
        steps.tell(batch, fits=fits, peak_bytes=shown, affine=affine and shown is not None)
    result = steps.result()
    assert result.probes == len(ran) + len(failed)
    assert result.largest_batch_size == max(ran, default=None)
    above = [batch for batch in failed if batch > (result.largest_batch_size or 0)]
    assert result.smallest_failed_batch_size == min(above, default=None)
    assert result.stopped_because
    return result, ran, failed


def caps_around(ceiling: int) -> list[int]:
    """Those that a ceiling meets in different ways."""
    near = {ceiling + step for step in (-1, 0, 1, 2)}
    return sorted(cap for cap in {1, 2, 3, 9, 64, 2 * ceiling + 1, 400} | near if cap >= 1)


def assert_few_probes(start: int, true: int, result: CeilingResult, failed: list[int]) -> None:
    """What affine bytes promise wherever the first batch fits."""
    if start <= true:
        assert result.probes <= 3
        assert not failed or (start, failed) == (1, [2])


@pytest.mark.parametrize("start", [1, 2, 8, 64])
@pytest.mark.parametrize("offset", [0, 30_000_000, 75_000_000])
def test_every_ceiling_of_affine_bytes_is_found_in_three_probes_without_a_failure(start: int, offset: int) -> None:
    for ceiling in range(301):
        peak = affine_memory(ceiling, offset)
        for cap in caps_around(ceiling):
            result, _, failed = search(peak, cap=cap, start=start)
            true = min(ceiling, cap)
            assert (result.largest_batch_size or 0) == true
            assert_few_probes(min(start, cap), true, result, failed)


@pytest.mark.parametrize("start", [1, 8, 64])
@pytest.mark.parametrize("constants", [30_000_000, 70_000_000, 75_999_999])
def test_every_ceiling_behind_a_plateau_is_found(start: int, constants: int) -> None:
    for ceiling in range(301):
        peak = plateau_memory(ceiling, 10_000_000, constants)
        for cap in (ceiling or 1, ceiling + 1, 400):
            result, _, _ = search(peak, cap=cap, start=start)
            assert (result.largest_batch_size or 0) == min(ceiling, cap)


@pytest.mark.parametrize("start", [1, 8, 64])
def test_every_ceiling_is_found_where_bytes_say_nothing(start: int) -> None:
    for ceiling in range(301):
        for affine in (False, True):
            result, _, _ = search(silent_memory(ceiling), cap=400, start=start, affine=affine)
            assert (result.largest_batch_size or 0) == ceiling


@settings(max_examples=150)
@given(ceilings, caps, starts, offsets)
def test_affine_bytes_need_three_probes_and_no_failure(ceiling: int, cap: int, start: int, offset: int) -> None:
    result, _, failed = search(affine_memory(ceiling, offset), cap=cap, start=start)
    true = min(ceiling, cap)
    assert (result.largest_batch_size or 0) == true
    assert_few_probes(min(start, cap), true, result, failed)


@settings(max_examples=150)
@given(ceilings, caps, starts, offsets, st.integers(0, USABLE))
def test_a_plateau_is_no_slope(ceiling: int, cap: int, start: int, offset: int, constants: int) -> None:
    result, _, failed = search(plateau_memory(ceiling, offset, constants), cap=cap, start=start)
    assert (result.largest_batch_size or 0) == (min(ceiling, cap) if constants <= USABLE else 0)
    assert result.probes <= 20
    assert len(failed) <= 9


@settings(max_examples=150)
@given(ceilings, caps, starts, offsets, st.integers())
def test_noisy_bytes_cost_probes_and_little_else(ceiling: int, cap: int, start: int, offset: int, seed: int) -> None:
    """Reserved bytes follow the batch only roughly, and they are what must leave the margin."""
    exact = affine_memory(ceiling, offset)
    generator = random.Random(seed)
    noise = [generator.uniform(-0.003, 0.003) for _ in range(401)]

    def reserved(batch: int) -> int:
        return int(exact(batch) * (1 + noise[batch]))

    result, _, _ = search(reserved, cap=cap, start=start)
    assert result.probes <= 20
    # What 0.3 % of the whole card is worth in samples cannot be seen in readings with such noise.
    blur = 2 * 0.003 * LIMIT / (exact(1000) - exact(0)) * 1000 + 1
    assert (result.largest_batch_size or 0) >= min(ceiling, cap) / (1 + RESOLUTION) - blur


@settings(max_examples=150)
@given(ceilings, caps, starts)
def test_without_affine_bytes_it_doubles_and_bisects(ceiling: int, cap: int, start: int) -> None:
    result, _, failed = search(silent_memory(ceiling), cap=cap, start=start, affine=False)
    assert (result.largest_batch_size or 0) == min(ceiling, cap)
    assert result.probes <= 18
    assert len(failed) <= 9


def test_far_ceilings_are_found_to_a_few_per_cent_where_bytes_say_nothing() -> None:
    for ceiling in range(EXACT_UP_TO, 4096, 37):
        result, _, _ = search(silent_memory(ceiling), cap=4096, start=32, affine=False)
        assert result.largest_batch_size is not None
        assert ceiling / (1 + RESOLUTION) <= result.largest_batch_size <= ceiling


@settings(max_examples=150)
@given(ceilings, st.sampled_from([32, 48, 96, 256, 360]), starts, offsets, st.booleans(), st.booleans())
def test_only_divisors_of_a_held_batch_are_run(
    ceiling: int, held: int, start: int, offset: int, affine: bool, larger_too: bool
) -> None:
    sizes = [size for size in range(1, 401) if held % size == 0 or (larger_too and size >= held)]
    result, _, failed = search(affine_memory(ceiling, offset), cap=400, start=start, affine=affine, allowed=sizes)
    true = max((size for size in sizes if size <= ceiling), default=0)
    assert (result.largest_batch_size or 0) == true
    if affine:
        assert_few_probes(max(size for size in sizes if size <= start), true, result, failed)


@settings(max_examples=150)
@given(st.lists(st.booleans(), min_size=65, max_size=65), st.integers(1, 64), starts, st.booleans())
def test_a_memory_without_any_order_still_ends_with_what_ran(
    luck: list[bool], cap: int, start: int, affine: bool
) -> None:
    search(lambda batch: USABLE // 2 + batch if luck[batch] else LIMIT + 1, cap=cap, start=start, affine=affine)


def test_the_three_probes_of_a_typical_gpu() -> None:
    """0.801 GiB a sample beside 1.5 GiB, on 76 GiB: 93 samples (GPT-2 124M in bf16 on an H200 made smaller)."""
    gibibyte = 2**30
    steps = CeilingSearch(limit_bytes=80 * gibibyte, cap=1024, start=8)
    asked = []
    while (batch := steps.next()) is not None:
        asked.append(batch)
        peak = int((1.5 + 0.801 * batch) * gibibyte)
        assert peak <= 76 * gibibyte
        steps.tell(batch, fits=True, peak_bytes=peak, affine=True)
    assert asked == [8, 69, 93]
    result = steps.result()
    assert result.largest_batch_size == 93
    assert result.smallest_failed_batch_size is None
    assert "94 is predicted to need more" in result.stopped_because


def test_a_prediction_that_leaves_no_margin_is_not_the_answer() -> None:
    """Reserved memory ran 10 % above allocated: the bytes promise 200, the margin is gone from 182 on."""
    steps = CeilingSearch(limit_bytes=1000, cap=1000, start=8, margin=0.0)
    while (batch := steps.next()) is not None:
        steps.tell(batch, fits=batch < 182, peak_bytes=5 * batch, affine=True)
    result = steps.result()
    assert (result.largest_batch_size, result.smallest_failed_batch_size) == (181, 182)
    assert result.stopped_because == "182 did not fit"


def test_readings_that_were_not_asked_for_save_probes() -> None:
    steps = CeilingSearch(limit_bytes=1000, cap=1000, start=8, margin=0.0)
    steps.tell(10, fits=True, peak_bytes=200, affine=True)
    steps.tell(20, fits=True, peak_bytes=300, affine=True)
    assert steps.next() == 90
    assert steps.result().stopped_because == ""


def test_reasons_to_stop() -> None:
    cap, _, _ = search(lambda batch: 1, cap=16, start=8)
    assert cap.stopped_because == "16 is the largest batch that may be tried"
    nothing, _, _ = search(lambda batch: LIMIT + 1, cap=16, start=8)
    assert (nothing.largest_batch_size, nothing.stopped_because) == (None, "not even 1 fits")


def test_nothing_to_try_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no batch size to try: at most 16, and allowed are \[32, 64\]"):
        CeilingSearch(limit_bytes=None, cap=16, start=8, allowed=[32, 64])
