"""`TrialFailure`: how measuring code ends a trial with a failure that it has already named."""

from __future__ import annotations

from autotune.records import FailureKind


class TrialFailure(Exception):  # noqa: N818  # named for the record that becomes of it
    """Ends a trial with a failure of this kind; the phase is added by whoever catches it.

    `message` is one sentence: what happened, with which value, what to change. `detail` holds further lines, such as
    the user's own frames; left empty, it is taken from the exception that caused this one.
    """

    def __init__(self, kind: FailureKind, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.kind: FailureKind = kind
        self.message = message
        self.detail = detail
