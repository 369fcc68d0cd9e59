"""The host's memory as the kernel tells it: what this process has, and whether the kernel killed for lack of it."""

from __future__ import annotations

from pathlib import Path

_CGROUP_ROOT = Path("/sys/fs/cgroup")


def oom_kills() -> int:
    """Processes that the kernel has killed for lack of memory, here or in this control group; its rise matters."""
    directory = _cgroup_directory("memory")
    counts = [
        _field(Path("/proc/vmstat"), "oom_kill"),
        _field(directory / "memory.events", "oom_kill"),
        _field(directory / "memory.oom_control", "oom_kill"),
    ]
    return sum(count for count in counts if count is not None)


def data_bytes() -> int:
    """This process's private writable memory, which RLIMIT_DATA limits."""
    kib = _field(Path("/proc/self/status"), "VmData:")
    assert kib is not None, "/proc/self/status always tells VmData"
    return kib * 1024


def _cgroup_directory(controller: str) -> Path:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return _CGROUP_ROOT
    unified = _CGROUP_ROOT
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return _existing(_CGROUP_ROOT / controller, path)
        if controllers == "":
            unified = _existing(_CGROUP_ROOT, path)
    return unified


def _existing(root: Path, path: str) -> Path:
    # inside a container the path may be the host's, and the container's own group lies at the root
    directory = root / path.lstrip("/")
    return directory if directory.is_dir() else root


def _field(path: Path, name: str) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        words = line.split()
        if len(words) >= 2 and words[0] == name and words[1].isdigit():
            return int(words[1])
    return None
