"""Takes from a point that the sampler drew the changes that do nothing for it: a draw changes whatever it likes."""

from __future__ import annotations

from collections.abc import Callable

from autotune.config import TrainingConfig
from autotune.knobs.base import Knob
from autotune.knobs.registry import KNOBS
from autotune.records import Trial
from autotune.search.answers import WORTHWHILE_GAIN
from autotune.search.compute import is_worthwhile
from autotune.search.session import Session

AS_GOOD = 1.01
"""Without a change, a first measurement this close says that the change is not needed."""


def prune(session: Session, drawn: Trial, refuse: Callable[[Session, TrainingConfig], str | None]) -> int:
    """Where a drawn point leads: measures it without each change that no two trials show to be worthwhile, the least
    simple first, and goes on without those that were not; `refuse` says what is not worth running. Returns how many
    trials that took."""
    if not _leads(session, drawn):
        return 0
    measured, leader = 0, drawn
    for knob in _least_simple_first(session, drawn):
        if _was_shown(session, knob, leader):
            continue
        without = leader.config.replace({knob.name: session.changes_base[knob.name]})
        known = session.measured(without)
        if known is None and (refuse(session, without) is not None or not session.affords(without)):
            continue
        trial = known or session.measure(without, "explore")
        measured += known is None
        if trial.failure is None and session.score(trial) * AS_GOOD >= session.score(leader):
            leader = trial
    return measured


def _leads(session: Session, trial: Trial) -> bool:
    """Whether nothing better is known that holds the batch, or lets it go, as this one does."""
    held = session.allowed(trial.config)
    rivals = [one for one in session.candidates(free=True) if session.allowed(one.config) == held]
    return bool(rivals) and rivals[0] is trial


def _least_simple_first(session: Session, trial: Trial) -> list[Knob]:
    """The knobs that the trial changes. Not the batch: how far that pays is for the search of the batch."""
    changed = session.changes(trial.config)
    knobs = [knob for knob in KNOBS if knob.name in changed and knob.stage != "batch"]
    return sorted(knobs, key=lambda knob: knob.rank(trial.config[knob.name], session.facts), reverse=True)


def _was_shown(session: Session, knob: Knob, leader: Trial) -> bool:
    """Whether some trial with the leader's value of the knob ran, and clearly worse, or not at all, without it."""
    value, base = leader.config[knob.name], session.changes_base[knob.name]
    for trial in session.trials:
        if trial.config[knob.name] != value or trial.measurement is None or trial.failure is not None:
            continue
        without = session.measured(trial.config.replace({knob.name: base}))
        if without is not None and (without.failure is not None or _is_worth_its_change(session, knob, trial, without)):
            return True
    return False


def _is_worth_its_change(session: Session, knob: Knob, trial: Trial, without: Trial) -> bool:
    """End to end, or for the step alone where the loader hides it."""
    end_to_end = session.score(trial) >= WORTHWHILE_GAIN * session.score(without)
    return end_to_end or is_worthwhile(session, knob, trial, without)
