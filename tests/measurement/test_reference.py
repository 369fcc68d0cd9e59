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


class Partial(Averaging):
    """Its state holds nothing of what is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.tanh(self.frozen(x)))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        held = super().state_dict(*args, **kwargs)
        return {name: value for name, value in held.items() if not name.startswith("frozen")}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state_dict, strict=False, assign=assign)


class Remembering(Averaging):
    """Its gradient depends on how often it was called, which lies in an extra state that it hands out itself."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = [0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls[0] += 1
        return super().forward(x) * self.calls[0]

    def get_extra_state(self) -> list[int]:
        return self.calls

    def set_extra_state(self, state: list[int]) -> None:
        self.calls = state


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


@pytest.mark.parametrize("model", [Averaging, Partial, Remembering])
def test_a_step_starts_from_the_same_whatever_ran_before(model: Any) -> None:
    functions = program(model, optimizer_fn=lambda model: torch.optim.AdamW(model.parameters(), lr=0.1))
    reference, run, windows = asked(functions)
    at_first = of_rounding(reference, run, windows, [0])
    reference.reuse_if_stateless(run, windows)
    assert list(of_rounding(reference, run, windows, [2])) == [2], "it is given the state before the step"
    found = of_rounding(reference, run, windows, [0])
    assert found[0].gradients.relative_error == pytest.approx(at_first[0].gradients.relative_error, rel=1e-4)
    assert found[0].buffers == pytest.approx(at_first[0].buffers, rel=1e-4)
    exact = reference.inexact(windows, run.steps, [0])
    assert exact[0].gradients.relative_error < 1e-6, "what was rounded is as it was"
