"""What ran without retries and left the margin fits; what did not says why."""

from __future__ import annotations

from autotune.memory_margin import misfit
from autotune.records import MemoryMarks

GIB = 2**30


def marks(reserved_bytes: int | None, retries: int = 0) -> MemoryMarks:
    return MemoryMarks(peak_allocated_bytes=GIB, reserved_bytes=reserved_bytes, allocator_retries=retries)


def test_what_leaves_the_margin_fits_to_the_byte() -> None:
    assert misfit(marks(76 * GIB), limit_bytes=80 * GIB, margin=0.05) == ""
    told = misfit(marks(76 * GIB + 1), limit_bytes=80 * GIB, margin=0.05)
    assert told == "it reserved 76.0 GiB and left less than the margin (76.0 GiB are usable)"


def test_a_thrashing_allocator_is_no_fit_however_much_is_left() -> None:
    told = misfit(marks(GIB, retries=3), limit_bytes=80 * GIB, margin=0.05)
    assert told == "it ran, but only with 3 allocator retries: it does not really fit"
    assert misfit(marks(None, retries=1), limit_bytes=None, margin=0.05) != ""


def test_without_a_limit_or_without_reserved_bytes_what_ran_fits() -> None:
    assert misfit(marks(200 * GIB), limit_bytes=None, margin=0.05) == ""
    assert misfit(marks(None), limit_bytes=1, margin=0.05) == ""
