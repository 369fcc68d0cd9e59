"""A stand-in for `pynvml` over invented cards, for machines without a GPU to ask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

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
    instance: tuple[int, int] = (0, 0)
    """Numbers of a MIG instance: GPU instance and compute instance."""


class Nvml:
    """The functions of pynvml that are used, over invented cards: no GPU is here to ask."""

    NVMLError = NVMLError

    def __init__(self, *cards: Card, absent: bool = False, unlisted: bool = False) -> None:
        self.cards = list(cards)
        self.absent, self.unlisted = absent, unlisted

    def nvmlInit(self) -> None:  # noqa: N802
        if self.absent:
            raise NVMLError("library not found")

    def nvmlSystemGetDriverVersion(self) -> bytes:  # noqa: N802
        return b"570.1"

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        if self.unlisted:
            raise NVMLError("not permitted")
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Card:  # noqa: N802
        if "nvmlDeviceGetHandleByIndex" in self.cards[index].refused:
            raise NVMLError("not permitted")
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
            "nvmlDeviceGetGpuInstanceId": lambda card: card.instance[0],
            "nvmlDeviceGetComputeInstanceId": lambda card: card.instance[1],
            "nvmlDeviceGetMigMode": lambda card: (int(bool(card.instances)), 0),
        }
        if question not in answers:
            raise AttributeError(question)

        def ask(card: Card, *arguments: Any) -> Any:
            if question in card.refused:
                raise NVMLError("not permitted")
            return answers[question](card, *arguments)

        return ask
