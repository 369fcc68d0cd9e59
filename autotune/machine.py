"""Reads what a search needs to know of the machine: GPUs through NVML, cores, memory and limits of this process.

NVML may be absent, forbidden or silent about some things, as in containers and under MIG: then everything else is read
all the same, and `notes` says what could not be seen.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import os
import platform
import resource
import threading
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from autotune.records import GpuFacts, MachineFacts

SAMPLES_PER_SECOND = 5.0
NOTABLE_SHARE = 0.05
"""Slowdowns seen in fewer of the samples than this change no rate that matters."""
NOTABLE_BYTES = 64 * 2**20
"""Other processes that hold less than this on a GPU hold a bare handle."""
INITIAL_PID_NAMESPACE = 0xEFFFFFFC
"""Inode of the pid namespace in which NVML's process numbers are meaningful (PROC_PID_INIT_INO in the kernel)."""

THROTTLE_REASONS = "nvmlDeviceGetCurrentClocksThrottleReasons"
SM_CLOCK = 1
"""NVML_CLOCK_SM."""

SLOWDOWNS = {
    0x20: "heat (thermal slowdown by the driver)",
    0x40: "heat (thermal slowdown by the hardware)",
    0x80: "the power brake (an external signal of the power supply)",
    0x08: "the hardware (heat or power beyond what the driver could hold)",
}
"""Bits of NVML's throttle reasons that make a rate not repeatable. Idle clocks and the power cap belong to a card."""


def read_machine_facts(*, root: Path = Path("/"), nvml: Any = None) -> MachineFacts:
    """The machine as this process may use it. Never raises for something that cannot be seen.

    `root` is where /proc, /sys and /dev are found; `nvml` stands in for the module `pynvml`.
    """
    notes: list[str] = []
    gpus, driver_version = _read_gpus(nvml, notes)
    groups = _control_groups(root)
    usable_cores = max(1, min(len(os.sched_getaffinity(0)), *(_cores_by_quota(group) for group in groups), 2**20))
    total_bytes, available_bytes = _read_memory(root, groups)
    cpu_name = _read_cpu_name(root)
    known_by: list[object] = [f"{gpu.name} {gpu.uuid}" for gpu in gpus]
    known_by = known_by or [cpu_name, usable_cores, round(total_bytes / 2**30)]
    return MachineFacts(
        gpus=tuple(gpus),
        driver_version=driver_version,
        cpu_name=cpu_name,
        usable_cores=usable_cores,
        memory_total_bytes=total_bytes,
        memory_available_bytes=available_bytes,
        shared_memory_bytes=_read_shared_memory(root, notes),
        open_files_limit=_read_open_files_limit(),
        platform=platform.platform(),
        python_version=platform.python_version(),
        torch_version=_read_torch_version(notes),
        identity=hashlib.sha256(repr(known_by).encode()).hexdigest()[:12],
        notes=tuple(notes),
    )


def available_memory_bytes(*, root: Path = Path("/")) -> int:
    """What could still be allocated without swapping: of the machine, or of the control group that has least left."""
    return _read_memory(root, _control_groups(root))[1]


def gpu_used_bytes(index: int = 0, *, nvml: Any = None) -> int | None:
    """Bytes in use on the visible GPU of that index, by whichever process; None where NVML does not say."""
    module = _started(nvml)
    if module is None:
        return None
    handles = _visible_handles(module, [])
    memory = _ask(module, "nvmlDeviceGetMemoryInfo", handles[index]) if index < len(handles) else None
    return None if memory is None else int(memory.used)


class GpuWatch:
    """Watches a GPU while trials run, from a thread of this process: `with GpuWatch() as watch: ...; watch.notes()`.

    Does nothing where NVML is absent. Enter it before the trials begin: in a container, where process numbers do not
    match, only processes that were there from the beginning are known to be others.
    """

    def __init__(self, index: int = 0, *, nvml: Any = None, samples_per_second: float = SAMPLES_PER_SECOND) -> None:
        self._index = index
        self._nvml: Any = _started(nvml)
        self._handle: Any = None
        self._interval_seconds = 1 / samples_per_second
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="autotune-gpu-watch", daemon=True)
        self._samples = 0
        self._slowdowns: dict[int, int] = {}
        self._slow_clocks: list[int] = []
        self._clocks: list[int] = []
        self._there_before: set[int] = set()
        self._others: dict[int, int] = {}

    def __enter__(self) -> Self:
        if self._nvml is not None:
            handles = _visible_handles(self._nvml, [])
            self._handle = handles[self._index] if self._index < len(handles) else None
        if self._handle is not None:
            self._there_before = {process.pid for process in self._processes()}
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def notes(self) -> tuple[str, ...]:
        """What may have changed the rates, one sentence each; empty where nothing did or nothing could be seen."""
        found = []
        for bit, reason in SLOWDOWNS.items():
            count = self._slowdowns.get(bit, 0)
            if count > NOTABLE_SHARE * self._samples:
                found.append(
                    f"GPU {self._index} was slowed down by {reason} in {count / self._samples:.0%} of the time{self._fall()}"
                )
        for pid, used_bytes in sorted(self._others.items()):
            found.append(f"another process ({pid}) held {used_bytes / 2**20:.0f} MiB on GPU {self._index}")
        return tuple(found)

    def _fall(self) -> str:
        """How far the clock fell, where that was seen."""
        if not self._slow_clocks or min(self._slow_clocks) >= max(self._clocks):
            return ""
        return f", its clock down to {min(self._slow_clocks)} from {max(self._clocks)} MHz"

    def _run(self) -> None:
        while True:
            self._sample()
            if self._stop.wait(self._interval_seconds):
                return

    def _sample(self) -> None:
        reasons = int(_ask(self._nvml, THROTTLE_REASONS, self._handle) or 0)
        clock = _ask(self._nvml, "nvmlDeviceGetClockInfo", self._handle, SM_CLOCK)
        slow = [bit for bit in SLOWDOWNS if reasons & bit]
        self._samples += 1
        for bit in slow:
            self._slowdowns[bit] = self._slowdowns.get(bit, 0) + 1
        if clock is not None:
            (self._slow_clocks if slow else self._clocks).append(int(clock))
        for process in self._processes():
            used_bytes = process.usedGpuMemory or 0
            if used_bytes >= NOTABLE_BYTES and self._is_foreign(process.pid):
                self._others[process.pid] = max(used_bytes, self._others.get(process.pid, 0))

    def _processes(self) -> list[Any]:
        return list(_ask(self._nvml, "nvmlDeviceGetComputeRunningProcesses", self._handle) or [])

    def _is_foreign(self, pid: int) -> bool:
        if _pids_are_meaningful():
            return not _descends_from(pid, os.getpid())
        return pid in self._there_before


# --- NVML -------------------------------------------------------------------------------------------------------------


def _started(nvml: Any) -> Any | None:
    """The module, started, or None where there is no NVML. The real one is started once and kept."""
    if nvml is None:
        return _real_nvml()
    return nvml if _starts(nvml) else None


@cache
def _real_nvml() -> Any | None:
    try:
        module = importlib.import_module("pynvml")
    except ImportError:
        return None
    return module if _starts(module) else None


def _ask(nvml: Any, question: str, *arguments: Any) -> Any | None:
    """What a function of NVML answers; None where it refuses, or where the bindings are too old to have it."""
    function = getattr(nvml, question, None)
    if function is None:
        return None
    try:
        return function(*arguments)
    except nvml.NVMLError:
        return None


def _starts(nvml: Any) -> bool:
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return False
    return True


def _read_gpus(nvml: Any, notes: list[str]) -> tuple[list[GpuFacts], str | None]:
    module = _started(nvml)
    if module is None:
        if _visible_devices() != [] and Path("/dev/nvidiactl").exists():
            notes.append(
                "there is an NVIDIA device, and NVML does not answer: GPUs, clocks and other users are not seen"
            )
        return [], None
    driver_version = _ask(module, "nvmlSystemGetDriverVersion")
    gpus = []
    for index, handle in enumerate(_visible_handles(module, notes)):
        facts = _read_gpu(module, index, handle, notes)
        if facts is not None:
            gpus.append(facts)
    if len({gpu.name for gpu in gpus}) > 1 and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        notes.append(
            "the GPUs differ, and CUDA may number them in another order than NVML; set CUDA_DEVICE_ORDER=PCI_BUS_ID"
        )
    return gpus, None if driver_version is None else _text(driver_version)


def _read_gpu(nvml: Any, index: int, handle: Any, notes: list[str]) -> GpuFacts | None:
    """One GPU, or one MIG instance; None where not even its memory is told."""
    memory = _ask(nvml, "nvmlDeviceGetMemoryInfo", handle)
    if memory is None:
        notes.append(f"NVML does not tell the memory of GPU {index}; it is left out")
        return None
    name, uuid = _ask(nvml, "nvmlDeviceGetName", handle), _ask(nvml, "nvmlDeviceGetUUID", handle)
    card = _ask(nvml, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle) or handle
    capability = _ask(nvml, "nvmlDeviceGetCudaComputeCapability", card)
    processes = _ask(nvml, "nvmlDeviceGetComputeRunningProcesses", handle)
    if processes is None:
        notes.append(f"NVML does not say which processes use GPU {index}")
    if _ask(nvml, THROTTLE_REASONS, handle) is None:
        notes.append(f"NVML does not say whether GPU {index} slows down")
    own = os.getpid() if _pids_are_meaningful() else None
    return GpuFacts(
        index=index,
        name="unknown GPU" if name is None else _text(name),
        uuid="unknown" if uuid is None else _text(uuid),
        total_bytes=int(memory.total),
        used_bytes=int(memory.used),
        compute_capability=None if capability is None else (int(capability[0]), int(capability[1])),
        processes=None if processes is None else sum(process.pid != own for process in processes),
    )


def _visible_handles(nvml: Any, notes: list[str]) -> list[Any]:
    """Handles of what CUDA_VISIBLE_DEVICES leaves, in its order, up to the first entry that names nothing, as in CUDA."""
    count = _ask(nvml, "nvmlDeviceGetCount")
    if count is None:
        notes.append("NVML does not list the GPUs")
        return []
    cards = [_ask(nvml, "nvmlDeviceGetHandleByIndex", index) for index in range(count)]
    visible = _visible_devices()
    if visible is None:
        return [_first_instance(nvml, card) for card in cards if card is not None]
    handles: list[Any] = []
    for entry in visible:
        handle = _named(nvml, cards, entry)
        if handle is None:
            notes.append(f"CUDA_VISIBLE_DEVICES names {entry!r}, which NVML does not know")
            break
        handles.append(handle)
    return handles


def _visible_devices() -> list[str] | None:
    """The entries of CUDA_VISIBLE_DEVICES; None where it is not set, none where it hides everything."""
    setting = os.environ.get("CUDA_VISIBLE_DEVICES")
    if setting is None:
        return None
    entries = [entry.strip() for entry in setting.split(",")]
    hidden = next((place for place, entry in enumerate(entries) if entry in ("", "-1")), len(entries))
    return entries[:hidden]


def _named(nvml: Any, cards: list[Any], entry: str) -> Any | None:
    """The card or MIG instance of an entry: a number, a UUID or the beginning of one."""
    if entry.isdigit():
        card = cards[int(entry)] if int(entry) < len(cards) else None
    elif entry.startswith("MIG-"):
        return _ask(nvml, "nvmlDeviceGetHandleByUUID", entry)
    else:
        fitting = [card for card in cards if _text(_ask(nvml, "nvmlDeviceGetUUID", card) or "").startswith(entry)]
        card = fitting[0] if len(fitting) == 1 else None
    return None if card is None else _first_instance(nvml, card)


def _first_instance(nvml: Any, card: Any) -> Any:
    """The card, or where it is split by MIG its first instance, which is the one that CUDA uses."""
    mode = _ask(nvml, "nvmlDeviceGetMigMode", card)
    if mode is None or not mode[0]:
        return card
    for place in range(_ask(nvml, "nvmlDeviceGetMaxMigDeviceCount", card) or 0):
        instance = _ask(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", card, place)
        if instance is not None:
            return instance
    return card


def _text(value: Any) -> str:
    """Older bindings answer in bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)


def _pids_are_meaningful() -> bool:
    """Whether NVML's process numbers are those of this process's namespace."""
    return os.stat("/proc/self/ns/pid").st_ino == INITIAL_PID_NAMESPACE


def _descends_from(pid: int, ancestor: int) -> bool:
    while pid > 1:
        if pid == ancestor:
            return True
        try:
            # The name in parentheses may hold anything; after it come the state and the parent.
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            return False
    return False


# --- cores and memory -------------------------------------------------------------------------------------------------


def _control_groups(root: Path) -> list[Path]:
    """Folders of this process's control groups and their ancestors, version 1 or 2, as far as they are visible.

    In a container the path that /proc names is often the host's; then the mount's own root is the group.
    """
    listed = _read(root / "proc/self/cgroup") or ""
    mounts = root / "sys/fs/cgroup"
    folders: list[Path] = []
    for line in listed.splitlines():
        _, controllers, path = line.split(":", 2)
        mount = mounts / controllers if controllers else mounts
        group = mount / path.lstrip("/")
        while group != mount and mount in group.parents:
            if group.is_dir():
                folders.append(group)
            group = group.parent
        if mount.is_dir():
            folders.append(mount)
    return folders


def _cores_by_quota(group: Path) -> int:
    """Whole cores that the group's quota pays for; a very large number where there is none."""
    maximum = _read(group / "cpu.max")
    if maximum is not None:
        quota, period = maximum.split()[:2]
    else:
        quota = _read(group / "cpu.cfs_quota_us") or "-1"
        period = _read(group / "cpu.cfs_period_us") or "100000"
    if quota in ("max", "-1"):
        return 2**20
    return max(1, int(quota) // int(period))


def _read_memory(root: Path, groups: list[Path]) -> tuple[int, int]:
    """Total and available bytes: the machine's, or of the group that has least."""
    lines = (_read(root / "proc/meminfo") or "").splitlines()
    kibibytes = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.endswith("kB")}
    machine_total = total = kibibytes["MemTotal"] * 1024
    available = kibibytes.get("MemAvailable", kibibytes["MemTotal"]) * 1024
    for group in groups:
        limit = _read(group / "memory.max") or _read(group / "memory.limit_in_bytes") or "max"
        if limit == "max" or int(limit) >= machine_total:
            continue
        used = int(_read(group / "memory.current") or _read(group / "memory.usage_in_bytes") or 0)
        reclaimable = _file_cache_bytes(group)
        total = min(total, int(limit))
        # A wider group may have less left than this one, where others in it have taken much.
        available = min(available, max(0, int(limit) - used + reclaimable))
    return total, min(available, total)


def _file_cache_bytes(group: Path) -> int:
    """Cached file pages that the kernel gives back when memory is asked for."""
    statistics = dict(line.split()[:2] for line in (_read(group / "memory.stat") or "").splitlines())
    return int(statistics.get("total_inactive_file", statistics.get("inactive_file", 0)))


def _read_shared_memory(root: Path, notes: list[str]) -> int:
    try:
        file_system = os.statvfs(root / "dev/shm")
    except OSError:
        notes.append("there is no /dev/shm: loader workers cannot hand over tensors")
        return 0
    return file_system.f_bavail * file_system.f_frsize


def _read_open_files_limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**20 if soft == resource.RLIM_INFINITY else soft


def _read_cpu_name(root: Path) -> str:
    for line in (_read(root / "proc/cpuinfo") or "").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _read_torch_version(notes: list[str]) -> str:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        notes.append("torch is not installed as a package; its version is not known")
        return "unknown"


def _read(file: Path) -> str | None:
    """The stripped text of a small file; None where there is none or it may not be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
