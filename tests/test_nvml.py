"""GPUs are read as NVML tells them and as CUDA_VISIBLE_DEVICES leaves them, with NVML in whatever state it is."""

from __future__ import annotations

import pytest

from autotune.nvml import gpu_used_bytes, hidden_by_setting, read_gpus
from autotune.records import GpuFacts
from tests.invented_nvml import GIB, Card, Nvml, Used


@pytest.fixture(autouse=True)
def _all_devices_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)


def read(*cards: Card, nvml: Nvml | None = None) -> tuple[list[GpuFacts], list[str]]:
    """The GPUs, and what is said of those that cannot be seen."""
    notes: list[str] = []
    gpus, _ = read_gpus(nvml or Nvml(*cards), notes)
    return gpus, notes


def test_a_gpu_as_nvml_describes_it() -> None:
    notes: list[str] = []
    (gpu,), driver_version = read_gpus(Nvml(Card(name=b"NVIDIA H200", processes=[Used(999_999, 5)])), notes)
    assert (gpu.index, gpu.name, gpu.uuid, gpu.total_bytes, gpu.used_bytes) == (
        0, "NVIDIA H200", "GPU-aaaa", 141 * GIB, GIB,
    )  # fmt: skip
    assert (gpu.compute_capability, gpu.processes, driver_version) == ((9, 0), 1, "570.1")
    assert notes == []


def test_what_nvml_does_not_tell_is_said() -> None:
    silent = Card(
        refused=frozenset({
            "nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetCurrentClocksThrottleReasons",
            "nvmlDeviceGetCudaComputeCapability", "nvmlDeviceGetMigMode",
        })
    )  # fmt: skip
    (gpu,), notes = read(silent, Card(refused=frozenset({"nvmlDeviceGetMemoryInfo"})))
    assert (gpu.processes, gpu.compute_capability) == (None, None)
    assert notes == [
        "NVML does not say which processes use GPU 0",
        "NVML does not say whether GPU 0 slows down",
        "NVML does not tell the memory of GPU 1; it is left out",
    ]


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
        ("1,1", [], 1),
        ("GPU-b,GPU-b", [], 1),
        ("0,,2", ["GPU-aaaa-1"], 0),
        ("MIG-GPU-bbbb-3/1/0", [], 1),
    ],
)
def test_only_visible_gpus_in_their_order(
    monkeypatch: pytest.MonkeyPatch, setting: str, uuids: list[str], notes: int
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    gpus, said = read(*CARDS)
    assert [gpu.uuid for gpu in gpus] == uuids
    assert [gpu.index for gpu in gpus] == list(range(len(uuids)))
    assert len(said) == notes
    assert all("CUDA_VISIBLE_DEVICES names" in note for note in said)
    assert hidden_by_setting() == (setting in ("", "-1", "1,1", "GPU-b,GPU-b"))


@pytest.mark.parametrize("setting", [None, "0", "MIG-2", "MIG-2bbb", "MIG-GPU-aaaa/2/0", "MIG-GPU-aa/2/0", "GPU-aaaa"])
def test_under_mig_the_instance_counts(monkeypatch: pytest.MonkeyPatch, setting: str | None) -> None:
    if setting is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    card = Card()
    for number in (1, 2):
        card.instances.append(
            Card(
                name="MIG 1g.18gb", uuid=f"MIG-{number}bbb-cc", total=18 * GIB, parent=card, instance=(number, 0),
                refused=frozenset({"nvmlDeviceGetCudaComputeCapability"}),
            )
        )  # fmt: skip
    (gpu,), notes = read(card)
    expected = "MIG-2bbb-cc" if setting is not None and "2" in setting else "MIG-1bbb-cc"
    assert notes == []
    assert (gpu.uuid, gpu.total_bytes, gpu.compute_capability) == (expected, 18 * GIB, (9, 0))


def test_cards_that_differ_may_be_numbered_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in read(Card(), Card(name="NVIDIA T4"))[1][0]
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert read(Card(), Card(name="NVIDIA T4"))[1] == []


def test_used_bytes_of_a_visible_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml(Card(used=5), Card(uuid="GPU-bbbb", used=7))
    assert gpu_used_bytes(nvml=nvml) == 5
    assert gpu_used_bytes(1, nvml=nvml) == 7
    assert gpu_used_bytes(2, nvml=nvml) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert gpu_used_bytes(nvml=nvml) == 7
    assert gpu_used_bytes(nvml=Nvml(absent=True)) is None
    assert gpu_used_bytes(nvml=Nvml(Card(refused=frozenset({"nvmlDeviceGetMemoryInfo"})))) is None


@pytest.mark.parametrize("setting", ["MIG-GPU-aaaa/3/0", "MIG-GPU-cccc/1/0", "MIG-", "MIG-9"])
def test_an_instance_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    card = Card()
    card.instances.extend(Card(uuid=f"MIG-{number}", parent=card, instance=(number, 0)) for number in (1, 2))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    gpus, (note,) = read(card)
    assert gpus == []
    assert note.startswith(f"CUDA_VISIBLE_DEVICES names {setting!r}, which NVML does not know")


def test_a_card_that_is_forbidden_keeps_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    forbidden, other = Card(uuid="GPU-1", refused=frozenset({"nvmlDeviceGetHandleByIndex"})), Card(uuid="GPU-2")
    gpus, notes = read(forbidden, other)
    assert ([gpu.uuid for gpu in gpus], notes) == (["GPU-2"], [])


def test_an_nvml_that_lists_nothing_is_said() -> None:
    assert read(nvml=Nvml(unlisted=True)) == ([], ["NVML does not list the GPUs"])
    assert read(nvml=Nvml(absent=True)) == ([], [])
