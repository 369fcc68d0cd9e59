"""`CoreWaits`: how long a training stood still because other work had the cores of the machine."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

NANOSECOND = 1e-9


class CoreWaits:
    """What threads of this process, and of its loader's workers, waited for a core while they could have run."""

    def __init__(self) -> None:
        self._before = _waited()

    def since_last(self) -> float:
        """Seconds of the thread that waited most since the last call; 0 where the kernel does not tell."""
        before, self._before = self._before, _waited()
        return max((seconds - before.get(thread, 0.0) for thread, seconds in self._before.items()), default=0.0)


def _waited() -> dict[str, float]:
    """By thread, as its place in /proc: the seconds since its start in which it waited in a run queue (the second number of
    `schedstat`)."""
    workers = [worker.pid for worker in multiprocessing.active_children()]
    found = {}
    for pid in filter(None, [os.getpid(), *workers]):
        for thread in Path(f"/proc/{pid}/task").glob("*"):
            try:
                found[str(thread)] = int((thread / "schedstat").read_text().split()[1]) * NANOSECOND
            except (OSError, IndexError):  # it has ended meanwhile, or the kernel was built without
                continue
    return found
