"""`CoreWaits`: how long a training stood still because other work had the cores of the machine."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

NANOSECOND = 1e-9
IDLE = (3, 4)
"""Of the numbers behind `cpu` in /proc/stat, those of time that nobody used: idle, and waiting for a disk."""
OF_THE_MACHINE = 8
"""So many of them are there; the others are of guests, and in the first ones already."""


class CoreWaits:
    """What threads of this process, and of its loader's workers, waited for a core that other work had."""

    def __init__(self) -> None:
        self._before = _threads()
        self._used_before = _used_by_all()

    def since_last(self) -> float:
        """Seconds of the thread that waited most since the last call, as far as other work used the cores for so long: more
        threads than cores wait for each other. 0 where the kernel does not tell."""
        before, self._before = self._before, _threads()
        used_before, self._used_before = self._used_before, _used_by_all()
        spent = [
            (ran - before.get(thread, (0.0, 0.0))[0], waited - before.get(thread, (0.0, 0.0))[1])
            for thread, (ran, waited) in self._before.items()
        ]
        longest = max((waited for _, waited in spent), default=0.0)
        used_by_others = self._used_before - used_before - sum(ran for ran, _ in spent)
        return max(0.0, min(longest, used_by_others))


def _threads() -> dict[str, tuple[float, float]]:
    """By thread, as its place in /proc: the seconds since its start in which it ran, and in which it waited in a run queue
    (the first two numbers of `schedstat`)."""
    workers = [worker.pid for worker in multiprocessing.active_children()]
    found = {}
    for pid in filter(None, [os.getpid(), *workers]):
        for thread in Path(f"/proc/{pid}/task").glob("*"):
            try:
                ran, waited = (thread / "schedstat").read_text().split()[:2]
            except (OSError, ValueError):  # it has ended meanwhile, or the kernel was built without
                continue
            found[str(thread)] = int(ran) * NANOSECOND, int(waited) * NANOSECOND
    return found


def _used_by_all() -> float:
    """Seconds of all cores that anybody had, since the machine started."""
    try:
        numbers = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1 : 1 + OF_THE_MACHINE]
    except OSError:
        return 0.0
    ticks = sum(int(number) for place, number in enumerate(numbers) if place not in IDLE)
    return ticks / os.sysconf("SC_CLK_TCK")
