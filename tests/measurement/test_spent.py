"""Where a trial's seconds went is told, the user's own functions apart from the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autotune.measurement.measure import measure
from autotune.measurement.spent import process_age_seconds
from tests.measurement.programs import no_phase, pause, perceptron, program, regression_data, request


def test_what_the_users_functions_take_is_told_apart() -> None:
    def slow(seconds: float, function: Any) -> Any:
        def called(*arguments: Any) -> Any:
            pause(seconds)
            return function(*arguments)

        return called

    functions = program(
        slow(0.03, perceptron),
        slow(0.05, regression_data),
        optimizer_fn=slow(0.02, lambda model: torch.optim.SGD(model.parameters(), lr=0.1)),
    )
    result = measure(functions, request("measure", measure_resident=True), no_phase)
    spent = result.spent
    assert spent is not None
    assert spent.model_seconds >= 0.03
    assert spent.data_seconds >= 0.05
    assert spent.optimizer_seconds >= 0.02
    assert result.build_seconds >= spent.model_seconds + spent.data_seconds + spent.optimizer_seconds
    assert spent.end_to_end_seconds >= sum(result.blocks.seconds)
    assert result.resident_blocks is not None
    assert spent.resident_seconds >= sum(result.resident_blocks.seconds)
    assert spent.warm_up_seconds > 0 and spent.shares_seconds > 0


def test_the_age_of_a_process_that_is_no_trial_is_not_invented(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOTUNE_STARTED_AT", raising=False)
    assert process_age_seconds() == 0.0
