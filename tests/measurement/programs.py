"""User programs and requests for the tests of what a trial process does with them."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from autotune.config import TrainingConfig, Value
from autotune.knobs.registry import KNOBS
from autotune.records import Conditions, Phase, TrialKind, TrialRequest
from autotune.workload import UserFunctions
from tests.knobs.search_facts import cpu_facts

WIDTH = 16
BATCH_SIZE = 8


def regression_data(samples: int = 64, batch_size: int = BATCH_SIZE, width: int = WIDTH) -> DataLoader[Any]:
    x = torch.randn(samples, width, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x[:, :1]), batch_size=batch_size)


class Features(Dataset[Any]):
    """What another model gives, with all that it was computed from."""

    def __init__(self) -> None:
        self.extractor = nn.Linear(WIDTH, WIDTH)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return self.extractor(torch.full((WIDTH,), index / 64)).tanh(), torch.ones(1)


def mse(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]).float(), batch[1])


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 1))


class Plain(nn.Module):
    """Not of torch's own classes, which the compiler skips."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


def slowly_compiled(seconds: float) -> Callable[[], nn.Module]:
    """A model_fn that compiles its model, by a backend that takes so long for each shape and changes nothing. What an
    earlier training compiled is compiled again."""

    def compile_slowly(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        time.sleep(seconds)
        return graph.forward

    def model_fn() -> nn.Module:
        torch._dynamo.reset()
        model = Plain()
        model.compile(backend=compile_slowly, dynamic=False)
        return model

    return model_fn


def program(
    model_fn: Callable[[], nn.Module] = perceptron,
    data_fn: Callable[[], Any] = regression_data,
    loss_fn: Callable[[Any, Any], Any] | None = mse,
    optimizer_fn: Callable[[Any], Any] | None = None,
    scheduler_fn: Callable[[Any], Any] | None = None,
) -> UserFunctions:
    return UserFunctions(model_fn, data_fn, loss_fn, optimizer_fn, scheduler_fn)


def config(batch_size: int = BATCH_SIZE, **changes: Value) -> TrainingConfig:
    """Every knob at its baseline except those named."""
    facts = cpu_facts(batch_size=batch_size)
    return TrainingConfig({knob.name: knob.baseline(facts) for knob in KNOBS}).replace(changes)


def request(
    kind: TrialKind,
    *,
    blocks: tuple[str, ...] = (),
    global_batch_size: int | None = None,
    block_seconds: float = 0.02,
    minimum_blocks: int = 3,
    maximum_blocks: int = 12,
    relative_precision: float = 0.01,
    measure_resident: bool = False,
    clip_grad_norm: float | None = None,
    memory_limit_bytes: int | None = None,
    rate_to_beat: float | None = None,
    resident_rate_to_beat: float | None = None,
    **changes: Any,
) -> TrialRequest:
    """A request for a trial in this process, on the CPU, with short blocks."""
    return TrialRequest(
        kind=kind,
        config=TrainingConfig({}) if kind == "facts" else config(**changes),
        conditions=Conditions(
            device="cpu",
            global_batch_size=global_batch_size,
            clip_grad_norm=clip_grad_norm,
            memory_limit_bytes=memory_limit_bytes,
        ),
        blocks=blocks,
        block_seconds=block_seconds,
        minimum_blocks=minimum_blocks,
        maximum_blocks=maximum_blocks,
        relative_precision=relative_precision,
        measure_resident=measure_resident,
        rate_to_beat=rate_to_beat,
        resident_rate_to_beat=resident_rate_to_beat,
    )


def no_phase(phase: Phase) -> None:
    """For callers to whom phases do not matter."""


@torch.compiler.disable
def pause(seconds: float) -> None:
    """Waits so long to some microseconds: sleeps most of it and watches the clock for the rest."""
    end = time.perf_counter() + seconds
    time.sleep(max(0.0, seconds - 0.0005))
    while time.perf_counter() < end:
        pass


def held_bytes(count: int) -> mmap.mmap:
    """So many bytes straight from the kernel: what an allocator has left over from other tests hides growth."""
    pages = mmap.mmap(-1, count)
    pages.write(b"x" * count)
    return pages


def agrees(compare: Callable[[], float], tolerance: float, attempts: int = 25) -> bool:
    """Whether two readings of one thing, whose ratio `compare` gives, come within `tolerance` of each other once.

    What else runs on the machine only drives them apart, so one agreement is enough. What may go wrong on a busy machine
    alone is no assertion in `compare`, but gives NaN.
    """
    return any(abs(compare() - 1) <= tolerance for _ in range(attempts))


def holds(compare: Callable[[], bool]) -> bool:
    """Whether something is seen once that a quiet machine shows each time, and what else runs on a machine may hide."""
    return agrees(lambda: float(compare()), 0.0)
