"""A memory probe steps on the largest batch that a pass holds, not on the first ones."""

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from autotune.config import TrainingConfig
from autotune.measurement.probes import probe_memory
from autotune.records import Conditions, TrialRequest
from autotune.workload import UserFunctions


class Texts(Dataset):
    """All are short, but for one that comes late."""

    def __len__(self):
        return 129

    def __getitem__(self, index):
        return torch.ones(64 if index == 100 else 4)


class Reader(nn.Module):
    def __init__(self, seen):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.seen = seen

    def forward(self, rows):
        self.seen.append(rows.shape[1])
        return (rows * self.weight).mean()


def test_the_longest_batch_of_a_pass_is_stepped_on():
    seen = []
    functions = UserFunctions(
        model_fn=lambda: Reader(seen),
        data_fn=lambda: DataLoader(
            Texts(), batch_size=2, collate_fn=lambda rows: (pad_sequence(rows, batch_first=True),)
        ),
    )
    conditions = Conditions(device="cpu", global_batch_size=None)
    request = TrialRequest(kind="memory", config=TrainingConfig({}), conditions=conditions)
    probe = probe_memory(functions, request, lambda phase: None)
    assert 64 in seen
    assert len(seen) < 10, "the others are only looked at"
    assert probe.fits
