"""`answer_of`: what a trial's end says, from its result file, its exit status and what the server saw."""

from __future__ import annotations

import os
import re
import resource
import signal
from dataclasses import dataclass
from pathlib import Path

from autotune.processes.frames import is_own
from autotune.processes.wire import decode_answer, unfinished
from autotune.records import Failure, FailureKind, Phase, TrialAnswer

_TAIL_BYTES = 8192
_FRAME_LINE = re.compile(r'^  File "(?P<file>.*)", line \d+ in ')


@dataclass
class Ending:
    """How a trial ended, as seen from outside. Filled while it runs."""

    output_path: str
    result_path: Path
    last_phase: Phase = "start"
    timeout_phase: Phase | None = None
    """Where it was ended by us because it took too long."""
    timeout_seconds: float = 0.0
    status: int | None = None
    """Its wait status, where it ended by itself."""
    server_ended: str | None = None
    """How the server ended, where it died with the trial."""
    host_killed: bool = False
    """The kernel killed some process for lack of memory meanwhile."""
    survivors: tuple[int, ...] = ()
    exhausted_files_limit: int | None = None

    def remove_results(self) -> None:
        """Removes what the trial has written down, finished or not."""
        self.result_path.unlink(missing_ok=True)
        Path(unfinished(str(self.result_path))).unlink(missing_ok=True)


def answer_of(ending: Ending) -> TrialAnswer:
    """The answer that the trial wrote, or the failure that its end is."""
    if ending.survivors:
        message = f"processes {_listed(ending.survivors)} of the trial could not be killed; the driver may hold them"
        return _failed("memory_not_returned", ending, message)
    if ending.result_path.exists():
        answer = decode_answer(ending.result_path.read_text(encoding="utf-8"))
        return _blaming_the_kernel(answer) if ending.host_killed else answer
    if ending.server_ended is not None:
        return _server_died(ending, ending.server_ended)
    if ending.timeout_phase is not None:
        return _timed_out(ending, ending.timeout_phase)
    assert ending.status is not None, "a trial ends by itself, by timeout or with its server"
    if os.WIFSIGNALED(ending.status):
        return _killed(ending, signal.Signals(os.WTERMSIG(ending.status)).name)
    return _ended_silently(ending, os.WEXITSTATUS(ending.status))


def _blaming_the_kernel(answer: TrialAnswer) -> TrialAnswer:
    """A loader worker that got SIGKILL while the kernel was short of memory: the trial saw only the signal."""
    failure = answer.failure
    if failure is None or failure.signal != "SIGKILL":
        return answer
    message = f"the host ran out of memory: {failure.message}, by the kernel"
    changed = failure.model_copy(update={"kind": "host_oom", "message": message})
    return answer.model_copy(update={"failure": changed})


def _server_died(ending: Ending, how: str) -> TrialAnswer:
    if ending.host_killed:
        return _failed("host_oom", ending, f"the kernel killed the trial's server ({how}) for lack of host memory")
    name = how.removeprefix("signal ") if how.startswith("signal ") else None
    return _failed("crash", ending, f"the trial's server ended with {how}, and the trial with it", signal_name=name)


def _timed_out(ending: Ending, phase: Phase) -> TrialAnswer:
    limit = ending.exhausted_files_limit
    if limit is None and "Too many open files" in _tail(ending.output_path):
        # a thread of a loader worker has died of it, and the batch it was to send never arrives
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit is not None:
        message = (
            f"the trial hung in {_named(phase)} after its limit of {limit} open files was reached: raise it with "
            "`ulimit -n`, or use fewer loader workers"
        )
        return _failed("file_limit", ending, message)
    message = f"the trial did not get through {_named(phase)} within {ending.timeout_seconds:g} s"
    return _failed("timeout", ending, message)


def _killed(ending: Ending, name: str) -> TrialAnswer:
    if name == "SIGKILL" and ending.host_killed:
        return _failed("host_oom", ending, "the kernel killed the trial for lack of host memory")
    if name == "SIGABRT" and "std::bad_alloc" in _tail(ending.output_path):
        return _failed("host_oom", ending, "the host ran out of memory (std::bad_alloc in native code)")
    if name == "SIGBUS" and "/dev/shm" in _tail(ending.output_path):
        return _failed("shared_memory", ending, "/dev/shm is full (SIGBUS): use fewer loader workers, or enlarge it")
    return _failed("crash", ending, f"the trial was ended by {name} in {_named(ending.last_phase)}", signal_name=name)


def _ended_silently(ending: Ending, status: int) -> TrialAnswer:
    if status != 0 and "libgomp: Thread creation failed" in _tail(ending.output_path):
        return _failed("host_oom", ending, "the host ran out of memory (libgomp could not start its threads)")
    message = f"the trial ended without a result, with status {status}, in {_named(ending.last_phase)}"
    return _failed("crash", ending, message)


def _named(phase: Phase) -> str:
    # `compile` would mislead where nothing is compiled
    return "its first step" if phase == "compile" else f"its {phase} phase"


def _failed(kind: FailureKind, ending: Ending, message: str, *, signal_name: str | None = None) -> TrialAnswer:
    detail = where_it_was(ending.output_path)
    failure = Failure(kind=kind, phase=ending.last_phase, message=message, detail=detail, signal=signal_name)
    return TrialAnswer(failure=failure)


def where_it_was(output_path: str) -> str:
    """The user's own frames, from the stack that Python printed when a process crashed or was found hanging."""
    _, heading, stack = _tail(output_path).rpartition("(most recent call first):\n")
    frames = [line for line in stack.splitlines() if (found := _FRAME_LINE.match(line)) and is_own(found["file"])]
    return "\n".join(["Where it was (the user's own frames, innermost first):", *frames]) if heading and frames else ""


def _tail(path: str) -> str:
    """The end of what the trial printed; native code tells the reason for an abort nowhere else."""
    try:
        with open(path, "rb") as stream:
            stream.seek(max(0, os.path.getsize(path) - _TAIL_BYTES))
            return stream.read().decode(errors="replace")
    except OSError:  # it died before it opened the file
        return ""


def _listed(pids: tuple[int, ...]) -> str:
    return ", ".join(str(pid) for pid in pids)
