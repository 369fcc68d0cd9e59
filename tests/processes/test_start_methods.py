"""Which trials can be forked, and what happens where they cannot."""

import os
import time
from itertools import count

import psutil
import pytest

from autotune.errors import WorkloadError
from autotune.processes.pool import TrialPool

ENTRY = "trial_behaviours:answer"

BEHAVING = "from trial_behaviours import data_fn, model_fn"

PARALLEL_AT_IMPORT = """
import torch
from trial_behaviours import data_fn, model_fn
torch._C.set_num_threads(2)  # not torch.set_num_threads, which is only taken down
torch.ones(1 << 22).sum()
"""

SILENT_WHEN_FORKED = """
import os
import time
import torch
from trial_behaviours import data_fn
IMPORTED_BY = os.getpid()

def model_fn():
    while os.getpid() != IMPORTED_BY:
        time.sleep(0.1)
    return torch.nn.Linear(4, 1)
"""

THREAD_AT_IMPORT = """
import builtins
import queue
import threading
from trial_behaviours import data_fn, model_fn

ASKED, ANSWERED = queue.Queue(), queue.Queue()

def answer():
    while True:
        ANSWERED.put(ASKED.get())

threading.Thread(target=answer, daemon=True).start()
builtins.ask_a_thread = lambda: (ASKED.put(1), ANSWERED.get())
"""


def start_method_of(answer):
    assert answer.failure is None, answer.failure
    return answer.soak.findings[3]


def test_parallel_operation_at_import(file_workload, request_for, children, tmp_path):
    heard = []
    workload = file_workload(PARALLEL_AT_IMPORT)
    with TrialPool(workload, tmp_path, entry=ENTRY, on_note=heard.append, silence_seconds=0.5) as pool:
        assert start_method_of(pool.run(request_for("look_around"))) == "fresh"
        broken = pool.run(request_for("leave_children_and_hang", measure_seconds=1.0))
        assert broken.failure.kind == "timeout"
        assert children() == {server.pid for server in pool._servers.values()}
    heard = [note for note in heard if not note.startswith("still")]  # on a busy machine torch takes long
    assert heard == pool.notes
    assert len(heard) == 1
    assert "an interpreter of its own" in heard[0]


PROCESS_GROUP_AT_IMPORT = """
import torch.distributed
from trial_behaviours import data_fn, model_fn
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
"""


def test_a_process_group_at_import(file_workload, request_for, tmp_path):
    with TrialPool(file_workload(PROCESS_GROUP_AT_IMPORT), tmp_path, entry=ENTRY) as pool:
        assert start_method_of(pool.run(request_for("look_around"))) == "fresh"
    assert "a process group is made while the user's module is imported" in pool.notes[0]


def test_first_trial_silent(file_workload, request_for, tmp_path, monkeypatch):
    with TrialPool(file_workload(SILENT_WHEN_FORKED), tmp_path, entry=ENTRY) as pool:
        # The silent one alone is not waited for: the other imports torch meanwhile.
        monkeypatch.setattr(
            "autotune.processes.pool.allowed_seconds", lambda *_: 0.5 if pool._start_method == "fork" else 200.0
        )
        assert pool.notes == []
        assert start_method_of(pool.run(request_for("look_around"))) == "fresh"
        assert len(pool.notes) == 1


def test_a_program_that_waits_for_a_thread_of_its_import(file_workload, request_for, tmp_path):
    with TrialPool(file_workload(THREAD_AT_IMPORT), tmp_path, entry=ENTRY) as pool:
        assert start_method_of(pool.run(request_for("look_around"))) == "fork"
        answer = pool.run(request_for("ask_a_thread", measure_seconds=5.0))
        assert start_method_of(answer) == "fresh"
        assert answer.seconds - float(answer.soak.findings[4]) < 5.0  # without those of the one that hung
        assert "none of the threads" in pool.notes[0]


def test_a_trial_that_hangs_after_one_was_measured_is_not_run_again(file_workload, request_for, tmp_path):
    with TrialPool(file_workload(THREAD_AT_IMPORT), tmp_path, entry=ENTRY) as pool:
        assert start_method_of(pool.run(request_for("look_around").model_copy(update={"kind": "measure"}))) == "fork"
        assert pool.run(request_for("ask_a_thread", measure_seconds=1.0)).failure.kind == "timeout"
        assert start_method_of(pool.run(request_for("look_around"))) == "fork"
        assert pool.notes == []


def test_the_compiler_is_imported_after_the_look_at_the_program(behaving_workload, request_for, tmp_path):
    with TrialPool(behaving_workload, tmp_path, entry=ENTRY, warm_compiler=True) as pool:
        first = pool.run(request_for("look_around").model_copy(update={"kind": "facts"}))
        assert first.soak.findings[7] == "False"
        assert pool.run(request_for("look_around")).soak.findings[7] == "True"


def test_one_server_for_each_environment(behaving_workload, request_for, tmp_path, monkeypatch):
    environments = iter([{"LD_BIND_NOW": "1"}, {}, {}])
    monkeypatch.setattr("autotune.processes.pool.environment_of", lambda config: next(environments))
    with TrialPool(behaving_workload, tmp_path, entry=ENTRY, warm_compiler=True) as pool:
        for _ in range(2):
            answer = pool.run(request_for("look_around"))
            assert start_method_of(answer) == "fork"
            assert answer.soak.findings[7] == "True"  # the compiler was imported before the fork
            assert answer.soak.findings[9] == "False"
        phases = []
        answer = pool.run(request_for("look_around", config={"compile_mode": "default"}), phases.append)
        assert phases[:2] == ["compile", "start"]
        assert answer.soak.findings[9] == "True"  # and has found out once what it would find out in each
        assert len(pool._servers) == 2
        (other,) = (server for key, server in pool._servers.items() if key)
        assert psutil.Process(other.pid).environ()["LD_BIND_NOW"] == "1"


@pytest.mark.parametrize(
    ("source", "message", "detail"),
    [
        ("import nowhere_to_be_found\n", "ModuleNotFoundError: No module named 'nowhere_to_be_found'", "train.py"),
        ("def model_fn(:\n", "SyntaxError", "def model_fn(:"),
        ("raise SystemExit(2)\n", "SystemExit: 2", "train.py"),
        ("def model_fn(): pass\n", "does not define data_fn", ""),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n", "ended the process with signal SIGSEGV", ""),
        ("import os\nos.closerange(3, 4096)\n", "closed files that it had not opened", ""),
        ("import os\nos._exit(0)\n", "ended the process with status 0", ""),
    ],
)
def test_import_failures(file_workload, children, tmp_path, source, message, detail):
    pool = TrialPool(file_workload(source), tmp_path, entry=ENTRY)
    with pytest.raises(WorkloadError) as caught:
        pool.start()
    assert message in str(caught.value)
    assert detail in caught.value.detail
    assert os.path.join("autotune", "") not in caught.value.detail
    assert "importlib" not in caught.value.detail
    assert children() == set()


def test_an_import_that_does_not_end_is_told_while_it_lasts_and_where_it_hangs(
    file_workload, children, tmp_path, monkeypatch
):
    class UntilItHangs:
        """Every second, until torch is imported and it is the user's module that takes time."""

        def __iter__(self):
            yield 0.5
            for seconds in count(1):
                if (tmp_path / "hangs").exists():
                    return
                yield seconds

    monkeypatch.setattr("autotune.processes.server_process._STILL_IMPORTING_SECONDS", UntilItHangs())
    monkeypatch.setattr("autotune.processes.server_process._IMPORT_SECONDS", 1.0)
    heard = []
    hanging = f"import ctypes\n\ndef download():\n    open('{tmp_path}/hangs', 'w')\n    ctypes.CDLL(None).sleep(600)\n"
    pool = TrialPool(file_workload(f"{hanging}\ndownload()\n"), tmp_path, entry=ENTRY, on_note=heard.append)
    with pytest.raises(
        WorkloadError, match="did not end within 1 s: what takes so long belongs into model_fn"
    ) as caught:
        pool.start()
    assert (
        f"still importing torch and {tmp_path}/train.py after 1 s; what it prints goes to {tmp_path}/server.log"
        in heard
    )
    assert "in download" in caught.value.detail
    assert children() == set()


UNRULY = """
import os, signal, sys, threading, time
from trial_behaviours import data_fn, model_fn
os.umask(0o777)
os.environ.pop("HOME", None)
for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, signal.SIG_IGN)
threading.Thread(target=time.sleep, args=(600,)).start()
assert sys.stdin.read() == ""
sys.stdout.close()
sys.excepthook = lambda *told: None
os.fork()
"""


def test_a_module_that_changes_its_process_while_it_is_imported(file_workload, request_for, children, tmp_path):
    with TrialPool(file_workload(UNRULY), tmp_path, entry=ENTRY) as pool:
        measured = request_for("look_around").model_copy(update={"kind": "measure"})  # so that no thread is missed
        assert start_method_of(pool.run(measured)) == "fork"
        lost = pool.run(request_for("lose_a_worker_by_signal")).failure
        assert (lost.kind, lost.signal) == ("crash", "SIGSEGV"), lost
        hung = pool.run(request_for("hang", measure_seconds=1.0)).failure
        assert (hung.kind, "in hang" in hung.detail) == ("timeout", True)
        assert pool.run(request_for("look_around")).failure is None
    assert children() == set()


def test_files_named_like_modules_of_python(file_workload, request_for, tmp_path, monkeypatch):
    for name in ("types", "random", "queue", "socket"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')\n")
    monkeypatch.chdir(tmp_path)
    good = file_workload("import random, socket\nfrom trial_behaviours import data_fn, model_fn\nrandom.random()\n")
    with TrialPool(good, tmp_path, entry=ENTRY, start_method="fresh") as pool:
        assert pool.run(request_for("look_around")).failure is None
    pool = TrialPool(file_workload("from random import model_fn, data_fn\n"), tmp_path, entry=ENTRY)
    with pytest.raises(
        WorkloadError, match=rf"{tmp_path}/random.py has the name of a module of Python's own, which was"
    ):
        pool.start()


def test_the_compiler_is_spared_where_there_is_no_time_for_it(behaving_workload, request_for, tmp_path):
    with TrialPool(behaving_workload, tmp_path, entry=ENTRY, warm_compiler=True) as pool:
        pool.spare_the_compiler()
        pool.run(request_for("look_around").model_copy(update={"kind": "facts"}))
        assert pool.run(request_for("look_around")).soak.findings[7] == "False"


def test_the_first_server_imports_beside_what_is_done_meanwhile(file_workload, request_for, children, tmp_path):
    """It gets as far as the user's module before anybody waits for it."""
    began = tmp_path / "began"
    workload = file_workload(f"open({str(began)!r}, 'w').close()\n" + BEHAVING)
    pool = TrialPool(workload, tmp_path, entry=ENTRY)
    try:
        pool.begin()
        (first,) = children()
        while not began.exists():
            time.sleep(0.01)
        pool.start()
        assert start_method_of(pool.run(request_for("look_around"))) == "fork"
        assert children() == {first}
    finally:
        pool.close()
    assert children() == set()


def test_a_server_that_nobody_waited_for_is_ended_too(behaving_workload, children, tmp_path):
    pool = TrialPool(behaving_workload, tmp_path, entry=ENTRY)
    pool.begin()
    assert len(children()) == 1
    pool.close()
    assert children() == set()
