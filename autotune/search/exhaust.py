"""Measures every point of the space, one after the other: the truth that searches are held against."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from autotune.config import TrainingConfig
from autotune.knobs.base import Knob
from autotune.knobs.registry import KNOBS
from autotune.search.session import Session
from autotune.space import SearchSpace


def exhaust(session: Session, points: Sequence[TrainingConfig] | None = None) -> None:
    """Measures what was not measured yet and does not conflict, until the budget's reserve is reached; the same command
    goes on from there.

    `points`: these alone, in their order. Nothing is left out because it is expected to fail or to be slow, and nothing
    is stopped early: out of memory is a point of the table like any other.
    """
    if points is None:
        points = [config for config in every_point(session.space) if session.space.conflict(config) is None]
    session.watcher.stage("explore", f"all {len(points)} points of the space")
    left = len(points)
    for config in points:
        if session.measured(config) is None:
            if not session.budget.allows(session.expected_seconds(config)):
                continue
            session.measure_again(config, "explore")
        left -= 1
    if left:
        unfinished = f"{left} of {len(points)} points are not measured yet; the same command goes on with them"
        session.skipped["points"] = unfinished


def every_point(space: SearchSpace) -> Iterator[TrainingConfig]:
    """The space's points. Those that share what is dear, a compilation above all, come one after the other."""
    names = dear_first(space.choices)
    for values in itertools.product(*(space.choices[name] for name in names)):
        yield TrainingConfig(dict(zip(names, values, strict=True)))


def dear_first(names: Iterable[str]) -> list[str]:
    """The knobs in the order in which points go through them, the one that moves last first.

    How batches are loaded moves most often, then the optimizer's update: neither is compiled.
    """
    wanted = set(names)

    def dearness(knob: Knob) -> tuple[bool, bool]:
        return knob.stage == "loader", knob.in_update_only

    return [knob.name for knob in sorted(KNOBS, key=dearness) if knob.name in wanted]
