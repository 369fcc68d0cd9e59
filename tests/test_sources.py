"""A change of a user's function is noticed wherever it stands; the same function is the same."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.sources import sources

CELLS = """
import functools
WIDTH = 3
SIZES = [1, {"deep": 2}]
class Part:
    scale = 1.5
    def forward(self, x):
        return x * self.scale
class Model(Part):
    def forward(self, x):
        return max(super().forward(x), 0)
def helper(x):
    return [Model().forward(y + WIDTH) for y in x if y in {1, 2, 3}]
def model_fn(depth=2):
    return helper(SIZES)
"""


def told(text: str, name: str = "model_fn") -> str:
    """Of a function that was defined in no file, as a notebook does."""
    namespace: dict[str, Any] = {"__name__": "notebook"}
    exec(text, namespace)
    return "\n".join(sources(namespace[name]))


def test_what_holds_itself_is_told_to_an_end() -> None:
    rooted = "TABLE = {'size': 3}; TABLE['all'] = [TABLE]\ndef model_fn():\n    return TABLE"
    assert told(rooted) == told(rooted) != told(rooted.replace("'size': 3", "'size': 4"))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("return helper(SIZES)", "return helper(SIZES[:1])"),
        ("depth=2", "depth=3"),
        ("WIDTH = 3", "WIDTH = 4"),
        ('"deep": 2', '"deep": 3'),
        ("y + WIDTH", "y - WIDTH"),
        ("{1, 2, 3}", "{1, 2, 4}"),
        ("forward(x), 0)", "forward(x), 1)"),
        ("scale = 1.5", "scale = 2.5"),
        ("x * self.scale", "x / self.scale"),
    ],
)
def test_a_change_anywhere_in_a_notebook_is_noticed(before: str, after: str) -> None:
    changed = CELLS.replace(before, after)
    assert changed != CELLS
    assert told(changed) != told(CELLS)


def test_other_cells_and_comments_change_nothing() -> None:
    assert told(CELLS) == told(f"# of the model\nprint\n{CELLS}\nOTHER = 5\ndef another(): ...\n")


def test_another_interpreter_says_the_same() -> None:
    code = "from tests.test_sources import told, CELLS; print(hash('x')); print(told(CELLS).encode().hex())"
    said = [
        subprocess.run(
            [sys.executable, "-c", code], cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout.split()
        for seed in ("1", "2")
    ]  # fmt: skip
    assert said[0][0] != said[1][0]
    assert said[0][1] == said[1][1] == told(CELLS).encode().hex()


def closure(width: int) -> Callable[[], int]:
    return lambda: width


class Maker:
    def __init__(self, width: int) -> None:
        self.width = width
        self.itself = self

    def __call__(self) -> int:
        return self.width

    def make(self) -> int:
        return self.width


@pytest.mark.parametrize(
    "make", [closure, lambda width: functools.partial(closure, width), Maker, lambda width: Maker(width).make]
)
def test_what_a_function_holds_tells_it_from_others(make: Callable[[int], Any]) -> None:
    assert list(sources(make(1))) == list(sources(make(1)))
    assert list(sources(make(1))) != list(sources(make(2)))
    assert Path(__file__).read_text() in list(sources(make(1)))


def test_what_has_no_source_is_told_all_the_same() -> None:
    assert list(sources(max))
