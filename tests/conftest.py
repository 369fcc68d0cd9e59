"""What the machine that the tests run on has no say in."""

from __future__ import annotations

import gc
import os

import pytest

# Of a thread that has nothing to do while it waits for another: it sleeps. By default it keeps its core busy, which on a
# machine that others use as well, another of pytest's workers for one, makes small parallel operations take many times as
# long. Here, since it is read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Continuous integration often has no terminal, and asks for what one would show.
for name in ("COLUMNS", "LINES", "FORCE_COLOR", "CLICOLOR_FORCE", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
    os.environ.pop(name, None)


@pytest.fixture(autouse=True, scope="module")
def _nothing_of_other_modules() -> None:
    """What earlier modules left is collected, so that their open files are closed; what lives is looked through no more.

    Of that there are a million objects, torch's compiler and all tests among them, and `gc.collect()`, which a parity
    check calls before each run of its reference, would take a fifth of a second instead of some milliseconds.
    """
    gc.collect()
    gc.freeze()
