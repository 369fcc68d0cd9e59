"""Trials as real processes: whatever happens in one is an answer with a name, and nothing is left behind."""

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from autotune.errors import NoAnswerError
from autotune.processes.pool import TrialPool
from tests.measurement.programs import holds

ENTRY = "trial_behaviours:answer"


@pytest.fixture(scope="module")
def pool(behaving_workload, tmp_path_factory, children):
    directory = Path(os.path.relpath(tmp_path_factory.mktemp("study")))
    with TrialPool(behaving_workload, directory, entry=ENTRY) as pool:
        yield pool
    assert children() == set()


@pytest.fixture(autouse=True)
def nothing_left(pool, children):
    """After each trial, all that descends from this process are idle servers."""
    yield
    assert children() == {server.pid for server in pool._servers.values()}


def failure_of(answer):
    assert answer.failure is not None
    assert answer.soak is None
    assert answer.failure.output_path == answer.output_path
    return answer.failure


def test_a_trial_finds_itself_where_the_users_module_went(pool, request_for):
    answer = pool.run(request_for("look_around"))
    assert answer.failure is None
    threads, directory, child, start_method, age, own_session, interruptible, compiler = answer.soak.findings[:8]
    assert directory == "/"
    assert (threads, child, start_method, own_session, interruptible) == ("2", "1", "fork", "True", "True")
    assert compiler == "False"
    assert 0 <= float(age) < 200
    assert answer.seconds > 0


def test_phases_are_told_in_order(pool, request_for):
    seen = []
    pool.run(request_for("look_around"), seen.append)
    assert seen == ["start", "build", "measure"]


def test_segmentation_fault(pool, request_for):
    failure = failure_of(pool.run(request_for("die_of_segfault")))
    assert (failure.kind, failure.signal, failure.phase) == ("crash", "SIGSEGV", "measure")
    assert "in die_of_segfault" in failure.detail
    assert "processes/child.py" not in failure.detail


@pytest.mark.parametrize(
    "behaviour", ["hang", "hang_in_native_code", "hang_and_ignore_signals", "leave_children_and_hang"]
)
def test_hang(pool, request_for, behaviour):
    failure = failure_of(pool.run(request_for(behaviour, measure_seconds=1.0)))
    assert failure.kind == "timeout"
    assert failure.message == "the trial did not get through its measure phase within 1 s"
    assert f"in {behaviour}\n" in failure.detail


def test_an_exception_shows_the_users_frames_alone(pool, request_for):
    failure = failure_of(pool.run(request_for("raise_error")))
    assert failure.kind == "user_error"
    assert "LookupError: sample 37 is broken" in failure.message
    assert "in raise_error" in failure.message
    assert "trial_behaviours.py" in failure.detail
    assert "processes/child.py" not in failure.detail


def test_the_memory_limit_is_that_of_workers_too(pool, request_for):
    failure = failure_of(pool.run(request_for("allocate_too_much_in_a_worker", memory_limit_bytes=2**30)))
    assert failure.kind == "host_oom"


def test_without_a_limit_the_machine_is_not_endangered(pool, request_for):
    assert failure_of(pool.run(request_for("map_too_much"))).kind == "host_oom"


def test_a_talkative_trial(pool, request_for):
    answer = pool.run(request_for("print_a_lot"))
    assert answer.soak.findings == ("printed",)
    assert os.path.getsize(answer.output_path) > 2_000_000


def test_standard_input_is_empty(pool, request_for):
    assert pool.run(request_for("read_the_keyboard")).soak.findings == ("''", "b''")


def test_children_that_left_the_group_are_killed(pool, request_for):
    pids = [int(pid) for pid in pool.run(request_for("leave_children")).soak.findings]
    assert len(pids) == 2
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_worker_that_exits(pool, request_for):
    failure = failure_of(pool.run(request_for("lose_a_worker_by_exit")))
    assert failure.kind == "user_error"
    assert "a loader worker exited with status 3" in failure.message


def test_an_exception_in_a_worker_is_unwrapped(pool, request_for):
    failure = failure_of(pool.run(request_for("raise_in_a_worker")))
    assert failure.kind == "user_error"
    assert failure.message.startswith("OSError: file 37 is truncated (")
    assert "in raise_own_error" in failure.message
    assert "dataloader.py" not in failure.detail


def test_a_full_disk_is_no_failure_of_what_was_tried(pool, request_for):
    with pytest.raises(
        NoAnswerError, match="a trial could not write its result to .*: make room there and give the same"
    ):
        pool.run(request_for("write_to_a_full_disk"))
    assert pool.run(request_for("look_around")).failure is None


def test_a_hang_without_a_free_descriptor_is_not_just_a_timeout(pool, request_for):
    failure = failure_of(pool.run(request_for("use_up_files_and_hang", measure_seconds=2.0)))
    assert failure.kind == "file_limit"


def test_answers_may_hold_nan(pool, request_for):
    soak = pool.run(request_for("return_not_a_number")).soak
    assert math.isnan(soak.samples_per_second)
    assert math.isinf(soak.growth_bytes_per_step)


@pytest.mark.parametrize("behaviour", ["leave_shared_memory", "leave_shared_memory_of_workers", "leave_python_memory"])
def test_shared_memory_of_a_trial_is_removed(pool, request_for, behaviour):
    paths = pool.run(request_for(behaviour)).soak.findings
    assert len(paths) >= 1
    assert all(path.startswith("/dev/shm/") for path in paths)
    assert not [path for path in paths if os.path.exists(path)]


@pytest.mark.parametrize("behaviour", ["leave_sockets_of_workers", "leave_sockets_of_torchs_managers"])
def test_sockets_of_a_trial_are_removed(pool, request_for, behaviour):
    directories = pool.run(request_for(behaviour)).soak.findings
    assert len(directories) >= 1
    assert not [path for path in directories if os.path.exists(path)]


def test_ctrl_c_kills_the_trial_and_passes_through(pool, request_for, children):
    def interrupt(phase):
        if phase == "measure":
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        pool.run(request_for("leave_children_and_hang"), interrupt)
    assert children() == set()
    assert pool.run(request_for("look_around")).failure is None


def test_a_killed_server_is_a_crash_and_is_replaced(pool, request_for):
    until = f"614.{os.getpid()}"  # this run's own
    failure = failure_of(pool.run(request_for("kill_the_server", said=(until,))))
    assert (failure.kind, failure.signal) == ("crash", "SIGKILL")
    assert not [process for process in psutil.process_iter() if command_of(process) == ["sleep", until]]
    assert pool.run(request_for("look_around")).failure is None


def command_of(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_waits_until_memory_is_back(pool, request_for, monkeypatch):
    readings = iter([10, 2**30, 2**30, 20])
    monkeypatch.setattr(pool, "_gpu_used_bytes", lambda: next(readings))
    assert pool.run(request_for("look_around")).failure is None
    assert next(readings, None) is None


def test_result_files_are_removed_and_logs_kept(pool, request_for):
    answer = pool.run(request_for("print_a_lot"))
    names = {path.name for path in pool._directory.iterdir()}
    assert os.path.basename(answer.output_path) in names
    assert not [name for name in names if ".json" in name]


def test_output_is_named_after_the_trial_that_printed_it(pool, request_for):
    asked = request_for("look_around")
    names = [Path(pool.run(one).output_path).name for one in (asked.model_copy(update={"trial": 3}), asked)]
    count = int(names[0].partition("-")[0])
    assert names == [f"{count:04d}-trial-3.log", f"{count + 1:04d}-{asked.kind}.log"]


@pytest.mark.parametrize("name", ["0041-trial-7.log", "0041-parity.log", "trial-0041.log"])
def test_files_of_an_earlier_search_are_not_written_to(name, behaving_workload, tmp_path):
    (tmp_path / name).touch()
    (tmp_path / "server.log").touch()
    assert TrialPool(behaving_workload, tmp_path, entry=ENTRY)._process_count == 41


def test_a_trial_is_cheap(pool, request_for):
    def three_take_less_than_importing_torch():
        began = time.monotonic()
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
        imported = time.monotonic()
        for _ in range(3):
            pool.run(request_for("exit_silently"))
        return time.monotonic() - imported < imported - began

    assert holds(three_take_less_than_importing_torch)


TEMPORARY_DIRECTORIES = """
import os
import tempfile
from trial_behaviours import data_fn
import trial_behaviours

DATA = tempfile.TemporaryDirectory(dir={at!r})
KEPT = []

def model_fn():
    global DATA
    KEPT.append(tempfile.TemporaryDirectory(dir={at!r}))
    assert len(os.listdir({at!r})) == 2
    assert os.path.isdir(DATA.name)
    DATA = None
    return trial_behaviours.model_fn()
"""


@pytest.mark.parametrize("behaviour", ["look_around", "raise_error"])
def test_temporary_directories_are_removed(file_workload, request_for, tmp_path, behaviour):
    place = tmp_path / "temporary"
    place.mkdir()
    with TrialPool(file_workload(TEMPORARY_DIRECTORIES.format(at=str(place))), tmp_path, entry=ENTRY) as pool:
        for _ in range(2):  # the second finds what the import made
            failure = pool.run(request_for(behaviour)).failure
            assert failure is None or "temporary" not in failure.detail, failure
        assert len(list(place.iterdir())) == 1
    assert list(place.iterdir()) == []


def test_a_temporary_directory_that_is_left_is_no_error_where_warnings_are(file_workload, request_for, tmp_path):
    place = tmp_path / "temporary"
    place.mkdir()
    strict = "    import warnings; warnings.simplefilter('error')\n"
    text = TEMPORARY_DIRECTORIES.format(at=str(place)).replace("def model_fn():\n", f"def model_fn():\n{strict}")
    with TrialPool(file_workload(text), tmp_path, entry=ENTRY) as pool:
        answer = pool.run(request_for("look_around"))
        assert answer.failure is None, answer.failure
        assert Path(answer.output_path).read_text() == "", "it ended in code of the server's"
    assert list(place.iterdir()) == []
