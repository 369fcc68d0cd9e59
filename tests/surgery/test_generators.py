"""All generators are seeded, and a draw from any of them is seen."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from autotune.surgery.generators import random_state, seed_everything


def test_seeding_covers_python_numpy_and_torch() -> None:
    import numpy

    def drawn() -> tuple[float, float, float]:
        return random.random(), float(numpy.random.rand()), float(torch.rand(1))

    seed_everything(7)
    first = drawn()
    seed_everything(7)
    assert drawn() == first
    seed_everything(8)
    assert all(a != b for a, b in zip(drawn(), first, strict=True))


def draw_python() -> None:
    random.random()


def draw_torch() -> None:
    torch.rand(1)


def draw_numpy() -> None:
    import numpy

    numpy.random.rand()


@pytest.mark.parametrize(("draw", "library"), [(draw_python, "python"), (draw_torch, "torch"), (draw_numpy, "numpy")])
def test_random_state_tells_which_library_was_drawn_from(draw: Callable[[], None], library: str) -> None:
    draw()
    before = random_state()
    assert random_state() == before
    draw()
    after = random_state()
    assert {name for name in after if after[name] != before[name]} == {library}
