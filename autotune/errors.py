"""The ways in which a search ends without a plain answer, each an exception of its own."""

from __future__ import annotations

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
    """Ctrl-C during a search.

    `result` is the best so far, already saved in the study; None where the baseline had not ended.
    """

    def __init__(self, result: TuningResult | None) -> None:
        super().__init__()
        self.result = result
