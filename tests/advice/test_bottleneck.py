from __future__ import annotations

import sys
from typing import Any, Literal, get_args

import pytest

from autotune.advice.bottleneck import bottleneck, bottleneck_of_step, explain
from autotune.knobs.registry import KNOBS
from autotune.records import Bottleneck, MemoryMarks
from tests.report.sample_records import GIB, measurement


def cause_of(
    device: Literal["cuda", "cpu"] = "cuda", limit_bytes: int | None = 141 * GIB, **changes: Any
) -> Bottleneck | None:
    return bottleneck(measurement(**changes), device=device, limit_bytes=limit_bytes)


def test_a_loader_that_is_clearly_slower_is_the_cause_whatever_else_is_seen() -> None:
    assert cause_of(resident_samples_per_second=1500.0, device_lag_share=0.5) == "loader"
    assert cause_of("cpu", resident_samples_per_second=1500.0) == "loader"


@pytest.mark.parametrize(("lag_share", "cause"), [(0.5, "compute"), (0.01, "launch")])
def test_what_holds_the_step_itself_back_is_told_beside_a_loader(lag_share: float, cause: str) -> None:
    slow_loader = measurement(resident_samples_per_second=1500.0, device_lag_share=lag_share)
    assert bottleneck(slow_loader, device="cuda", limit_bytes=None) == "loader"
    assert bottleneck_of_step(slow_loader, device="cuda", limit_bytes=None) == cause


def test_a_loader_within_the_interval_is_not_blamed() -> None:
    wide = {"samples_per_second": 1000.0, "interval": (700.0, 1450.0), "device_lag_share": 0.5}
    assert cause_of(resident_samples_per_second=1500.0, **wide) == "compute"
    unknown = {"interval": (0.0, sys.float_info.max), "device_lag_share": 0.5}
    assert cause_of(resident_samples_per_second=1500.0, **unknown) == "compute"


def test_a_device_that_works_on_after_the_step_is_queued_is_the_limit() -> None:
    assert cause_of(device_lag_share=0.6) == "compute"
    assert cause_of(device_lag_share=0.6, compiled_graphs=2) == "compute"


def test_a_device_that_waits_is_starved_by_launches_or_once_compiled_by_the_host() -> None:
    assert cause_of(device_lag_share=0.01) == "launch"
    assert cause_of(device_lag_share=0.01, compiled_graphs=2) == "host"


def test_a_starved_device_without_room_for_a_larger_batch_lacks_memory() -> None:
    full = MemoryMarks(peak_allocated_bytes=20 * GIB, reserved_bytes=22 * GIB)
    assert cause_of(device_lag_share=0.01, memory=full, limit_bytes=24 * GIB) == "memory"
    assert cause_of(device_lag_share=0.01, memory=full, limit_bytes=80 * GIB) == "launch"
    assert cause_of(device_lag_share=0.01, memory=full, limit_bytes=None) == "launch"
    assert cause_of(device_lag_share=0.6, memory=full, limit_bytes=24 * GIB) == "compute"


def test_an_allocator_that_retries_lacks_memory() -> None:
    thrashing = MemoryMarks(peak_allocated_bytes=20 * GIB, allocator_retries=3)
    assert cause_of(memory=thrashing, device_lag_share=0.6) == "memory"


def test_what_was_not_seen_is_not_guessed() -> None:
    assert cause_of(device_lag_share=None) is None
    assert cause_of(device_lag_share=0.6, resident_samples_per_second=None) == "compute"


def test_on_a_cpu_only_the_shortest_steps_are_the_hosts() -> None:
    assert cause_of("cpu", samples_per_second=1000.0, micro_batch_size=32) == "compute"
    fast: dict[str, Any] = {"samples_per_second": 64e3, "interval": (63e3, 65e3), "resident_samples_per_second": 64e3}
    assert cause_of("cpu", micro_batch_size=32, **fast) == "host"
    assert cause_of("cpu", micro_batch_size=256, **fast) == "compute"


@pytest.mark.parametrize(
    ("cause", "changes", "sentence"),
    [
        (
            "loader",
            {"resident_samples_per_second": 4364.0},
            "the step waits for data: 1,000 (± 1 %) samples/s, 4,364 with batches that lie ready",
        ),
        (
            "compute",
            {"device_lag_share": 0.6},
            "the step is limited by what the device can compute: the device works on for 60 % of it once all is queued",
        ),
        (
            "compute",
            {"resident_samples_per_second": 320.0},
            "the step is limited by the CPU work inside it, of which a micro-batch takes 0.1 s",
        ),
        (
            "launch",
            {"device_lag_share": 0.01},
            "the step is limited by starting many small kernels: the device works on for 1 % of it once all is queued",
        ),
        (
            "host",
            {"resident_samples_per_second": 64_000.0},
            "the step is limited by CPU work: a micro-batch takes 0.5 ms",
        ),
        (
            "memory",
            {"memory": MemoryMarks(peak_allocated_bytes=1, allocator_retries=3)},
            "the step waits for memory: the allocator had to free its cache 3 times",
        ),
        ("memory", {}, "the step is limited by memory, which has no room for a larger batch"),
    ],
)
def test_the_cause_is_told_with_the_figures_that_show_it(
    cause: Bottleneck, changes: dict[str, Any], sentence: str
) -> None:
    assert explain(cause, measurement(**changes), KNOBS, changed=set(), tried=set())[0] == sentence


@pytest.mark.parametrize("cause", get_args(Bottleneck))
def test_the_cures_named_are_the_knobs_that_declare_them(cause: Bottleneck) -> None:
    cures = [knob.name for knob in KNOBS if cause in knob.cures]
    assert cures
    told = explain(cause, measurement(), KNOBS, changed=set(cures), tried=set(cures))
    assert told[1:] == (f"what helps against that: {', '.join(cures)}",)


def test_cures_that_did_not_help_and_those_that_were_not_tried_are_called_that() -> None:
    told = explain("loader", measurement(), KNOBS, changed={"pin_memory"}, tried={"num_workers", "pin_memory"})
    assert told[1:] == (
        "what helps against that: pin_memory",
        "tried against that, without a certain gain: num_workers",
        "what may help against that, and was not tried: prefetch_factor",
    )


def test_a_cause_without_a_cure_says_so() -> None:
    assert (
        explain("loader", measurement(), (), changed=set(), tried=set())[1]
        == "none of the knobs that can be moved here helps against that"
    )
