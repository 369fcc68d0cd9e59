"""A DataLoader with everything of its own; dropout, batch norm, blocks, a scheduler."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 8))

    def forward(self, x):
        return x + self.inner(x)


def model_fn():
    return nn.Sequential(nn.Linear(5, 8), Block(), Block(), Block(), nn.Linear(8, 3))


def collate(samples):
    inputs, labels = zip(*samples, strict=True)
    return {"inputs": torch.stack(inputs) * 2, "labels": torch.stack(labels)}


def data_fn():
    generator = torch.Generator().manual_seed(1)
    dataset = TensorDataset(torch.randn(22, 5, generator=generator), torch.randint(3, (22,), generator=generator))
    sampler = WeightedRandomSampler(torch.linspace(0.1, 1, 22).tolist(), 22, generator=torch.Generator().manual_seed(2))
    return DataLoader(dataset, batch_size=8, sampler=sampler, collate_fn=collate)


def loss_fn(model, batch):
    return F.cross_entropy(model(batch["inputs"]), batch["labels"])


def optimizer_fn(model):
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def scheduler_fn(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
