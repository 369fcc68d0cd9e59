"""A small network over spectrograms that are made from sound when they are asked for: the CPU holds the training back.

autotune search examples/slow_loader.py --space loader    finds the workers that keep up
python examples/slow_loader.py                            trains a few steps as it stands
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

CLASSES = 35
SAMPLE_RATE = 16_000
WINDOW = 512
HOP = 128
BANDS = 64


class Clips(Dataset[tuple[Tensor, int]]):
    """One second of sound each: shifted, mixed with noise, then turned into the logarithm of a spectrogram."""

    def __init__(self, count: int, kept: int = 256) -> None:
        generator = torch.Generator().manual_seed(0)
        self.clips = torch.randn(kept, SAMPLE_RATE, generator=generator)
        self.window = torch.hann_window(WINDOW)
        self.filters = torch.rand(BANDS, WINDOW // 2 + 1, generator=generator) / WINDOW
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not 0 <= index < self.count:
            raise IndexError(index)
        generator = torch.Generator().manual_seed(index)
        sound = self.clips[index % len(self.clips)].roll(int(torch.randint(SAMPLE_RATE, (), generator=generator)))
        sound = sound + 0.1 * torch.randn(SAMPLE_RATE, generator=generator)
        spectrum = torch.stft(sound, WINDOW, HOP, window=self.window, return_complex=True).abs().square()
        return torch.log1p(self.filters @ spectrum), index % CLASSES


def model_fn() -> nn.Module:
    """Spectrograms [batch, BANDS, frames] to scores [batch, CLASSES]."""
    return nn.Sequential(
        nn.Conv1d(BANDS, 128, 5, padding=2),
        nn.ReLU(),
        nn.Conv1d(128, 128, 5, padding=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(128, CLASSES),
    )


def data_fn() -> DataLoader[tuple[Tensor, int]]:
    return DataLoader(Clips(20_000), batch_size=64, shuffle=True)


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    spectrograms, labels = batch
    return F.cross_entropy(model(spectrograms), labels)


def optimizer_fn(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def main(steps: int = 10) -> None:
    """A plain training loop, without autotune."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = model_fn().to(device)
    optimizer = optimizer_fn(model)
    for step, (spectrograms, labels) in zip(range(1, steps + 1), data_fn(), strict=False):
        loss = loss_fn(model, (spectrograms.to(device), labels.to(device)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
