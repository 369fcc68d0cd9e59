"""What the server does before its first trial: the user's imports, and a fork that shows whether forks will work."""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from contextlib import suppress

from autotune.processes import child
from autotune.processes.wire import Hello
from autotune.workload import UserFunctions, load_functions

_CUDA_FAILED_STATUS = 3


def import_user_module(hello: Hello) -> tuple[UserFunctions, int]:
    """Imports torch and the user's functions, with one thread; returns also how many threads the trials shall have.

    One parallel operation on the CPU before a fork makes every forked process hang in libgomp. What the user's module
    itself asks for with `torch.set_num_threads` is taken down, to be set after the fork.
    """
    import torch

    thread_count = torch.get_num_threads()
    set_num_threads = torch.set_num_threads
    set_num_threads(1)
    importing = True

    def take_down(count: int) -> None:
        nonlocal thread_count
        if not importing:  # `from torch import set_num_threads` keeps this function
            set_num_threads(count)
            return
        thread_count = count

    torch.set_num_threads = take_down  # type: ignore[assignment]  # a function of native code there
    sys.argv = [hello.workload.location]
    try:
        functions = load_functions(hello.workload)
    finally:
        importing = False
        torch.set_num_threads = set_num_threads
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the user's module may have made errors of them, which are for the user's code
        _import_what_trials_need(hello)
    set_num_threads(1)
    return functions, thread_count


def _import_what_trials_need(hello: Hello) -> None:
    import torch._dynamo  # noqa: F401  # making any optimizer imports it, which takes a second: better here than in a trial

    child.load_entry(hello.entry)


def import_compiler() -> None:
    """Imports inductor, for the forks that come after: 1 to 3 s."""
    # it starts a pool of compiling processes, unless told not to: ours would be of no use to a trial
    before = os.environ.get("TORCH_WARM_POOL")
    os.environ["TORCH_WARM_POOL"] = "0"
    # What cannot be imported fails where it is needed. Of warnings the user's module may have made errors.
    with warnings.catch_warnings(), suppress(Exception):
        warnings.simplefilter("ignore")
        import torch._inductor.compile_fx  # noqa: F401
    if before is None:
        del os.environ["TORCH_WARM_POOL"]
    else:
        os.environ["TORCH_WARM_POOL"] = before


def prepare_for_compiling(device: str) -> None:
    """Has the imported compiler find out, once for all forks, what it otherwise does in each: hashes over all its files
    and, for a CPU, which vector instructions compile and run, for which it starts compilers and interpreters.

    On two cores that is 2.5 s of each compiled trial.
    """
    # There is no compiler, or torch, whose own functions these are, keeps them elsewhere: what is only to save time must not
    # end the server, which would fail each trial that compiles.
    with suppress(Exception):
        from torch._inductor.codecache import torch_key

        torch_key()
        if device == "cpu":
            from torch._inductor.cpu_vec_isa import valid_vec_isa_list

            valid_vec_isa_list()
        else:
            from torch._inductor.runtime.triton_compat import triton_key

            triton_key()


def fork_problem(thread_count: int, silence_seconds: float) -> str | None:
    """Forks a process that does what trials will do, and says why it could not, in words for the user.

    None where it could; a process that is still silent after `silence_seconds` could not.
    """
    import torch

    if torch.cuda.is_initialized():
        return "CUDA is used while the user's module is imported"
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return "a process group is made while the user's module is imported, and its threads are in no forked process"
    pid = fork()
    if pid == 0:
        _try_out(thread_count)
    deadline = time.monotonic() + silence_seconds
    while time.monotonic() < deadline:
        waited, status = os.waitpid(pid, os.WNOHANG)
        if waited:
            failed = os.waitstatus_to_exitcode(status) == _CUDA_FAILED_STATUS
            return "CUDA cannot be used in a forked process" if failed else None
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "importing the user's module starts threads that a forked process waits for in vain"


def _try_out(thread_count: int) -> None:
    """In a forked process: a parallel operation on the CPU and, where there is a GPU, the first use of CUDA."""
    try:
        import torch

        torch.set_num_threads(thread_count)
        (torch.ones(1 << 20) * 2).sum()
        torch.ones(256, 256) @ torch.ones(256, 256)
        if torch.cuda.is_available():
            torch.cuda.init()
    except BaseException as error:  # in a fork of the server nothing may escape
        words = ("forked subprocess", "initialization error")
        os._exit(_CUDA_FAILED_STATUS if any(word in str(error) for word in words) else 0)
    os._exit(0)


def fork() -> int:
    """`os.fork`, with nothing printed twice and no warning."""
    child.flush_streams()  # or the child writes it a second time
    with warnings.catch_warnings():
        # Python 3.12 warns of threads, which the user may have made an error; whether they matter has been tried out
        warnings.simplefilter("ignore")
        return os.fork()
