"""ResNet-18 at 32 px, batch 128: one of the three that pytorch-autotune publishes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from benchmarks.rival_workloads.parts import TINY, Images, default_loader
from benchmarks.rival_workloads.resnet import Basic, ResNet

BATCH_SIZE = 8 if TINY else 128
LARGEST_GUESS = 4 * BATCH_SIZE if TINY else 8192
"""The batch from which accelerate's search comes down."""
LEARNING_RATE = 1e-3


def dataset() -> Dataset[Any]:
    return Images(256, 32, 10, kept=64) if TINY else Images(50_000, 32, 10, kept=4096)


def model_fn() -> nn.Module:
    return ResNet(Basic, (1, 1), 10, width=8) if TINY else ResNet(Basic, (2, 2, 2, 2), 10)


def data_fn() -> DataLoader[Any]:
    return default_loader(dataset(), BATCH_SIZE)


def criterion(scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores, labels)


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return criterion(model(batch[0]), batch[1])


def optimizer_fn(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
