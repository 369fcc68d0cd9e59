"""ResNets as torchvision has them (7 x 7 first, then a pooling, at every image size), in plain PyTorch."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class Basic(nn.Module):
    """Two 3 x 3 convolutions, added to what goes in."""

    EXPANSION = 1

    def __init__(self, channels_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels_in, width, 3, stride=stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(width)
        self.shortcut = shortcut(channels_in, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(inner)) + self.shortcut(x))


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 (which strides) and 1 x 1 convolutions, added to what goes in."""

    EXPANSION = 4

    def __init__(self, channels_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(channels_in, width, 1, bias=False)
        self.reduce_norm = nn.BatchNorm2d(width)
        self.convolve = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.convolve_norm = nn.BatchNorm2d(width)
        self.expand = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.expand_norm = nn.BatchNorm2d(4 * width)
        self.shortcut = shortcut(channels_in, 4 * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.reduce_norm(self.reduce(x)))
        inner = F.relu(self.convolve_norm(self.convolve(inner)))
        return F.relu(self.expand_norm(self.expand(inner)) + self.shortcut(x))


def shortcut(channels_in: int, channels_out: int, stride: int) -> nn.Module:
    """Past a block: nothing, or a 1 x 1 convolution where the shape changes."""
    if stride == 1 and channels_in == channels_out:
        return nn.Identity()
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 1, stride=stride, bias=False), nn.BatchNorm2d(channels_out)
    )


class ResNet(nn.Module):
    """Images [batch, 3, height, width] to scores [batch, classes]; `depths` blocks in each stage, `width` channels first."""

    def __init__(
        self, block: type[Basic] | type[Bottleneck], depths: tuple[int, ...], classes: int, width: int = 64
    ) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.enter_norm = nn.BatchNorm2d(width)
        blocks: list[nn.Module] = []
        channels = width
        for stage, depth in enumerate(depths):
            for position in range(depth):
                blocks.append(block(channels, width * 2**stage, stride=2 if stage and not position else 1))
                channels = block.EXPANSION * width * 2**stage
        self.blocks = nn.Sequential(*blocks)
        self.leave = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.enter_norm(self.enter(x))), 3, stride=2, padding=1)
        return self.leave(self.blocks(x).mean((2, 3)))
