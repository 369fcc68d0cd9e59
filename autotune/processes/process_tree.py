"""Which processes descend from a given one, read from /proc."""

from __future__ import annotations

import os
import resource
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_EXEC_SECONDS = 1.0
"""For a process to become another program, whose first pages may have to come from a slow disk."""


@dataclass(frozen=True)
class ProcessId:
    """A process; the start time tells it from a later one with the same number."""

    pid: int
    start_ticks: int


def descendants(root: int, *, except_below: frozenset[ProcessId] = frozenset()) -> list[ProcessId]:
    """Every process below `root`, zombies included, but for those in or below `except_below`."""
    children: dict[int, list[ProcessId]] = defaultdict(list)
    for process, parent in _processes():
        children[parent].append(process)
    found: list[ProcessId] = []
    waiting = [root]
    while waiting:
        for process in children[waiting.pop()]:
            if process not in except_below:
                found.append(process)
                waiting.append(process.pid)
    return found


def carrying(variable: str, value: str) -> list[int]:
    """Processes that were started with this environment variable, or forked from one that was."""
    wanted = f"{variable}={value}".encode()
    return [pid for pid in _pids() if wanted in _environment(pid).split(b"\0")]


def _environment(pid: int) -> bytes:
    """Of a process, empty where it cannot be read; one that becomes another program is looked at when it has.

    For as long as that takes its environment reads as empty, and so does its command line, which of no other program do.
    """
    environment = Path(f"/proc/{pid}/environ")
    deadline = time.monotonic() + _EXEC_SECONDS
    try:
        while not (variables := environment.read_bytes()) and time.monotonic() < deadline:
            os.readlink(f"/proc/{pid}/exe")  # which a thread of the kernel has not, nor what has ended
            if Path(f"/proc/{pid}/cmdline").read_bytes():
                return environment.read_bytes()  # it may have become the other one since it was read
            time.sleep(0.001)
        return variables
    except OSError:  # gone, or another user's
        return b""


def exhausted_files_limit(pid: int) -> int | None:
    """The limit of open files of a process that has (nearly) reached it; None otherwise."""
    try:
        limit = resource.prlimit(pid, resource.RLIMIT_NOFILE)[0]
        count = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:  # gone
        return None
    # handing over one tensor takes a few descriptors at once, which are given back when it fails
    return limit if limit != resource.RLIM_INFINITY and count >= limit - 4 else None


def is_resource_tracker(pid: int) -> bool:
    """Whether it is Python's own helper that removes named semaphores and shared memory of dead processes."""
    return b"multiprocessing.resource_tracker" in _command(pid)


def is_torchs_manager(pid: int) -> bool:
    """Whether it is torch's helper that removes shared memory of dead processes, and ends two seconds after the last."""
    return b"torch_shm_manager" in _command(pid)


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # gone
        return b""


def _processes() -> Iterator[tuple[ProcessId, int]]:
    for pid in _pids():
        try:
            text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        except OSError:  # gone
            continue
        fields = text[text.rindex(")") + 2 :].split()  # the name before it may hold anything
        yield ProcessId(pid, int(fields[19])), int(fields[1])


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())
