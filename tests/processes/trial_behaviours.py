"""A user's program and a measurement in one: each function here is something that a trial may do or suffer.

The seed of the request's conditions says which one; see `seed_of`.
"""

import ctypes
import errno
import mmap
import os
import signal
import subprocess
import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset

from autotune.failure import TrialFailure
from autotune.records import SoakResult, TrialAnswer

DEFAULT_THREAD_COUNT = 2
torch.set_num_threads(DEFAULT_THREAD_COUNT)
os.chdir("/")


def model_fn():
    return torch.nn.Linear(4, 1)


def data_fn():
    return torch.utils.data.TensorDataset(torch.zeros(8, 4))


def found(*findings):
    """A good answer that carries texts."""
    texts = tuple(str(finding) for finding in findings)
    soak = SoakResult(steps=1, samples_per_second=1.0, growth_bytes_per_step=0.0, allocator_retries=0, findings=texts)
    return TrialAnswer(soak=soak)


def answer(request, functions, phase):
    phase("build")
    assert isinstance(functions.model_fn(), torch.nn.Module)
    phase("measure")
    return BEHAVIOURS[request.conditions.seed](request)


def look_around(request):
    large = torch.ones(1 << 22).sum().item()
    return found(
        torch.get_num_threads(),
        os.getcwd(),
        os.environ["AUTOTUNE_CHILD"],
        os.environ["AUTOTUNE_START_METHOD"],
        time.monotonic() - float(os.environ["AUTOTUNE_STARTED_AT"]),
        os.getsid(0) == os.getpid(),
        signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "torch._inductor.compile_fx" in sys.modules,
        large,
    )


def die_of_segfault(request):
    ctypes.string_at(0)


def hang(request):
    while True:
        pass


def hang_in_native_code(request):
    ctypes.CDLL(None).sleep(10**6)


def hang_and_ignore_signals(request):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(10**6)


def exit_silently(request):
    os._exit(0)


def exit_loudly(request):
    sys.exit(3)


def raise_error(request):
    raise LookupError("sample 37 is broken")


def find_numerics(request):
    raise TrialFailure("numerics", "the loss is NaN in step 3")


def allocate_too_much(request):
    return found(*[torch.empty(1 << 26) for _ in range(64)])


def allocate_too_much_in_a_worker(request):
    loader = DataLoader(Greedy(), batch_size=1, num_workers=1)
    return found(next(iter(loader)))


class Greedy(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.ones(1 << 32)


def print_a_lot(request):
    for number in range(20_000):
        print('{"failure": null}', number, "." * 100)
        sys.stderr.write("Error: CUDA out of memory\n")
    return found("printed")


def read_the_keyboard(request):
    return found(repr(sys.stdin.read()), os.read(0, 1))


def leave_children(request):
    inside = subprocess.Popen(["sleep", "613"])
    outside = subprocess.Popen(["sleep", "613"], start_new_session=True, env={})
    command = [sys.executable, "-c", "import os, time\nif os.fork() == 0:\n os.setsid()\n time.sleep(613)"]
    subprocess.run(command, env={}, check=True)
    return found(inside.pid, outside.pid)


def leave_children_and_hang(request):
    leave_children(request)
    time.sleep(10**6)


class Broken(Dataset):
    def __init__(self, trouble):
        self.trouble = trouble

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == 37:
            self.trouble()
        return torch.full((1000,), float(index))


def kill_myself():
    os.kill(os.getpid(), signal.SIGSEGV)


def raise_own_error():
    raise OSError("file 37 is truncated")


def run_loader(trouble):
    for _ in DataLoader(Broken(trouble), batch_size=8, num_workers=2):
        pass
    return found("all read")


def lose_a_worker_by_signal(request):
    return run_loader(kill_myself)


def lose_a_worker_by_exit(request):
    return run_loader(lambda: sys.exit(3))


def raise_in_a_worker(request):
    return run_loader(raise_own_error)


def kill_the_server(request):
    subprocess.Popen(["sleep", "614"], start_new_session=True)
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(10**6)


def leave_shared_memory(request):
    path = f"/dev/shm/torch_{os.getpid()}_12345_0"
    with open(path, "wb") as stream:
        stream.write(bytes(100))
    return found(path)


def use_up_files(request):
    opened = []
    try:
        while True:
            opened.append(open(os.devnull, "rb"))  # noqa: SIM115
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
    return opened, open(os.devnull, "rb")


def use_up_files_and_hang(request):
    opened = []
    try:
        while True:
            opened.append(os.dup(0))
    except OSError:
        time.sleep(10**6)


def map_too_much(request):
    return found(mmap.mmap(-1, 1 << 46, flags=mmap.MAP_PRIVATE))


def return_not_a_number(request):
    soak = SoakResult(
        steps=1, samples_per_second=float("nan"), growth_bytes_per_step=float("inf"), allocator_retries=0, findings=()
    )
    return TrialAnswer(soak=soak)


BEHAVIOURS = [
    look_around,
    die_of_segfault,
    hang,
    hang_in_native_code,
    hang_and_ignore_signals,
    exit_silently,
    exit_loudly,
    raise_error,
    find_numerics,
    allocate_too_much,
    allocate_too_much_in_a_worker,
    print_a_lot,
    read_the_keyboard,
    leave_children,
    leave_children_and_hang,
    lose_a_worker_by_signal,
    lose_a_worker_by_exit,
    raise_in_a_worker,
    kill_the_server,
    leave_shared_memory,
    use_up_files,
    use_up_files_and_hang,
    map_too_much,
    return_not_a_number,
]


def seed_of(name):
    """The seed that asks for the behaviour of this name."""
    return [behaviour.__name__ for behaviour in BEHAVIOURS].index(name)
