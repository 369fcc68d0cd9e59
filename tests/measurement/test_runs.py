from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from autotune.measurement.runs import Step, differences, run_steps
from autotune.training.training import Training
from autotune.training.windows import MicroBatch
from tests.measurement.programs import WIDTH, program, request


def test_a_step_is_let_go_before_the_next_one_runs() -> None:
    made: list[weakref.ref[Step]] = []

    def step() -> Step:
        one = Step({"a": torch.ones(1)}, {}, loss=1.0, skipped=0, drew=frozenset())
        made.append(weakref.ref(one))
        return one

    def steps() -> Iterator[Step]:
        for _ in range(3):
            assert all(earlier() is None for earlier in made)
            yield step()

    assert len(differences([Step({"a": torch.ones(1)}, {}, 1.0, 0, frozenset())] * 3, steps())) == 3
    assert len(made) == 3


class SeesGradients(nn.Linear):
    """Counts how many of its earlier gradients are still held when it runs."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 1)
        self.earlier: list[weakref.ref[torch.Tensor]] = []
        self.held: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.held.append(sum(earlier() is not None for earlier in self.earlier))
        return super().forward(x)


@pytest.mark.parametrize("inexact", [None, lambda tensor: tensor * 1.001], ids=["exact", "inexact"])
def test_gradients_are_let_go_before_the_next_step_runs(inexact: Any) -> None:
    asked = request("parity")
    training = Training(program(SeesGradients), asked.config, asked.conditions)
    model = training.model
    assert isinstance(model, SeesGradients)

    def seen(step: Step) -> None:
        gradient = step.gradients["weight"]
        assert gradient is not None
        model.earlier.append(weakref.ref(gradient))

    window = [MicroBatch(4, [torch.ones(4, WIDTH), torch.ones(4, 1)])]
    assert len(list(map(seen, run_steps(training, [window] * 3, 1, inexact=inexact)))) == 3
    assert model.held == [0, 0, 0]
