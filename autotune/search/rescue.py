"""For a program that fits at no batch: the lightest settings that save memory with which it does."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from autotune.config import TrainingConfig, Value, settings_text
from autotune.errors import UserError
from autotune.knobs.registry import KNOBS
from autotune.quantities import format_share
from autotune.records import OUT_OF_MEMORY, TrialAnswer
from autotune.search.session import Session
from autotune.space import SearchSpace

Settings = Mapping[str, Value]
Attempt = tuple[Settings, TrialAnswer]
"""Settings, and what a memory probe of the smallest micro-batch with them said."""


class Lightest(NamedTuple):
    """The user's program at the smallest micro-batch, made to fit."""

    config: TrainingConfig
    short_of_margin: str = ""
    """Where nothing leaves the margin: what is to be told of that, one sentence."""


def lightest_that_fits(session: Session, why: str, expected: Settings) -> Lightest:
    """The user's program at the smallest micro-batch, with as few and as harmless changes as make it fit there.

    One knob after the other is set to what saves most of it, then two of them together, then more; what leaves the numbers
    alone comes before what rounds. Of those that fit together, lighter values are tried then. `expected` comes first,
    where that is known from an earlier search.

    Where nothing leaves the margin, what ran at all has to do, and the margin is waived for the whole session. Raises
    `UserError` with all that was tried where nothing ran; `why` says what the program itself failed of.
    """
    smallest = smallest_batch(session.space)
    session.obstacles.learn_misfit(smallest)
    tried: list[Attempt] = []
    for settings in [*([expected] if expected else []), *_by_weight(session.space)]:
        answer = _attempt(session, smallest, settings)
        if answer is not None and _fits(answer):
            return Lightest(smallest.replace(_lightened(session, smallest, settings)))
        if answer is not None:
            tried.append((settings, answer))
    nearest = _nearest_to_the_margin(session, smallest, tried)
    if nearest is not None:
        return nearest
    raise UserError(
        f"your program fits at no batch, not even at a micro-batch of {session.space.micro_batch(smallest)}, "
        f"{_tried_text(tried)}: {why}. Use a smaller model, or a larger card"
    )


def _nearest_to_the_margin(session: Session, smallest: TrainingConfig, tried: Sequence[Attempt]) -> Lightest | None:
    """Of what ran without leaving the margin: the user's own program if it did; else what took least, and what rounds only
    where nothing else ran. None where nothing did."""
    own = _attempt(session, smallest, {}) if session.facts.workload.step_fits else None
    ran = [
        (settings, answer.memory.memory.reserved_bytes or 0)
        for settings, answer in [*([({}, own)] if own is not None else []), *tried]
        if answer.memory is not None and session.runs(answer.memory.memory)
    ]
    if not ran:
        return None
    rounding = _rounding()
    settings, reserved_bytes = min(ran, key=lambda one: (bool(one[0]), len(rounding & one[0].keys()), one[1]))
    short_of_margin = _short_of_margin(session, settings, reserved_bytes)
    session.waive_margin()
    if settings:
        session.obstacles.learn_misfit(smallest)
    return Lightest(smallest.replace(settings), short_of_margin)


def _short_of_margin(session: Session, settings: Settings, reserved_bytes: int) -> str:
    limit = session.memory_limit_bytes()
    took = f"took {_mebibytes(reserved_bytes)}" + (f" of {_mebibytes(limit)}" if limit is not None else "")
    return (
        "nothing that makes your program fit leaves "
        f"{format_share(session.settings.conditions.memory_margin)} of the memory free "
        f"({settings_text(settings) or 'your own settings'} {took}): all that runs counts as fitting here, and a longer run "
        "may run out of memory"
    )


def _mebibytes(size_bytes: int) -> str:
    """Exact enough to tell two sizes apart that are within a margin of each other."""
    return f"{size_bytes / 2**20:,.0f} MiB"


def _tried_text(tried: Sequence[Attempt]) -> str:
    """What was tried to make it fit, and what failed otherwise than for its memory."""
    if not tried:
        return "and no setting that saves memory may be moved here"
    others = [
        f"; {settings_text(settings)} ended as {answer.failure.kind}"
        for settings, answer in tried
        if answer.failure is not None and answer.failure.kind not in OUT_OF_MEMORY
    ]
    last = settings_text(tried[-1][0])
    ways = f"with {last}" if len(tried) == 1 else f"in any of {len(tried)} ways to save memory, up to {last}"
    return f"nor {ways}{''.join(others)}"


def smallest_batch(space: SearchSpace) -> TrainingConfig:
    """The user's program at a micro-batch of 1, or at its own where that cannot be changed."""
    one = space.baseline.replace({space.batch_name: 1})
    return one if space.conflict(one) is None else space.baseline


def _by_weight(space: SearchSpace) -> list[Settings]:
    """Every set of knobs that save memory, each at what saves most: the fewest first, of as many those that round last.

    What is learnt of them on the way counts: that a program does not fit in bf16 either without recomputation is why the
    search may recommend the two together.
    """
    rounding = _rounding()
    values = {name: found[-1] for name, found in saving(space).items()}
    sets = [
        {name: values[name] for name in names}
        for count in range(1, len(values) + 1)
        for names in itertools.combinations(values, count)
    ]

    def weight(one: Settings) -> tuple[int, int, float]:
        return len(one), len(rounding & one.keys()), space.rank(space.baseline.replace(one))

    return sorted(sets, key=weight)


def _rounding() -> frozenset[str]:
    """The knobs that do not leave the numbers alone."""
    return frozenset(knob.name for knob in KNOBS if knob.effect != "exact")


def saving(space: SearchSpace) -> dict[str, tuple[Value, ...]]:
    """What each knob of the space has to save memory, as far as the space holds it."""
    offered = {
        knob.name: tuple(value for value in knob.saving(space.facts) if value in space.choices[knob.name])
        for knob in KNOBS
    }
    return {name: values for name, values in offered.items() if values}


def _lightened(session: Session, smallest: TrainingConfig, settings: Settings) -> Settings:
    """The same with lighter values of its knobs, where it fits with them too."""
    for name, values in saving(session.space).items():
        for value in values[:-1] if settings.get(name) == values[-1] else ():
            lighter = {**settings, name: value}
            answer = _attempt(session, smallest, lighter)
            if answer is not None and _fits(answer):
                settings = lighter
                break
    return settings


def _attempt(session: Session, smallest: TrainingConfig, settings: Settings) -> TrialAnswer | None:
    """A memory probe; None where the settings conflict."""
    config = smallest.replace(settings)
    if session.space.conflict(config) is not None:
        return None
    answer = session.probe("memory", config)
    if answer.failure is not None:
        verdict = f"{answer.failure.kind}: {answer.failure.message}"
    else:
        verdict = "fits" if _fits(answer) else "ran, but left no margin"
    beside = f", {settings_text(settings)}" if settings else ""
    session.watcher.probe("memory", f"batch {session.space.micro_batch(config)}{beside}: {verdict}")
    return answer


def _fits(answer: TrialAnswer) -> bool:
    return answer.memory is not None and answer.memory.fits
