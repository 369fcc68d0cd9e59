"""The fork server: imports torch and the user's module once, and forks a process for each trial.

Started with a descriptor and its parent's number by `server_process.ServerProcess`. It never touches
CUDA, forks from its only thread of our own, adopts whatever a trial leaves behind, and kills it all before it exits:
when it is told to, and when the orchestrator is gone.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass, field
from types import FrameType

from autotune.knobs.registry import slow_to_start
from autotune.processes import child, sockets
from autotune.processes.failures import import_failure
from autotune.processes.output import shorten
from autotune.processes.preparation import (
    fork,
    fork_problem,
    import_compiler,
    import_user_module,
    prepare_for_compiling,
)
from autotune.processes.process_tree import (
    ProcessId,
    descendants,
    exhausted_files_limit,
    is_resource_tracker,
    is_torchs_manager,
)
from autotune.processes.shared_memory import remove_left_by
from autotune.processes.wire import (
    CHANNEL_CLOSED_STATUS,
    SHOW_WHERE_SIGNAL,
    Channel,
    EndTrial,
    Hello,
    ImportFailed,
    PhaseReported,
    Ready,
    StartTrial,
    TrialEnded,
    TrialExited,
    TrialOrder,
)
from autotune.records import TrialRequest
from autotune.workload import UserFunctions

_PR_SET_CHILD_SUBREAPER = 36
_KILL_SECONDS = 30.0
"""After which a process that does not die of SIGKILL (the driver may hold it) is told as a survivor."""
_SHOW_WHERE_SECONDS = 5.0
"""For a hanging trial to print its stack, which takes a moment unless others hold all cores."""
_CLEANING_SECONDS = 10.0
"""For Python's resource tracker, once all that it works for are dead; as that."""
_OUTPUT_WATCH_MILLISECONDS = 500
"""How often the size of a running trial's output is looked at."""


@dataclass
class _RunningTrial:
    pid: int
    report_descriptor: int
    output_path: str
    sockets_path: str | None
    exited: bool = False
    reports_open: bool = True
    unread: bytes = b""
    started_at: float = field(default_factory=time.time)
    processes: set[int] = field(default_factory=set)
    """Every process that was seen to belong to it, those included that are long dead."""


class Server:
    """Answers the orchestrator until it is gone."""

    def __init__(self, channel: Channel, orchestrator: int) -> None:
        self._channel = channel
        self._orchestrator = orchestrator
        self._pid = os.getpid()
        self._functions: UserFunctions | None = None
        self._thread_count = 1
        self._kept: frozenset[ProcessId] = frozenset()
        self._trial: _RunningTrial | None = None
        self._compiler_imported = False
        self._compiler_prepared = False
        """Forks find what the compiler has to find out once."""

    def run(self) -> None:
        """Prepares what the orchestrator asks for, then serves trials. Returns when the orchestrator hangs up."""
        self._take_charge()
        try:
            hello: Hello = self._channel.receive()
            if self._prepare(hello):
                self._serve(hello)
        except (EOFError, OSError):  # the orchestrator is gone
            pass
        finally:
            self._leave_nothing()

    # --- preparing ---

    def _take_charge(self) -> None:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._hear_signals()
        child.signal_at_parents_death(signal.SIGUSR1, self._orchestrator)

    def _hear_signals(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGUSR1, self._parent_thread_ended)
        child.show_where_on_signal()
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    def _parent_thread_ended(self, number: int, frame: FrameType | None) -> None:
        # the thread that started us may end while the orchestrator lives on; its end alone means nothing
        if os.getppid() != self._orchestrator:
            self._leave_nothing()
            os._exit(1)

    def _prepare(self, hello: Hello) -> bool:
        problem: str | None = None
        if hello.start_method == "fork":
            try:
                self._functions, self._thread_count = import_user_module(hello)
            except BaseException as error:  # the user's module may raise anything, SystemExit too
                self._keep_to_the_connection()
                told = import_failure(error, hello.workload.location)
                self._channel.send(ImportFailed(str(told), told.detail))
                return False
            self._keep_to_the_connection()
            self._hear_signals()  # the user's module may have set handlers of its own, or ignored them
            self._kept = frozenset(descendants(os.getpid()))
            problem = fork_problem(self._thread_count, hello.silence_seconds)
        self._channel.send(Ready(problem, started_threads=threading.active_count() > 1))
        return True

    def _keep_to_the_connection(self) -> None:
        """The user's module may have forked, and two servers would answer for one; or have closed the connection."""
        if os.getpid() != self._pid:
            os._exit(0)
        if not self._channel.is_open():
            os._exit(CHANNEL_CLOSED_STATUS)

    # --- serving ---

    def _serve(self, hello: Hello) -> None:
        wakeup_read, wakeup_write = os.pipe()
        os.set_blocking(wakeup_read, False)
        os.set_blocking(wakeup_write, False)
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # wakes the poll below
        while True:
            poll = select.poll()
            for descriptor in (self._channel.fileno(), wakeup_read):
                poll.register(descriptor, select.POLLIN)
            if self._trial is not None and self._trial.reports_open:
                poll.register(self._trial.report_descriptor, select.POLLIN)
            ready = {descriptor for descriptor, _ in poll.poll(_OUTPUT_WATCH_MILLISECONDS if self._trial else None)}
            if self._trial is not None and not ready:
                shorten(self._trial.output_path)
            status = None
            if wakeup_read in ready:
                os.read(wakeup_read, 4096)
                status = self._reap()
            if self._trial is not None:
                self._forward_reports(self._trial)
            if status is not None:
                self._channel.send(TrialExited(status))
            if self._channel.fileno() in ready:
                self._obey(self._channel.receive(), hello)

    def _obey(self, message: object, hello: Hello) -> None:
        if isinstance(message, StartTrial):
            self._start(message, hello)
        elif isinstance(message, EndTrial):
            self._end(message)
            if message.warm_compiler:  # while the orchestrator opens its study, and nothing runs that is timed
                self._import_compiler(hello)
        else:
            raise AssertionError(f"the orchestrator sent {message!r}")

    def _start(self, message: StartTrial, hello: Hello) -> None:
        assert self._trial is None, "one trial at a time"
        if message.warm_compiler and message.request.kind != "facts":
            self._import_compiler(hello)
        self._prepare_compiler(message.request)
        order = TrialOrder(
            message.request,
            hello.workload,
            hello.entry,
            hello.start_method,
            message.output_path,
            message.result_path,
            sockets.make_directory(),
        )
        report_read, report_write = os.pipe()
        os.set_blocking(report_read, False)
        server = os.getpid()
        pid = fork()
        if pid == 0:
            self._become_trial(order, report_write, server)
        os.close(report_write)
        self._trial = _RunningTrial(pid, report_read, order.output_path, order.sockets_path)

    def _import_compiler(self, hello: Hello) -> None:
        """Once, where trials are forked, never beside one: what compiles nothing by itself may be tried compiled."""
        if not self._compiler_imported and hello.start_method == "fork":
            import_compiler()
            self._compiler_imported = True

    def _prepare_compiler(self, request: TrialRequest) -> None:
        """Before the first trial that compiles, where the compiler is imported for all forks."""
        if self._compiler_imported and not self._compiler_prepared and slow_to_start(request.config):
            self._channel.send(PhaseReported("compile"))  # it may take the time that compiling may
            prepare_for_compiling(request.conditions.device)
            self._compiler_prepared = True

    def _become_trial(self, order: TrialOrder, report_descriptor: int, server: int) -> None:
        try:
            self._channel.close()
            child.set_apart(order, server)
            if order.start_method == "fresh":
                child.run_fresh(order, report_descriptor)
            else:
                assert self._functions is not None
                child.run_forked(order, report_descriptor, self._functions, self._thread_count)
        except BaseException as error:  # it must not reach the server's own code
            child.fail(error)
        child.leave()

    def _forward_reports(self, trial: _RunningTrial) -> None:
        while True:
            try:
                piece = os.read(trial.report_descriptor, 4096)
            except BlockingIOError:
                break
            if not piece:  # every process that could write to it is gone, or has closed it
                trial.reports_open = False
                break
            *lines, trial.unread = (trial.unread + piece).split(b"\n")
            for line in lines:
                if line.isdigit():
                    trial.processes.add(int(line))
                else:
                    self._channel.send(PhaseReported(line.decode()))  # type: ignore[arg-type]  # our child's spelling

    def _reap(self) -> int | None:
        """Buries every child that has ended, those included that a trial left to us; returns the trial's status."""
        trial_status = None
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return trial_status
            if pid == 0:
                return trial_status
            if self._trial is not None and pid == self._trial.pid:
                self._trial.exited = True
                trial_status = status

    # --- ending ---

    def _end(self, message: EndTrial) -> None:
        assert self._trial is not None
        below = descendants(os.getpid(), except_below=self._kept)
        limits = [limit for process in below if (limit := exhausted_files_limit(process.pid)) is not None]
        if message.show_where and not self._trial.exited:
            self._show_where(self._trial)
        survivors = self._kill_all()
        shorten(self._trial.output_path)
        os.close(self._trial.report_descriptor)
        self._trial = None
        self._channel.send(TrialEnded(survivors, min(limits, default=None)))

    def _show_where(self, trial: _RunningTrial) -> None:
        """Has its stack printed, with which it ends."""
        os.kill(trial.pid, SHOW_WHERE_SIGNAL)
        deadline = time.monotonic() + _SHOW_WHERE_SECONDS
        while not trial.exited and time.monotonic() < deadline:
            time.sleep(0.005)
            self._reap()

    def _leave_nothing(self) -> None:
        """The server is about to end, and all that it has started ends with it."""
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # a resource tracker works until nobody can tell it anything more
        self._kept = frozenset()
        self._kill_all()

    def _kill_all(self) -> tuple[int, ...]:
        """Kills all that descends from us, however it tried to leave, and waits until it is gone, with what it left in
        /dev/shm and its sockets. Returns what would not die."""
        deadline = time.monotonic() + _KILL_SECONDS
        cleaned_by = deadline
        killed: set[int] = set()
        managers: set[str | None] = set()
        while (below := descendants(os.getpid(), except_below=self._kept)) and time.monotonic() < deadline:
            # semaphores and shared memory of Python's own are removed by the tracker, when the others are gone
            victims = [process.pid for process in below if not is_resource_tracker(process.pid)]
            if victims:
                cleaned_by = time.monotonic() + _CLEANING_SECONDS
            elif time.monotonic() > cleaned_by:
                victims = [process.pid for process in below]
            for pid in victims:
                if is_torchs_manager(pid):
                    managers.add(sockets.directory_of_manager(pid))
                killed.add(pid)
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.002)
            self._reap()
        if self._trial is not None:
            self._trial.processes |= {*killed, self._trial.pid}
            remove_left_by(self._trial.processes, self._trial.started_at)
            for path in (self._trial.sockets_path, *managers):
                sockets.remove_directory(path)
        return tuple(process.pid for process in below)


def main() -> None:
    """Serves until the orchestrator is gone; leaves nothing behind."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    Server(Channel(connection), int(sys.argv[2])).run()
    child.leave()
