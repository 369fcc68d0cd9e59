"""When a configuration that ran still does not count as fitting: it thrashed, or it left too little of the memory."""

from __future__ import annotations

from autotune.quantities import format_bytes
from autotune.records import MemoryMarks


def misfit(memory: MemoryMarks, *, limit_bytes: int | None, margin: float) -> str:
    """Why what took this memory does not fit, in one sentence; empty where it does.

    `margin` is the share of `limit_bytes` that must stay unreserved. On a CPU nothing is reserved, and what ran fits.
    """
    if memory.allocator_retries:
        return f"it ran, but only with {memory.allocator_retries} allocator retries: it does not really fit"
    if limit_bytes is None or memory.reserved_bytes is None:
        return ""
    allowed = (1 - margin) * limit_bytes
    if memory.reserved_bytes <= allowed:
        return ""
    return (
        f"it reserved {format_bytes(memory.reserved_bytes)} and left less than the margin "
        f"({format_bytes(allowed)} are usable)"
    )
