"""Every spelling of a failure gets its name, and what is the user's stays the user's."""

import argparse
import errno
import sys

import numpy
import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed, InternalTorchDynamoError
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from autotune.errors import WorkloadError
from autotune.failure import TrialFailure
from autotune.processes import failures
from autotune.processes.failures import classify, import_failure
from autotune.processes.frames import origin_of


class OutOfResources(Exception):  # noqa: N818
    """As Triton's, which is not installed everywhere."""

    __module__ = "triton.runtime.errors"


def no_space(path):
    return OSError(errno.ENOSPC, "No space left on device", path)


SHM_FULL = "unable to open shared memory object </torch_12_34_5> in read-write mode: No space left on device (28)"
SHM_NO_FILES = "unable to open shared memory object </torch_12_34_5> in read-write mode: Too many open files (24)"
TRITON_RESOURCES = "out of resource: shared memory, Required: 262144, Hardware limit: 232448. Reducing block sizes"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."), "device_oom"),
        (torch.OutOfMemoryError("the card is full"), "device_oom"),
        (RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB."), "device_oom"),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously"), "device_oom"),
        (torch.AcceleratorError("CUDA error: out of memory"), "device_oom"),
        (RuntimeError("CUDA driver error: out of memory"), "device_oom"),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "device_oom"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "device_oom"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "device_oom"),
        (RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"), "device_oom"),
        (RuntimeError('NVML_SUCCESS == r INTERNAL ASSERT FAILED at "CUDACachingAllocator.cpp":1016'), "device_oom"),
        (RuntimeError("torch.compile with aot_autograd does not currently support double backward"), "compile_error"),
        (RuntimeError("This backward function was compiled with non-empty donated buffers"), "compile_error"),
        (MemoryError(), "host_oom"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate"), "host_oom"),
        (RuntimeError("could not execute a primitive"), "host_oom"),
        (RuntimeError("std::bad_alloc"), "host_oom"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "host_oom"),
        (RuntimeError("unable to mmap 64 bytes from file </torch_1_2>: Cannot allocate memory (12)"), "host_oom"),
        (OutOfResources(TRITON_RESOURCES), "launch_limit"),
        (RuntimeError(f"No valid triton configs. OutOfResources: {TRITON_RESOURCES}"), "launch_limit"),
        (RuntimeError("CUDA error: too many resources requested for launch"), "launch_limit"),
        (RuntimeError(SHM_FULL), "shared_memory"),
        (RuntimeError(f"unable to write to file </torch_12_34_5>: {errno.ENOSPC}"), "shared_memory"),
        (no_space("/dev/shm/psm_12"), "shared_memory"),
        (no_space("/home/user/checkpoint.pt"), "user_error"),
        (RuntimeError(SHM_NO_FILES), "file_limit"),
        (OSError(errno.EMFILE, "Too many open files"), "file_limit"),
        (RuntimeError("received 0 items of ancdata"), "file_limit"),
        (RuntimeError("CUDA error: device-side assert triggered"), "cuda_error"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "cuda_error"),
        (torch.AcceleratorError("CUDA error: unspecified launch failure"), "cuda_error"),
        (torch.AcceleratorError("something new"), "cuda_error"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"), "cuda_error"),
        (RuntimeError("Unable to find a valid cuDNN algorithm to run convolution"), "cuda_error"),
        (RuntimeError("GET was unable to find an engine to execute this computation"), "cuda_error"),
        (InternalTorchDynamoError("TypeError: unhashable type"), "compile_error"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (8x4 and 5x2)"), "user_error"),
        (ValueError("out of memory, says my own check: Cannot allocate memory"), "user_error"),
        (LookupError("CUDA error: in the name of my class"), "user_error"),
        (SystemExit(0), "user_error"),
        (KeyboardInterrupt(), "user_error"),
        (TrialFailure("conflict", "batch 3 does not divide 32"), "conflict"),
        (WorkloadError("data_fn returned a generator"), "user_error"),
    ],
    ids=lambda value: value if isinstance(value, str) else repr(value)[:60],
)
def test_spellings(error, kind):
    failure = classify(error, "measure")
    assert (failure.kind, failure.phase) == (kind, "measure")
    assert failure.message
    assert "\n" not in failure.message


@pytest.mark.parametrize(
    "text",
    [
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "cuFFT error: CUFFT_INTERNAL_ERROR",
        "Unable to find a valid cuDNN algorithm to run convolution",
        "GET was unable to find an engine to execute this computation",
    ],
)
def test_ambiguous_spellings_are_memory_only_near_the_ceiling(monkeypatch, text):
    assert classify(RuntimeError(text), "measure").kind == "cuda_error"
    monkeypatch.setattr(failures, "_device_nearly_full", lambda: True)
    assert classify(RuntimeError(text), "measure").kind == "device_oom"


def raised(function):
    try:
        function()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def test_real_cpu_errors():
    assert classify(raised(lambda: torch.empty(1 << 60)), "build").kind == "host_oom"
    assert classify(raised(lambda: numpy.empty(1 << 58)), "build").kind == "host_oom"
    assert classify(raised(lambda: bytearray(1 << 60)), "build").kind == "host_oom"


def test_batch_norm_with_a_last_batch_of_one():
    failure = classify(raised(lambda: nn.BatchNorm1d(3)(torch.zeros(1, 3))), "measure")
    assert failure.kind == "user_error"
    assert "drop_last=True" in failure.message


def test_cuda_where_there_is_none():
    failure = classify(AssertionError("Torch not compiled with CUDA enabled"), "build")
    assert failure.kind == "user_error"
    assert "autotune places the model itself" in failure.message
    assert classify(RuntimeError("Found no NVIDIA driver on your system."), "build").kind == "user_error"


def test_system_exit_is_named():
    assert classify(SystemExit(3), "build").message.startswith("the user's code called sys.exit: SystemExit: 3")


def test_ready_failures_pass_as_they_are():
    failure = classify(TrialFailure("numerics", "the loss is NaN", "step 3"), "warm-up")
    assert (failure.kind, failure.message, failure.detail) == ("numerics", "the loss is NaN", "step 3")


def from_cause(outer, cause):
    try:
        raise outer from cause
    except type(outer) as error:
        return error


def test_what_it_was_raised_from_decides():
    assert classify(from_cause(RuntimeError("my step failed"), torch.OutOfMemoryError("full")), "build").kind == (
        "device_oom"
    )
    assert classify(from_cause(ValueError("no"), TrialFailure("numerics", "NaN")), "build").kind == "numerics"
    assert classify(from_cause(InternalTorchDynamoError("no"), MemoryError()), "build").kind == "host_oom"
    assert classify(from_cause(RuntimeError("no"), InternalTorchDynamoError("no")), "build").kind == "compile_error"


def test_an_exception_in_a_compiler_backend():
    def failing_backend(graph, example_inputs):
        raise NotImplementedError("no such kernel")

    compiled = torch.compile(nn.Linear(2, 2), backend=failing_backend)
    error = raised(lambda: compiled(torch.zeros(1, 2)))
    assert isinstance(error, BackendCompilerFailed)
    failure = classify(error, "compile")
    assert failure.kind == "compile_error"
    assert "no such kernel" in failure.message
    torch._dynamo.reset()

    def hungry_backend(graph, example_inputs):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    compiled = torch.compile(nn.Linear(2, 2), backend=hungry_backend)
    assert classify(raised(lambda: compiled(torch.zeros(1, 2))), "compile").kind == "device_oom"
    torch._dynamo.reset()


def test_the_users_error_in_compiled_code_is_theirs():
    def refuse(x):
        raise LookupError("no such token")

    failure = classify(raised(lambda: torch.compile(refuse, backend="eager")(torch.zeros(1))), "compile")
    assert failure.kind == "user_error"
    assert "no such token" in failure.message
    torch._dynamo.reset()


class Troubled(Dataset):
    def __init__(self, trouble):
        self.trouble = trouble

    def __len__(self):
        return 2

    def __getitem__(self, index):
        self.trouble()


def refuse_key():
    return {}["no such column"]


def refuse_late():
    try:
        return {}["no such column"]
    except KeyError as error:
        raise TwoArgumentError("missing:\n  column", 3) from error


class TwoArgumentError(Exception):
    def __init__(self, text, number):
        super().__init__(text)
        self.number = number


def exhaust():
    torch.empty(1 << 60)


@pytest.mark.parametrize(
    ("trouble", "kind", "message", "frame"),
    [
        (refuse_key, "user_error", "KeyError: 'no such column'", "in refuse_key"),
        (refuse_late, "user_error", "TwoArgumentError: missing:", "in refuse_late"),
        (exhaust, "host_oom", "the host ran out of memory", "in exhaust"),
    ],
)
def test_exceptions_of_real_workers(trouble, kind, message, frame):
    batches = iter(DataLoader(Troubled(trouble), num_workers=1, multiprocessing_context="fork"))
    failure = classify(raised(lambda: next(batches)), "measure")
    batches._shutdown_workers()  # or the next test's worker inherits it, and its end waits 5 s
    assert failure.kind == kind
    assert message in failure.message
    assert frame in failure.detail
    assert "worker.py" not in failure.detail
    assert "Original Traceback" not in failure.detail


def test_import_failures_keep_what_is_told_already():
    told = import_failure(WorkloadError("train.py does not define data_fn", "their frames"), "train.py")
    assert (str(told), told.detail) == ("train.py does not define data_fn", "their frames")


class UntellableError(Exception):
    def __str__(self) -> str:
        raise KeyError("no words")


def test_an_exception_that_cannot_be_shown_is_told_all_the_same() -> None:
    failure = classify(UntellableError(), "measure")
    assert (failure.kind, failure.message) == (
        "user_error",
        "UntellableError: (its text cannot be shown: str() raises KeyError)",
    )


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SparseAdam])
def test_an_optimizer_that_takes_one_kind_of_gradients_says_which_take_both(optimizer_class):
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1))
    optimizer = optimizer_class(model.parameters())
    model(torch.zeros(2, dtype=torch.long)).sum().backward()
    failure = classify(raised(optimizer.step), "compile")
    assert failure.kind == "user_error"
    assert "takes both kinds of gradients, such as torch.optim.SGD" in failure.message
    assert "without optimizer_fn it is AdamW" in failure.message


def test_messages_are_short():
    assert len(classify(RuntimeError("x" * 5000), "build").message) < 500


def test_a_block_that_cannot_be_recomputed_says_why():
    drawn = iter([True, False])

    def block(x):
        return torch.relu(x * 2) if next(drawn) else x

    x = torch.ones(2, requires_grad=True)
    failure = classify(raised(lambda: checkpoint(block, x, use_reentrant=False).sum().backward()), "compile")
    assert failure.kind == "user_error"
    assert failure.message.startswith(
        "recomputing a block gave something else than its forward did: it counts its calls"
    )


def test_a_loss_that_was_propagated_already():
    def twice():
        loss = torch.ones(2, requires_grad=True).exp().sum()
        loss.backward()
        loss.backward()

    failure = classify(raised(twice), "compile")
    assert failure.kind == "user_error"
    assert "; the step calls backward() itself, so loss_fn must not, and what the model keeps" in failure.message


def test_notes_on_an_exception_are_told_after_it():
    error = ValueError("no such size")
    error.add_note("at the last batch of a pass")
    error.add_note("of 3 samples\nand more")
    message = "ValueError: no such size (at the last batch of a pass; of 3 samples)"
    assert classify(error, "soak").message == message
    named = TrialFailure("numerics", "the loss was nan")
    named.add_note("in the evaluation")
    assert classify(named, "soak").message == "the loss was nan (in the evaluation)"


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_that_make_no_batch(workers):
    ragged = [torch.ones(1), torch.ones(2)]
    context = "fork" if workers else None
    batches = iter(DataLoader(ragged, batch_size=2, num_workers=workers, multiprocessing_context=context))
    failure = classify(raised(lambda: next(batches)), "build")
    if workers:
        batches._shutdown_workers()
        assert failure.detail == "", "the message has told all of it, and no line of the user's is to blame"
    assert failure.kind == "user_error"
    assert failure.message.startswith("samples could not be put together into a batch (RuntimeError: stack expects")


def test_samples_with_a_graph_make_no_batch_in_a_loader_worker():
    samples = list(torch.ones(2, 1, requires_grad=True) * 2)
    batches = iter(DataLoader(samples, batch_size=2, num_workers=1, multiprocessing_context="fork"))
    failure = classify(raised(lambda: next(batches)), "build")
    batches._shutdown_workers()
    assert failure.message.startswith(
        "a loader worker could not put samples together into a batch (RuntimeError: stack()"
    )
    assert failure.message.endswith("must be detached from it (.detach()), or num_workers=0 be kept")


def test_a_module_that_ends_the_process_is_told_about_the_guard():
    assert 'under `if __name__ == "__main__":`' in str(import_failure(SystemExit(2), "train.py"))
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    told = str(import_failure(raised(lambda: parser.parse_args([])), "train.py"))
    assert told.endswith("of which a trial has none: give each a default, or read them in main() alone")
    reads_it_itself = str(import_failure(raised(lambda: sys.argv[1000]), "train.py"))
    assert reads_it_itself.endswith("of which a trial has none: give each a default, or read them in main() alone")


def test_an_exception_that_says_nothing_is_told_by_its_name() -> None:
    assert origin_of(KeyboardInterrupt()).detail == "KeyboardInterrupt"
