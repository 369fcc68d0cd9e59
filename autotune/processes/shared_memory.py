"""Files in /dev/shm that killed processes can no longer remove."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_DIRECTORY = Path("/dev/shm")
_COARSEST_CLOCK_SECONDS = 0.1
"""Times of files are those of the kernel's last tick."""


def remove_left_by(pids: Iterable[int], since: float) -> None:
    """Removes the tensors that these processes, all of them dead, have left since that time (seconds since the epoch).

    torch puts its process's number into the name. The time tells them from those of an unrelated process in another
    container, which may have the same number and see the same /dev/shm.
    """
    for pid in pids:
        for path in _DIRECTORY.glob(f"torch_{pid}_*"):
            try:
                state = path.stat()
                if state.st_uid == os.geteuid() and state.st_mtime >= since - _COARSEST_CLOCK_SECONDS:
                    path.unlink()
            except OSError:  # its last user has just removed it
                continue
