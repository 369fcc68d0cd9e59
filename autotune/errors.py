"""The ways in which a search ends without a plain answer, each an exception of its own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autotune.result import TuningResult


class UserError(ValueError):
    """What was asked, or the user's code, is at fault; the text says in one sentence what to change.

    `detail` holds the user's own frames of a traceback, where their code raised.
    """

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail


class WorkloadError(UserError):
    """The user's functions are missing, cannot be loaded or sent, or return something else than they must."""


class NoAnswerError(RuntimeError):
    """The search ended without an answer, and not through the user's fault; the text says why.

    `detail` holds what a person would look at next, such as the end of a trial's output.
    """

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail


class SearchInterrupted(KeyboardInterrupt):
    """Ctrl-C during a search. Its text says what is left of it, as a notebook shows it below the cell.

    `result` is the best so far, already saved as `saved_as`; None where the baseline had not ended.
    """

    def __init__(self, result: TuningResult | None, saved_as: Path | None = None) -> None:
        kept = "nothing new was measured"
        if result is not None:
            kept = f'the best so far is in `.result` of this exception, and kept: autotune.load("{saved_as}")'
        super().__init__(f"the search was interrupted; {kept}. The same call goes on where this one stopped")
        self.result = result
