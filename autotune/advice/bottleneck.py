"""What holds a training step back, read from its measurement by rules, and which knobs cure it."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Literal

from autotune.knobs.base import Knob
from autotune.quantities import format_duration, format_rate, format_share, format_spread
from autotune.records import Bottleneck, Measurement

WAITS_FOR_DATA = 0.95
"""The loader holds the step back where even the upper end of the end-to-end rate stays below this share of the rate on
batches that lie ready. On a busy machine two rates of the same step differ by up to 5 %."""

DEVICE_LAGS = 0.1
"""Where the device works on for this share of a step after the CPU has queued all of it, the CPU is ahead, and what
limits the step is the device."""

NEARLY_FULL = 0.85
"""From this share of the memory on, the next larger batch (one and a half times) has no room."""

DISPATCH_SECONDS = 0.001
"""On a CPU, a micro-batch that is faster than this spends its time on calling operators, not in them: forward, backward
and AdamW of two small linear layers take 0.4 ms at any batch size up to 128 (two cores, torch 2.13)."""


def bottleneck(
    measurement: Measurement, *, device: Literal["cuda", "cpu"], limit_bytes: int | None
) -> Bottleneck | None:
    """What to attack first, or None where nothing was seen that tells.

    `limit_bytes` is the memory that the process may use, None where it is not known. The rules, in their order:

    - `memory`: the allocator had to free its cache and try again, so the step waits for memory.
    - `loader`: end to end is clearly slower than on resident batches (`WAITS_FOR_DATA`).
    - `compute`: the device works on after the CPU has queued the step (`DEVICE_LAGS`).
    - a device that does not is held back by the CPU, which larger batches cure: `memory` where they have no room
      (`NEARLY_FULL`); `host` where the step is compiled already, so that few launches are left; else `launch`.
    - on a CPU, which is host and device in one: `host` for the shortest steps (`DISPATCH_SECONDS`), else `compute`.
    """
    retries, resident = measurement.memory.allocator_retries, measurement.resident_samples_per_second
    if not retries and resident is not None and measurement.interval[1] < WAITS_FOR_DATA * resident:
        return "loader"
    return bottleneck_of_step(measurement, device=device, limit_bytes=limit_bytes)


def bottleneck_of_step(
    measurement: Measurement, *, device: Literal["cuda", "cpu"], limit_bytes: int | None
) -> Bottleneck | None:
    """The same where batches lie ready: the rules of `bottleneck` but for that of the loader."""
    if measurement.memory.allocator_retries > 0:
        return "memory"
    if device == "cpu":
        return "host" if _micro_batch_seconds(measurement) < DISPATCH_SECONDS else "compute"
    lag_share = measurement.device_lag_share
    if lag_share is None:
        return None
    if lag_share >= DEVICE_LAGS:
        return "compute"
    if _nearly_full(measurement, limit_bytes):
        return "memory"
    return "host" if measurement.compiled_graphs else "launch"


def explain(
    cause: Bottleneck, measurement: Measurement, knobs: Sequence[Knob], *, changed: Set[str], tried: Set[str]
) -> tuple[str, ...]:
    """A sentence that says what holds the step back, with the figures that show it, and what became of the knobs that
    may cure it.

    `knobs` are those that can be moved here, `changed` the names of those that the answer moves, `tried` of all that
    were moved in some trial.
    """
    cures = [knob.name for knob in knobs if cause in knob.cures]
    if not cures:
        return (_cause_text(cause, measurement), "none of the knobs that can be moved here helps against that")
    outcomes = (
        ("what helps against that", [name for name in cures if name in changed]),
        ("tried against that, without a certain gain", [name for name in cures if name in tried - changed]),
        ("what may help against that, and was not tried", [name for name in cures if name not in tried | changed]),
    )
    return (_cause_text(cause, measurement), *(f"{what}: {', '.join(names)}" for what, names in outcomes if names))


def _cause_text(cause: Bottleneck, measurement: Measurement) -> str:
    rate = _rate_text(measurement.samples_per_second, measurement.interval)
    resident = measurement.resident_samples_per_second
    lag_share = measurement.device_lag_share
    lag = "" if lag_share is None else f": the device works on for {format_share(lag_share)} of it once all is queued"
    match cause:
        case "loader":
            ready_rate = "" if resident is None else _rate_text(resident, measurement.resident_interval)
            ready = "" if resident is None else f", {ready_rate} with batches that lie ready"
            return f"the step waits for data: {rate} samples/s{ready}"
        case "compute":
            if lag_share is None:  # a CPU, which is host and device in one
                step = format_duration(_micro_batch_seconds(measurement))
                return f"the step is limited by the CPU work inside it, of which a micro-batch takes {step}"
            return f"the step is limited by what the device can compute{lag}"
        case "launch":
            return f"the step is limited by starting many small kernels{lag}"
        case "host":
            step = format_duration(_micro_batch_seconds(measurement))
            return f"the step is limited by CPU work{lag or f': a micro-batch takes {step}'}"
        case "memory":
            retries = measurement.memory.allocator_retries
            if retries:
                return f"the step waits for memory: the allocator had to free its cache {retries:,} times"
            return f"the step is limited by memory, which has no room for a larger batch{lag}"


def _rate_text(value: float, interval: tuple[float, float] | None) -> str:
    return format_rate(value) if interval is None else f"{format_rate(value)} ({format_spread(value, interval)})"


def _micro_batch_seconds(measurement: Measurement) -> float:
    """Of a micro-batch that lies ready, where that was measured."""
    rate = measurement.resident_samples_per_second or measurement.samples_per_second
    return measurement.micro_batch_size / rate


def _nearly_full(measurement: Measurement, limit_bytes: int | None) -> bool:
    reserved = measurement.memory.reserved_bytes
    return reserved is not None and limit_bytes is not None and reserved >= NEARLY_FULL * limit_bytes
