"""A deep, narrow network over rows of a table: on a GPU, starting its many small kernels takes longer than running them.

autotune search examples/small.py    finds how to train it fastest on this machine
python examples/small.py             trains it as it stands
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

COLUMNS = 32
WIDTH = 64
DEPTH = 24


class Block(nn.Module):
    """A gated layer behind a norm, added to what goes in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm(x)
        return x + torch.sigmoid(self.gate(inner)) * torch.tanh(self.value(inner))


def model_fn() -> nn.Module:
    """Rows [batch, COLUMNS] to one number each [batch, 1]."""
    return nn.Sequential(nn.Linear(COLUMNS, WIDTH), *(Block() for _ in range(DEPTH)), nn.Linear(WIDTH, 1))


def data_fn() -> DataLoader[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(65_536, COLUMNS, generator=generator)
    targets = torch.sin(rows).sum(1, keepdim=True) / COLUMNS**0.5
    return DataLoader(TensorDataset(rows, targets), batch_size=128, shuffle=True)


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    rows, targets = batch
    return F.mse_loss(model(rows), targets)


def optimizer_fn(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def main(steps: int = 100) -> None:
    """A plain training loop, without autotune."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = model_fn().to(device)
    optimizer = optimizer_fn(model)
    for step, (rows, targets) in zip(range(1, steps + 1), data_fn(), strict=False):
        loss = loss_fn(model, (rows.to(device), targets.to(device)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
