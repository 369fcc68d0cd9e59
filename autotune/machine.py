"""Reads what a search needs to know of the machine: GPUs, cores, memory and the limits of this process.

What cannot be seen is left out, as in containers and under MIG, and `notes` says so.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

from autotune.nvml import hidden_by_setting, read_gpus
from autotune.records import GpuFacts, MachineFacts

NVIDIA_DEVICES = ("dev/nvidiactl", "dev/nvidia0", "dev/dxg")
"""Where one of them is, CUDA may work although NVML does not."""
ASK_TORCH_SECONDS = 120.0
"""Importing torch takes 4 s, on a cold disk much longer."""
GPUS_BY_TORCH = """
import json, torch
gpus = []
for index in range(torch.cuda.device_count()):
    facts = torch.cuda.get_device_properties(index)
    free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    gpus.append({
        "index": index, "name": facts.name, "uuid": f"GPU-{getattr(facts, 'uuid', 'unknown')}",
        "total_bytes": total_bytes, "used_bytes": total_bytes - free_bytes,
        "compute_capability": [facts.major, facts.minor], "processes": None,
    })
print(json.dumps(gpus))
"""


def read_machine_facts(*, root: Path = Path("/"), nvml: Any = None) -> MachineFacts:
    """The machine as this process may use it. Never raises for something that cannot be seen.

    `root` is where /proc, /sys and /dev are found; `nvml` stands in for the module `pynvml`.
    """
    notes: list[str] = []
    gpus, driver_version = read_gpus(nvml, notes)
    if not gpus and not hidden_by_setting() and any((root / device).exists() for device in NVIDIA_DEVICES):
        gpus = _ask_torch(notes)
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


def _ask_torch(notes: list[str]) -> list[GpuFacts]:
    """The GPUs as torch sees them, asked in a process of its own: this one keeps away from torch and CUDA."""
    asked = [sys.executable, "-P", "-c", GPUS_BY_TORCH]  # a json.py in the working directory is not meant
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=ASK_TORCH_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        notes.append(
            f"there is an NVIDIA device, NVML shows none, and torch did not answer in {ASK_TORCH_SECONDS:.0f} s"
        )
        return []
    if done.returncode != 0 or not done.stdout.startswith("[{"):
        why = next(iter(reversed(done.stderr.strip().splitlines())), "torch finds none")
        notes.append(f"there is an NVIDIA device that neither NVML nor torch can use ({why[:300]})")
        return []
    notes.append("NVML shows no GPU, torch does: clocks, other processes and whether memory comes back are not seen")
    return [GpuFacts.model_validate(gpu) for gpu in json.loads(done.stdout)]


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
