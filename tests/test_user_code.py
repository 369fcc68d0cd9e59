"""What the user's code may do to the process that it runs in: each has an answer, and the search goes on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune import sessions
from autotune.config import TrainingConfig
from autotune.errors import UserError
from autotune.processes.pool import TrialPool
from autotune.records import Conditions, PhaseTimeouts, TrialAnswer, TrialRequest
from autotune.workload import workload_from_target
from tests.running_search import DEADLINE_SECONDS, TINY_PROGRAM, RunningSearch, gone

INCONSIDERATE = """
import atexit, os, signal, sys, threading, time
from pathlib import Path
from torch.utils.data import Dataset

HERE = Path(__file__).parent
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1):
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
threading.Thread(target=time.sleep, args=(10**6,)).start()
atexit.register(time.sleep, 10**6)
os.chdir(HERE / "went")
os.environ.clear()
os.write(1, bytes(range(256)) * 40)
print("no end of line", end="")
sys.stderr.close()
"""
"""At import. Nothing of this is the business of the process that imports it, but scripts do it."""

BEHAVING = """
class Leaving(Dataset):
    def __len__(self):
        return 512

    def __getitem__(self, index):
        exec((HERE / "getitem").read_text())
        return torch.zeros(8), torch.zeros(1)


plain_model_fn, plain_loss_fn = model_fn, loss_fn


def model_fn():
    exec((HERE / "model").read_text())
    return plain_model_fn()


def data_fn():
    return DataLoader(Leaving(), batch_size=16, num_workers=int((HERE / "workers").read_text()))


def loss_fn(model, batch):
    exec((HERE / "loss").read_text())
    return plain_loss_fn(model, batch)
"""
"""Each trial reads what its functions do from files beside the program."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("user")
    (directory / "program.py").write_text(TINY_PROGRAM + INCONSIDERATE + BEHAVING)
    (directory / "stood").mkdir()
    (directory / "went").mkdir()
    return directory


@pytest.fixture(scope="module")
def pool(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrialPool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place / "stood")
        made = TrialPool(workload_from_target(str(place / "program.py")), tmp_path_factory.mktemp("logs"))
    made.start()
    yield made
    (server,) = made._servers.values()
    made.close()
    assert server._process.returncode == 0, "the program's threads or handlers were waited for, until it was killed"


def trial_that_does(place: Path, pool: TrialPool, where: str, what: str, workers: int = 0) -> TrialAnswer:
    for name in ("model", "loss", "getitem"):
        (place / name).write_text(what if name == where else "")
    (place / "workers").write_text(str(workers))
    return pool.run(
        TrialRequest(
            kind="facts", config=TrainingConfig({}), conditions=Conditions(device="cpu", global_batch_size=None),
            timeouts=PhaseTimeouts(build_seconds=400, compile_seconds=400, measure_seconds=400),
        )
    )  # fmt: skip


# --- no harm ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "what",
    [
        "pass",
        "os.write(1, os.urandom(10**6)); print('x' * 10**6, end='')",
        "os.chdir('/tmp'); os.environ.clear(); os.environ['CUDA_VISIBLE_DEVICES'] = '7'; os.umask(0o777)",
        "[signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]",
        "threading.Thread(target=time.sleep, args=(10**6,)).start(); atexit.register(time.sleep, 10**6)",
        "sys.stdout.close(); os.closerange(1, 3)",
        "import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True, env={})",
    ],
)
def test_it_is_let_do(what: str, place: Path, pool: TrialPool) -> None:
    answer = trial_that_does(place, pool, "model", what)
    assert answer.failure is None, answer.failure
    assert answer.facts is not None and answer.facts.batch_size == 16
    assert pool.notes == [], "trials are forked all the same"


def test_relative_paths_are_those_of_the_place_where_the_program_goes_at_import(place: Path, pool: TrialPool) -> None:
    answer = trial_that_does(place, pool, "model", "Path('model.txt').write_text('kept')")
    assert answer.failure is None
    assert (place / "went" / "model.txt").read_text() == "kept"


# --- told -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "what", "workers", "sentence"),
    [
        ("model", "sys.exit(3)", 0, "SystemExit"),
        ("loss", "sys.exit()", 0, "SystemExit"),
        ("model", "os._exit(0)", 0, "the trial ended without a result, with status 0, in its build phase"),
        ("loss", "os._exit(3)", 0, "the trial ended without a result, with status 3, in its"),
        ("getitem", "os._exit(3)", 0, "the trial ended without a result, with status 3, in its"),
        ("getitem", "os._exit(3)", 1, "a loader worker exited with status 3 before its batch arrived"),
        ("getitem", "sys.exit(3)", 1, "a loader worker exited with status 3 before its batch arrived"),
        ("loss", "input('batch? ')", 0, "EOFError"),
    ],
)
def test_it_is_told_in_a_sentence(
    where: str, what: str, workers: int, sentence: str, place: Path, pool: TrialPool
) -> None:
    failure = trial_that_does(place, pool, where, what, workers).failure
    assert failure is not None
    with pytest.raises(UserError) as told:
        sessions.raise_failure(failure)
    assert sentence in str(told.value)
    assert len(str(told.value).splitlines()) == 1


# --- while it is imported ---------------------------------------------------------------------------------------------

SLOW_TO_IMPORT = (
    TINY_PROGRAM
    + """
import ctypes, subprocess
subprocess.Popen(["sleep", "615"], start_new_session=True, env={})
open("importing", "w").close()
ctypes.PyDLL(None).sleep(615)  # in native code, which hears no signal of Python's
"""
)


def test_ctrl_c_does_not_wait_for_the_import(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW_TO_IMPORT)
    search = RunningSearch("search", "slow.py", "--study", "here", directory=tmp_path)
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (tmp_path / "importing").exists():
        assert time.monotonic() < deadline and search.process.poll() is None, search.errors
        time.sleep(0.02)
    started = search.descendants(at_least=2)
    search.interrupt()
    began = time.monotonic()
    assert search.end() == 130
    assert time.monotonic() - began < 35, (
        "it waited for the import, until that was killed"
    )  # a tenth of a second, if idle
    assert search.lines[-1].startswith("autotune: interrupted; nothing new was measured")
    assert gone(started)
