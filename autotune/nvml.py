"""NVML: which GPUs this process may use and what they tell, read without torch and without a CUDA context.

NVML may be absent, forbidden or silent about some things, as in containers and under MIG: then the rest is read all the
same, and notes say what could not be seen.
"""

from __future__ import annotations

import importlib
import os
import re
from functools import cache
from typing import Any

from autotune.records import GpuFacts

THROTTLE_REASONS = "nvmlDeviceGetCurrentClocksThrottleReasons"
INITIAL_PID_NAMESPACE = 0xEFFFFFFC
"""Inode of the pid namespace in which NVML's process numbers are meaningful (PROC_PID_INIT_INO in the kernel)."""
_INSTANCE_OF_CARD = re.compile(r"MIG-(?P<card>GPU-[^/]+)/(?P<gpu_instance>\d+)/(?P<compute_instance>\d+)")
"""How drivers before 470 named a MIG instance."""


def started(nvml: Any = None) -> Any | None:
    """The module, started, or None where there is no NVML. The real one, `pynvml`, is started once and kept."""
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


def _starts(nvml: Any) -> bool:
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return False
    return True


def ask(nvml: Any, question: str, *arguments: Any) -> Any | None:
    """What a function of NVML answers; None where it refuses, or where the bindings are too old to have it."""
    function = getattr(nvml, question, None)
    if function is None:
        return None
    try:
        return function(*arguments)
    except nvml.NVMLError:
        return None


def gpu_used_bytes(index: int = 0, *, nvml: Any = None) -> int | None:
    """Bytes in use on the visible GPU of that index, by whichever process; None where NVML does not say."""
    module = started(nvml)
    if module is None:
        return None
    handles = visible_handles(module, [])
    memory = ask(module, "nvmlDeviceGetMemoryInfo", handles[index]) if index < len(handles) else None
    return None if memory is None else int(memory.used)


def read_gpus(nvml: Any, notes: list[str]) -> tuple[list[GpuFacts], str | None]:
    """The visible GPUs and the driver's version. What cannot be seen is added to `notes`, a sentence each."""
    module = started(nvml)
    if module is None:
        return [], None
    driver_version = ask(module, "nvmlSystemGetDriverVersion")
    gpus = []
    for index, handle in enumerate(visible_handles(module, notes)):
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
    memory = ask(nvml, "nvmlDeviceGetMemoryInfo", handle)
    if memory is None:
        notes.append(f"NVML does not tell the memory of GPU {index}; it is left out")
        return None
    name, uuid = ask(nvml, "nvmlDeviceGetName", handle), ask(nvml, "nvmlDeviceGetUUID", handle)
    card = ask(nvml, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle) or handle
    capability = ask(nvml, "nvmlDeviceGetCudaComputeCapability", card)
    processes = ask(nvml, "nvmlDeviceGetComputeRunningProcesses", handle)
    if processes is None:
        notes.append(f"NVML does not say which processes use GPU {index}")
    if ask(nvml, THROTTLE_REASONS, handle) is None:
        notes.append(f"NVML does not say whether GPU {index} slows down")
    own = os.getpid() if pids_are_meaningful() else None
    return GpuFacts(
        index=index,
        name="unknown GPU" if name is None else _text(name),
        uuid="unknown" if uuid is None else _text(uuid),
        total_bytes=int(memory.total),
        used_bytes=int(memory.used),
        compute_capability=None if capability is None else (int(capability[0]), int(capability[1])),
        processes=None if processes is None else sum(process.pid != own for process in processes),
    )


def pids_are_meaningful() -> bool:
    """Whether NVML's process numbers are those of this process's namespace."""
    return os.stat("/proc/self/ns/pid").st_ino == INITIAL_PID_NAMESPACE


def _text(value: Any) -> str:
    """Older bindings answer in bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)


# --- CUDA_VISIBLE_DEVICES ---------------------------------------------------------------------------------------------


def hidden_by_setting() -> bool:
    """Whether CUDA_VISIBLE_DEVICES hides every GPU."""
    return _visible_devices([]) == []


def visible_handles(nvml: Any, notes: list[str]) -> list[Any]:
    """Handles of what CUDA_VISIBLE_DEVICES leaves, in its order, up to the first entry that names nothing, as in CUDA."""
    count = ask(nvml, "nvmlDeviceGetCount")
    if count is None:
        notes.append("NVML does not list the GPUs")
        return []
    cards: list[Any | None] = [ask(nvml, "nvmlDeviceGetHandleByIndex", index) for index in range(count)]
    visible = _visible_devices(notes)
    if visible is None:
        return [_first_instance(nvml, card) for card in cards if card is not None]
    handles: list[Any] = []
    for entry in visible:
        handle = _named(nvml, cards, entry)
        if handle is None:
            notes.append(
                f"CUDA_VISIBLE_DEVICES names {entry!r}, which NVML does not know: it and all after it are left out"
            )
            break
        handles.append(handle)
    return handles


def _visible_devices(notes: list[str]) -> list[str] | None:
    """The entries of CUDA_VISIBLE_DEVICES; None where it is not set, none where it hides everything."""
    setting = os.environ.get("CUDA_VISIBLE_DEVICES")
    if setting is None:
        return None
    entries = [entry.strip() for entry in setting.split(",")]
    hidden = next((place for place, entry in enumerate(entries) if entry in ("", "-1")), len(entries))
    entries = entries[:hidden]
    twice = next((entry for entry in entries if entries.count(entry) > 1), None)
    if twice is not None:
        notes.append(f"CUDA_VISIBLE_DEVICES names {twice!r} twice, on which CUDA shows no GPU at all")
        return []
    return entries


def _named(nvml: Any, cards: list[Any | None], entry: str) -> Any | None:
    """The card or MIG instance of an entry: a number, a UUID or the beginning of one."""
    seen = [card for card in cards if card is not None]
    if entry.startswith("MIG-"):
        return _named_instance(nvml, seen, entry)
    numbered = dict(enumerate(cards))
    card = numbered.get(int(entry)) if entry.isdecimal() else _only_one(nvml, seen, entry)
    return None if card is None else _first_instance(nvml, card)


def _named_instance(nvml: Any, cards: list[Any], entry: str) -> Any | None:
    """The MIG instance of `MIG-UUID`, of the beginning of one, or of `MIG-GPU-UUID/GPU-INSTANCE/COMPUTE-INSTANCE`."""
    known = ask(nvml, "nvmlDeviceGetHandleByUUID", entry)
    if known is not None:
        return known
    by_card = _INSTANCE_OF_CARD.fullmatch(entry)
    if by_card is None:
        return _only_one(nvml, [instance for card in cards for instance in _instances(nvml, card)], entry)
    card = _only_one(nvml, cards, by_card["card"])
    wanted = int(by_card["gpu_instance"]), int(by_card["compute_instance"])
    for instance in _instances(nvml, card) if card is not None else []:
        numbers = (
            ask(nvml, "nvmlDeviceGetGpuInstanceId", instance),
            ask(nvml, "nvmlDeviceGetComputeInstanceId", instance),
        )
        if numbers == wanted:
            return instance
    return None


def _only_one(nvml: Any, handles: list[Any], beginning: str) -> Any | None:
    """The one whose UUID begins so; None where there is none, or more than one."""
    fitting = [one for one in handles if _text(ask(nvml, "nvmlDeviceGetUUID", one) or "").startswith(beginning)]
    return fitting[0] if len(fitting) == 1 else None


def _first_instance(nvml: Any, card: Any) -> Any:
    """The card, or where it is split by MIG its first instance, which is the one that CUDA uses."""
    return next(iter(_instances(nvml, card)), card)


def _instances(nvml: Any, card: Any) -> list[Any]:
    """The MIG instances of a card; none where it is not split."""
    mode = ask(nvml, "nvmlDeviceGetMigMode", card)
    if mode is None or not mode[0]:
        return []
    places = range(ask(nvml, "nvmlDeviceGetMaxMigDeviceCount", card) or 0)
    found = [ask(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", card, place) for place in places]
    return [instance for instance in found if instance is not None]
