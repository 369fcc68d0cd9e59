from __future__ import annotations

import pytest

from autotune.quantities import (
    format_bytes,
    format_cosine,
    format_duration,
    format_error,
    format_rate,
    format_ratio,
    parse_assignments,
    parse_duration,
    parse_names,
    parse_positive_count,
    parse_seed,
    parse_share,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90), ("10m", 600), ("10min", 600), ("1h30m", 5400), ("2h", 7200), ("1h 5s", 3605), ("600", 600),
        ("0.5h", 1800), ("1.5", 1.5), ("2M30S", 150),
    ],
)  # fmt: skip
def test_durations_are_read(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "x", "10x", "m", "10m1h", "-5m", "0", "0s", "1h30", "inf", "nan"])
def test_what_is_no_duration_is_refused_with_the_forms_that_are(text: str) -> None:
    with pytest.raises(ValueError, match="90s, 10m or 1h30m") as caught:
        parse_duration(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("24GiB", 24 * 2**30), ("24 gib", 24 * 2**30), ("24GB", 24 * 10**9), ("800MiB", 800 * 2**20),
        ("1.5TiB", 3 * 2**39), ("500MB", 500 * 10**6), ("512B", 512), ("3kB", 3000), ("3KiB", 3072),
    ],
)  # fmt: skip
def test_sizes_are_read(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["24", "24G", "GiB", "-1GiB", "", "0GiB", "1e9B"])
def test_a_size_without_a_clear_unit_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="24GiB"):
        parse_size(text)


@pytest.mark.parametrize(("text", "share"), [("0.05", 0.05), ("5%", 0.05), ("5 %", 0.05), ("0", 0.0), ("12.5%", 0.125)])
def test_shares_are_read(text: str, share: float) -> None:
    assert parse_share(text) == share


@pytest.mark.parametrize("text", ["5", "1", "100%", "-0.1", "", "x%", "nan"])
def test_a_share_of_all_or_of_nothing_sensible_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"0\.05 or 5%"):
        parse_share(text)


@pytest.mark.parametrize(("text", "count"), [("7", 7), ("1_000_000", 1_000_000), ("1e6", 1_000_000)])
def test_counts_are_read(text: str, count: int) -> None:
    assert parse_positive_count(text) == count


@pytest.mark.parametrize("text", ["0", "-3", "1.5", "x", "", "inf", "nan"])
def test_what_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a whole number above 0"):
        parse_positive_count(text)


def test_names_keep_their_order_and_come_once() -> None:
    assert parse_names("precision, compile_mode,precision,") == ("precision", "compile_mode")
    with pytest.raises(ValueError, match="names nothing"):
        parse_names(" , ")


def test_assignments_may_be_repeated_or_separated_by_commas() -> None:
    assert parse_assignments(["batch_size=32,precision = bf16", "num_workers=0"]) == {
        "batch_size": "32",
        "precision": "bf16",
        "num_workers": "0",
    }
    assert parse_assignments(["batch_size=32", "batch_size=32"]) == {"batch_size": "32"}


@pytest.mark.parametrize("text", ["batch_size", "batch_size=", "=32", ""])
def test_what_is_no_assignment_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"{text!r} is not an assignment; write it as batch_size=32"):
        parse_assignments([text])


def test_two_values_for_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="batch_size is fixed to both 32 and 64; give it one value"):
        parse_assignments(["batch_size=32", "batch_size=64"])


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"), (0.012, "12 ms"), (0.42, "0.42 s"), (9.96, "10 s"), (38.4, "38 s"), (59.7, "1 min"),
        (598, "9 min 58 s"), (600, "10 min"), (3599.7, "1 h"), (5400, "1 h 30 min"), (-61, "-1 min 1 s"),
    ],
)  # fmt: skip
def test_durations_are_written(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (512, "512 B"), (2048, "2.0 KiB"), (812 * 2**20, "812 MiB"), (1023.9 * 2**20, "1.0 GiB"),
        (28.5 * 2**30, "28.5 GiB"), (141 * 2**30, "141 GiB"), (5000 * 2**40, "5000 TiB"),
    ],
)  # fmt: skip
def test_sizes_are_written(size_bytes: float, text: str) -> None:
    assert format_bytes(size_bytes) == text


def test_rates_ratios_and_errors_are_written() -> None:
    assert [format_rate(rate) for rate in (0.08311, 4.166, 48.2, 99.96, 537_102.3)] == [
        "0.0831", "4.17", "48.2", "100", "537,102",
    ]  # fmt: skip
    assert [format_ratio(ratio) for ratio in (1.0, 1.857, 12.34)] == ["1.00x", "1.86x", "12.3x"]
    assert [format_error(error) for error in (0.0, 0.2134, 0.0005, 2e-7)] == ["0 %", "21 %", "0.05 %", "2e-05 %"]
    assert [format_error(error) for error in (0.994, 0.996, 1.74, 2e9)] == ["99 %", "100 %", "174 %", "2e+11 %"]


def test_a_seed_is_what_every_generator_takes() -> None:
    assert parse_seed("0") == 0
    assert parse_seed("4294967295") == 2**32 - 1
    for text in ("x", "-1", "1.5", "4294967296"):
        with pytest.raises(ValueError, match="whole number from 0"):
            parse_seed(text)


@pytest.mark.parametrize(
    ("cosine", "shown"),
    [
        (1.0, "1"),
        (1 - 1e-13, "1"),
        (1.0000000002, "1"),
        (0.9999999, "0.999999"),
        (0.99998, "0.99998"),
        (0.93, "0.93"),
        (-0.2, "-0.2"),
    ],
)
def test_a_cosine_is_never_rounded_up_to_1(cosine: float, shown: str) -> None:
    assert format_cosine(cosine) == shown
