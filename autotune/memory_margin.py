"""What speaks against a configuration although it ran: it thrashed, left too little of the memory, or takes ever more."""

from __future__ import annotations

from autotune.quantities import format_bytes
from autotune.records import Conditions, MachineFacts, MemoryMarks

LEAK_BYTES_PER_STEP = 16 * 2**10
"""Growth below this is the allocator's or the interpreter's own."""


def leak(growth_bytes_per_step: float) -> str:
    """What is found of a program that holds more memory with every step; empty where it does not."""
    if growth_bytes_per_step < LEAK_BYTES_PER_STEP:
        return ""
    grown = f"memory grows by {growth_bytes_per_step / 2**20:.2f} MiB with every step"
    return f"{grown}: something keeps tensors of past steps (a leak)"


def limit_bytes(conditions: Conditions, machine: MachineFacts) -> int | None:
    """What a trial may use: the limit that was asked for, or the card; on CPU only the former."""
    asked = conditions.memory_limit_bytes
    if conditions.device == "cpu":
        return asked
    card = machine.gpus[0].total_bytes
    return card if asked is None else min(asked, card)


def misfit(memory: MemoryMarks, *, limit_bytes: int | None, margin: float) -> str:
    """Why what took this memory does not fit, in one sentence; empty where it does.

    `margin` is the share of `limit_bytes` that must stay unreserved. On a CPU nothing is reserved, and what ran fits: there
    the margin of a memory probe was out of its reach while it ran.
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
