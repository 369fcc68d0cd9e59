"""Tells tones in noisy recordings apart: a small classifier with a data set that takes its time, as many do.

autotune search examples/quickstart.py        finds how to train it fastest on this machine
python examples/quickstart.py                 trains it as it stands
"""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

# Layers this small gain nothing from a second thread, and whoever loads the data can use the core.
torch.set_num_threads(1)

CLASSES = 10
SAMPLE_COUNT = 1024
"""Values in one recording."""
READ_SECONDS = 0.001
"""What reading one recording takes. There are no files here, so a pause stands for the disk on which they would lie."""


class Recordings(Dataset[tuple[Tensor, Tensor]]):
    """Noisy tones; each is read and turned into a spectrum when it is asked for."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.labels = torch.randint(CLASSES, (count,), generator=generator)
        tones = torch.sin(2 * math.pi / 64 * (self.labels[:, None] + 5) * torch.arange(SAMPLE_COUNT))
        self.recordings = tones + 1.5 * torch.randn(count, SAMPLE_COUNT, generator=generator)
        self.window = torch.hann_window(SAMPLE_COUNT)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(READ_SECONDS)
        spectrum = torch.fft.rfft(self.recordings[index] * self.window)[: SAMPLE_COUNT // 4]
        return torch.log1p(spectrum.abs()) - 3.5, self.labels[index]


class Block(nn.Module):
    """Two layers behind a norm, added to what goes in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 2 * width)
        self.narrow = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(F.gelu(self.widen(self.norm(x))))


class Classifier(nn.Module):
    """Spectrum [batch, SAMPLE_COUNT / 4] to scores [batch, CLASSES]."""

    def __init__(self, width: int = 128, depth: int = 12) -> None:
        super().__init__()
        self.enter = nn.Linear(SAMPLE_COUNT // 4, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.leave = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.blocks(self.enter(x)))


def model_fn() -> nn.Module:
    return Classifier()


def data_fn() -> DataLoader[tuple[Tensor, Tensor]]:
    return DataLoader(Recordings(4000), batch_size=16, shuffle=True)


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    spectra, labels = batch
    return F.cross_entropy(model(spectra), labels)


def optimizer_fn(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def main(steps: int = 100) -> None:
    """A plain training loop, without autotune."""
    model = model_fn()
    optimizer = optimizer_fn(model)
    for step, batch in zip(range(1, steps + 1), data_fn(), strict=False):
        loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
