"""`TrialPool`: runs each trial in a process of its own, whatever happens to it, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

from autotune.config import TrainingConfig
from autotune.errors import NoAnswerError
from autotune.knobs.registry import knob
from autotune.processes import system_memory
from autotune.processes.ending import Ending, answer_of
from autotune.processes.server_process import ServerProcess
from autotune.processes.wire import (
    DISK_FULL_STATUS,
    ENTRY,
    EndTrial,
    Hello,
    PhaseReported,
    StartMethod,
    StartTrial,
    TrialEnded,
    TrialExited,
)
from autotune.records import Failure, Phase, PhaseTimeouts, TrialAnswer, TrialRequest
from autotune.workload import Workload

_SILENCE_SECONDS = 20.0
_END_SECONDS = 40.0
_GPU_RETURN_SECONDS = 20.0
_GPU_RETURN_TOLERANCE_BYTES = 64 * 2**20
_GPU_RETURN_POLL_SECONDS = 0.002


class TrialPool:
    """A `TrialBackend` of real processes: one server per environment, one fork of it per trial.

    Where forked processes cannot work (the user's module uses CUDA or parallel operations when it is imported, or a step
    waits for a thread that the import started), every trial gets an interpreter of its own instead; `notes` and `on_note`
    say so once.
    """

    def __init__(
        self,
        workload: Workload,
        directory: Path,
        *,
        warm_compiler: bool = False,
        gpu_used_bytes: Callable[[], int | None] | None = None,
        on_note: Callable[[str], None] | None = None,
        start_method: StartMethod = "fork",
        entry: str = ENTRY,
        silence_seconds: float = _SILENCE_SECONDS,
    ) -> None:
        """`directory` exists and takes a file of output per process, counted, and named after what ran: `0005-trial-3.log`,
        `0006-parity.log`. `gpu_used_bytes` says what is in use on the GPU, by anyone, or
        None where that cannot be seen. `warm_compiler` imports the compiler before the forks, not in each."""
        self.notes: list[str] = []
        self._workload = workload
        self._directory = directory.resolve()  # importing the user's module may change the server's directory
        self._warm_compiler = warm_compiler
        self._gpu_used_bytes = gpu_used_bytes or (lambda: None)
        self._on_note = on_note or (lambda note: None)
        self._entry = entry
        self._silence_seconds = silence_seconds
        self._start_method: StartMethod = start_method
        self._fork_proven = False
        self._started_threads = False
        self._servers: dict[tuple[tuple[str, str], ...], ServerProcess] = {}
        self._begun: ServerProcess | None = None
        """The first server, which nobody has waited for yet."""
        self._process_count = _last_count(directory)

    def __enter__(self) -> TrialPool:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def begin(self) -> None:
        """Starts the first server, which imports torch and the user's module beside what is done until `start`."""
        self._begun = ServerProcess({}, self._directory / "server.log")
        self._begun.begin(self._hello())

    def start(self) -> None:
        """Waits until the first server has imported the user's module. Raises WorkloadError where that fails."""
        self._server({})

    def spare_the_compiler(self) -> None:
        """The compiler is not imported before it is needed: where time is short, importing it takes seconds of that."""
        self._warm_compiler = False

    def close(self) -> None:
        """Ends every process that the pool has started; harmless when called twice."""
        if self._begun is not None:
            self._begun.stop()
            self._begun = None
        while self._servers:
            _, server = self._servers.popitem()
            server.stop()

    def run(self, request: TrialRequest, on_phase: Callable[[Phase], None] | None = None) -> TrialAnswer:
        """Runs one trial to its end, its last process included; see `TrialBackend`.

        Raises WorkloadError where a server has to be started for it and the user's module cannot be imported there, and
        NoAnswerError where the disk is full.
        KeyboardInterrupt, and whatever `on_phase` raises, passes through after the trial is killed.
        """
        started = time.monotonic()
        used_before = self._gpu_used_bytes()
        ending = self._run_once(request, on_phase)
        if self._start_method == "fork" and not self._fork_proven:
            if problem := self._problem_of_forking(ending):
                self._switch_to_fresh(problem)
                ending.remove_results()
                started = time.monotonic()  # or the trial would pass for a slow one
                ending = self._run_once(request, on_phase)
            # A queue that no thread empties takes some steps to fill up: a few show nothing.
            self._fork_proven = request.kind == "measure" or not self._started_threads
        self._refuse_full_disk(ending)
        answer = answer_of(ending)
        ending.remove_results()
        failure = answer.failure or self._memory_failure(used_before, ending.last_phase)
        if failure is not None:
            answer = TrialAnswer(failure=failure.model_copy(update={"output_path": ending.output_path}))
        seconds = time.monotonic() - started
        return answer.model_copy(update={"seconds": seconds, "output_path": ending.output_path})

    def _problem_of_forking(self, ending: Ending) -> str | None:
        """What may have kept a trial from ending that an interpreter of its own would cure."""
        if ending.timeout_phase in ("start", "build"):
            return "a trial stayed silent in a forked process"
        if ending.timeout_phase is not None and self._started_threads:
            return "a trial got stuck in a forked process, which has none of the threads that importing your program starts"
        return None

    def _refuse_full_disk(self, ending: Ending) -> None:
        """What a trial could not write down is no failure of what it tried."""
        status = ending.status
        if status is not None and os.WIFEXITED(status) and os.WEXITSTATUS(status) == DISK_FULL_STATUS:
            ending.remove_results()
            raise NoAnswerError(
                f"a trial could not write its result to {self._directory}: make room there and give the same command "
                "again, it goes on where this one stopped"
            )

    # --- servers ---

    def _server(self, environment: Mapping[str, str]) -> ServerProcess:
        key = tuple(sorted(environment.items()))
        if key in self._servers:
            return self._servers[key]
        begun = None if key else self._begun
        server = self._servers[key] = begun or ServerProcess(environment, self._directory / "server.log")
        if server is begun:
            self._begun = None  # after that: a Ctrl-C between the two must not lose it
        try:
            ready = server.prepare(self._hello(), self._on_note)
        except BaseException:
            self._discard(server)
            raise
        self._started_threads = ready.started_threads
        if ready.fork_problem is None:
            return server
        self._switch_to_fresh(ready.fork_problem)
        return self._server(environment)

    def _hello(self) -> Hello:
        return Hello(
            self._workload,
            self._start_method,
            self._entry,
            self._silence_seconds,
        )

    def _switch_to_fresh(self, reason: str) -> None:
        self.close()
        self._start_method = "fresh"
        note = f"{reason}: each trial gets an interpreter of its own, which takes some seconds more"
        self.notes.append(note)
        self._on_note(note)

    def _discard(self, server: ServerProcess) -> None:
        self._servers = {key: other for key, other in self._servers.items() if other is not server}
        server.stop()

    # --- one trial ---

    def _run_once(self, request: TrialRequest, on_phase: Callable[[Phase], None] | None) -> Ending:
        server = self._server(environment_of(request.config))
        self._process_count += 1
        ran = request.kind if request.trial is None else f"trial-{request.trial}"
        stem = self._directory / f"{self._process_count:04d}-{ran}"
        ending = Ending(str(stem.with_suffix(".log")), stem.with_suffix(".json"))
        kills_before = system_memory.oom_kills()
        try:
            server.send(StartTrial(request, ending.output_path, str(ending.result_path), self._warm_compiler))
            self._follow(server, request.timeouts, ending, on_phase)
            self._end(server, ending)
        except EOFError:
            ending.server_ended = server.how_it_ended()
            self._discard(server)
        except BaseException:  # KeyboardInterrupt, or of the caller's on_phase: the trial ends with its server
            self._discard(server)
            ending.remove_results()
            raise
        ending.host_killed = system_memory.oom_kills() > kills_before
        return ending

    def _follow(
        self,
        server: ServerProcess,
        timeouts: PhaseTimeouts,
        ending: Ending,
        on_phase: Callable[[Phase], None] | None,
    ) -> None:
        """Waits until the trial's process ends, or stays in a phase for too long."""
        deadline = time.monotonic() + allowed_seconds("start", timeouts)
        while True:
            try:
                message = server.receive(deadline - time.monotonic())
            except TimeoutError:
                ending.timeout_phase = ending.last_phase
                ending.timeout_seconds = allowed_seconds(ending.last_phase, timeouts)
                return
            if isinstance(message, TrialExited):
                ending.status = message.status
                return
            assert isinstance(message, PhaseReported), message
            ending.last_phase = message.phase
            deadline = time.monotonic() + allowed_seconds(message.phase, timeouts)
            if on_phase is not None:
                on_phase(message.phase)

    def _end(self, server: ServerProcess, ending: Ending) -> None:
        """Has everything killed that is left of the trial. A server that does not manage is given up."""
        server.send(EndTrial(self._warm_compiler, show_where=ending.timeout_phase is not None))
        deadline = time.monotonic() + _END_SECONDS
        while True:
            try:
                message = server.receive(deadline - time.monotonic())
            except TimeoutError:
                self._discard(server)
                return
            if isinstance(message, TrialEnded):
                break
        ending.survivors = message.survivors
        ending.exhausted_files_limit = message.exhausted_files_limit

    def _memory_failure(self, used_before: int | None, phase: Phase) -> Failure | None:
        """Waits until the GPU's memory is back; a failure where it does not come back."""
        if used_before is None:
            return None
        deadline = time.monotonic() + _GPU_RETURN_SECONDS
        while True:
            used = self._gpu_used_bytes()
            if used is None or used <= used_before + _GPU_RETURN_TOLERANCE_BYTES:
                return None
            if time.monotonic() > deadline:
                break
            time.sleep(_GPU_RETURN_POLL_SECONDS)
        excess = (used - used_before) / 2**20
        message = (
            f"{excess:.0f} MiB more than before the trial were in use on the GPU {_GPU_RETURN_SECONDS:.0f} s after its "
            "end; another program may have started there"
        )
        return Failure(kind="memory_not_returned", phase=phase, message=message)


def allowed_seconds(phase: Phase, timeouts: PhaseTimeouts) -> float:
    """How long a trial may stay in a phase."""
    if phase in ("start", "build"):
        return timeouts.build_seconds
    return timeouts.compile_seconds if phase == "compile" else timeouts.measure_seconds


def environment_of(config: TrainingConfig) -> dict[str, str]:
    """The variables that a configuration needs to stand before torch is imported."""
    merged: dict[str, str] = {}
    for name, value in config.items():
        merged.update(knob(name).environment(value))
    return merged


def _last_count(directory: Path) -> int:
    """Of the files that are there; earlier versions named all of them trials."""
    counts = [int(found[1]) for path in directory.iterdir() if (found := re.match(r"(?:trial-)?(\d+)[-.]", path.name))]
    return max(counts, default=0)
