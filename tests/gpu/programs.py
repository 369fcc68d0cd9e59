"""Small programs for the GPU, as a user would write them; each trial process imports this file."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

KEPT_BYTES = 2**24
"""What each block keeps for the backward pass, for every sample."""


class Keep(torch.autograd.Function):
    """Passes on what it gets and keeps exactly KEPT_BYTES a sample."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(torch.ones(len(x), KEPT_BYTES, dtype=torch.uint8, device=x.device))
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        (kept,) = ctx.saved_tensors
        return gradient * kept[:, :1]


class KeepingBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    @torch.compiler.disable
    def forward(self, x):
        return x + Keep.apply(torch.tanh(self.linear(x)))


def rows(count, width):
    x = torch.randn(count, width, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x[:, :1])


def keeping_model():
    return nn.Sequential(nn.Sequential(*[KeepingBlock() for _ in range(4)]), nn.Linear(32, 1))


def keeping_data():
    return DataLoader(rows(4096, 32), batch_size=4)


class WideBlock(nn.Module):
    """16 MiB of parameters, and two times KEPT_BYTES for every sample."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2048, 2048, bias=False)

    @torch.compiler.disable
    def forward(self, x):
        return x + Keep.apply(Keep.apply(torch.tanh(self.linear(x))))


def wide_model():
    return nn.Sequential(nn.Sequential(*[WideBlock() for _ in range(16)]), nn.Linear(2048, 1))


def wide_data():
    return DataLoader(rows(512, 2048), batch_size=8)


class Network(nn.Module):
    """Convolutions with BatchNorm and a residual, small enough for a second a trial."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Conv2d(3, 32, 3, padding=1)
        self.blocks = nn.ModuleList(Residual(32) for _ in range(4))
        self.leave = nn.Linear(32, 10)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x.mean((2, 3)))


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.convolution = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x):
        return x + torch.relu(self.norm(self.convolution(x)))


def network_model():
    return Network()


def network_data():
    x = torch.randn(2048, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, torch.arange(2048) % 10), batch_size=64)


def classification_loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]).float(), batch[1])


def perceptron_model():
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))


def perceptron_data():
    return DataLoader(rows(16384, 32), batch_size=64)


def regression_loss(model, batch):
    return nn.functional.mse_loss(model(batch[0]).float(), batch[1])


def out_of_range_loss(model, batch):
    """A label that the kernel asserts on, once a batch is large."""
    labels = torch.zeros(len(batch[0]), dtype=torch.long, device=batch[0].device)
    if len(labels) > 64:
        labels[-1] = 7
    return nn.functional.cross_entropy(model(batch[0]).repeat(1, 3), labels)


def dying_loss(model, batch):
    """Killed in the middle of a step, with memory taken."""
    torch.ones(2**30, dtype=torch.uint8, device=batch[0].device)
    os.kill(os.getpid(), 9)
    return regression_loss(model, batch)


def endless_loss(model, batch):
    """Never ends once a batch is large: with memory taken, and work queued on the device."""
    if len(batch[0]) > 64:
        taken = torch.ones(2**14, 2**14, device=batch[0].device)
        while True:
            taken = (taken @ taken).tanh()
    return regression_loss(model, batch)


class GraphedInPieces(nn.Module):
    """Replays a CUDA graph of its own for batches of 16: every replay writes the gradients into the same memory."""

    def __init__(self):
        super().__init__()
        self.net = perceptron_model()
        self.graphed = False

    def forward(self, x):
        if len(x) != 16:
            return nn.Sequential.forward(self.net, x)
        if not self.graphed:
            torch.cuda.make_graphed_callables(self.net, (torch.randn_like(x),))
            self.graphed = True
        return self.net(x)


def graphed_model():
    return GraphedInPieces()
