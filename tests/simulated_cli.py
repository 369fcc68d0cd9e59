"""The command line over a simulated machine, as a process that starts at once: for tests that end it in many ways.

Everything is real but the trials and the clock, which stands still: the console script, the wiring, the study on disk. A
process that has imported it all is forked for each call, so that a call costs its search alone.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import optuna

from autotune import __main__, cli, sessions
from autotune.records import Phase, TrialAnswer, TrialRequest
from autotune.search.budget import Budget
from autotune.space import build_space
from tests.knobs.search_facts import cpu_facts
from tests.search.simulated_machine import SimulatedMachine
from tests.search.simulated_programs import SCENARIOS

DEADLINE_SECONDS = 400.0
PROGRAM = "def model_fn(): ...\ndef data_fn(): ...\n"
SIMULATED = SCENARIOS["tables on a CPU"].program


class SimulatedPool:
    """Takes the place of `TrialPool`."""

    ending: tuple[int, int] = (0, -1)
    """A signal, and at the how many-th trial or probe this process sends it to itself."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.notes: list[str] = []
        facts = cpu_facts()
        self._facts = facts.workload
        self._machine = SimulatedMachine(SIMULATED, build_space(facts, preset="quick"))
        self._asked = 0

    def begin(self) -> None:
        """Nothing is to be started."""

    def start(self) -> None:
        """Nor to be waited for."""

    def spare_the_compiler(self) -> None:
        """Nothing is imported."""

    def close(self) -> None:
        """Nothing runs."""

    def run(self, request: TrialRequest, on_phase: Callable[[Phase], None] | None = None) -> TrialAnswer:
        """What the simulated machine answers, and what the user's program is like."""
        self._asked += 1
        number, at = self.ending
        if self._asked == at:
            os.kill(os.getpid(), number)
        if request.kind == "facts":
            return TrialAnswer(facts=self._facts)
        return self._machine.run(request, on_phase)


@dataclass(frozen=True)
class Ended:
    """One call that has ended. `exit_code` is negative where a signal ended it."""

    exit_code: int
    output: str
    errors: str
    seconds: float


class SimulatedCli:
    """The process that is forked."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.simulated_cli"],
            cwd=Path(__file__).parents[1],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, directory: Path, *arguments: str, **how: Any) -> int:
        """Starts a search in a directory, with more arguments; returns its process id. `how`: as `_search` takes it."""
        (directory / "train.py").write_text(PROGRAM)
        return int(self._ask({"directory": str(directory), "arguments": arguments, **how}))

    def end(self, directory: Path) -> Ended:
        """Waits for the end of the search that was started last."""
        exit_code, seconds = json.loads(self._ask({}))
        output, errors = ((directory / name).read_text(errors="replace") for name in ("stdout", "stderr"))
        return Ended(exit_code, output, errors, seconds)

    def run(self, directory: Path, *arguments: str, **how: Any) -> Ended:
        """A search from its start to its end."""
        self.start(directory, *arguments, **how)
        return self.end(directory)

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(DEADLINE_SECONDS)

    def _ask(self, request: dict[str, Any]) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline()


def _search(
    directory: str, arguments: list[str], *, ending: tuple[int, int] = (0, -1), killed_at_statement: int = -1
) -> int:
    """In the fork: one call of the command line, which may send itself a signal or be killed while it writes."""
    os.setsid()
    os.chdir(directory)
    for descriptor, name in ((0, os.devnull), (1, "stdout"), (2, "stderr")):
        os.dup2(os.open(name, os.O_RDONLY if descriptor == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    SimulatedPool.ending = ending
    sessions.TrialPool = SimulatedPool  # type: ignore[assignment, misc]
    # Of a busy machine's time the search itself would take much, and of the simulated one's the trials take none.
    sessions.Budget = partial(Budget, clock=lambda: 0.0)  # type: ignore[assignment, misc]
    sqlite3.connect = _killing(killed_at_statement)  # type: ignore[assignment]
    sys.argv[1:] = ["search", "train.py", "--device", "cpu", "--study", "here", "--space", "quick", *arguments]
    cli.main = _hearing_ctrl_c(cli.main)
    return __main__.main()


def _hearing_ctrl_c(command: Callable[[], int]) -> Callable[[], int]:
    """The command in a process that hears no Ctrl-C else: one that comes earlier waits."""

    def heard() -> int:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        try:
            return command()
        finally:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})

    return heard


def _killing(at: int) -> Callable[..., sqlite3.Connection]:
    """`sqlite3.connect`, with SIGKILL at a statement, and without waiting for the disk: none of this is a power cut."""
    connect = sqlite3.connect
    seen = 0

    def count(statement: str) -> None:
        nonlocal seen
        seen += 1
        if seen == at:
            os.kill(os.getpid(), signal.SIGKILL)

    def connected(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*arguments, **options)
        connection.execute("PRAGMA synchronous = OFF")
        if at > 0:
            connection.set_trace_callback(count)
        return connection

    return connected


def _serve() -> None:
    from autotune.report import recommendation, terminal  # noqa: F401  # once, not in each fork, as all that this needs:

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    optuna.create_study(storage="sqlite://", study_name="first")
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    # The tests may run under nohup, where a search would not hear it either.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    pid, began = 0, 0.0
    for line in sys.stdin:
        request = json.loads(line)
        if request:
            began = time.monotonic()
            pid = os.fork()
            if pid == 0:
                try:
                    code = _search(**request)
                    sys.stdout.flush()
                    sys.stderr.flush()
                except BaseException:
                    sys.excepthook(*sys.exc_info())
                    code = 99
                os._exit(code)
            print(pid, flush=True)
        else:
            _, status = os.waitpid(pid, 0)
            print(json.dumps([os.waitstatus_to_exitcode(status), time.monotonic() - began]), flush=True)


if __name__ == "__main__":
    _serve()
