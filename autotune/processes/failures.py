"""`classify`: what kind of failure an exception in a trial is, whichever of its many spellings it came in."""

from __future__ import annotations

import re
import resource
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from autotune.errors import UserError, WorkloadError
from autotune.failure import TrialFailure
from autotune.processes.frames import Origin, origin_of, text_of
from autotune.records import Failure, FailureKind, Phase


@dataclass(frozen=True)
class _Spelling:
    """A text that torch, CUDA or the system gives to a kind of failure."""

    kind: FailureKind
    pattern: re.Pattern[str]
    only_near_ceiling: bool = False
    """The text also has other causes: it counts only while the device's memory is nearly full."""


def _spelling(kind: FailureKind, pattern: str, *, only_near_ceiling: bool = False) -> _Spelling:
    return _Spelling(kind, re.compile(pattern, re.IGNORECASE | re.MULTILINE), only_near_ceiling)


# The first that matches decides, so the narrow ones stand before the wide ones.
_SPELLINGS = (
    # "open shared memory object" fails for two reasons, which only the end of the text tells apart
    _spelling("file_limit", r"\[Errno 24\]|too many open files( \(24\)|$)|received \d+ items of ancdata"),
    _spelling("shared_memory", r"insufficient shared memory"),
    _spelling("shared_memory", r"(shared memory object|/torch_\d+|/dev/shm)[\s\S]*no space left on device"),
    _spelling("shared_memory", r"unable to (resize file|write to file|allocate shared memory)[\s\S]*/torch_\d+"),
    _spelling("launch_limit", r"out of resources?: |OutOfResources|too many resources requested for launch"),
    _spelling("launch_limit", r"CUDA error: invalid configuration argument"),
    _spelling("device_oom", r"(CUDA|HIP)( driver)?( error)?:? out of memory|Triton Error \[\w+\]: out of memory"),
    _spelling("device_oom", r"CU\w+_STATUS_ALLOC_FAILED|CUSPARSE_STATUS_INSUFFICIENT_RESOURCES|CUFFT_ALLOC_FAILED"),
    _spelling("device_oom", r"NVML_SUCCESS == r"),
    _spelling("device_oom", r"CUDNN_STATUS_INTERNAL_ERROR|CUFFT_INTERNAL_ERROR", only_near_ceiling=True),
    _spelling("device_oom", r"CUBLAS_STATUS_NOT_INITIALIZED", only_near_ceiling=True),
    _spelling("device_oom", r"unable to find (a valid|an) (cudnn )?(algorithm|engine)", only_near_ceiling=True),
    _spelling("device_oom", r"no valid (cudnn )?(algorithm|engine|execution plan)", only_near_ceiling=True),
    _spelling("host_oom", r"DefaultCPUAllocator|not enough memory: you tried to allocate|std::bad_alloc"),
    _spelling("host_oom", r"\[Errno 12\]|cannot allocate memory( \(12\)|$)"),
    _spelling("host_oom", r"could not (create|execute) a primitive$|could not create a memory object$"),  # oneDNN
    _spelling("compile_error", r"torch\.compile with aot_autograd|compiled with non-empty donated buffers"),
    _spelling("cuda_error", r"(CUDA|HIP)( driver)? error|Triton Error \[|device-side assert|C(U\w+|UDNN)_STATUS_"),
    _spelling("cuda_error", r"CUFFT_\w+|unable to find (a valid|an) (cudnn )?(algorithm|engine)"),
)

_SPELLED_TYPES = frozenset({"RuntimeError", "OSError", "MemoryError", "AssertionError", "SystemError"})
"""Errors of the system and of torch's native code. A ValueError of the user that speaks of memory is just that."""

_WORKER_SIGNALS = {
    "bus error": signal.SIGBUS,
    "segmentation fault": signal.SIGSEGV,
    "aborted": signal.SIGABRT,
    "killed": signal.SIGKILL,
    "terminated": signal.SIGTERM,
    "floating point exception": signal.SIGFPE,
    "illegal instruction": signal.SIGILL,
}
_WORKER_KILLED = re.compile(r"DataLoader worker \(pid\S* [\d, ]+\) is killed by signal: ([\w ]+)", re.IGNORECASE)
_WORKER_EXITED = re.compile(r"DataLoader worker \(pid\S* [\d, ]+\) exited unexpectedly(?: with exit code (-?\d+))?")
_LOST_CONNECTION = frozenset(
    {"FileNotFoundError", "ConnectionRefusedError", "ConnectionResetError", "BrokenPipeError", "EOFError"}
)
_WORKER_DEATH_SECONDS = 10.0
"""For a worker whose sockets are closed to be dead, which takes a moment unless others hold all cores."""
_NO_CUDA = re.compile(
    r"Torch not compiled with CUDA enabled|No CUDA GPUs are available|Found no NVIDIA driver|"
    r"torch\.cuda\.is_available\(\) is False"
)
WITHOUT_ARGUMENTS = "it reads arguments, of which a trial has none: give each a default, or read them in main() alone"

_COMPILER_MODULES = ("torch._dynamo", "torch._inductor", "torch._functorch", "torch.fx", "triton")


def classify(error: BaseException, phase: Phase) -> Failure:
    """The failure that this exception is, wherever it was raised and however torch wrapped it.

    Where an exception was raised from another one, the most telling of the two decides; what nothing is known of is a
    `user_error`, which shows the exception and the user's own frames. Notes on the exception are told after it. Never
    raises.
    """
    failure = _classified(error, phase)
    notes = "; ".join(_first_line(str(note)) for note in getattr(error, "__notes__", ()))
    return failure.model_copy(update={"message": f"{failure.message} ({notes})"}) if notes else failure


def _classified(error: BaseException, phase: Phase) -> Failure:
    links = list(_links(error))
    for link in links:
        if isinstance(link, TrialFailure):
            return Failure(kind=link.kind, phase=phase, message=link.message, detail=_detail_of(link))
        if isinstance(link, UserError):
            return Failure(kind="user_error", phase=phase, message=str(link), detail=_detail_of(link))
    for link in links:
        failure = _named_failure(link, origin_of(link), phase)
        if failure is not None:
            return failure
    origin = origin_of(error)
    if any(_is_of_compiler(link) for link in links):
        inner = getattr(error, "inner_exception", None) or error  # what a backend raised is told by its wrapper only
        told = origin_of(inner)
        message = f"compiling failed with {told.type_name}: {_first_line(told.message)}"
        return Failure(kind="compile_error", phase=phase, message=message, detail=origin.detail)
    told_whole = not origin.frames and "\n" not in origin.message.strip()
    detail = "" if told_whole else origin.detail
    return Failure(kind="user_error", phase=phase, message=_user_message(error, origin), detail=detail)


def import_failure(error: BaseException, location: str) -> WorkloadError:
    """What to tell a user whose module cannot be imported: their exception, their frames."""
    if isinstance(error, UserError):
        return WorkloadError(str(error), error.detail)
    origin = origin_of(error)
    where = f" ({origin.where})" if origin.where else ""
    ended = "called sys.exit" if isinstance(error, SystemExit) else "failed"
    message = f"importing {location} {ended} with {origin.type_name}: {_first_line(origin.message)}{where}"
    reads_it_itself = isinstance(error, IndexError) and "sys.argv" in origin.frames
    if reads_it_itself or (isinstance(error, SystemExit) and _is_of_argparse(error)):
        message += f"; {WITHOUT_ARGUMENTS}"
    elif isinstance(error, SystemExit):
        message += '; put what runs the script under `if __name__ == "__main__":`'
    if isinstance(error, ImportError) and "relative import" in origin.message:
        message += "; name it as a module from the folder above its package, such as package.train"
    if isinstance(error, ImportError) and error.name in sys.stdlib_module_names:
        own = Path(location).parent / f"{error.name}.py"
        if own.is_file():
            message += f"; {own} has the name of a module of Python's own, which was imported instead: rename yours"
    return WorkloadError(message, origin.detail)


def _is_of_argparse(error: BaseException) -> bool:
    return any(frame.f_globals.get("__name__") == "argparse" for frame, _ in traceback.walk_tb(error.__traceback__))


def _links(error: BaseException) -> Iterator[BaseException]:
    """The exception and those it was raised from, outermost first."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        link = waiting.pop(0)
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        inner = getattr(link, "inner_exception", None)  # torch._dynamo's BackendCompilerFailed
        waiting.append(inner if isinstance(inner, BaseException) else None)
        waiting.append(link.__cause__ if link.__suppress_context__ else link.__context__)


def _named_failure(error: BaseException, origin: Origin, phase: Phase) -> Failure | None:
    """The failure, where the exception is one of those that have a name of their own."""

    def failure(kind: FailureKind) -> Failure:
        return Failure(kind=kind, phase=phase, message=_explained(kind, origin), detail=origin.detail)

    text = origin.message
    killed = _WORKER_KILLED.search(text)
    exited = _WORKER_EXITED.search(text)
    if killed is not None and killed[1].strip().lower() in _WORKER_SIGNALS:
        return _worker_died(origin, -_WORKER_SIGNALS[killed[1].strip().lower()], phase)
    if exited is not None or _is_lost_worker(error, origin):
        code = int(exited[1]) if exited is not None and exited[1] else _worker_exit_code(error)
        return _worker_died(origin, code, phase)
    if _has_type(error, "torch", "OutOfMemoryError") or origin.type_name == "OutOfMemoryError":
        return failure("device_oom")
    if isinstance(error, MemoryError) or origin.type_name in ("MemoryError", "_ArrayMemoryError"):
        return failure("host_oom")
    if _NO_CUDA.search(text):
        return None  # the user's, with a hint; "CUDA driver" in its text is no error of the driver
    kind = _kind_by_spelling(error, origin)
    return None if kind is None else failure(kind)


def _worker_died(origin: Origin, code: int | None, phase: Phase) -> Failure:
    shown = f"{origin.type_name}: {_first_line(origin.message)}"
    if code == -signal.SIGBUS:
        message = _full_shared_memory("a loader worker was killed by SIGBUS")
        return Failure(kind="shared_memory", phase=phase, message=message, detail=origin.detail)
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        message = f"a loader worker was killed by {name}"
        return Failure(kind="crash", phase=phase, message=message, detail=origin.detail, signal=name)
    status = f" with status {code}" if code is not None else ""
    message = f"a loader worker exited{status} before its batch arrived ({shown})"
    return Failure(kind="user_error", phase=phase, message=message, detail=origin.detail)


def _kind_by_spelling(error: BaseException, origin: Origin) -> FailureKind | None:
    spelled = any(cls.__name__ in _SPELLED_TYPES for cls in type(error).__mro__) or _is_of_compiler(error)
    if not spelled:
        return None
    text = f"{origin.type_name}: {origin.message}"
    if isinstance(error, OSError) and error.filename is not None:
        text += f" {error.filename}"
        text = f"{error.filename} {text}"  # a rule may want the path before or after the reason
    for spelling in _SPELLINGS:
        if spelling.pattern.search(text) and (not spelling.only_near_ceiling or _device_nearly_full()):
            return spelling.kind
    return "cuda_error" if _has_type(error, "torch", "AcceleratorError") else None


def _is_lost_worker(error: BaseException, origin: Origin) -> bool:
    """A batch whose tensors' sender is gone: torch reconnects to a dead worker's socket to fetch them."""
    if origin.in_worker or type(error).__name__ not in _LOST_CONNECTION:
        return False
    files = []
    link = error.__traceback__
    while link is not None:
        files.append(link.tb_frame.f_code.co_filename)
        link = link.tb_next
    return any("multiprocessing" in file for file in files[-4:])


def _worker_exit_code(error: BaseException) -> int | None:
    """How a loader worker ended, from the loader that the traceback runs through; negative for a signal."""
    workers = _workers_in(error)
    deadline = time.monotonic() + _WORKER_DEATH_SECONDS
    while workers and time.monotonic() < deadline:  # its sockets close a moment before it is dead
        ended = [worker.exitcode for worker in workers if worker.exitcode]
        if ended:
            return min(ended, key=lambda code: code == -signal.SIGTERM)  # of which the loader's own shutdown makes use
        time.sleep(0.01)
    return None


def _workers_in(error: BaseException) -> list[BaseProcess]:
    link = error.__traceback__
    while link is not None:
        workers = getattr(link.tb_frame.f_locals.get("self"), "_workers", None)
        if isinstance(workers, list):
            return [worker for worker in workers if isinstance(worker, BaseProcess)]
        link = link.tb_next
    return []


def _is_of_compiler(error: BaseException) -> bool:
    return any(cls.__module__.startswith(_COMPILER_MODULES) for cls in type(error).__mro__)


def _has_type(error: BaseException, module: str, name: str) -> bool:
    return any(cls.__name__ == name and cls.__module__.startswith(module) for cls in type(error).__mro__)


def _device_nearly_full() -> bool:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        allocator_ooms = torch.cuda.memory_stats().get("num_ooms", 0)
    except RuntimeError:  # the context is broken, which leaves the text to decide
        return False
    return bool(free_bytes < 0.1 * total_bytes or allocator_ooms > 0)


def _explained(kind: FailureKind, origin: Origin) -> str:
    shown = _first_line(f"{origin.type_name}: {origin.message}")
    open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    sentences: dict[FailureKind, str] = {
        "device_oom": f"the device ran out of memory ({shown})",
        "host_oom": f"the host ran out of memory ({shown})",
        "shared_memory": _full_shared_memory(shown),
        "file_limit": f"the limit of {open_files} open files was reached ({shown}): raise it with `ulimit -n`, or use "
        "fewer loader workers",
        "launch_limit": f"a kernel needs more than the device has ({shown})",
        "cuda_error": f"the CUDA context broke ({shown})",
        "compile_error": f"the compiled step cannot do what the step itself does ({shown})",
    }
    return sentences[kind]


def _full_shared_memory(shown: str) -> str:
    return f"/dev/shm is full ({shown}): use fewer loader workers or a smaller batch, or enlarge it"


def _user_message(error: BaseException, origin: Origin) -> str:
    where = f" ({origin.where})" if origin.where else ""
    shown = f"{origin.type_name}: {_first_line(origin.message)}" if origin.message else origin.type_name
    if isinstance(error, SystemExit):
        return f"the user's code called sys.exit: {shown}{where}"
    if "Expected more than 1 value per channel when training" in origin.message:
        return (
            "a batch of one sample reached BatchNorm, which refuses it in training: set drop_last=True, or choose a "
            f"batch size that leaves no last batch of one sample ({shown})"
        )
    if _is_of_collate(error):
        if "requires grad" in origin.message:  # which torch minds in a loader worker alone
            return (
                f"a loader worker could not put samples together into a batch ({shown}): what a model gives in the data set "
                "must be detached from it (.detach()), or num_workers=0 be kept"
            )
        return (
            f"samples could not be put together into a batch ({shown}): make them alike, or give the DataLoader a "
            "collate_fn"
        )
    if origin.type_name == "CheckpointError":
        return (
            "recomputing a block gave something else than its forward did: it counts its calls, or draws numbers from "
            f"other generators than torch's ({shown})"
        )
    if "backward through the graph a second time" in origin.message:
        return (
            f"{shown}{where}; the step calls backward() itself, so loss_fn must not, and what the model keeps of a step for "
            "the next one must be detached from it (.detach())"
        )
    if re.search("does not support (sparse|dense) gradients", origin.message):
        return (
            f"{shown}{where}; an embedding with sparse=True needs an optimizer_fn whose optimizer takes both kinds of "
            "gradients, such as torch.optim.SGD or Adagrad, or is made without it (without optimizer_fn it is AdamW)"
        )
    if _NO_CUDA.search(origin.message):
        return f"{shown}{where}: there is no GPU here; leave .cuda() and .to(...) out, autotune places the model itself"
    return f"{shown}{where}"


def _is_of_collate(error: BaseException) -> bool:
    """Whether torch's own collate function raised it, here or in a loader worker: no line of the user's shows then."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    files += re.findall(r'^  File "(.*)", line', text_of(error), re.MULTILINE)
    return bool(files) and files[-1].endswith("torch/utils/data/_utils/collate.py")


def _detail_of(error: TrialFailure | UserError) -> str:
    """Its own, or the user's frames in what it was raised from."""
    if error.detail or error.__cause__ is None:
        return error.detail
    origin = origin_of(error.__cause__)
    return origin.detail if origin.frames or isinstance(error, TrialFailure) else ""


def _first_line(text: str) -> str:
    line = text.strip().splitlines()[0] if text.strip() else ""
    return line if len(line) <= 300 else line[:297] + "..."
