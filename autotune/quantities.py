"""Durations, sizes, shares and assignments as people write them, and as reports print them. Pure functions of text."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

_SECONDS_PER_UNIT = {"h": 3600.0, "m": 60.0, "s": 1.0}
_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m(?:in)?)?(?:(\d+(?:\.\d+)?)s)?")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)")
_BYTES_PER_UNIT = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


def parse_duration(text: str) -> float:
    """Seconds of `90s`, `10m`, `1h30m` or a plain number of seconds. Raises ValueError for anything else, zero too."""
    compact = "".join(text.split()).lower()
    if _NUMBER.fullmatch(compact):
        seconds = float(compact)
    else:
        match = _DURATION.fullmatch(compact)
        if match is None or not compact:
            raise ValueError(f"{text!r} is not a time; write it as 90s, 10m or 1h30m")
        pieces = zip(match.groups(), _SECONDS_PER_UNIT.values(), strict=True)
        seconds = sum(float(number) * scale for number, scale in pieces if number)
    if seconds <= 0:
        raise ValueError(f"{text!r} is no time at all; write it as 90s, 10m or 1h30m")
    return seconds


def parse_size(text: str) -> int:
    """Bytes of `24GiB` (powers of 1024) or `24GB` (powers of 1000). Raises ValueError, also for a missing unit."""
    match = _SIZE.fullmatch(text.strip().lower())
    if match is None or match[2] not in _BYTES_PER_UNIT:
        raise ValueError(f"{text!r} is not a size; write it with its unit, as 24GiB, 24GB or 800MiB")
    size_bytes = int(float(match[1]) * _BYTES_PER_UNIT[match[2]])
    if size_bytes <= 0:
        raise ValueError(f"{text!r} is no memory at all; write a size such as 24GiB")
    return size_bytes


def parse_share(text: str) -> float:
    """A share of at least 0 and below 1, written as `0.05` or `5%`. Raises ValueError."""
    stripped = text.strip()
    number = stripped.removesuffix("%").strip()
    if not _NUMBER.fullmatch(number):
        raise ValueError(f"{text!r} is not a share; write it as 0.05 or 5%")
    share = float(number) / 100 if stripped.endswith("%") else float(number)
    if share >= 1:
        raise ValueError(f"{text!r} is all of it or more; write a share below 1, as 0.05 or 5%")
    return share


def parse_positive_number(text: str) -> float:
    """A number above 0, such as `1.0`. Raises ValueError."""
    if not _NUMBER.fullmatch(text.strip()) or not 0 < float(text) < float("inf"):
        raise ValueError(f"{text!r} is not a number above 0")
    return float(text)


def parse_positive_count(text: str) -> int:
    """A whole number above 0; `1_000_000` and `1e6` are understood. Raises ValueError."""
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a whole number above 0") from None
    if not 1 <= number < float("inf") or number != int(number):
        raise ValueError(f"{text!r} is not a whole number above 0")
    return int(number)


def parse_seed(text: str) -> int:
    """A whole number from 0 to 2^32 - 1, which every generator takes. Raises ValueError."""
    if not text.isdecimal() or int(text) >= 2**32:
        raise ValueError(f"{text!r} is not a whole number from 0 to {2**32 - 1}")
    return int(text)


def parse_names(text: str) -> tuple[str, ...]:
    """The names in `precision,compile_mode`, each once, in their order. Raises ValueError where there is none."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise ValueError(f"{text!r} names nothing; write it as precision,compile_mode")
    return names


def parse_assignments(texts: Iterable[str]) -> dict[str, str]:
    """Name to value of `batch_size=32` and `batch_size=32,num_workers=4`, the values as text.

    Raises ValueError for what is not an assignment and for a name that gets two values.
    """
    assigned: dict[str, str] = {}
    for assignment in (part.strip() for text in texts for part in text.split(",")):
        name, equals, value = (piece.strip() for piece in assignment.partition("="))
        if not (name and equals and value):
            raise ValueError(f"{assignment!r} is not an assignment; write it as batch_size=32")
        if assigned.setdefault(name, value) != value:
            raise ValueError(f"{name} is fixed to both {assigned[name]} and {value}; give it one value")
    return assigned


def format_duration(seconds: float) -> str:
    """Such as `12 ms`, `0.42 s`, `38 s`, `9 min 58 s`, `1 h 30 min`."""
    if seconds < 0:
        return f"-{format_duration(-seconds)}"
    if 0 < seconds < 0.0995:
        return f"{seconds * 1000:.2g} ms"
    if seconds < 9.95:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min" + (f" {whole % 60} s" if whole % 60 else "")
    minutes = round(seconds / 60)
    return f"{minutes // 60} h" + (f" {minutes % 60} min" if minutes % 60 else "")


def format_bytes(size_bytes: float) -> str:
    """Such as `28.5 GiB`, `812 MiB`, `512 B`: powers of 1024, three digits or so."""
    if abs(size_bytes) < 1024:
        return f"{size_bytes:.0f} B"
    scaled = float(size_bytes)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        scaled /= 1024
        if abs(scaled) < 999.5 or unit == "TiB":
            break
    return f"{scaled:.0f} {unit}" if abs(scaled) >= 99.95 else f"{scaled:.1f} {unit}"


def format_rate(per_second: float) -> str:
    """A rate with three digits or more and thousands separated: `0.0831`, `4.17`, `48.2`, `537,102`."""
    if per_second >= 99.95:
        return f"{per_second:,.0f}"
    return f"{per_second:.3g}"


def format_ratio(ratio: float) -> str:
    """Such as `1.86x`."""
    return f"{ratio:.1f}x" if ratio >= 9.95 else f"{ratio:.2f}x"


def format_error(relative_error: float) -> str:
    """A relative error as a percentage: `170 %`, `21 %`, `0.05 %`, `2e-05 %`, `0 %`."""
    percent = relative_error * 100
    return f"{percent:.0f} %" if 99.5 <= percent < 1e6 else f"{percent:.2g} %"


def format_share(share: float) -> str:
    """A share as a whole percentage, such as `59 %`."""
    return f"{share * 100:.0f} %"


def format_cosine(cosine: float) -> str:
    """Six digits, never rounded up to 1 by more than a sum in float64 is off: `1`, `0.999998`, `0.93`, `-0.2`."""
    return f"{math.floor((cosine + 1e-9) * 1e6) / 1e6:.6g}"


NO_UPPER_END = 1e300
"""One reading has no spread: its interval then ends at the largest number that JSON can hold."""


def format_spread(value: float, interval: tuple[float, float]) -> str:
    """Half of an interval as a share of its value, `± 1.2 %`; says so where the spread was not seen."""
    low, high = interval
    return "spread not seen" if high >= NO_UPPER_END else f"± {format_error((high - low) / 2 / value)}"
