"""What the machine that the tests run on has no say in, and what all of them share."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
from collections.abc import Iterator

import pytest

# Of a thread that has nothing to do while it waits for another: it sleeps. By default it keeps its core busy, which on a
# machine that others use as well, another of pytest's workers for one, makes small parallel operations take many times as
# long. Here, since it is read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Continuous integration often has no terminal, and asks for what one would show.
for name in ("COLUMNS", "LINES", "FORCE_COLOR", "CLICOLOR_FORCE", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
    os.environ.pop(name, None)

# A shell without job control starts what runs in its background deaf to Ctrl-C, and what that starts inherits it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

LONGEST = (
    "test_api.py", "test_end_to_end.py", "test_verify.py", "test_search.py", "test_start_methods.py",
    "test_interrupting_fit.py", "test_interruptions.py", "test_arithmetic.py",
)  # fmt: skip
"""Files that begin before the others, so that in the end no worker waits for another's long one."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Nothing of what is imported and collected is garbage, and looking for some takes a fifth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)


@pytest.fixture(autouse=True, scope="module")
def _nothing_of_other_modules() -> None:
    """What earlier modules left is collected, so that their open files are closed; what lives is looked through no more.

    Of that there are a million objects, torch's compiler and all tests among them, and `gc.collect()`, which a parity
    check calls before each run of its reference, would take a fifth of a second instead of some milliseconds.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _same_numbers_in_any_order() -> None:
    """What a test draws at random does not depend on which tests ran before it in the same process."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
