"""What the end of a trial says, where only its outside was seen."""

import signal

import pytest

from autotune.processes.ending import Ending, answer_of
from autotune.processes.wire import encode_answer
from autotune.records import Failure, TrialAnswer


@pytest.fixture
def ending(tmp_path):
    return Ending(str(tmp_path / "trial-0001.log"), tmp_path / "trial-0001.json", last_phase="measure")


def printed(ending, text):
    with open(ending.output_path, "w") as stream:
        stream.write("x" * 10_000 + text)


@pytest.mark.parametrize(
    ("status", "output", "host_killed", "kind", "signal_name"),
    [
        (signal.SIGSEGV, "", False, "crash", "SIGSEGV"),
        (signal.SIGKILL, "", False, "crash", "SIGKILL"),
        (signal.SIGKILL, "", True, "host_oom", None),
        (signal.SIGSEGV, "", True, "crash", "SIGSEGV"),
        (signal.SIGABRT, "terminate called after throwing an instance of 'std::bad_alloc'", False, "host_oom", None),
        (signal.SIGABRT, "an assertion", False, "crash", "SIGABRT"),
        (1 << 8, "libgomp: Thread creation failed: Resource temporarily unavailable", False, "host_oom", None),
        (1 << 8, "Error: CUDA out of memory", False, "crash", None),
        (0, "libgomp: Thread creation failed", False, "crash", None),
    ],
)
def test_statuses(ending, status, output, host_killed, kind, signal_name):
    printed(ending, output)
    ending.status, ending.host_killed = status, host_killed
    failure = answer_of(ending).failure
    assert (failure.kind, failure.signal, failure.phase) == (kind, signal_name, "measure")


def test_no_output_at_all(ending):
    ending.status = signal.SIGABRT
    assert answer_of(ending).failure.kind == "crash"


def test_server_that_the_kernel_killed(ending):
    ending.server_ended, ending.host_killed = "signal SIGKILL", True
    assert answer_of(ending).failure.kind == "host_oom"


def test_worker_that_the_kernel_killed(ending):
    failure = Failure(kind="crash", phase="measure", message="a loader worker was killed by SIGKILL", signal="SIGKILL")
    ending.result_path.write_text(encode_answer(TrialAnswer(failure=failure)))
    ending.status = 0
    assert answer_of(ending).failure == failure
    ending.host_killed = True
    assert answer_of(ending).failure.kind == "host_oom"


def test_survivors_are_told(ending):
    ending.status, ending.survivors = 0, (12, 13)
    failure = answer_of(ending).failure
    assert failure.kind == "memory_not_returned"
    assert "12, 13" in failure.message


def test_timeout_with_all_files_in_use(ending):
    ending.timeout_phase, ending.timeout_seconds, ending.exhausted_files_limit = "measure", 5.0, 128
    failure = answer_of(ending).failure
    assert failure.kind == "file_limit"
    assert "128" in failure.message


def test_timeout_after_a_thread_of_a_worker_ran_out_of_files(ending):
    ending.timeout_phase, ending.timeout_seconds = "measure", 5.0
    assert answer_of(ending).failure.kind == "timeout"
    printed(ending, "OSError: [Errno 24] Too many open files\n")
    assert answer_of(ending).failure.kind == "file_limit"


def test_where_a_crash_happened(ending, tmp_path):
    own = f'  File "{tmp_path}/train.py", line 3 in forward'
    installed = '  File "/usr/lib/site-packages/torch/nn.py", line 9 in __call__'
    printed(ending, f"\nCurrent thread 0x1 (most recent call first):\n{own}\n{installed}\n{own}\n")
    ending.status = signal.SIGSEGV
    assert answer_of(ending).failure.detail.splitlines()[1:] == [own, own]


def test_code_that_torch_compile_wrote_is_not_the_users(ending, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/cache/")
    written = ["/tmp/torchinductor_me/ka/ckaty.py", "/cache/ka/ckaty.py", "<eval_with_key>.3"]
    stack = "\n".join(f'  File "{file}", line 783 in <module>' for file in written)
    printed(ending, f"\nCurrent thread 0x1 (most recent call first):\n{stack}\n")
    ending.status = signal.SIGSEGV
    assert answer_of(ending).failure.detail == ""


def test_the_first_step_is_not_called_compiling(ending):
    ending.timeout_phase, ending.last_phase, ending.timeout_seconds = "compile", "compile", 5.0
    failure = answer_of(ending).failure
    assert (failure.phase, failure.message) == ("compile", "the trial did not get through its first step within 5 s")
