"""A directory for what leaves no study. Removed at its end; after a SIGKILL, by the next command that needs one."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from autotune.errors import UserError
from autotune.options import SearchOptions

PREFIX = "autotune-"
MARK = "in-use"
"""A file that is locked as long as its directory is used. A directory that shall stay has none."""


@contextmanager
def scratch(options: SearchOptions) -> Iterator[SearchOptions]:
    """The options with a directory of their own, which stays where an error names a file in it."""
    try:
        directory = Path(tempfile.mkdtemp(prefix=PREFIX))
    except FileNotFoundError as error:  # it tries several, and says which
        raise UserError(f"{error.strerror}: make room in one of them, or set TMPDIR to another") from None
    _remove_abandoned(directory.parent)
    with _marked(directory):
        try:
            yield dataclasses.replace(options, study=directory)
        except Exception as error:
            if directory.name in f"{error} {getattr(error, 'detail', '')}":
                (directory / MARK).unlink(missing_ok=True)
            else:
                shutil.rmtree(directory, ignore_errors=True)
            raise
        except KeyboardInterrupt:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _marked(directory: Path) -> Iterator[None]:
    """Locks the mark, which the operating system unlocks when this process is gone, whatever ended it."""
    unlocked = directory / f"{MARK}.new"
    with unlocked.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        unlocked.rename(directory / MARK)  # never seen without its lock
        yield


def _remove_abandoned(parent: Path) -> None:
    """Removes directories of ours whose process was killed; those of other users and those in use are left alone."""
    for mark in parent.glob(f"{PREFIX}*/{MARK}"):
        with suppress(OSError):  # it went away meanwhile, or is not ours to touch
            if mark.parent.is_symlink() or mark.parent.stat().st_uid != os.getuid():
                continue
            with mark.open() as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(mark.parent)
