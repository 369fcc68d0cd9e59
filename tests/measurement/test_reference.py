"""The user's program, run as often as is asked, from the weights of the first time or from those of a later step."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from autotune.config import TrainingConfig
from autotune.measurement.reference import Reference
from autotune.measurement.runs import Difference, Run
from autotune.measurement.samples import windows_for_both
from autotune.records import Conditions
from autotune.training.training import Training
from autotune.training.windows import Window
from autotune.workload import UserFunctions
from tests.measurement.programs import WIDTH, config, program

CONDITIONS = Conditions(global_batch_size=None, device="cpu")


class Averaging(nn.Module):
    """Its running statistics are other ones before each step, some of them kept beside its state."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = (self.mean + x.detach().mean(0)) / 2
        return self.layers(x)  # type: ignore[no-any-return]


class Counting(Averaging):
    """Its gradient depends on how often it was called, which nothing can restore."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = itertools.count()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + next(self.calls))


def asked(functions: UserFunctions) -> tuple[Reference, Run, list[Window]]:
    reference = Reference(functions, CONDITIONS, None, TrainingConfig({}), ())
    windows = windows_for_both(Training(functions, config(), CONDITIONS), 3).windows
    return reference, reference.run(windows), windows


def of_rounding(reference: Reference, run: Run, windows: list[Window], numbers: list[int]) -> dict[int, Difference]:
    return reference.inexact(windows, run.steps, numbers, rounding="bfloat16", outputs="bfloat16")


@pytest.mark.parametrize(("model", "out_of_turn"), [(Averaging, [2]), (Counting, [0, 1, 2])])
def test_a_step_out_of_its_turn_is_off_as_in_its_turn(model: Any, out_of_turn: list[int]) -> None:
    functions = program(model, optimizer_fn=lambda model: torch.optim.AdamW(model.parameters(), lr=0.1))
    reference, run, windows = asked(functions)
    in_turn = of_rounding(reference, run, windows, [2])
    assert list(in_turn) == [0, 1, 2], "what had to run as well is told too"
    reference.reuse_if_stateless(run, windows)
    found = of_rounding(reference, run, windows, [2])
    assert list(found) == out_of_turn
    assert found[2].gradients.relative_error == pytest.approx(in_turn[2].gradients.relative_error, rel=1e-4)
    assert found[2].buffers == pytest.approx(in_turn[2].buffers, rel=1e-4)
    assert found[2].loss == pytest.approx(in_turn[2].loss, rel=1e-6)
    assert 1e-4 < found[2].gradients.relative_error < 0.1
