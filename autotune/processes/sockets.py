"""The directory in which the processes of a trial make the sockets that multiprocessing hands over tensors by.

Each process would make a directory of its own, at its first tensor, and remove it at its end: one that is killed leaves it.
"""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile

PREFIX = "pymp-"
"""As multiprocessing names its own."""


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


def remove_directory(path: str | None) -> None:
    """Once all who used it are dead."""
    if path is not None:
        shutil.rmtree(path, ignore_errors=True)
