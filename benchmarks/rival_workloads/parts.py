"""What the workloads of `benchmarks/rivals.py` share: data in memory, and the loader that PyTorch makes of it by default."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

TINY = os.environ.get("RIVALS_TINY") == "1"
"""Every workload is then small enough for two cores: to try out the benchmark, not to learn anything from it."""


class Images(Dataset[tuple[Tensor, int]]):
    """Images of normally distributed values, float32, and a class for each; `kept` different ones lie in memory."""

    def __init__(self, count: int, size: int, classes: int, kept: int) -> None:
        self.pixels = torch.randn(kept, 3, size, size, generator=torch.Generator().manual_seed(0))
        self.count, self.classes = count, classes

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return self.pixels[index % len(self.pixels)], index % self.classes


class Tokens(Dataset[tuple[Tensor, Tensor]]):
    """Windows into one long row of random tokens, each with the window one token further on as its target."""

    def __init__(self, windows: int, length: int, vocabulary: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(vocabulary, (windows * length + 1,), generator=generator)
        self.windows, self.length = windows, length

    def __len__(self) -> int:
        return self.windows

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < self.windows:
            raise IndexError(index)
        start = index * self.length
        return self.tokens[start : start + self.length], self.tokens[start + 1 : start + 1 + self.length]


def default_loader(dataset: Dataset[Any], batch_size: int) -> DataLoader[Any]:
    """As one writes it first: shuffled, and everything else at PyTorch's defaults."""
    return DataLoader(dataset, batch_size=batch_size, shuffle=True, drop_last=True)
