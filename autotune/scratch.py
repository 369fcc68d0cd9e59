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
CLAIM = b"autotune removes this directory when no command uses it any more\n"
"""What the mark says: somebody else's directory may have such names, and nothing else tells it from one of ours."""


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
    with unlocked.open("wb", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            file.write(CLAIM)
            unlocked.rename(directory / MARK)  # never seen without its lock and its claim
        except OSError:  # the disk is full: without a mark nobody would ever remove it
            shutil.rmtree(directory, ignore_errors=True)
            raise
        yield


def _remove_abandoned(parent: Path) -> None:
    """Removes directories of ours whose process was killed; those of other users and those in use are left alone."""
    for mark in parent.glob(f"{PREFIX}*/{MARK}"):
        with suppress(OSError):  # it went away meanwhile, or is not ours to touch
            if mark.parent.is_symlink() or mark.parent.stat().st_uid != os.getuid():
                continue
            # No link is followed, and no pipe waited for.
            with open(os.open(mark, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                unlinked = os.fstat(file.fileno()).st_nlink == 0  # its process let the directory stay meanwhile
                if not unlinked and file.read(len(CLAIM) + 1) == CLAIM:
                    shutil.rmtree(mark.parent)
