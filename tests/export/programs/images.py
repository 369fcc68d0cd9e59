"""Convolutions over images."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def model_fn():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
    )


def data_fn():
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(10, 3, 8, 8, generator=generator)
    return DataLoader(TensorDataset(images, images.mean((1, 2, 3)).gt(0).long()), batch_size=4)


def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
