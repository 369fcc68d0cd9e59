"""The directory in which the processes of a trial make the sockets that multiprocessing hands over tensors by.

Each process would make a directory of its own, at its first tensor, and remove it at its end: one that is killed leaves it.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "pymp-"
"""As multiprocessing names its own."""
_TORCHS_PREFIX = "torch-shm-dir-"
"""As the helpers of torch's name theirs."""


def make_directory() -> str | None:
    """A new one, with a short path as sockets need it; None where none can be made, which only some trials miss."""
    try:
        return tempfile.mkdtemp(prefix=PREFIX)
    except OSError:  # no room, or nowhere to write
        return None


def use_directory(path: str | None) -> None:
    """From now on this process and those that it starts make their sockets there."""
    if path is not None:
        multiprocessing.current_process()._config["tempdir"] = path  # type: ignore[attr-defined]  # where it looks first


def directory_of_manager(pid: int) -> str | None:
    """That of torch's helper of this number, which removes it where it ends by itself; None where it has none."""
    try:
        files = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()}
        lines = Path("/proc/net/unix").read_text().splitlines()[1:]
    except OSError:  # gone
        return None
    bound = [fields for line in lines if len(fields := line.split(None, 7)) == 8 and f"socket:[{fields[6]}]" in files]
    directories = [os.path.dirname(path) for *_, path in bound]
    return next((one for one in directories if os.path.basename(one).startswith(_TORCHS_PREFIX)), None)


def remove_directory(path: str | None) -> None:
    """Once all who used it are dead."""
    if path is not None:
        shutil.rmtree(path, ignore_errors=True)
