from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch

from autotune.measurement.runs import Step, differences


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
