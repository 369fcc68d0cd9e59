"""For a program that fits at no batch: the lightest settings that save memory with which it does."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from autotune.config import TrainingConfig, Value, settings_text
from autotune.errors import UserError
from autotune.knobs.registry import KNOBS
from autotune.records import OUT_OF_MEMORY, FailureKind, TrialAnswer
from autotune.search.session import Session
from autotune.space import SearchSpace

Settings = Mapping[str, Value]


def lightest_that_fits(session: Session, why: str, expected: Settings) -> TrainingConfig:
    """The user's program at the smallest micro-batch, with as few and as harmless changes as make it fit there.

    One knob after the other is set to what saves most of it, then two of them together, then more; what leaves the numbers
    alone comes before what rounds. Of those that fit together, lighter values are tried then. `expected` comes first,
    where that is known from an earlier search. Raises `UserError` with all that was tried where nothing fits; `why` says
    what the program itself failed of.
    """
    smallest = smallest_batch(session.space)
    session.obstacles.learn_misfit(smallest)
    failures: list[tuple[Settings, FailureKind | None]] = []
    for settings in [*([expected] if expected else []), *_by_weight(session.space)]:
        answer = _attempt(session, smallest, settings)
        if answer is not None and _fits(answer):
            return smallest.replace(_lightened(session, smallest, settings))
        if answer is not None:
            failures.append((settings, answer.failure.kind if answer.failure is not None else None))
    raise UserError(
        f"your program fits at no batch, not even at a micro-batch of {session.space.micro_batch(smallest)}, "
        f"{_tried_text(failures)}: {why}. Use a smaller model, or a larger card"
    )


def _tried_text(failures: Sequence[tuple[Settings, FailureKind | None]]) -> str:
    """What was tried to make it fit, and what failed otherwise than for its memory."""
    if not failures:
        return "and no setting that saves memory may be moved here"
    others = [
        f"; {settings_text(settings)} ended as {kind}"
        for settings, kind in failures
        if kind is not None and kind not in OUT_OF_MEMORY
    ]
    settings = settings_text(failures[-1][0])
    ways = (
        f"with {settings}" if len(failures) == 1 else f"in any of {len(failures)} ways to save memory, up to {settings}"
    )
    return f"nor {ways}{''.join(others)}"


def smallest_batch(space: SearchSpace) -> TrainingConfig:
    """The user's program at a micro-batch of 1, or at its own where that cannot be changed."""
    one = space.baseline.replace({space.batch_name: 1})
    return one if space.conflict(one) is None else space.baseline


def _by_weight(space: SearchSpace) -> Iterator[Settings]:
    """Every set of knobs that save memory, each at what saves most, the lightest set first."""
    rounding = {knob.name for knob in KNOBS if knob.effect != "exact"}
    values = {name: found[-1] for name, found in saving(space).items()}
    for count in range(1, len(values) + 1):
        sets = [{name: values[name] for name in names} for names in itertools.combinations(values, count)]
        yield from sorted(sets, key=lambda one: (len(rounding & one.keys()), space.rank(space.baseline.replace(one))))


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
    session.watcher.probe("memory", f"batch {session.space.micro_batch(config)}, {settings_text(settings)}: {verdict}")
    return answer


def _fits(answer: TrialAnswer) -> bool:
    return answer.memory is not None and answer.memory.fits
