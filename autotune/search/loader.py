"""The loader: how many workers the step needs, predicted from the loader alone and then run together."""

from __future__ import annotations

import math

from autotune.advice.bottleneck import WAITS_FOR_DATA
from autotune.config import TrainingConfig, Value
from autotune.knobs.base import Knob
from autotune.knobs.registry import KNOBS
from autotune.quantities import format_rate, format_share
from autotune.records import Trial
from autotune.search.answers import WORTHWHILE_GAIN
from autotune.search.session import Session

IDLE_SHARE = 0.97
"""End to end at this share of the step alone, the loader holds nothing back, and no worker can help."""
HEADROOM = 1.1
"""Workers are predicted for so much more than the step takes: loading and training share the machine."""
PLENTY = 1.5
"""Where workers alone give so many times what the step takes, it does not wait for them, and no more of them are tried: all
that the first gains is that batches are made beside the step, and what a further one seems to gain is noise."""
MUCH = 1.15
"""A step that waits for its data, and a loader that gives so many times more: worth more than a further round of the
confirmation. ResNet-50 in CUDA graphs: 2,719 samples/s with three workers, which give 3,700 alone, and 3,333 with six, for
which a search of 285 s had no time left (H200)."""


def search_loader(session: Session, incumbent: Trial) -> Trial:
    """Moves the loader's knobs where the loader holds the step back. Returns the trial that leads in the end."""
    assert incumbent.measurement is not None
    knobs = [knob for knob in KNOBS if knob.stage == "loader" and knob.name in session.space.varied]
    alone = incumbent.measurement.resident_samples_per_second
    if not knobs or alone is None or session.settings.objective == "memory":
        return incumbent
    for knob in knobs:
        session.skipped.pop(knob.name, None)  # it was said for another step
    share = loader_share(incumbent)
    if share >= IDLE_SHARE:
        names = ", ".join(knob.name for knob in knobs)
        given = format_share(min(share, 1.0))
        session.skipped[knobs[0].name] = (
            f"{names}: nothing further was tried, since the loader gives {given} of what the step takes"
        )
        return incumbent
    session.watcher.stage("loader", "workers for the pace of the step")
    for number, knob in enumerate(knobs):
        if loader_share(incumbent) >= IDLE_SHARE or (number > 0 and _may_be_idle(incumbent)):
            break  # one knob was enough
        incumbent = (
            _enough_of(session, knob, incumbent, alone) if knob.adds_up else _each_value(session, knob, incumbent)
        )
    return incumbent


def loader_share(trial: Trial) -> float:
    """The rate end to end as a share of that of the step alone; 0 where the step alone was not timed."""
    measured = trial.measurement
    assert measured is not None
    alone = measured.resident_samples_per_second
    return measured.samples_per_second / alone if alone is not None else 0.0


def _may_be_idle(trial: Trial) -> bool:
    """Whether the rate end to end, as far as it is known, may be that of an idle loader."""
    measured = trial.measurement
    assert measured is not None
    alone = measured.resident_samples_per_second
    return alone is not None and measured.interval[1] >= IDLE_SHARE * alone


def _enough_of(session: Session, knob: Knob, incumbent: Trial, goal: float) -> Trial:
    """The fewest that reach the goal: predicted from what one gives, then measured jointly, with its neighbours."""
    counts = sorted(int(value) for value in session.space.choices[knob.name] if int(value) > 0)
    pace = _pace_of_one(session, knob, incumbent, counts)
    if pace is None:
        return incumbent
    reached = session.score(incumbent)
    if HEADROOM * counts[-1] * pace <= reached:
        session.skipped[knob.name] = (
            f"{knob.name}: not moved, since one gives {format_rate(pace)} samples/s alone, and even {counts[-1]} would "
            f"give less than the {format_rate(reached)} of now"
        )
        return incumbent
    needed = math.ceil(HEADROOM * goal / pace)
    at = next((index for index, count in enumerate(counts) if count >= needed), len(counts) - 1)
    gain = min(goal, counts[at] * pace) / reached
    candidate = incumbent.config.replace({knob.name: counts[at]})
    if _is_worth_a_trial(session, incumbent, candidate, gains_much=gain >= MUCH):
        session.watcher.note(
            f"{knob.name}: one gives {format_rate(pace)} samples/s and the step takes {format_rate(goal)}: "
            f"{counts[at]} to try"
        )
    best = _run(session, knob, incumbent, counts[at], gains_much=gain >= MUCH)
    for index, count in enumerate(counts[at + 1 :], start=at):  # more, as long as more gives more
        if counts[index] * pace >= PLENTY * goal:
            break
        larger = _run(session, knob, incumbent, count)
        if larger is None or (best is not None and not _worthwhile(session, larger, best)):
            break
        best = larger
    top = best
    for count in reversed(counts[:at]):  # fewer, as long as fewer gives as much
        if top is not None and count * pace * WORTHWHILE_GAIN < session.score(top):
            break  # the loader alone says that it cannot
        smaller = _run(session, knob, incumbent, count)
        if smaller is None or (top is not None and session.score(smaller) * WORTHWHILE_GAIN < session.score(top)):
            break
        best = smaller
        top = smaller if top is None or session.score(smaller) > session.score(top) else top
    return best if best is not None and _worthwhile(session, best, incumbent) else incumbent


def _pace_of_one(session: Session, knob: Knob, incumbent: Trial, counts: list[int]) -> float | None:
    """Samples per second of the loader alone with the smallest count."""
    if not counts:
        return None
    candidate = incumbent.config.replace({knob.name: counts[0]})
    obstacle = session.obstacle(candidate)
    if obstacle is not None:
        session.skipped[knob.name] = f"{knob.name}: {counts[0]} was not tried, since {obstacle}"
        return None
    # The loader alone does not depend on the step: one probe answers for all of them.
    assert session.baseline is not None
    alone = session.baseline.replace(_of_the_loader(session, candidate))
    is_news = ("loader", alone.key) not in session.probes
    if is_news and not session.affords(candidate):
        return None
    answer = session.probe("loader", alone)
    if answer.loader is None:
        message = answer.failure.message if answer.failure else "no answer"
        session.watcher.probe("loader", f"{knob.name}={counts[0]}: {message}")
        session.skipped[knob.name] = f"{knob.name}: {message}"
        return None
    rate = answer.loader.samples_per_second / counts[0]
    if is_news:
        session.watcher.probe("loader", f"{knob.name}={counts[0]}: {format_rate(rate)} samples/s, nothing trained")
    return rate


def _each_value(session: Session, knob: Knob, incumbent: Trial) -> Trial:
    """The knob's values, best first, until one that ran was not worthwhile: those after it are expected to give less."""
    for value in knob.prior(session.facts):
        if value in session.space.choices[knob.name] and value != incumbent.config[knob.name]:
            trial = _run(session, knob, incumbent, value)
            if trial is not None and not _worthwhile(session, trial, incumbent):
                break
            incumbent = incumbent if trial is None else trial
    return incumbent


def _worthwhile(session: Session, trial: Trial, than: Trial) -> bool:
    return session.score(trial) >= WORTHWHILE_GAIN * session.score(than)


def _run(session: Session, knob: Knob, incumbent: Trial, value: Value, *, gains_much: bool = False) -> Trial | None:
    """The incumbent with this value; None where it cannot run, is too dear or fails."""
    candidate = incumbent.config.replace({knob.name: value})
    if not _is_worth_a_trial(session, incumbent, candidate, gains_much=gains_much):
        return None
    trial = session.measure(candidate, "loader")
    return trial if trial.failure is None else None


def _is_worth_a_trial(
    session: Session, incumbent: Trial, candidate: TrainingConfig, *, gains_much: bool = False
) -> bool:
    if session.obstacle(candidate) is not None or not session.affords(candidate, gains_much=gains_much):
        return False
    return _most_seen(session, candidate) >= WORTHWHILE_GAIN * session.score(incumbent)


def _most_seen(session: Session, candidate: TrainingConfig) -> float:
    """The most that this loader was seen to give to a step that clearly waited for it; infinite where none did."""
    loader = _of_the_loader(session, candidate)
    # A little less than what the step takes alone may be copies to the device, which a faster step has too.
    waited = [
        measured.samples_per_second
        for trial in session.trials
        if (measured := trial.measurement) is not None
        and measured.resident_samples_per_second is not None
        and loader_share(trial) < WAITS_FOR_DATA
        and _of_the_loader(session, trial.config) == loader
    ]
    return max(waited, default=math.inf)


def _of_the_loader(session: Session, config: TrainingConfig) -> dict[str, Value]:
    """What the loader's pace depends on."""
    names = [session.space.batch_name, *(knob.name for knob in KNOBS if knob.stage == "loader")]
    return {name: config[name] for name in names}
