"""`GpuWatch`: what may have changed the rate of a trial on a GPU, seen by NVML while it ran."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from autotune.nvml import THROTTLE_REASONS, ask, pids_are_meaningful, started, visible_handles
from autotune.quantities import format_bytes, format_share
from autotune.records import GpuFacts

SAMPLES_PER_SECOND = 8.0
NOTABLE_SHARE = 0.05
"""Slowdowns seen in fewer of the samples than this change no rate that matters."""
NOTABLE_BYTES = 64 * 2**20
"""Other processes that hold less than this on a GPU hold a bare handle."""
UNEXPLAINED_BYTES = 2**30
"""A card without processes shows some hundred MiB in use: the driver's own."""
SM_CLOCK = 1
"""NVML_CLOCK_SM."""

SLOWDOWNS = {
    0x20: "heat (thermal slowdown by the driver)",
    0x40: "heat (thermal slowdown by the hardware)",
    0x80: "the power brake (an external signal of the power supply)",
    0x08: "the hardware (heat or power beyond what the driver could hold)",
}
"""Bits of NVML's throttle reasons that make a rate not repeatable. Idle clocks and the power cap belong to a card."""
BY_THE_HARDWARE = 0x08
REASONS_OF_THE_HARDWARE = 0x40 | 0x80
"""Beside which the bit before is set too; these say more."""


def occupied(gpu: GpuFacts) -> str | None:
    """That others use a GPU before anything of ours runs there, in a sentence; None where nobody does."""
    if gpu.used_bytes < NOTABLE_BYTES or (not gpu.processes and gpu.used_bytes < UNEXPLAINED_BYTES):
        return None
    in_use = f"{format_bytes(gpu.used_bytes)} of {format_bytes(gpu.total_bytes)} on GPU {gpu.index} ({gpu.name})"
    if not gpu.processes:
        return (
            f"{in_use} are in use by processes that cannot be seen from here: rates may be theirs to change, and ceilings "
            "are those of what they leave"
        )
    who = "another process" if gpu.processes == 1 else f"{gpu.processes} other processes"
    return (
        f"{who} and the driver hold {in_use}: rates are measured beside them, and ceilings are those of what they leave"
    )


@dataclass
class _Seen:
    """What the samples showed."""

    samples: int = 0
    slow_samples: int = 0
    slowdowns: dict[int, int] = field(default_factory=dict)
    """Bit to the samples that had it."""
    slow_clocks: list[int] = field(default_factory=list)
    clocks: list[int] = field(default_factory=list)
    others: dict[int, int] = field(default_factory=dict)
    """Process to the most that it held, in bytes."""


class GpuWatch:
    """Watches a GPU while a trial runs, from a thread of this process: `with GpuWatch() as watch: ...; watch.notes()`.

    Does nothing where NVML is absent. Enter it before the trial begins: in a container, where process numbers do not
    match, only processes that were there from the beginning are known to be others.
    """

    def __init__(self, index: int = 0, *, nvml: Any = None, samples_per_second: float = SAMPLES_PER_SECOND) -> None:
        self._index = index
        self._nvml: Any = started(nvml)
        self._handle: Any = None
        self._interval_seconds = 1 / samples_per_second
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="autotune-gpu-watch", daemon=True)
        self._there_before: set[int] = set()
        self._ours: set[int] = set()
        """Also those that have ended, which the driver may still list while it takes their memory back."""
        self._seen = _Seen()

    def __enter__(self) -> Self:
        if self._nvml is not None:
            handles = visible_handles(self._nvml, [])
            self._handle = handles[self._index] if self._index < len(handles) else None
        if self._handle is not None:
            self._there_before = {process.pid for process in self._processes()}
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def restart(self) -> None:
        """Forgets what was seen: what is timed begins only now."""
        self._seen = _Seen()

    def slow_share(self) -> float:
        """The share of the time in which the GPU was slowed down by heat or by the hardware; 0 where that is unknown."""
        seen = self._seen
        return seen.slow_samples / seen.samples if seen.samples else 0.0

    def slowed_down(self) -> bool:
        """Whether it was slowed down for long enough to change a rate."""
        return self.slow_share() > NOTABLE_SHARE

    def notes(self) -> tuple[str, ...]:
        """What may have changed the rates, one sentence each; empty where nothing did or nothing could be seen."""
        seen = self._seen
        found = []
        for bit, reason in SLOWDOWNS.items():
            share = seen.slowdowns.get(bit, 0) / max(1, seen.samples)
            if share > NOTABLE_SHARE:
                lasting = f"in {format_share(share)} of the time{_fall(seen)}"
                found.append(f"GPU {self._index} was slowed down by {reason} {lasting}")
        for pid, used_bytes in sorted(seen.others.items()):
            found.append(f"another process ({pid}) held {format_bytes(used_bytes)} on GPU {self._index}")
        return tuple(found)

    def _run(self) -> None:
        while True:
            self._sample(self._seen)
            if self._stop.wait(self._interval_seconds):
                return

    def _sample(self, seen: _Seen) -> None:
        reasons = int(ask(self._nvml, THROTTLE_REASONS, self._handle) or 0)
        clock = ask(self._nvml, "nvmlDeviceGetClockInfo", self._handle, SM_CLOCK)
        slow = [bit for bit in SLOWDOWNS if reasons & bit]
        if BY_THE_HARDWARE in slow and reasons & REASONS_OF_THE_HARDWARE:
            slow.remove(BY_THE_HARDWARE)
        seen.samples += 1
        seen.slow_samples += bool(slow)
        for bit in slow:
            seen.slowdowns[bit] = seen.slowdowns.get(bit, 0) + 1
        if clock is not None:
            (seen.slow_clocks if slow else seen.clocks).append(int(clock))
        for process in self._processes():
            used_bytes = process.usedGpuMemory or 0
            if used_bytes >= NOTABLE_BYTES and self._is_foreign(process.pid):
                seen.others[process.pid] = max(used_bytes, seen.others.get(process.pid, 0))

    def _processes(self) -> list[Any]:
        return list(ask(self._nvml, "nvmlDeviceGetComputeRunningProcesses", self._handle) or [])

    def _is_foreign(self, pid: int) -> bool:
        if not pids_are_meaningful():
            return pid in self._there_before
        if _descends_from(pid, os.getpid()):
            self._ours.add(pid)
        return pid not in self._ours


def _fall(seen: _Seen) -> str:
    """How far the clock fell, where that was seen."""
    if not seen.slow_clocks:
        return ""
    lowest, usual = min(seen.slow_clocks), max(seen.clocks, default=0)
    return f", its clock down to {lowest} from {usual} MHz" if lowest < usual else f", its clock at {lowest} MHz"


def _descends_from(pid: int, ancestor: int) -> bool:
    while pid > 1:
        if pid == ancestor:
            return True
        try:
            # The name in parentheses may hold anything; after it come the state and the parent.
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            return False
    return False
