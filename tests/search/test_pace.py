"""How long a trial may take, by what is compiled or tuned in its first step and by the budget."""

from __future__ import annotations

import pytest

from autotune.config import Value
from autotune.records import Conditions, Settings
from autotune.search.pace import hurried, pace_for, trial_request
from autotune.space import build_space
from tests.knobs.search_facts import cuda_facts


@pytest.mark.parametrize(
    ("changes", "budget_seconds", "limit_seconds"),
    [
        ({}, 1e4, 15),
        ({"compile_mode": "default"}, 1e4, 300),
        ({"compile_mode": "default"}, 400, 100),
        ({"compile_mode": "default"}, 60, 30),
        ({"cudnn_benchmark": "on"}, 1e4, 60),
        ({"cudnn_benchmark": "on", "compile_mode": "default"}, 1e4, 300),
    ],
)
def test_a_first_step_has_a_limit_of_its_own_and_a_quarter_of_the_budget(
    changes: dict[str, Value], budget_seconds: float, limit_seconds: float
) -> None:
    space = build_space(cuda_facts(convolution_ranks=(4,), step_seconds=0.1), preset="default")
    conditions = Conditions(device="cuda", global_batch_size=None)
    request = trial_request(
        "measure",
        space.baseline.replace(changes),
        confirm=False,
        space=space,
        settings=Settings(budget_seconds=budget_seconds, space="default", conditions=conditions),
        pace=pace_for(budget_seconds),
    )
    assert request.timeouts.compile_seconds == limit_seconds


def test_a_shorter_budget_confirms_in_shorter_blocks_and_a_very_short_one_in_fewer_rounds_too() -> None:
    ample, short, very_short = map(pace_for, (400.0, 399.0, 239.0))
    assert ample.confirm_block_seconds > short.confirm_block_seconds == very_short.confirm_block_seconds
    assert ample.rounds_of_a_plain_gain == short.rounds_of_a_plain_gain > very_short.rounds_of_a_plain_gain
    assert ample.soak_seconds == short.soak_seconds > very_short.soak_seconds


def test_who_hurries_measures_less_and_soaks_no_longer() -> None:
    for whole in map(pace_for, (45.0, 300.0, 600.0)):
        short = hurried(whole)
        assert short.block_seconds < whole.block_seconds
        assert short.maximum_blocks < whole.maximum_blocks
        assert short.confirm_maximum_blocks * short.confirm_block_seconds < (
            whole.confirm_minimum_blocks * whole.confirm_block_seconds
        )
        assert short.minimum_blocks == short.confirm_minimum_blocks == whole.minimum_blocks, "fewer show no spread"
        assert short.soak_seconds < whole.soak_seconds
