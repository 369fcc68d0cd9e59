"""A user's program and a measurement in one: each function here is something that a trial may do or suffer.

The seed of the request's conditions says which one; see `seed_of`.
"""

import builtins
import ctypes
import errno
import mmap
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from multiprocessing.shared_memory import SharedMemory

import psutil
import torch
from torch.utils.data import DataLoader, Dataset

from autotune.config import TrainingConfig
from autotune.failure import TrialFailure
from autotune.knobs.registry import KNOBS
from autotune.records import SoakResult, TrialAnswer
from autotune.training.training import Training
from autotune.workload import UserFunctions

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
        knows_the_vectors(),
    )


def knows_the_vectors():
    module = sys.modules.get("torch._inductor.cpu_vec_isa")
    return module is not None and module.valid_vec_isa_list.cache_info().currsize > 0


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


class OutOfResources(Exception):  # noqa: N818
    """As Triton's, which is not installed everywhere."""

    __module__ = "triton.runtime.errors"


def raise_this(request):
    """The exception whose type and text stand where a real request has the names of blocks."""
    name, text = request.blocks
    known = {"OutOfResources": OutOfResources, "AcceleratorError": torch.AcceleratorError}
    raise known.get(name, getattr(torch, name, None) or getattr(builtins, name, None))(text)


def fail_to_compile(request):
    def backend(graph, example_inputs):
        raise NotImplementedError("no such kernel")

    torch.compile(model_fn(), backend=backend)(torch.zeros(1, 4))


def train_in_conflict(request):
    """Micro-batches that do not add up to the batch that is held."""
    config = TrainingConfig({knob.name: "as_is" for knob in KNOBS}).replace(
        {"batch_size": 3, "num_workers": 0, "pin_memory": False}
    )
    conditions = request.conditions.model_copy(update={"global_batch_size": 8})
    Training(UserFunctions(model_fn, data_fn, lambda model, batch: model(batch[0]).sum()), config, conditions)


def lose_a_worker_to_full_shared_memory(request):
    return run_loader(lambda: os.kill(os.getpid(), signal.SIGBUS))


def ignore_signals_in_workers(request):
    """Workers that hang, ignore SIGTERM and have a session of their own, while the trial fails."""

    def trouble():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.setsid()
        time.sleep(10**6)

    batches = iter(DataLoader(Broken(trouble), batch_size=38, num_workers=2))
    time.sleep(0.3)
    raise LookupError(f"workers {[worker.pid for worker in batches._workers]} are stuck")


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
    subprocess.Popen(["sleep", *request.blocks], start_new_session=True)
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(10**6)


def leave_shared_memory(request):
    path = f"/dev/shm/torch_{os.getpid()}_12345_0"
    with open(path, "wb") as stream:
        stream.write(bytes(100))
    return found(path)


def leave_shared_memory_of_workers(request):
    """One worker is killed, the other lives on; both have batches on their way in files of their own."""
    torch.multiprocessing.set_sharing_strategy("file_system")
    before = set(os.listdir("/dev/shm"))
    batches = iter(DataLoader(Broken(None), batch_size=4, num_workers=2, prefetch_factor=4))
    next(batches)
    while len(set(os.listdir("/dev/shm")) - before) < 4:
        time.sleep(0.01)
    os.kill(batches._workers[0].pid, signal.SIGKILL)
    batches._workers[0].join()
    global KEPT_BATCHES
    KEPT_BATCHES = batches
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return found(*(f"/dev/shm/{name}" for name in set(os.listdir("/dev/shm")) - before))


def leave_sockets_of_workers(request):
    """Both workers are alive at the end, and listen for who wants their tensors."""
    global KEPT_BATCHES
    KEPT_BATCHES = iter(DataLoader(Broken(None), batch_size=4, num_workers=2))
    next(KEPT_BATCHES)
    return directories_of_sockets(lambda: [psutil.Process(worker.pid) for worker in KEPT_BATCHES._workers])


def leave_sockets_of_torchs_managers(request):
    """Each process that has files in shared memory has one."""
    torch.multiprocessing.set_sharing_strategy("file_system")
    global KEPT_BATCHES
    KEPT_BATCHES = iter(DataLoader(Broken(None), batch_size=4, num_workers=2))
    next(KEPT_BATCHES)
    ours = psutil.Process(os.getppid())
    return directories_of_sockets(lambda: [one for one in ours.children(recursive=True) if "torch_shm" in one.name()])


def directories_of_sockets(processes):
    """Of those that listen; waits until one does."""
    paths = set()
    while not paths:
        paths = {socket.laddr for one in processes() for socket in one.net_connections("unix") if socket.laddr}
    return found(*{os.path.dirname(path) for path in paths})


def leave_python_memory(request):
    """A named block and a named semaphore, as spawned workers and data sets in shared memory have."""
    before = set(os.listdir("/dev/shm"))
    global KEPT_BATCHES
    KEPT_BATCHES = SharedMemory(create=True, size=100), multiprocessing.get_context("spawn").Lock()
    left = set(os.listdir("/dev/shm")) - before
    assert len(left) == 2, left
    return found(*(f"/dev/shm/{name}" for name in left))


def write_to_a_full_disk(request):
    """No file may grow any more, as when the disk is full."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    return found("nobody will read this")


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
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))  # so few that this takes no time
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


def ask_a_thread(request):
    builtins.ask_a_thread()  # which the user's module started
    return look_around(request)


BEHAVIOURS = [
    look_around,
    ask_a_thread,
    die_of_segfault,
    hang,
    hang_in_native_code,
    hang_and_ignore_signals,
    exit_silently,
    exit_loudly,
    raise_error,
    raise_this,
    fail_to_compile,
    train_in_conflict,
    lose_a_worker_to_full_shared_memory,
    ignore_signals_in_workers,
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
    leave_shared_memory_of_workers,
    leave_sockets_of_workers,
    leave_sockets_of_torchs_managers,
    leave_python_memory,
    write_to_a_full_disk,
    use_up_files,
    use_up_files_and_hang,
    map_too_much,
    return_not_a_number,
]


def seed_of(name):
    """The seed that asks for the behaviour of this name."""
    return [behaviour.__name__ for behaviour in BEHAVIOURS].index(name)
