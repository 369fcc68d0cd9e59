"""Every kind of failure is provoked in a real trial process, with the sentence that the user sees; nothing is left."""

import gc
import os
import re
import resource
from dataclasses import dataclass
from typing import get_args

import pytest

from autotune.processes.pool import TrialPool
from autotune.records import FailureKind

ENTRY = "trial_behaviours:answer"


@dataclass(frozen=True)
class Provoked:
    """What a trial does, and what becomes of it. `sentence` is the whole message, as a regular expression."""

    kind: FailureKind
    behaviour: str
    sentence: str
    said: tuple[str, ...] = ()
    """Type and text of the exception, for `raise_this`."""
    measure_seconds: float = 200.0
    memory_limit_bytes: int | None = None


def raising(kind, type_name, text, sentence):
    return Provoked(kind, "raise_this", sentence.format(re.escape(f"{type_name}: {text}")), (type_name, text))


DEVICE_OOM = r"the device ran out of memory \({}\)"
HOST_OOM = r"the host ran out of memory \({}\)"
LAUNCH = r"a kernel needs more than the device has \({}\)"
BROKE = r"the CUDA context broke \({}\)"
USERS = r"{} \(.*trial_behaviours\.py:\d+ in raise_this\)"
SHM = r"/dev/shm is full \({}\): use fewer loader workers or a smaller batch, or enlarge it"
FILES = (
    rf"the limit of {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} open files was reached \({{}}\): "
    r"raise it with `ulimit -n`, or use fewer loader workers"
)
TRITON = "out of resource: shared memory, Required: 262144, Hardware limit: 232448. Reducing block sizes may help."

OUT_OF_MEMORY = [
    raising("device_oom", "OutOfMemoryError", "CUDA out of memory. Tried to allocate 20.00 GiB.", DEVICE_OOM),
    raising("device_oom", "RuntimeError", "CUDA out of memory. Tried to allocate 20.00 GiB.", DEVICE_OOM),
    raising("device_oom", "RuntimeError", "CUDA error: out of memory", DEVICE_OOM),
    raising("device_oom", "AcceleratorError", "CUDA error: out of memory", DEVICE_OOM),
    raising("device_oom", "RuntimeError", "CUDA driver error: out of memory", DEVICE_OOM),
    raising("device_oom", "RuntimeError", "Triton Error [CUDA]: out of memory", DEVICE_OOM),
    raising("device_oom", "RuntimeError", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `f(x)`", DEVICE_OOM),
    raising("device_oom", "RuntimeError", "cuDNN error: CUDNN_STATUS_ALLOC_FAILED", DEVICE_OOM),
    raising("device_oom", "RuntimeError", "cuFFT error: CUFFT_ALLOC_FAILED", DEVICE_OOM),
    raising("device_oom", "RuntimeError", "NVML_SUCCESS == r INTERNAL ASSERT FAILED at \"A.cpp\":1016", DEVICE_OOM),
    raising("host_oom", "MemoryError", "Unable to allocate 8.00 GiB for an array", HOST_OOM),
    raising("host_oom", "RuntimeError", "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't", HOST_OOM),
    raising("host_oom", "RuntimeError", "std::bad_alloc", HOST_OOM),
    raising("host_oom", "OSError", "[Errno 12] Cannot allocate memory", HOST_OOM),
    raising("host_oom", "RuntimeError", "unable to mmap 64 bytes from file </t>: Cannot allocate memory (12)", HOST_OOM),
    Provoked("host_oom", "allocate_too_much", HOST_OOM.format("RuntimeError: .*DefaultCPUAllocator.*"),
             memory_limit_bytes=2**30),
]  # fmt: skip
LOOK_ALIKES = [
    raising("launch_limit", "OutOfResources", TRITON, LAUNCH),
    raising("launch_limit", "RuntimeError", f"No valid triton configs. OutOfResources: {TRITON}", LAUNCH),
    raising("launch_limit", "RuntimeError", "CUDA error: too many resources requested for launch", LAUNCH),
    raising("cuda_error", "RuntimeError", "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR", BROKE),
    raising("user_error", "RuntimeError", "the memory bank is out of memory slots", USERS),
    raising("user_error", "RuntimeError", "cannot allocate memory cells to 5 heads", USERS),
    raising("user_error", "RuntimeError", "too many open files in the index", USERS),
    raising("user_error", "ValueError", "CUDA out of memory, says my own check", USERS),
    raising("user_error", "LookupError", "Cannot allocate memory", USERS),
]
OTHERS = [
    Provoked("shared_memory", "lose_a_worker_to_full_shared_memory",
             SHM.format("a loader worker was killed by SIGBUS")),
    raising("shared_memory", "RuntimeError", "unable to open shared memory object </torch_1_2_3> in read-write mode: "
            "No space left on device (28)", SHM),
    Provoked("file_limit", "use_up_files", FILES.format(r"OSError: \[Errno 24\] Too many open files: '/dev/null'")),
    Provoked("timeout", "hang", "the trial did not get through its measure phase within 1 s", measure_seconds=1.0),
    Provoked("crash", "die_of_segfault", "the trial was ended by SIGSEGV in its measure phase"),
    Provoked("crash", "exit_silently", "the trial ended without a result, with status 0, in its measure phase"),
    Provoked("crash", "lose_a_worker_by_signal", "a loader worker was killed by SIGSEGV"),
    raising("cuda_error", "AcceleratorError", "CUDA error: device-side assert triggered", BROKE),
    raising("cuda_error", "RuntimeError", "CUDA error: an illegal memory access was encountered", BROKE),
    Provoked("compile_error", "fail_to_compile", "compiling failed with NotImplementedError: no such kernel"),
    Provoked("numerics", "find_numerics", "the loss is NaN in step 3"),
    Provoked("user_error", "ignore_signals_in_workers", r"LookupError: workers \[\d+, \d+\] are stuck \(.*\)"),
    Provoked("user_error", "exit_loudly", r"the user's code called sys\.exit: SystemExit: 3 \(.* in exit_loudly\)"),
    Provoked("conflict", "train_in_conflict",
             "micro-batches of 3 do not add up to the global batch of 8; use a divisor of 8"),
    Provoked("memory_not_returned", "look_around",
             r"1024 MiB more than before the trial were in use on the GPU 0 s after its end; another program may have "
             "started there"),
]  # fmt: skip
TABLE = [*OUT_OF_MEMORY, *LOOK_ALIKES, *OTHERS]


@pytest.fixture(scope="module")
def pool(behaving_workload, tmp_path_factory, children):
    with TrialPool(behaving_workload, tmp_path_factory.mktemp("study"), entry=ENTRY) as pool:
        yield pool
    assert children() == set()


def test_every_kind_is_in_the_table():
    assert {row.kind for row in TABLE} == set(get_args(FailureKind))


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.kind}-{row.behaviour}-{'-'.join(row.said)[:40]}")
def test_a_failure_has_its_name_and_its_sentence_and_leaves_nothing(row, pool, request_for, children, monkeypatch):
    if row.kind == "memory_not_returned":  # there is no GPU here whose memory could stay away
        readings = iter([0])
        monkeypatch.setattr(pool, "_gpu_used_bytes", lambda: next(readings, 2**30))
        monkeypatch.setattr("autotune.processes.pool._GPU_RETURN_SECONDS", 0.1)
    answer = pool.run(request_for(row.behaviour, row.measure_seconds, row.memory_limit_bytes, said=row.said))
    assert answer.failure is not None
    assert (answer.failure.kind, answer.failure.phase) == (row.kind, "measure")
    assert re.fullmatch(row.sentence, answer.failure.message), answer.failure.message
    assert children() == {server.pid for server in pool._servers.values()}


def test_fifty_failures_leave_no_descriptor_open(pool, request_for):
    def descriptors():
        (server,) = pool._servers.values()
        gc.collect()  # closes what earlier tests have left open
        return len(os.listdir("/proc/self/fd")), len(os.listdir(f"/proc/{server.pid}/fd"))

    pool.run(request_for("exit_silently"))
    before = descriptors()
    for number in range(50):
        pool.run(request_for(("exit_silently", "raise_error", "die_of_segfault")[number % 3]))
    assert descriptors() == before
