"""What a trial prints, kept within bounds: a program that prints its tensors in each step would fill the disk."""

from __future__ import annotations

import os

LARGEST_BYTES = 16 * 2**20
"""More than this is shortened; a program that prints a line in each step stays below."""
KEPT_BYTES = 2**20
"""Of the end, where a crash says what happened."""


def shorten(path: str) -> None:
    """Leaves the end of a file of output that has grown too large, and a line that says so.

    Whoever writes to it, always at its end, may go on meanwhile; what is written in that moment may be lost.
    """
    try:
        size = os.path.getsize(path)
        if size <= LARGEST_BYTES:
            return
        with open(path, "r+b") as stream:
            stream.seek(-KEPT_BYTES, os.SEEK_END)
            end = stream.read(KEPT_BYTES)
            stream.truncate(0)
        told = f"[autotune: {size - KEPT_BYTES:,} bytes of output before this were dropped]\n"
        with open(path, "ab") as stream:
            stream.write(told.encode() + end)
    except OSError:  # the user's program has removed it, or the disk is full: there is nothing to be told
        return
