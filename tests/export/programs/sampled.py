"""A loader whose own batch sampler decides what goes together."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class ByLength:
    def __iter__(self):
        return iter([[0, 1, 2], [5, 4, 3], [6, 7]])

    def __len__(self):
        return 3


def model_fn():
    return nn.Linear(4, 4)


def data_fn():
    data = TensorDataset(torch.randn(8, 4, generator=torch.Generator().manual_seed(4)))
    return DataLoader(data, batch_sampler=ByLength())


def loss_fn(model, batch):
    return (model(batch[0]) - batch[0]).square().mean()
