"""`ServerProcess`: the fork server as the orchestrator sees it."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from autotune.errors import WorkloadError
from autotune.processes.ending import where_it_was
from autotune.processes.interpreter import command
from autotune.processes.process_tree import carrying, descendants
from autotune.processes.wire import (
    CHANNEL_CLOSED_STATUS,
    MARKER_VARIABLE,
    SHOW_WHERE_SIGNAL,
    Channel,
    Hello,
    ImportFailed,
    Ready,
)

_IMPORT_SECONDS = 600.0
_STILL_IMPORTING_SECONDS = (20.0, 60.0, 120.0, 300.0)
"""After which the user is told that it is the import that takes so long: torch's own takes up to 12 s."""
_SHOW_WHERE_SECONDS = 5.0
"""For a hanging import to print its stack, which takes a moment unless others hold all cores."""
_STOP_SECONDS = 40.0
"""More than the server itself takes to give up on a process that does not die."""


class ServerProcess:
    """One running server. It and all that descends from it are gone after `stop`, and when this process dies."""

    def __init__(self, environment: Mapping[str, str], log_path: Path) -> None:
        """Starts it with these variables beside our own; what it prints is appended to `log_path`."""
        self._log_path = log_path
        self._marker = secrets.token_hex(8)
        variables = {
            **os.environ,
            **environment,
            MARKER_VARIABLE: self._marker,
            "AUTOTUNE_CHILD": "1",
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # importing inductor otherwise makes CUDA in a fork impossible
        }
        self._importing = False
        ours, theirs = socket.socketpair()
        arguments = command("autotune.processes.server", str(theirs.fileno()), str(os.getpid()))
        try:
            with theirs, log_path.open("ab") as log:
                self._process = subprocess.Popen(
                    arguments,
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,  # Ctrl-C in the terminal is ours to handle
                )
        except OSError:
            ours.close()
            raise
        self._channel = Channel(ours)

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._process.pid

    def begin(self, hello: Hello) -> None:
        """Has it begin to import the user's module; `prepare` waits for that."""
        self._importing = True
        with contextlib.suppress(EOFError):  # `prepare` finds it gone, and says how it ended
            self.send(hello)

    def prepare(self, hello: Hello, on_progress: Callable[[str], None]) -> Ready:
        """Has it import the user's module. Raises WorkloadError where that fails, in whichever way.

        `on_progress` is told in a sentence, again and again, where it takes long.
        """
        location = hello.workload.location
        if not self._importing:
            self.begin(hello)
        try:
            answer = self._prepared(location, on_progress)
            self._importing = False
        except TimeoutError:
            raise self._hangs_at_import(location) from None
        except EOFError:
            ended = self.how_it_ended()
            if ended == f"status {CHANNEL_CLOSED_STATUS}":
                raise WorkloadError(
                    f"importing {location} closed files that it had not opened, the connection to autotune among them: "
                    "leave out what closes all, such as os.closerange"
                ) from None
            raise WorkloadError(
                f"importing {location} ended the process with {ended}; what it printed is in {self._log_path}"
            ) from None
        if isinstance(answer, ImportFailed):
            raise WorkloadError(answer.message, answer.detail)
        assert isinstance(answer, Ready), answer
        return answer

    def _prepared(self, location: str, on_progress: Callable[[str], None]) -> Any:
        began = time.monotonic()
        for seconds in _STILL_IMPORTING_SECONDS:
            try:
                return self.receive(began + seconds - time.monotonic())
            except TimeoutError:
                printed = f"what it prints goes to {self._log_path}"
                on_progress(f"still importing torch and {location} after {seconds:.0f} s; {printed}")
        return self.receive(began + _IMPORT_SECONDS - time.monotonic())

    def _hangs_at_import(self, location: str) -> WorkloadError:
        os.kill(self.pid, SHOW_WHERE_SIGNAL)
        deadline = time.monotonic() + _SHOW_WHERE_SECONDS
        while not where_it_was(str(self._log_path)) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.1)  # for what it has not printed yet: nothing tells the end
        return WorkloadError(
            f"importing {location} did not end within {_IMPORT_SECONDS:.0f} s: what takes so long belongs into model_fn "
            'or data_fn, and what runs the script under `if __name__ == "__main__":`',
            where_it_was(str(self._log_path)),
        )

    def send(self, message: object) -> None:
        """Raises EOFError where the server is gone."""
        try:
            self._channel.send(message)
        except OSError as error:
            raise EOFError from error

    def receive(self, timeout_seconds: float) -> Any:
        """Its next message. Raises TimeoutError, and EOFError where the server is gone."""
        return self._channel.receive(timeout_seconds)

    def how_it_ended(self) -> str:
        """`signal SIGSEGV` or `status 3`, of a server that has hung up."""
        try:
            code = self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            return "its connection closed"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"status {code}"

    def stop(self) -> None:
        """Ends it and everything it has started; harmless when called twice."""
        self._channel.close()  # on which it kills its descendants and exits
        try:
            if self._importing:  # the user's code, which may take minutes, and it sees nothing before that ends
                self._kill_below()
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        finally:
            self._kill_marked()

    def _kill_below(self) -> None:
        """Kills it with what descends from it, which would be hard to find without it."""
        below = descendants(self._process.pid)
        self._process.kill()
        for process in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)

    def _kill_marked(self) -> None:
        """Kills what outlived a server that was itself killed."""
        deadline = time.monotonic() + _STOP_SECONDS
        while (left := carrying(MARKER_VARIABLE, self._marker)) and time.monotonic() < deadline:
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            self._process.poll()
            time.sleep(0.005)
