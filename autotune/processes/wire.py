"""What the orchestrator, the server and a trial process say to each other, and how it travels."""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import socket
import stat
import struct
from dataclasses import dataclass
from typing import Any, Literal

from autotune.records import Phase, TrialAnswer, TrialRequest
from autotune.workload import Workload

StartMethod = Literal["fork", "fresh"]

ENTRY = "autotune.measurement.phases:answer"
"""What a trial process calls, as `module:function`, with (request, functions, phase)."""

MARKER_VARIABLE = "AUTOTUNE_SERVER"
"""Set for a server to a name of its own, so that every process it leaves behind can be found."""

DISK_FULL_STATUS = 74
"""With which a trial ends that could not write its answer down (EX_IOERR of sysexits)."""

CHANNEL_CLOSED_STATUS = 76
"""With which the server ends where the user's module has closed its connection (EX_PROTOCOL of sysexits)."""

SHOW_WHERE_SIGNAL = signal.SIGUSR2
"""On which the server and a trial print where they are, even while they are stuck in native code."""

_LONGEST_WAIT_MILLISECONDS = 2**31 - 1  # what poll() takes: 24 days
_HEADER = struct.Struct(">Q")


# --- orchestrator to server -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hello:
    """The first message: what to prepare."""

    workload: Workload
    start_method: StartMethod
    entry: str
    silence_seconds: float
    """How long the fork that is tried out before the first trial may take."""


@dataclass(frozen=True)
class StartTrial:
    """Run this. At most one trial is there at a time."""

    request: TrialRequest
    output_path: str
    result_path: str
    warm_compiler: bool
    """Import the compiler before, once for all forks; not before a look at the program, with which a search begins."""


@dataclass(frozen=True)
class EndTrial:
    """Kill whatever is left of the trial, and say when it is gone."""

    warm_compiler: bool
    """Import the compiler after that, if it is not yet."""
    show_where: bool
    """Have it first print where it is, since it hangs."""


# --- server to orchestrator -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ready:
    """Trials can start; `fork_problem` says why they cannot be forked, where that is so."""

    fork_problem: str | None
    started_threads: bool
    """Importing the user's module left threads, which no fork has."""


@dataclass(frozen=True)
class ImportFailed:
    """The user's module could not be imported."""

    message: str
    detail: str


@dataclass(frozen=True)
class PhaseReported:
    """The trial entered a phase."""

    phase: Phase


@dataclass(frozen=True)
class TrialExited:
    """The trial's first process ended; `status` is what `os.waitpid` gave. Its descendants may live on."""

    status: int


@dataclass(frozen=True)
class TrialEnded:
    """Nothing is left of the trial but `survivors`, which would not die."""

    survivors: tuple[int, ...]
    exhausted_files_limit: int | None
    """The limit of open files that one of its processes had reached, or None."""


# --- server to trial process ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrialOrder:
    """Everything that a trial process needs to know."""

    request: TrialRequest
    workload: Workload
    entry: str
    start_method: StartMethod
    output_path: str
    result_path: str
    sockets_path: str | None


class Channel:
    """Whole messages over a stream socket between two processes that trust each other."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def fileno(self) -> int:
        """The socket's descriptor, to wait on."""
        return self._connection.fileno()

    def is_open(self) -> bool:
        """Whether its descriptor is still the socket that it was."""
        try:
            return stat.S_ISSOCK(os.fstat(self.fileno()).st_mode)
        except OSError:
            return False

    def send(self, message: object) -> None:
        """Raises OSError where the other side is gone."""
        payload = pickle.dumps(message)
        self._connection.sendall(_HEADER.pack(len(payload)) + payload)

    def receive(self, timeout_seconds: float | None = None) -> Any:
        """The next message. Raises TimeoutError, and EOFError where the other side is gone."""
        if timeout_seconds is not None:
            poll = select.poll()  # not select(): the caller may have thousands of files open
            poll.register(self._connection, select.POLLIN)
            if not poll.poll(min(max(0.0, timeout_seconds) * 1000, _LONGEST_WAIT_MILLISECONDS)):
                raise TimeoutError
        (length,) = _HEADER.unpack(self._exactly(_HEADER.size))
        return pickle.loads(self._exactly(length))

    def close(self) -> None:
        """Harmless when called twice."""
        self._connection.close()

    def _exactly(self, count: int) -> bytes:
        chunks = bytearray()
        while len(chunks) < count:
            try:
                chunk = self._connection.recv(min(count - len(chunks), 1 << 20))
            except ConnectionError as error:
                raise EOFError from error
            if not chunk:
                raise EOFError
            chunks += chunk
        return bytes(chunks)


def unfinished(result_path: str) -> str:
    """The name of a trial's result while it is being written."""
    return result_path + ".unfinished"


def encode_answer(answer: TrialAnswer) -> str:
    """JSON in which a loss may be NaN or infinite, which pydantic's own would turn into null."""
    return json.dumps(answer.model_dump())


def decode_answer(text: str) -> TrialAnswer:
    """The inverse of `encode_answer`. Raises pydantic's ValidationError."""
    return TrialAnswer.model_validate(json.loads(text))
