"""A small user program, trained under a configuration by the class that is measured and handed out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from autotune.config import TrainingConfig, Value
from autotune.knobs.registry import KNOBS
from autotune.records import Conditions
from autotune.training.training import Training
from autotune.workload import UserFunctions
from tests.knobs.search_facts import cpu_facts

BATCH_SIZE = 4
SAMPLES = 24
WIDTH = 6


class Block(nn.Module):
    """A layer, with running statistics or without."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm: nn.Module = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.norm(self.linear(x)))


class Net(nn.Module):
    """Four blocks and a head."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(norm) for _ in range(4)])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


BLOCKS = ("blocks.0", "blocks.1", "blocks.2", "blocks.3")


def data_fn() -> DataLoader[Any]:
    x = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=BATCH_SIZE)


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]).float(), batch[1])


def baseline_config(**changes: Value) -> TrainingConfig:
    """Every knob at its baseline for this program, except those named."""
    facts = cpu_facts(batch_size=BATCH_SIZE)
    return TrainingConfig({knob.name: knob.baseline(facts) for knob in KNOBS}).replace(changes)


def train(
    *,
    norm: bool = True,
    global_batch_size: int | None = None,
    optimizer_fn: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    loss: Callable[[nn.Module, Any], torch.Tensor] = loss_fn,
    blocks: tuple[str, ...] = BLOCKS,
    make_model: Callable[[], nn.Module] | None = None,
    data: Callable[[], DataLoader[Any]] = data_fn,
    **changes: Value,
) -> Training:
    """The program under its baseline with some knobs changed, from the same weights each time, not stepped yet."""

    def model_fn() -> nn.Module:
        torch.manual_seed(0)
        return Net(norm) if make_model is None else make_model()

    functions = UserFunctions(model_fn, data, loss, optimizer_fn)
    conditions = Conditions(device="cpu", global_batch_size=global_batch_size)
    return Training(functions, baseline_config(**changes), conditions, blocks=blocks)


def steps(training: Training, count: int = 2) -> list[float]:
    """Losses of the first optimizer steps."""
    return [float(training.step(window)) for _, window in zip(range(count), training.loader, strict=False)]


def gradients(training: Training) -> dict[str, torch.Tensor]:
    """What the first window leaves in the parameters."""
    training.accumulate(next(iter(training.loader)))
    return {name: p.grad for name, p in training.model.named_parameters() if p.grad is not None}


def assert_equal_tensors(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, tolerance: float = 0.0
) -> None:
    """Same names; same values, up to a relative and absolute tolerance."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            actual[name], tensor, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
