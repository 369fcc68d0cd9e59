"""A Transformer of 6 layers, sequence 128, batch 32: one of the three that pytorch-autotune publishes.

Width, heads and vocabulary are ours; dropout is 0, so that gradients can be held against each other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from benchmarks.rival_workloads.parts import TINY, Tokens, default_loader

BATCH_SIZE = 4 if TINY else 32
LARGEST_GUESS = 4 * BATCH_SIZE if TINY else 2048
"""The batch from which accelerate's search comes down."""
LEARNING_RATE = 1e-3
LAYERS, WIDTH, HEADS, LENGTH, VOCABULARY = (2, 32, 2, 16, 100) if TINY else (6, 512, 8, 128, 10_000)


class Transformer(nn.Module):
    """Tokens [batch, LENGTH] to scores of the next one [batch, LENGTH, VOCABULARY]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.leave = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.leave(self.layers(self.embed(tokens) + self.place))


def dataset() -> Dataset[Any]:
    return Tokens(256 if TINY else 16_384, LENGTH, VOCABULARY)


def model_fn() -> nn.Module:
    return Transformer()


def data_fn() -> DataLoader[Any]:
    return default_loader(dataset(), BATCH_SIZE)


def criterion(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return criterion(model(batch[0]), batch[1])


def optimizer_fn(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
