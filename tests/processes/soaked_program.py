"""A user's program with one trouble a seed, each of which shows only when it runs on; 2 ms a step beside that."""

import mmap
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Steady(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        time.sleep(0.002)
        return self.net(x)


class Leaks(Steady):
    def __init__(self):
        super().__init__()
        self.kept = []

    def forward(self, x):
        self.kept.append(mmap.mmap(-1, 2**21))
        self.kept[-1].write(b"x" * 2**21)
        return super().forward(x)


class Slows(Steady):
    def forward(self, x):
        time.sleep(0.0005 * self.calls)
        return super().forward(x)


class LosesItself(Steady):
    def forward(self, x):
        scores = super().forward(x)
        return scores * float("nan") if self.calls > 100 else scores


class RefusesShortBatches(Steady):
    def forward(self, x):
        return super().forward(x).view(8, 1)


class RefusesEvaluation(Steady):
    def forward(self, x):
        scores = super().forward(x)
        return scores if self.training else [scores]


class RefusesItsState(Steady):
    def load_state_dict(self, state, *arguments, **options):
        raise RuntimeError("Missing key(s) in state_dict")


TROUBLES = (Steady, Leaks, Slows, LosesItself, RefusesShortBatches, RefusesEvaluation, RefusesItsState)


def model_fn():
    return TROUBLES[torch.initial_seed()]()


def data_fn():
    x = torch.randn(8 * 5_000 + 5, 4)
    return DataLoader(TensorDataset(x, x[:, :1]), batch_size=8)


def loss_fn(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


def optimizer_fn(model):
    return torch.optim.SGD(model.parameters(), lr=0.01)
