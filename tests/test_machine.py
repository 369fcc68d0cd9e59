"""The machine is read as this process may use it, with NVML in whatever state it is."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.machine import available_memory_bytes, read_machine_facts
from autotune.records import MachineFacts
from tests.invented_nvml import GIB, Card, Nvml


@pytest.fixture(autouse=True)
def _all_devices_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)


def invented_root(folder: Path, files: dict[str, str]) -> Path:
    """A root with 64 GiB of memory, a processor's name and a /dev/shm, and whatever files are given."""
    everything = {
        "proc/meminfo": "MemTotal:       67108864 kB\nMemFree:  1000 kB\nMemAvailable:   50331648 kB\nHugePages_Total: 0\n",
        "proc/cpuinfo": "processor\t: 0\nmodel name\t: Invented 9000\n",
        "proc/self/cgroup": "0::/\n",
        "dev/shm/.keep": "",
        **files,
    }
    for name, text in everything.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


def read(root: Path, *cards: Card) -> MachineFacts:
    return read_machine_facts(root=root, nvml=Nvml(*cards))


# --- this machine -----------------------------------------------------------------------------------------------------


def test_the_real_machine() -> None:
    facts = read_machine_facts()
    assert 1 <= facts.usable_cores <= len(os.sched_getaffinity(0))
    assert 0 < facts.memory_available_bytes <= facts.memory_total_bytes
    assert facts.shared_memory_bytes > 0
    assert facts.open_files_limit == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert facts.cpu_name
    assert facts.torch_version[0].isdigit()
    assert facts.identity == read_machine_facts().identity
    assert len(facts.identity) == 12
    assert MachineFacts.model_validate_json(facts.model_dump_json()) == facts


def test_fewer_cores_are_seen_when_the_affinity_is_narrower() -> None:
    script = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
        "from autotune.machine import read_machine_facts; import sys;"
        "print(read_machine_facts().usable_cores, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "False"]


# --- cores and memory -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 64),
        ({"sys/fs/cgroup/cpu.max": "max 100000"}, 64),
        ({"sys/fs/cgroup/cpu.max": "350000 100000"}, 3),
        ({"sys/fs/cgroup/cpu.max": "50000 100000"}, 1),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "400000 100000",
          "sys/fs/cgroup/a/b/cpu.max": "800000 100000"}, 4),
        ({"proc/self/cgroup": "0::/only/on/the/host\n", "sys/fs/cgroup/cpu.max": "200000 100000"}, 2),
        ({"proc/self/cgroup": "4:cpu,cpuacct:/job\n", "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "600000",
          "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000"}, 6),
        ({"proc/self/cgroup": "4:cpu:/\n", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
          "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 64),
    ],
)  # fmt: skip
def test_a_quota_lowers_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    assert read(invented_root(tmp_path, files)).usable_cores == cores


@pytest.mark.parametrize(
    ("files", "total", "available"),
    [
        ({}, 64 * GIB, 48 * GIB),
        ({"sys/fs/cgroup/memory.max": "max"}, 64 * GIB, 48 * GIB),
        ({"sys/fs/cgroup/memory.max": str(8 * GIB), "sys/fs/cgroup/memory.current": str(3 * GIB)}, 8 * GIB, 5 * GIB),
        ({"sys/fs/cgroup/memory.max": str(8 * GIB), "sys/fs/cgroup/memory.current": str(7 * GIB),
          "sys/fs/cgroup/memory.stat": f"anon 1\ninactive_file {2 * GIB}\n"}, 8 * GIB, 3 * GIB),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/memory.max": str(4 * GIB),
          "sys/fs/cgroup/a/memory.current": str(GIB), "sys/fs/cgroup/a/b/memory.max": str(16 * GIB)}, 4 * GIB, 3 * GIB),
        ({"proc/self/cgroup": "9:memory:/job\n", "sys/fs/cgroup/memory/job/memory.limit_in_bytes": str(2 * GIB),
          "sys/fs/cgroup/memory/job/memory.usage_in_bytes": str(GIB)}, 2 * GIB, GIB),
        ({"proc/self/cgroup": "9:memory:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2**63 - 4096)},
         64 * GIB, 48 * GIB),
        ({"sys/fs/cgroup/memory.max": str(60 * GIB), "sys/fs/cgroup/memory.current": "0"}, 60 * GIB, 48 * GIB),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/memory.max": str(12 * GIB),
          "sys/fs/cgroup/a/memory.current": str(11 * GIB), "sys/fs/cgroup/a/b/memory.max": str(10 * GIB),
          "sys/fs/cgroup/a/b/memory.current": str(GIB)}, 10 * GIB, GIB),
    ],
)  # fmt: skip
def test_a_limit_lowers_the_memory(tmp_path: Path, files: dict[str, str], total: int, available: int) -> None:
    facts = read(invented_root(tmp_path, files))
    assert (facts.memory_total_bytes, facts.memory_available_bytes) == (total, available)
    assert available_memory_bytes(root=tmp_path) == available


def test_shared_memory_that_is_missing_is_said(tmp_path: Path) -> None:
    root = invented_root(tmp_path, {})
    (root / "dev/shm/.keep").unlink()
    (root / "dev/shm").rmdir()
    facts = read(root)
    assert facts.shared_memory_bytes == 0
    assert facts.notes == ("there is no /dev/shm: loader workers cannot hand over tensors",)


def test_without_gpus_the_processor_identifies_the_machine(tmp_path: Path) -> None:
    first = read(invented_root(tmp_path / "a", {}))
    assert first.cpu_name == "Invented 9000"
    other_cpu = read(invented_root(tmp_path / "b", {"proc/cpuinfo": "model name : Other\n"}))
    other_memory = read(invented_root(tmp_path / "c", {"sys/fs/cgroup/memory.max": str(8 * GIB)}))
    kernel_took_some = read(invented_root(tmp_path / "d", {"proc/meminfo": "MemTotal: 67100000 kB\n"}))
    assert first.identity == kernel_took_some.identity
    assert len({first.identity, other_cpu.identity, other_memory.identity}) == 3


# --- GPUs -------------------------------------------------------------------------------------------------------------


def test_the_gpus_identify_the_machine(tmp_path: Path) -> None:
    root = invented_root(tmp_path / "a", {})
    other_root = invented_root(tmp_path / "b", {"proc/cpuinfo": "model name : Other\n"})
    one = read(root, Card(uuid="GPU-1")).identity
    assert one == read(other_root, Card(uuid="GPU-1", used=5)).identity
    assert one != read(root, Card(uuid="GPU-2")).identity
    assert one != read(root).identity


def test_an_absent_nvml_leaves_everything_else(tmp_path: Path) -> None:
    facts = read_machine_facts(root=invented_root(tmp_path, {}), nvml=Nvml(absent=True))
    assert (facts.gpus, facts.driver_version, facts.memory_total_bytes) == ((), None, 64 * GIB)


TORCH_WITH_A_GPU = """
from types import SimpleNamespace
def get_device_properties(index):
    return SimpleNamespace(name="NVIDIA Thor", uuid="aaaa", major=11, minor=0)
cuda = SimpleNamespace(
    device_count=lambda: 1, get_device_properties=get_device_properties, mem_get_info=lambda index: (3 << 30, 5 << 30)
)
"""


@pytest.mark.parametrize(
    ("torch", "uuids", "note"),
    [
        (TORCH_WITH_A_GPU, ["GPU-aaaa"], "NVML shows no GPU, torch does: clocks, other processes and whether memory comes"),
        ("raise RuntimeError('driver too old')", [], "can use (RuntimeError: driver too old)"),
        (TORCH_WITH_A_GPU.replace("lambda: 1", "lambda: 0"), [], "neither NVML nor torch can use (torch finds none)"),
    ],
)  # fmt: skip
def test_where_nvml_is_absent_torch_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch: str, uuids: list[str], note: str
) -> None:
    (tmp_path / "torch.py").write_text(torch)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    facts = read_machine_facts(root=invented_root(tmp_path, {"dev/nvidiactl": ""}), nvml=Nvml(absent=True))
    assert [gpu.uuid for gpu in facts.gpus] == uuids
    assert [(gpu.total_bytes, gpu.used_bytes, gpu.processes) for gpu in facts.gpus] == [(5 * GIB, 2 * GIB, None)] * len(
        uuids
    )
    (said,) = facts.notes
    assert note in said


def test_torch_is_not_asked_for_gpus_that_are_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    facts = read_machine_facts(root=invented_root(tmp_path, {"dev/nvidiactl": ""}), nvml=Nvml(absent=True))
    assert (facts.gpus, facts.notes) == ((), ())
