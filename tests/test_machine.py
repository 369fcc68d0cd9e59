"""The machine is read as this process may use it, with NVML in whatever state it is."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from autotune import machine
from autotune.machine import GpuWatch, available_memory_bytes, gpu_used_bytes, read_machine_facts
from autotune.records import MachineFacts

GIB = 2**30
MIB = 2**20


class NVMLError(Exception):
    """As the bindings raise it."""


@dataclass
class Used:
    """A process on a GPU."""

    pid: int
    usedGpuMemory: int | None  # noqa: N815  # the bindings' own name


@dataclass
class Card:
    """A GPU or MIG instance; `refused` names the functions that NVML does not answer for it."""

    name: str | bytes = "NVIDIA H200"
    uuid: str = "GPU-aaaa"
    total: int = 141 * GIB
    used: int = 1 * GIB
    capability: tuple[int, int] = (9, 0)
    processes: list[Used] = field(default_factory=list)
    reasons: int = 0x1
    clock: int = 1980
    instances: list[Card] = field(default_factory=list)
    parent: Card | None = None
    refused: frozenset[str] = frozenset()


class Nvml:
    """The functions of pynvml that are used, over invented cards: no GPU is here to ask."""

    NVMLError = NVMLError

    def __init__(self, *cards: Card, absent: bool = False) -> None:
        self.cards = list(cards)
        self.absent = absent

    def nvmlInit(self) -> None:  # noqa: N802
        if self.absent:
            raise NVMLError("library not found")

    def nvmlSystemGetDriverVersion(self) -> bytes:  # noqa: N802
        return b"570.1"

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Card:  # noqa: N802
        return self.cards[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Card:  # noqa: N802
        every = [*self.cards, *(instance for card in self.cards for instance in card.instances)]
        for card in every:
            if card.uuid == uuid:
                return card
        raise NVMLError("not found")

    def nvmlDeviceGetMaxMigDeviceCount(self, card: Card) -> int:  # noqa: N802
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card: Card, index: int) -> Card:  # noqa: N802
        # The first slot is empty, as it is where instances were destroyed.
        if not 1 <= index <= len(card.instances):
            raise NVMLError("not found")
        return card.instances[index - 1]

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, card: Card) -> Card:  # noqa: N802
        if card.parent is None:
            raise NVMLError("not a MIG device")
        return card.parent

    def __getattr__(self, question: str) -> Any:
        answers: dict[str, Callable[..., Any]] = {
            "nvmlDeviceGetMemoryInfo": lambda card: card,
            "nvmlDeviceGetName": lambda card: card.name,
            "nvmlDeviceGetUUID": lambda card: card.uuid,
            "nvmlDeviceGetCudaComputeCapability": lambda card: card.capability,
            "nvmlDeviceGetComputeRunningProcesses": lambda card: card.processes,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda card: card.reasons,
            "nvmlDeviceGetClockInfo": lambda card, kind: card.clock,
            "nvmlDeviceGetMigMode": lambda card: (int(bool(card.instances)), 0),
        }
        if question not in answers:
            raise AttributeError(question)

        def ask(card: Card, *arguments: Any) -> Any:
            if question in card.refused:
                raise NVMLError("not permitted")
            return answers[question](card, *arguments)

        return ask


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


def test_a_gpu_as_nvml_describes_it(tmp_path: Path) -> None:
    facts = read(invented_root(tmp_path, {}), Card(name=b"NVIDIA H200", processes=[Used(999_999, 5)]))
    (gpu,) = facts.gpus
    assert (gpu.index, gpu.name, gpu.uuid, gpu.total_bytes, gpu.used_bytes) == (
        0, "NVIDIA H200", "GPU-aaaa", 141 * GIB, GIB,
    )  # fmt: skip
    assert (gpu.compute_capability, gpu.processes, facts.driver_version) == ((9, 0), 1, "570.1")
    assert facts.notes == ()


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


def test_what_nvml_does_not_tell_is_said(tmp_path: Path) -> None:
    silent = Card(
        refused=frozenset({
            "nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetCurrentClocksThrottleReasons",
            "nvmlDeviceGetCudaComputeCapability", "nvmlDeviceGetMigMode",
        })
    )  # fmt: skip
    facts = read(invented_root(tmp_path, {}), silent, Card(refused=frozenset({"nvmlDeviceGetMemoryInfo"})))
    (gpu,) = facts.gpus
    assert (gpu.processes, gpu.compute_capability) == (None, None)
    assert facts.notes == (
        "NVML does not say which processes use GPU 0",
        "NVML does not say whether GPU 0 slows down",
        "NVML does not tell the memory of GPU 1; it is left out",
    )


CARDS = (Card(uuid="GPU-aaaa-1"), Card(uuid="GPU-aaaa-2"), Card(uuid="GPU-bbbb-3"))


@pytest.mark.parametrize(
    ("setting", "uuids", "notes"),
    [
        ("2,0", ["GPU-bbbb-3", "GPU-aaaa-1"], 0),
        ("1", ["GPU-aaaa-2"], 0),
        ("", [], 0),
        ("-1", [], 0),
        ("0,-1,1", ["GPU-aaaa-1"], 0),
        ("0,7,1", ["GPU-aaaa-1"], 1),
        ("GPU-bbbb-3, GPU-aaaa-1", ["GPU-bbbb-3", "GPU-aaaa-1"], 0),
        ("GPU-b", ["GPU-bbbb-3"], 0),
        ("GPU-a", [], 1),
        ("nonsense", [], 1),
    ],
)
def test_only_visible_gpus_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, uuids: list[str], notes: int
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    facts = read(invented_root(tmp_path, {}), *CARDS)
    assert [gpu.uuid for gpu in facts.gpus] == uuids
    assert [gpu.index for gpu in facts.gpus] == list(range(len(uuids)))
    assert len(facts.notes) == notes
    assert all("CUDA_VISIBLE_DEVICES names" in note for note in facts.notes)


@pytest.mark.parametrize("setting", [None, "0", "MIG-2", "GPU-aaaa"])
def test_under_mig_the_instance_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str | None) -> None:
    if setting is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    card = Card()
    for number in (1, 2):
        card.instances.append(
            Card(
                name="MIG 1g.18gb", uuid=f"MIG-{number}", total=18 * GIB, parent=card,
                refused=frozenset({"nvmlDeviceGetCudaComputeCapability"}),
            )
        )  # fmt: skip
    (gpu,) = read(invented_root(tmp_path, {}), card).gpus
    expected = "MIG-2" if setting == "MIG-2" else "MIG-1"
    assert (gpu.uuid, gpu.total_bytes, gpu.compute_capability) == (expected, 18 * GIB, (9, 0))


def test_cards_that_differ_may_be_numbered_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = invented_root(tmp_path, {})
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in read(root, Card(), Card(name="NVIDIA T4")).notes[0]
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert read(root, Card(), Card(name="NVIDIA T4")).notes == ()


def test_used_bytes_of_a_visible_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml(Card(used=5), Card(uuid="GPU-bbbb", used=7))
    assert gpu_used_bytes(nvml=nvml) == 5
    assert gpu_used_bytes(1, nvml=nvml) == 7
    assert gpu_used_bytes(2, nvml=nvml) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert gpu_used_bytes(nvml=nvml) == 7
    assert gpu_used_bytes(nvml=Nvml(absent=True)) is None
    assert gpu_used_bytes(nvml=Nvml(Card(refused=frozenset({"nvmlDeviceGetMemoryInfo"})))) is None


# --- watching ---------------------------------------------------------------------------------------------------------


def watched(card: Card, *later: dict[str, Any]) -> tuple[str, ...]:
    """Notes of a watch during which the card changes, each state seen in at least three samples."""
    nvml: Any = Nvml(card)
    samples = threading.Semaphore(0)
    original = nvml.nvmlDeviceGetClockInfo

    def count(*arguments: Any) -> Any:
        samples.release()
        return original(*arguments)

    nvml.nvmlDeviceGetClockInfo = count
    with GpuWatch(nvml=nvml, samples_per_second=500) as watch:
        for change in ({}, *later):
            for name, value in change.items():
                setattr(card, name, value)
            for _ in range(4):
                assert samples.acquire(timeout=10)
    return watch.notes()


def test_a_quiet_card_is_not_worth_a_note() -> None:
    power_cap = 0x4
    assert watched(Card(), {"reasons": power_cap, "clock": 1500}) == ()


@pytest.mark.parametrize(
    ("reason", "words"),
    [(0x20, "thermal slowdown by the driver"), (0x40, "thermal slowdown by the hardware"),
     (0x80, "power brake"), (0x8, "by the hardware")],
)  # fmt: skip
def test_slowdowns_are_told_with_their_share_and_the_clock(reason: int, words: str) -> None:
    (note,) = watched(Card(), {"reasons": reason, "clock": 1200})
    assert words in note
    assert "% of the time" in note
    assert note.endswith("its clock down to 1200 from 1980 MHz")


@pytest.mark.parametrize("same_numbers", [True, False])
def test_other_processes_are_told_and_our_own_are_not(monkeypatch: pytest.MonkeyPatch, same_numbers: bool) -> None:
    monkeypatch.setattr(machine, "_pids_are_meaningful", lambda: same_numbers)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        handle_only = Used(2, 10 * MIB)
        stranger = Used(1, 700 * MIB)
        ours = Used(child.pid, 900 * MIB)
        notes = watched(Card(processes=[stranger, handle_only]), {"processes": [stranger, handle_only, ours]})
        assert notes == ("another process (1) held 700 MiB on GPU 0",)
    finally:
        child.kill()
        child.wait()


def test_a_card_that_tells_nothing_is_watched_in_vain() -> None:
    refused = {"nvmlDeviceGetCurrentClocksThrottleReasons", "nvmlDeviceGetComputeRunningProcesses"}
    assert watched(Card(refused=frozenset(refused))) == ()


@pytest.mark.parametrize("nvml", [Nvml(absent=True), Nvml()])
def test_without_a_gpu_the_watch_does_nothing(nvml: Nvml) -> None:
    threads = threading.active_count()
    with GpuWatch(nvml=nvml) as watch:
        assert threading.active_count() == threads
    assert watch.notes() == ()


def test_the_watch_ends_with_its_block_and_soon() -> None:
    threads = threading.active_count()
    began = time.monotonic()
    with GpuWatch(nvml=Nvml(Card()), samples_per_second=0.01):
        assert threading.active_count() == threads + 1
    assert threading.active_count() == threads
    assert time.monotonic() - began < 10
