"""What disturbs a GPU while something is measured on it is seen and said."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from autotune import gpu_watch
from autotune.gpu_watch import GpuWatch, occupied
from autotune.records import GpuFacts
from tests.invented_nvml import GIB, MIB, Card, Nvml, Used


@pytest.fixture(autouse=True)
def _all_devices_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


# --- before anything runs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("used_bytes", "processes", "sentence"),
    [
        (0, 0, None),
        (600 * MIB, 0, None),
        (600 * MIB, None, None),
        (2 * MIB, 1, None),
        (600 * MIB, 1, "another process and the driver hold 600 MiB of 141 GiB on GPU 0 (NVIDIA H200)"),
        (30 * GIB, 2, "2 other processes and the driver hold 30.0 GiB of 141 GiB on GPU 0 (NVIDIA H200)"),
        (
            30 * GIB,
            0,
            "30.0 GiB of 141 GiB on GPU 0 (NVIDIA H200) are in use by processes that cannot be seen from here",
        ),
        (30 * GIB, None, "30.0 GiB of 141 GiB on GPU 0 (NVIDIA H200) are in use by processes that cannot be seen from"),
    ],
)
def test_who_else_uses_the_gpu_is_said_with_how_much(
    used_bytes: int, processes: int | None, sentence: str | None
) -> None:
    told = occupied(
        GpuFacts(
            index=0, name="NVIDIA H200", uuid="GPU-1", total_bytes=141 * GIB, used_bytes=used_bytes,
            compute_capability=(9, 0), processes=processes,
        )
    )  # fmt: skip
    assert (told is None) == (sentence is None)
    assert told is None or (sentence is not None and told.startswith(sentence))


# --- while a trial runs -----------------------------------------------------------------------------------------------


def watched(card: Card, *later: dict[str, Any]) -> tuple[str, ...]:
    """Notes of a watch during which the card changes, each state seen in at least three samples."""
    nvml: Any = Nvml(card)
    samples = threading.Semaphore(0)
    original = nvml.nvmlDeviceGetClockInfo

    def count(*arguments: Any) -> Any:
        samples.release()
        return original(*arguments)

    nvml.nvmlDeviceGetClockInfo = count
    with GpuWatch(nvml=nvml, samples_per_second=500) as watch:
        for change in ({}, *later):
            for name, value in change.items():
                setattr(card, name, value)
            for _ in range(4):
                assert samples.acquire(timeout=300)
    return watch.notes()


def test_a_quiet_card_is_not_worth_a_note() -> None:
    power_cap = 0x4
    assert watched(Card(), {"reasons": power_cap, "clock": 1500}) == ()


@pytest.mark.parametrize(
    ("reason", "words"),
    [(0x20, "thermal slowdown by the driver"), (0x40, "thermal slowdown by the hardware"),
     (0x80, "power brake"), (0x8, "by the hardware")],
)  # fmt: skip
def test_slowdowns_are_told_with_their_share_and_the_clock(reason: int, words: str) -> None:
    (note,) = watched(Card(), {"reasons": reason, "clock": 1200})
    assert words in note
    assert " % of the time" in note
    assert note.endswith("its clock down to 1200 from 1980 MHz")


@pytest.mark.parametrize("same_numbers", [True, False])
def test_other_processes_are_told_and_our_own_are_not(monkeypatch: pytest.MonkeyPatch, same_numbers: bool) -> None:
    monkeypatch.setattr(gpu_watch, "pids_are_meaningful", lambda: same_numbers)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(6000)"])
    try:
        handle_only = Used(2, 10 * MIB)
        stranger = Used(1, 700 * MIB)
        ours = Used(child.pid, 900 * MIB)
        notes = watched(Card(processes=[stranger, handle_only]), {"processes": [stranger, handle_only, ours]})
        assert notes == ("another process (1) held 700 MiB on GPU 0",)
    finally:
        child.kill()
        child.wait()


def test_our_own_process_that_is_listed_after_its_end_is_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_watch, "pids_are_meaningful", lambda: True)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(6000)"])
    card = Card(processes=[Used(child.pid, 900 * MIB)])
    nvml: Any = Nvml(card)
    with GpuWatch(nvml=nvml, samples_per_second=0.01) as watch:
        watch._sample(watch._seen)
        child.kill()
        child.wait()
        watch._sample(watch._seen)
    assert watch.notes() == ()


def test_a_card_that_tells_nothing_is_watched_in_vain() -> None:
    refused = {"nvmlDeviceGetCurrentClocksThrottleReasons", "nvmlDeviceGetComputeRunningProcesses"}
    assert watched(Card(refused=frozenset(refused))) == ()


@pytest.mark.parametrize("nvml", [Nvml(absent=True), Nvml()])
def test_without_a_gpu_the_watch_does_nothing(nvml: Nvml) -> None:
    threads = threading.active_count()
    with GpuWatch(nvml=nvml) as watch:
        assert threading.active_count() == threads
    assert watch.notes() == ()


def test_the_watch_ends_with_its_block_and_soon() -> None:
    threads = threading.active_count()
    began = time.monotonic()
    with GpuWatch(nvml=Nvml(Card()), samples_per_second=0.01):
        assert threading.active_count() == threads + 1
    assert threading.active_count() == threads
    assert time.monotonic() - began < 60, "it waited for the next sample"


def test_a_reason_of_the_hardware_is_told_once() -> None:
    (note,) = watched(Card(), {"reasons": 0x48, "clock": 1200})
    assert "thermal slowdown by the hardware" in note


def test_what_came_before_the_timed_part_does_not_count() -> None:
    card = Card(reasons=0x40, clock=1200)
    with GpuWatch(nvml=Nvml(card), samples_per_second=500) as watch:
        while not watch.slowed_down():
            time.sleep(0.001)
        card.reasons = 0
        before = watch._seen.samples
        while watch._seen.samples < before + 2:  # the one that is being taken may have seen what was
            time.sleep(0.001)
        watch.restart()
        while watch.slow_share() == 0 and watch._seen.samples < 5:
            time.sleep(0.001)
    assert (watch.notes(), watch.slow_share()) == ((), 0.0)


def test_a_card_that_was_slow_all_the_time_has_no_clock_to_compare_with() -> None:
    (note,) = watched(Card(reasons=0x40, clock=1200))
    assert note.endswith("in 100 % of the time, its clock at 1200 MHz")
