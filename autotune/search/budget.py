"""The time and the trials that a search may still spend."""

from __future__ import annotations

import time
from collections.abc import Callable


class Budget:
    """Seconds of wall clock from now, and a number of trials. `reserved_seconds` is kept for the confirmation, and
    `least_reserved_seconds` of it also before what is sure to gain much."""

    def __init__(self, seconds: float, trials: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start = clock()
        self.seconds = seconds
        self.trials_left = trials
        self.reserved_seconds = self.least_reserved_seconds = 0.0
        self.searched_seconds = seconds
        """What starting and the baseline leave of it: of that a share is kept for the confirmation."""

    def elapsed(self) -> float:
        """Seconds since the search began."""
        return self._clock() - self._start

    def left(self) -> float:
        """Seconds until the end; negative when overrun."""
        return self.seconds - self.elapsed()

    def allows(self, seconds: float, *, gains_much: bool = False) -> bool:
        """Whether a trial of so many seconds still fits before the reserve, and one more trial is allowed."""
        reserved = self.least_reserved_seconds if gains_much else self.reserved_seconds
        return (self.trials_left is None or self.trials_left > 0) and self.left() - reserved > seconds

    def spend_trial(self) -> None:
        """One trial of the search proper was run; re-measurements are not counted."""
        if self.trials_left is not None:
            self.trials_left -= 1
