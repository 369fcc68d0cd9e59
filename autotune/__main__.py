"""Where the command begins: from here on Ctrl-C ends it with one line, also while Python is still importing the rest."""

from __future__ import annotations

# Of what these bring along, each would be a time in which Ctrl-C is not heard.
import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType

INTERRUPTED = 130


def main() -> int:
    """The console script. Returns the exit code, as `autotune.cli.main` does."""
    # Not where it is ignored, as in a background job.
    heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if heard:
        signal.signal(signal.SIGINT, _leave)
    from autotune.cli import main as run

    try:
        if heard:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return run()
    except KeyboardInterrupt:  # before the command was read, or after its end
        _say()
        return INTERRUPTED


def _leave(number: int, frame: FrameType | None) -> None:
    """Nothing was begun yet that would have to be ended."""
    _say()
    os._exit(INTERRUPTED)


def _say() -> None:
    try:  # noqa: SIM105 - contextlib takes as long to import as all of the above
        os.write(2, b"autotune: interrupted\n")
    except OSError:  # stderr may be closed
        pass


if __name__ == "__main__":
    sys.exit(main())
