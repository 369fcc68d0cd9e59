"""The process of one trial: set apart, given its limits, it runs the user's training step and writes down the answer.

The only module of the orchestrator's half that reaches training and measurement, which it names by a string. It is
either entered in a fork of the server or, through `main`, in an interpreter of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import importlib
import io
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from autotune.machine import available_memory_bytes
from autotune.processes import sockets, system_memory
from autotune.processes.failures import classify, import_failure
from autotune.processes.interpreter import command
from autotune.processes.wire import DISK_FULL_STATUS, SHOW_WHERE_SIGNAL, TrialOrder, encode_answer, unfinished
from autotune.records import Conditions, Failure, Phase, TrialAnswer, TrialRequest
from autotune.workload import UserFunctions, load_functions

STARTED_VARIABLE = "AUTOTUNE_STARTED_AT"
"""`time.monotonic()` at the start of the trial's process, as text."""

START_METHOD_VARIABLE = "AUTOTUNE_START_METHOD"
"""`fork` or `fresh`."""

DEFAULT_MEMORY_SHARE = 0.9
"""Of the available host memory, for a CPU trial without a limit: the kernel's killer must not be what answers."""

_PR_SET_PDEATHSIG = 1

Entry = Callable[[TrialRequest, UserFunctions, Callable[[Phase], None]], TrialAnswer]


def signal_at_parents_death(number: int, parent: int) -> None:
    """Asks the kernel for this signal when the parent's thread ends; exits at once where that has happened already."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def show_where_on_signal(*, then_end: bool = False) -> None:
    """From now on SHOW_WHERE_SIGNAL prints the stack, whatever handler the user's module has set.

    `then_end`: it ends the process after that, so that whoever sent it can tell when all is printed.
    """
    faulthandler.unregister(SHOW_WHERE_SIGNAL)  # or registering it again would leave that handler
    if then_end:
        signal.signal(SHOW_WHERE_SIGNAL, signal.SIG_DFL)  # what the chain goes on to
    faulthandler.register(SHOW_WHERE_SIGNAL, 2, all_threads=False, chain=then_end)


def set_apart(order: TrialOrder, server: int) -> None:
    """In the forked process: a session of its own that dies with the server, hears no keyboard, owns its output."""
    os.environ[STARTED_VARIABLE] = repr(time.monotonic())
    os.environ[START_METHOD_VARIABLE] = order.start_method
    os.setsid()
    for directory in _temporary_directories():
        directory.detach()  # the server's, which further trials need, whatever becomes of our copies
    signal_at_parents_death(signal.SIGKILL, server)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGCHLD, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(order.output_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    for source in (nothing, output):
        if source > 2:  # it is one of the three where the user's module has closed that
            os.close(source)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not stream.closed:  # the user's module may have closed it
            stream.reconfigure(line_buffering=True)  # what was printed before a crash is worth reading


def run_fresh(order: TrialOrder, report_descriptor: int) -> None:
    """In the forked process: becomes a new interpreter, which runs `main`."""
    order_descriptor = os.memfd_create("autotune-order", 0)
    with os.fdopen(os.dup(order_descriptor), "wb") as stream:
        pickle.dump(order, stream)
    os.lseek(order_descriptor, 0, os.SEEK_SET)
    os.set_inheritable(report_descriptor, True)
    arguments = command("autotune.processes.child", str(order_descriptor), str(report_descriptor))
    os.execv(sys.executable, arguments)


def run_forked(order: TrialOrder, report_descriptor: int, functions: UserFunctions, thread_count: int) -> None:
    """In the forked process: runs the trial with the functions that the server has imported."""
    import torch

    torch.set_num_threads(thread_count)
    TrialProcess(order, report_descriptor).run(lambda: functions)


def main() -> None:
    """In an interpreter of its own: reads the order, imports everything, runs the trial. Does not return."""
    order_descriptor, report_descriptor = int(sys.argv[1]), int(sys.argv[2])
    with os.fdopen(order_descriptor, "rb") as stream:
        order: TrialOrder = pickle.load(stream)
    os.set_inheritable(report_descriptor, False)
    sys.argv = [order.workload.location]
    try:
        TrialProcess(order, report_descriptor).run(lambda: _load_after_torch(order))
    except BaseException as error:  # ours, not the user's, which is told in the answer
        fail(error)
    leave()


def _load_after_torch(order: TrialOrder) -> UserFunctions:
    # first, as in the server: what lies in the user's directories must not take the place of what torch imports
    import torch  # noqa: F401

    return load_functions(order.workload)


def leave() -> NoReturn:
    """Ends the process without running what others have registered for its end: a thread of theirs may never finish. Save
    that temporary directories go, of which each trial may have one."""
    for directory in _temporary_directories():
        with contextlib.suppress(Exception):  # it warns that nobody else has removed it, and warnings may be errors
            directory()
    flush_streams()
    os._exit(0)


def _temporary_directories() -> list[weakref.finalize[Any, Any]]:
    """What removes those that the user's code has made, and Python's own end would."""
    all_of_them: Iterable[weakref.finalize[Any, Any]] = weakref.finalize._registry  # type: ignore[attr-defined]
    held = [(finalizer, finalizer.peek()) for finalizer in list(all_of_them)]
    return [finalizer for finalizer, of in held if of and issubclass(type(of[0]), tempfile.TemporaryDirectory)]


def fail(error: BaseException) -> NoReturn:
    """Ends the process for a reason of ours, not of the user's: it belongs into the trial's output."""
    sys.__excepthook__(type(error), error, error.__traceback__)
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    os._exit(DISK_FULL_STATUS if full else 1)


def flush_streams() -> None:
    """Writes out what was printed so far."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):  # the user has replaced or closed it, or the disk is full
            continue


def load_entry(dotted: str) -> Entry:
    """The function that `module:function` names."""
    module, _, name = dotted.partition(":")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the user's module may have made errors of them, for its own code
        entry: Entry = getattr(importlib.import_module(module), name)
    return entry


class TrialProcess:
    """Runs one trial in this process and writes the answer's file."""

    def __init__(self, order: TrialOrder, report_descriptor: int) -> None:
        self._order = order
        self._report_descriptor = report_descriptor
        self._phase: Phase = "start"
        # opened now, since a trial may end because no further file can be opened
        self._unfinished_path = unfinished(order.result_path)
        self._result = open(self._unfinished_path, "w", encoding="utf-8")  # noqa: SIM115

    def run(self, load: Callable[[], UserFunctions]) -> None:
        """Runs the trial; whatever the user's code raises becomes the answer's failure, which ends the process."""
        faulthandler.enable(2, all_threads=False)  # a crash prints where it happened, too
        show_where_on_signal(then_end=True)
        os.register_at_fork(after_in_child=self._report_process)
        sockets.use_directory(self._order.sockets_path)
        self._enter("start")
        try:
            functions = load()
        except BaseException as error:  # the user's module may raise anything, SystemExit too
            told = import_failure(error, self._order.workload.location)
            failure = Failure(kind="user_error", phase="start", message=str(told), detail=told.detail)
            self._write(TrialAnswer(failure=failure))
            return
        if multiprocessing.get_start_method(allow_none=True) is None:  # the user's module has not chosen
            multiprocessing.set_start_method("fork")  # for loader workers: Python 3.14's forkserver costs 4 s a trial
        unlimited = resource.getrlimit(resource.RLIMIT_DATA)
        try:
            entry = load_entry(self._order.entry)
            conditions = self._order.request.conditions
            probed = self._order.request.kind == "memory"
            limit_memory(conditions, host_margin=conditions.memory_margin if probed else 0.0)
            answer = entry(self._order.request, functions, self._enter)
            _hear_no_workers()
        except BaseException as error:  # the user's code may raise anything, SystemExit too
            _hear_no_workers()
            resource.setrlimit(resource.RLIMIT_DATA, unlimited)  # telling what happened takes some memory as well
            self._write(TrialAnswer(failure=classify(error, self._phase)))
            leave()  # with the exception at hand: torch waits 5 s for each worker that its end would let go of
        self._write(answer)

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        os.write(self._report_descriptor, f"{phase}\n".encode())

    def _report_process(self) -> None:
        """In each process that is forked here, such as a loader worker: what it leaves behind bears its number."""
        try:
            os.write(self._report_descriptor, f"{os.getpid()}\n".encode())
        except OSError:  # the user's code has closed what it does not know
            return

    def _write(self, answer: TrialAnswer) -> None:
        self._result.write(encode_answer(answer))
        self._result.close()
        os.rename(self._unfinished_path, self._order.result_path)


def _hear_no_workers() -> None:
    # torch's handler raises in whatever runs when a loader worker dies, which must not be the telling of that death
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def limit_memory(conditions: Conditions, *, host_margin: float = 0.0) -> None:
    """Makes the device, or on CPU this process and each that it starts, as small as the conditions say.

    `host_margin`: the share of it that stays out of reach on a CPU, where nothing tells afterwards what was left.
    """
    limit_bytes = conditions.memory_limit_bytes
    if conditions.device == "cuda":
        if limit_bytes is not None:
            _limit_cuda(limit_bytes)
        return
    if limit_bytes is None:
        limit_bytes = int(DEFAULT_MEMORY_SHARE * available_memory_bytes())
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    soft = system_memory.data_bytes() + int(limit_bytes * (1 - host_margin))
    resource.setrlimit(resource.RLIMIT_DATA, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _limit_cuda(limit_bytes: int) -> None:
    import torch

    total_bytes = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total_bytes))
