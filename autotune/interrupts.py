"""When a Ctrl-C comes: `interrupts_kept` loses none, `interrupts_held` puts it off until something is written."""

from __future__ import annotations

import _thread
import signal
import sys
import threading
import time
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
        if not isinstance(unraisable.exc_value, KeyboardInterrupt):
            before(unraisable)
            return
        while True:
            try:
                # from another thread, since in this one it would come within the hook, which cannot raise either; without
                # `threading`, which would wait here for the thread to begin
                _thread.start_new_thread(_interrupt_main_thread, (_LATER_SECONDS,))
                return
            except KeyboardInterrupt:  # this thread was kept from leaving the hook for so long: once more
                continue

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


def _interrupt_main_thread(later_seconds: float) -> None:
    """With a real signal: `_thread.interrupt_main` leaves the thread in what it waits for, for minutes perhaps."""
    time.sleep(later_seconds)
    if callable(signal.getsignal(signal.SIGINT)):  # or it would end the program without a word
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Within it, what would interrupt the program waits for the end; for what must not stay half done, and is short.

    Libraries do not bear KeyboardInterrupt everywhere: a database stays locked where it came in the wrong moment.
    """
    came: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    in_main_thread = threading.current_thread() is threading.main_thread()  # no other is interrupted
    handlers = {number: signal.getsignal(number) for number in numbers} if in_main_thread else {}
    held = {number: handler for number, handler in handlers.items() if callable(handler)}
    try:
        for number in held:
            signal.signal(number, lambda number, frame: came.append(number))
        yield
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])
