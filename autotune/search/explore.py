"""The rest of the budget: points that Optuna's sampler proposes over the joint space."""

from __future__ import annotations

from collections.abc import Callable

from autotune.config import TrainingConfig
from autotune.knobs.registry import KNOBS
from autotune.search.loader import IDLE_SHARE, loader_share
from autotune.search.session import Session

ENOUGH_TRIALS = 30
TRIALS_WITHOUT_GAIN = 10
"""After so many trials, the last of them without a better point, the search ends before its budget does."""
MOST_REFUSALS_IN_A_ROW = 40
"""When the sampler proposes nothing new so often, the space is used up as far as it can see."""


def explore(session: Session) -> int:
    """Runs proposals until the budget's reserve is reached or nothing new is proposed. Returns how many were measured.

    First what was running when an earlier call was killed. Points that conflict, that are known not to fit or that train
    differently are not run; the sampler is told so and learns the region.
    """
    session.watcher.stage("explore", "points that the sampler proposes")
    measured = 0
    for config in session.study.interrupted:
        if session.measured(config) is None and session.obstacle(config) is None and session.affords(config):
            session.measure(config, "explore")
            measured += 1
    return measured + _run_proposals(session, refuse=_not_worth_it, ended=_saturated)


def sample(session: Session) -> None:
    """A sampler by itself, for comparison: proposals from the first trial on, until the budget's reserve is reached.

    What conflicts or is known not to fit is not run; no rule of ours takes anything else away from it.
    """
    session.watcher.stage("explore", "points that the sampler proposes, from the start")
    _run_proposals(session, refuse=Session.obstacle, ended=lambda session: False)


def _run_proposals(
    session: Session,
    *,
    refuse: Callable[[Session, TrainingConfig], str | None],
    ended: Callable[[Session], bool],
) -> int:
    """Measures what the sampler proposes, unless it is refused with a reason or longer than what is left. Returns how
    many were measured."""
    measured = refused = 0
    while session.budget.allows(0.0) and refused < MOST_REFUSALS_IN_A_ROW and not ended(session):
        config = session.study.propose()
        if session.study.knows(config):
            break
        reason = refuse(session, config)
        if reason is None and not session.affords(config):
            reason = "longer than what is left"
        if reason is not None:
            session.study.reject(reason)
            refused += 1
            continue
        refused = 0
        session.measure(config, "explore")
        measured += 1
    return measured


def _not_worth_it(session: Session, config: TrainingConfig) -> str | None:
    """Why a proposal is not run, in words; None where it is."""
    reason = session.obstacle(config)
    if reason is None and session.obstacles.is_bold(config):
        reason = "more than twice the largest batch that ran with any settings"
    if reason is None and _loads_otherwise_for_nothing(session, config):
        reason = "the same step was measured, and loading it otherwise makes nothing better"
    return reason


def _loads_otherwise_for_nothing(session: Session, config: TrainingConfig) -> bool:
    """Whether it differs in how batches are loaded alone from a trial whose step never waited for them, or whose memory
    is what counts."""
    loader = {knob.name: config[knob.name] for knob in KNOBS if knob.stage == "loader"}
    return any(
        trial.measurement is not None
        and trial.config.replace(loader) == config
        and (loader_share(trial) >= IDLE_SHARE or session.settings.objective == "memory")
        for trial in session.trials
    )


def _saturated(session: Session) -> bool:
    """Whether enough was measured without a better point for the rest of the budget to be better saved.

    Who says how many trials there shall be gets them.
    """
    trials = [trial for trial in session.trials if trial.round is None]
    if session.settings.trials is not None or len(trials) < ENOUGH_TRIALS:
        return False
    best = session.best()
    return best is None or best not in trials[-TRIALS_WITHOUT_GAIN:]
