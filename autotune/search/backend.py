"""`TrialBackend`: whatever can run a trial, seen from the search."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from autotune.records import Phase, TrialAnswer, TrialRequest


class TrialBackend(Protocol):
    """Runs one trial at a time."""

    def run(self, request: TrialRequest, on_phase: Callable[[Phase], None] | None = None) -> TrialAnswer:
        """The trial's answer; what goes wrong inside the trial is in `TrialAnswer.failure`, never raised.

        `on_phase` is called in the caller's thread whenever the trial enters a phase.
        """
        ...

    def close(self) -> None:
        """Ends every process; harmless when called twice."""
        ...
