"""Peaks of memory are predicted from two others: those recorded on a GPU, and some whose law is known."""

from __future__ import annotations

import pytest

from benchmarks.memory_backtest import (
    FEWEST_SIZES,
    Peak,
    as_promised,
    errors,
    files_of_a_gpu,
    predictions,
    recorded_peaks,
    two_others,
)

FILES = files_of_a_gpu()


def test_recorded_peaks_are_predicted_as_promised() -> None:
    classes = [peaks for peaks in recorded_peaks(FILES).values() if len(peaks) >= FEWEST_SIZES]
    made = [prediction for peaks in classes for prediction in predictions(peaks)]
    assert len(made) >= 80
    assert as_promised(made), errors(made)


def test_an_affine_peak_above_a_constant_one_is_predicted_exactly() -> None:
    peaks = {size: Peak(1000 + 300 * size, 2500) for size in (1, 2, 4, 8, 64)}
    made = predictions(peaks)
    assert [prediction.predicted_bytes for prediction in made] == [2500, 2500, 2500, 3400, 20200]
    assert errors(made) == {"points": 5, "mean": 0, "p95": 0, "largest": 0}
    assert [prediction.batch_size for prediction in made if prediction.upward] == [4, 8, 64]


def test_a_peak_that_is_not_affine_is_not_as_promised() -> None:
    made = predictions({size: Peak(1000 + 10 * size**2, 0) for size in (8, 16, 32)})
    assert not as_promised(made)


@pytest.mark.parametrize(
    ("size", "pair"), [(4, (8, 10)), (8, (4, 9)), (9, (4, 8)), (10, (4, 9)), (11, (8, 10)), (32, (8, 11))]
)
def test_a_slope_is_taken_from_sizes_that_are_apart(size: int, pair: tuple[int, int]) -> None:
    assert two_others(size, [4, 8, 9, 10, 11, 32]) == pair


def test_a_table_counts_with_the_searches_of_its_program() -> None:
    of_gpt2 = [path for path in FILES if "gpt2" in path.name]
    assert {path.suffix for path in of_gpt2} == {".jsonl", ".gz"}
    sizes = max(recorded_peaks(of_gpt2).values(), key=len)
    assert list(sizes) == [4, 8, 9, 10, 11, 16, 32, 87, 98]


def test_both_searches_of_one_program_count_together() -> None:
    both = [path for path in FILES if path.name in ("h200_gpt2.jsonl", "h200_gpt2_16gib.jsonl")]
    sizes = max(recorded_peaks(both).values(), key=len)
    assert list(sizes) == [4, 8, 9, 10, 11, 32, 87, 98]
