"""What cannot be asked for is refused in one sentence, before anything is run."""

from __future__ import annotations

from typing import Any

import pytest

import autotune
from autotune.errors import UserError
from autotune.options import SearchOptions


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"budget_seconds": 0.0}, "budget must be above 0, not 0.0"),
        ({"budget_seconds": float("nan")}, "budget must be above 0, not nan"),
        ({"trials": 0}, "trials must be above 0, not 0"),
        ({"global_batch_size": -4}, "global_batch_size must be above 0, not -4"),
        ({"memory_limit_bytes": 0}, "memory_limit must be above 0, not 0"),
        ({"train_samples": -1}, "train_samples must be above 0, not -1"),
        ({"clip_grad_norm": 0.0}, "clip_grad_norm must be above 0, not 0.0"),
        ({"memory_margin": 5}, "memory_margin is a share of at least 0 and below 1, such as 0.05, not 5"),
        ({"objective": "speed"}, "objective must be throughput or memory, not 'speed'"),
        ({"device": "gpu"}, "device must be cuda or cpu, not 'gpu'"),
        (
            {"free_batch": True, "global_batch_size": 8},
            "global_batch_size holds a batch, and free_batch holds none; give one of them",
        ),
    ],
)
def test_what_no_option_takes_is_refused(asked: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError) as caught:
        SearchOptions(**asked)
    assert str(caught.value) == told


def test_fit_refuses_it_before_it_looks_at_the_functions() -> None:
    with pytest.raises(ValueError, match="^device must be cuda or cpu, not 'gpu'$"):
        autotune.fit(dict, dict, device="gpu")
