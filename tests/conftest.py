"""What the machine that the tests run on has no say in."""

from __future__ import annotations

import os

# Of a thread that has nothing to do while it waits for another: it sleeps. By default it keeps its core busy, which on a
# machine that others use as well, another of pytest's workers for one, makes small parallel operations take many times as
# long. Here, since it is read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Continuous integration often has no terminal, and asks for what one would show.
for name in ("COLUMNS", "LINES", "FORCE_COLOR", "CLICOLOR_FORCE", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
    os.environ.pop(name, None)
