"""The user's own part of a traceback: no frame of autotune, torch, the standard library or any installed package.

Nor of what torch.compile has written, which no user has seen: inductor runs code from files in its cache.
"""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from dataclasses import dataclass
from pathlib import Path

_PACKAGE = str(Path(__file__).resolve().parent.parent)
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]
_FRAME_LINE = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+), in (?P<function>.*)$')
_WORKER_TRACEBACK = "Original Traceback (most recent call last):"


@dataclass(frozen=True)
class Origin:
    """Where an exception came from, as far as the user is concerned."""

    type_name: str
    message: str
    """Without the traceback that torch puts into the text of a loader worker's exception."""
    frames: str
    """The user's own frames, outermost first, in the form of a traceback; may be empty."""
    where: str
    """`file.py:12 in function` of their innermost frame; may be empty."""
    in_worker: bool
    """It was raised in a loader worker and came wrapped."""

    @property
    def detail(self) -> str:
        """The frames and the exception's own line."""
        heading = "Traceback (the user's own frames):\n" if self.frames else ""
        return f"{heading}{self.frames}{self.type_name}{f': {self.message}' if self.message else ''}".rstrip()


def origin_of(error: BaseException) -> Origin:
    """Reads the exception and its traceback; an exception from a loader worker is unwrapped."""
    text = text_of(error)
    if _WORKER_TRACEBACK in text:
        return _origin_in_worker(text)
    if isinstance(error, SyntaxError):
        return _origin_of_syntax_error(error)
    summary = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in summary if is_own(frame.filename)]
    where = f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}" if own else ""
    return Origin(type(error).__name__, text, "".join(traceback.format_list(own)), where, False)


def is_own(filename: str) -> bool:
    """Whether a source file is the user's: not autotune's, torch's, Python's, torch.compile's, or installed."""
    if filename.startswith("<frozen") or filename == "<string>":  # the latter is the line that starts our interpreters
        return False
    if filename.startswith("<eval_with_key>"):  # what torch.fx has written
        return False
    parts = Path(filename).parts
    if "site-packages" in parts or "dist-packages" in parts:
        return False
    if any(part.startswith("torchinductor_") for part in parts):
        return False
    return not any(
        filename.startswith(f"{directory}/") for directory in (_PACKAGE, _STANDARD_LIBRARY, *_inductor_cache())
    )


def _inductor_cache() -> tuple[str, ...]:
    # by default it is torchinductor_USER in the directory for temporary files
    given = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "").rstrip("/")
    return (given,) if given else ()


def text_of(error: BaseException) -> str:
    """What the exception says, whatever its class makes of that."""
    try:
        return _said_by(error)
    except Exception as failed:  # a __str__ of the user's that does not work
        return f"(its text cannot be shown: str() raises {type(failed).__name__})"


def _said_by(error: BaseException) -> str:
    if isinstance(error, KeyError) and error.args:
        # KeyError shows the repr of its argument; torch wraps a worker's text in a class whose repr is the text
        return str(error.args[0]) if _WORKER_TRACEBACK in str(error.args[0]) else repr(error.args[0])
    return str(error)


def _origin_of_syntax_error(error: SyntaxError) -> Origin:
    # the file that does not parse has no frame; format_exception_only shows its line
    lines = traceback.format_exception_only(error)
    where = f"{error.filename}:{error.lineno}" if error.filename else ""
    return Origin(type(error).__name__, str(error.msg), "".join(lines[:-1]), where, False)


def _origin_in_worker(text: str) -> Origin:
    lines = text[text.rindex(_WORKER_TRACEBACK) :].splitlines()[1:]
    frame_numbers = [number for number, line in enumerate(lines) if _FRAME_LINE.match(line)]
    ending = frame_numbers[-1] + 1 if frame_numbers else 0
    while ending < len(lines) and lines[ending].startswith("  "):  # the source line and what is marked in it
        ending += 1
    kept: list[str] = []
    where = ""
    own = False
    for line in lines[:ending]:
        frame = _FRAME_LINE.match(line)
        if frame is not None:
            own = is_own(frame["file"])
            where = f"{frame['file']}:{frame['line']} in {frame['function']}" if own else where
        if own and line.startswith("  "):
            kept.append(line + "\n")
    type_name, _, message = "\n".join(lines[ending:]).strip().partition(": ")
    return Origin(type_name.rpartition(".")[2], message, "".join(kept), where, True)
