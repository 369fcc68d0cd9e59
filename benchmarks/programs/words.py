"""A large table of words: 64 MiB of weights, gradients and moments, and about 24 MiB a sample for backward."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

WORDS = 65_536
LENGTH = 8192
WIDTH = 64
DEPTH = 2


class Block(nn.Module):
    """A layer behind a norm, added to what goes in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.layer(self.norm(x)))


def model_fn() -> nn.Module:
    """Texts [batch, LENGTH] to one number a word [batch, LENGTH, 1]."""
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *(Block() for _ in range(DEPTH)), nn.Linear(WIDTH, 1))


def data_fn() -> DataLoader[tuple[Tensor, ...]]:
    texts = torch.randint(WORDS, (128, LENGTH), generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(texts, (texts % 7)[..., None].float()), batch_size=8, shuffle=True)


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    texts, targets = batch
    return F.mse_loss(model(texts), targets)
