"""Sequences of unequal length with a loss that is a sum over tokens, told with its weight."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Sentences(Dataset):
    def __len__(self):
        return 14

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randint(1, 11, (2 + index % 5,), generator=generator)


def collate(rows):
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


def model_fn():
    return nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11))


def data_fn():
    return DataLoader(Sentences(), batch_size=4, collate_fn=collate, shuffle=True)


def loss_fn(model, batch):
    targets = batch.roll(1, dims=1)
    loss_sum = F.cross_entropy(model(batch).flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=0)
    return loss_sum, (targets != 0).sum()
