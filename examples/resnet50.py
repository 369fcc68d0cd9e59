"""ResNet-50 written out, on images of 224 x 224 that lie in memory: what convolutions can gain.

autotune search examples/resnet50.py    finds how to train it fastest on this machine (meant for a GPU)
python examples/resnet50.py             trains a few steps as it stands
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

CLASSES = 1000
IMAGE_SIZE = 224


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions, added to what goes in; the 3 x 3 one strides, as in version 1.5."""

    EXPANSION = 4

    def __init__(self, channels_in: int, width: int, stride: int) -> None:
        super().__init__()
        channels_out = self.EXPANSION * width
        self.reduce = nn.Conv2d(channels_in, width, 1, bias=False)
        self.reduce_norm = nn.BatchNorm2d(width)
        self.convolve = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.convolve_norm = nn.BatchNorm2d(width)
        self.expand = nn.Conv2d(width, channels_out, 1, bias=False)
        self.expand_norm = nn.BatchNorm2d(channels_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride=stride, bias=False), nn.BatchNorm2d(channels_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.reduce_norm(self.reduce(x)))
        inner = F.relu(self.convolve_norm(self.convolve(inner)))
        return F.relu(self.expand_norm(self.expand(inner)) + self.shortcut(x))


class ResNet(nn.Module):
    """Images [batch, 3, height, width] to scores [batch, CLASSES]; `depths` blocks in each of four stages."""

    def __init__(self, depths: tuple[int, int, int, int] = (3, 4, 6, 3)) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.enter_norm = nn.BatchNorm2d(64)
        stages, channels = [], 64
        for number, depth in enumerate(depths):
            width = 64 * 2**number
            blocks = []
            for position in range(depth):
                blocks.append(Bottleneck(channels, width, stride=2 if number and not position else 1))
                channels = Bottleneck.EXPANSION * width
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.leave = nn.Linear(channels, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.enter_norm(self.enter(x))), 3, stride=2, padding=1)
        return self.leave(self.stages(x).mean((2, 3)))


class Images(Dataset[tuple[Tensor, int]]):
    """Random images, as bytes, as a decoded data set lies in memory; scaled when they are asked for."""

    def __init__(self, count: int, kept: int = 512) -> None:
        generator = torch.Generator().manual_seed(0)
        self.pixels = torch.randint(256, (kept, 3, IMAGE_SIZE, IMAGE_SIZE), generator=generator, dtype=torch.uint8)
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return self.pixels[index % len(self.pixels)].float().div_(127.5).sub_(1), index % CLASSES


def model_fn() -> nn.Module:
    return ResNet()


def data_fn() -> DataLoader[tuple[Tensor, int]]:
    return DataLoader(Images(50_000), batch_size=64, shuffle=True)


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def optimizer_fn(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)


def main(steps: int = 3) -> None:
    """A plain training loop, without autotune."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = model_fn().to(device)
    optimizer = optimizer_fn(model)
    loader = DataLoader(Images(64), batch_size=8, shuffle=True)
    for step, (images, labels) in zip(range(1, steps + 1), loader, strict=False):
        loss = loss_fn(model, (images.to(device), labels.to(device)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
