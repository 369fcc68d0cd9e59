"""`interrupts_kept`: a Ctrl-C that Python would drop comes a moment later."""

from __future__ import annotations

import _thread
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

_LATER_SECONDS = 0.02


@contextmanager
def interrupts_kept() -> Iterator[None]:
    """Within it, KeyboardInterrupt is raised again where it came while Python ran something that cannot raise.

    That is a weak reference's callback or a `__del__`, of which libraries run many: Python prints the exception and goes
    on, and a search that was told to end would not.
    """
    before = sys.unraisablehook

    def hook(unraisable: UnraisableHookArgs) -> None:
        if isinstance(unraisable.exc_value, KeyboardInterrupt):
            # from another thread, since in this one it would come within the hook, which cannot raise either
            threading.Timer(_LATER_SECONDS, _thread.interrupt_main).start()
        else:
            before(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before
