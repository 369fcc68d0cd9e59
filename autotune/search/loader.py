"""The loader: how many workers the step needs, predicted from the loader alone and then run together."""

from __future__ import annotations

import math

from autotune.config import Value
from autotune.knobs.base import Knob
from autotune.knobs.registry import KNOBS
from autotune.records import Stage, Trial
from autotune.search.session import WORTHWHILE_GAIN, Session

IDLE_SHARE = 0.97
"""End to end at this share of the step alone, the loader holds nothing back, and no worker can help."""
HEADROOM = 1.1
"""Workers are predicted for so much more than the step takes: loading and training share the machine."""


def search_loader(session: Session, incumbent: Trial, stage: Stage = "loader") -> Trial:
    """Moves the loader's knobs where the loader holds the step back. Returns the trial that leads in the end."""
    assert incumbent.measurement is not None
    end_to_end = incumbent.measurement.samples_per_second
    alone = incumbent.measurement.resident_samples_per_second or end_to_end
    knobs = [knob for knob in KNOBS if knob.stage == "loader" and knob.name in session.space.varied]
    if not knobs:
        return incumbent
    if end_to_end >= IDLE_SHARE * alone:
        session.skipped.append(
            f"{', '.join(knob.name for knob in knobs)}: not moved, since the step reaches "
            f"{min(1.0, end_to_end / alone) * 100:.0f} % of its pace with the loader in it"
        )
        return incumbent
    session.watcher.stage(stage, "workers for the pace of the step")
    for knob in knobs:
        if _counts(knob, session):
            incumbent = _enough_of(session, knob, incumbent, alone, stage)
        else:
            incumbent = _each_value(session, knob, incumbent, stage)
    return incumbent


def _counts(knob: Knob, session: Session) -> bool:
    """Whether the knob's values are numbers of something."""
    return all(type(value) is int for value in session.space.choices[knob.name])


def _enough_of(session: Session, knob: Knob, incumbent: Trial, goal: float, stage: Stage) -> Trial:
    """The fewest that reach the goal: predicted from what one gives, then measured jointly, with its neighbours."""
    counts = sorted(int(value) for value in session.space.choices[knob.name] if int(value) > 0)
    first = _pace_of_one(session, knob, incumbent, counts)
    if first is None:
        return incumbent
    needed = math.ceil(HEADROOM * goal / first)
    at = next((index for index, count in enumerate(counts) if count >= needed), len(counts) - 1)
    session.watcher.note(
        f"{knob.name}: one gives {first:.4g} samples/s and the step takes {goal:.4g}: {counts[at]} to try"
    )
    best = _measured(session, knob, incumbent, counts[at], stage)
    while best is not incumbent and at + 1 < len(counts):  # more, as long as more gives more
        at += 1
        larger = _measured(session, knob, best, counts[at], stage)
        if larger is best:
            at -= 1
            break
        best = larger
    for count in reversed(counts[:at]):  # fewer, as long as fewer gives as much
        trial = _run(session, knob, incumbent, count, stage)
        if trial is None or trial.measurement is None or trial.failure is not None:
            break
        if session.score(trial) * WORTHWHILE_GAIN < session.score(best):
            break
        best = trial
    return best


def _pace_of_one(session: Session, knob: Knob, incumbent: Trial, counts: list[int]) -> float | None:
    """Samples per second of the loader alone with the smallest count."""
    if not counts:
        return None
    candidate = incumbent.config.replace({knob.name: counts[0]})
    if session.obstacle(candidate) is not None or not session.affords(candidate):
        return None
    answer = session.probe("loader", candidate)
    if answer.loader is None:
        message = answer.failure.message if answer.failure else "no answer"
        session.watcher.probe("loader", f"{knob.name}={counts[0]}: {message}")
        session.skipped.append(f"{knob.name}: {message}")
        return None
    rate = answer.loader.samples_per_second / counts[0]
    session.watcher.probe("loader", f"{knob.name}={counts[0]}: {rate:.4g} samples/s, nothing trained")
    return rate


def _each_value(session: Session, knob: Knob, incumbent: Trial, stage: Stage) -> Trial:
    for value in knob.prior(session.facts):
        if value in session.space.choices[knob.name] and value != incumbent.config[knob.name]:
            incumbent = _measured(session, knob, incumbent, value, stage)
    return incumbent


def _measured(session: Session, knob: Knob, incumbent: Trial, value: Value, stage: Stage) -> Trial:
    """The incumbent with this value where that is worthwhile, the incumbent itself otherwise."""
    trial = _run(session, knob, incumbent, value, stage)
    if trial is None or trial.measurement is None or trial.failure is not None:
        return incumbent
    return trial if session.score(trial) >= WORTHWHILE_GAIN * session.score(incumbent) else incumbent


def _run(session: Session, knob: Knob, incumbent: Trial, value: Value, stage: Stage) -> Trial | None:
    candidate = incumbent.config.replace({knob.name: value})
    if session.obstacle(candidate) is not None:
        return None
    if not session.affords(candidate):
        return None
    return session.measure(candidate, stage)
