"""What the parity tests share: small models, and a check of one configuration against the program as it stands."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from autotune.measurement.parity import check_parity
from autotune.records import ParityResult
from autotune.workload import UserFunctions
from tests.measurement.programs import WIDTH, no_phase, request

SPLIT: dict[str, Any] = {"batch_size": 2, "global_batch_size": 8}


def parity(functions: UserFunctions, **changes: Any) -> ParityResult:
    return check_parity(functions, request("parity", **changes), no_phase)


def assert_rejected(result: ParityResult, text: str) -> None:
    assert not result.passed, result
    assert re.search(text, result.reason), result.reason


def assert_passed(result: ParityResult) -> None:
    assert result.passed, result


# --- models ---


class Residual(nn.Module):
    """A block with a branch that can be left out."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(torch.tanh(self.inner(self.dropout(x))))


class Net(nn.Module):
    """Four blocks and a head."""

    def __init__(self, make_block: Callable[[], nn.Module] = Residual) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([make_block() for _ in range(4)])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


BLOCKS = ("blocks.0", "blocks.1", "blocks.2", "blocks.3")


class Sensitive(nn.Module):
    """So many layers with BatchNorm that rounding alone moves the gradient by a third of itself and more."""

    def __init__(self) -> None:
        super().__init__()
        widths = [WIDTH, *(32 for _ in range(24))]
        self.layers = nn.ModuleList(nn.Linear(one, other, bias=False) for one, other in itertools.pairwise(widths))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for width in widths[1:])
        self.head = nn.Linear(32, 1)
        for layer in self.layers:
            nn.init.orthogonal_(layer.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = torch.tanh(norm(layer(x)))
        return self.head(x)


class NormBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.norm(self.inner(x)))


def norm_net() -> nn.Module:
    return Net(NormBlock)


class NormNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, WIDTH))


def in_autocast() -> bool:
    return torch.is_autocast_enabled("cpu")


def noise_by_type(like: torch.Tensor) -> torch.Tensor:
    """Noise that is other in bf16, on every CPU: on some a generator gives the same numbers in all types."""
    if like.dtype == torch.bfloat16:
        torch.rand(1)
    return torch.randn_like(like)


# --- losses ---


def sum_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1], reduction="sum")


def contrastive(model: nn.Module, batch: Any) -> torch.Tensor:
    y = F.normalize(model(batch[0]), dim=1)
    return F.cross_entropy(y @ y.t() / 0.2, torch.arange(len(y)).roll(1))
