"""The rest of the budget: points that Optuna's sampler proposes over the joint space."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from autotune.config import TrainingConfig, Value, settings_text
from autotune.knobs.registry import KNOBS
from autotune.records import Trial
from autotune.search.compute import device_waits, gains_too_little, only_computes_faster
from autotune.search.coverage import knobs_told_of
from autotune.search.loader import IDLE_SHARE, loader_share
from autotune.search.prune import prune
from autotune.search.session import Session
from autotune.stats import OUT_OF_THE_RACE

ENOUGH_TRIALS = 30
TRIALS_WITHOUT_GAIN = 10
"""After so many trials, the last of them without a better point, the search ends before its budget does."""
MOST_REFUSALS_IN_A_ROW = 40
"""When the sampler proposes nothing new so often, the space is used up as far as it can see."""


def explore(session: Session) -> int:
    """Runs proposals until the budget's reserve is reached or nothing new is proposed. Returns how many were measured.

    First what was running when an earlier call was killed, then once more what lost clearly in a single trial. Points that
    conflict, that are known not to fit or that train differently are not run; the sampler is told so and learns the region.
    """
    session.watcher.stage("explore", "points that the sampler proposes")
    measured = 0
    for config in session.study.interrupted:
        if _can_be_tried(session, config):
            _measure(session, config)
            measured += 1
    measured += _second_chances(session)
    return measured + _run_proposals(session, refuse=_not_worth_it, ended=_saturated, then=_pruned)


def _second_chances(session: Session) -> int:
    """Measures again what lost clearly in the only trial of its value: other work on the machine may have held it back, and
    the value is not drawn any more. Where it did, the best so far is measured with the value. Returns how many trials that
    took."""
    measured = 0
    for slower, name, value, faster in list(_clear_losses(session)):
        with_it = [trial for trial in session.trials if trial.round is None and trial.config[name] == value]
        if with_it != [slower] or slower.number < faster.number or not session.affords(slower.config):
            continue
        shown = settings_text(session.told_changes(slower.config))
        session.watcher.note(f"{shown}: measured once more, since a single trial says that it is much slower")
        again = session.measure_again(slower.config, "explore")
        measured += 1
        best = session.best()
        if best is None or again.failure is not None or _is_clear_loss(session, again, faster):
            continue
        config = best.config.replace(slower.config.changes_from(faster.config))
        if _can_be_tried(session, config):
            session.measure(config, "explore")
            measured += 1
    return measured


def _can_be_tried(session: Session, config: TrainingConfig) -> bool:
    """Whether it was not measured yet, nothing stands against it, and there is time."""
    return session.measured(config) is None and session.obstacle(config) is None and session.affords(config)


def _pruned(session: Session, trial: Trial) -> int:
    return prune(session, trial, _not_worth_it)


def sample(session: Session) -> None:
    """A sampler by itself, for comparison: proposals from the first trial on, until the budget's reserve is reached.

    What conflicts or is known not to fit is not run; no rule of ours takes anything else away from it.
    """
    session.watcher.stage("explore", "points that the sampler proposes, from the start")
    _run_proposals(session, refuse=Session.obstacle, ended=lambda session: False, then=lambda session, trial: 0)


def _run_proposals(
    session: Session,
    *,
    refuse: Callable[[Session, TrainingConfig], str | None],
    ended: Callable[[Session], bool],
    then: Callable[[Session, Trial], int],
) -> int:
    """Measures what the sampler proposes, unless it is refused with a reason or longer than what is left, and what `then`
    makes of each. Returns how many were measured."""
    measured = refused = 0
    while session.allows(0.0) and refused < MOST_REFUSALS_IN_A_ROW and not ended(session):
        config = session.study.propose()
        if session.study.knows(config):
            break
        reason = refuse(session, config)
        if reason is None and not session.affords(config):
            reason = "longer than what is left"
        if reason is not None:
            session.study.reject(config, reason)
            refused += 1
            continue
        refused = 0
        measured += 1 + then(session, _measure(session, config))
    return measured


def _measure(session: Session, config: TrainingConfig) -> Trial:
    """Runs a point. What a stage said of a knob that it left alone holds no more where a new value of it is tried."""
    new = {name for name in session.space.varied if all(one.config[name] != config[name] for one in session.trials)}
    for key in [key for key, sentence in session.skipped.items() if new & knobs_told_of(sentence)]:
        del session.skipped[key]
    return session.measure(config, "explore")


def _not_worth_it(session: Session, config: TrainingConfig) -> str | None:
    """Why a proposal is not run, in words; None where it is."""
    reason = session.obstacle(config)
    if reason is None and session.obstacles.is_bold(config):
        reason = "more than twice the largest batch that ran with any settings"
    if reason is None and _saves_memory_for_nothing(session, config):
        reason = "it saves memory at the price of speed, and nothing says that the same does not fit without"
    if reason is None and _loads_otherwise_for_nothing(session, config):
        reason = "the same step was measured, and loading it otherwise makes nothing better"
    if reason is None and _updates_otherwise_for_nothing(session, config):
        reason = "the same step was measured, and its update takes too little for another one to be worthwhile"
    if reason is None and _computes_faster_for_nothing(session, config):
        reason = "the same step was measured, and its device waits for work, not for results"
    if reason is None and (lost := _lost_clearly(session, config)):
        reason = f"{lost} made another configuration much slower"
    return reason


def _saves_memory_for_nothing(session: Session, config: TrainingConfig) -> bool:
    """Whether it has values that do nothing but save memory, where the same without them is not known not to fit."""
    if session.settings.objective == "memory":
        return False
    space = session.space
    savers = [knob.name for knob in KNOBS if knob.only_saves_memory and knob.name in space.varied]
    plain = config.replace({name: space.baseline[name] for name in savers})
    known = session.obstacles.too_large(plain)
    return plain != config and (known is None or space.micro_batch(config) < known.micro_batch_size)


def _updates_otherwise_for_nothing(session: Session, config: TrainingConfig) -> bool:
    """Whether it differs in the optimizer's update alone from a trial in which that takes next to nothing."""
    update = {knob.name: config[knob.name] for knob in KNOBS if knob.in_update_only}
    return any(
        trial.measurement is not None
        and trial.config.replace(update) == config
        and gains_too_little(session, trial) is not None
        for trial in session.trials
    )


def _computes_faster_for_nothing(session: Session, config: TrainingConfig) -> bool:
    """Whether it differs from a trial whose device waits in nothing but what makes a device compute faster."""
    faster = {knob.name: config[knob.name] for knob in KNOBS if only_computes_faster(knob)}
    return any(
        trial.measurement is not None and trial.config.replace(faster) == config and device_waits(session, trial)
        for trial in session.trials
    )


def _lost_clearly(session: Session, config: TrainingConfig) -> str:
    """A value of it that was seen to lose clearly: beside another value of the same knob, all others alike.

    What loses by so much alone is not what wins in company: what pays only together costs little alone. What takes long to
    start may be fast at a larger batch, so where the device waited the loss says nothing of batches of twice the size.
    """
    micro_batch = session.space.micro_batch
    pairs = {
        (name, value)
        for slower, name, value, _ in _clear_losses(session)
        if not (device_waits(session, slower) and micro_batch(config) >= 2 * micro_batch(slower.config))
    }
    return ", ".join(f"{name}={value}" for name, value in sorted(pairs, key=str) if config[name] == value)


def _clear_losses(session: Session) -> Iterator[tuple[Trial, str, Value, Trial]]:
    """Those of the siblings of which the first is out of the race beside the second; none where memory is what counts, of
    which a trial that takes more is no slower, and no other work on the machine makes it take more."""
    if session.settings.objective == "memory":
        return
    for slower, name, value, faster in _siblings(session):
        if _is_clear_loss(session, slower, faster):
            yield slower, name, value, faster


def _is_clear_loss(session: Session, slower: Trial, faster: Trial) -> bool:
    return session.compute_score(slower) < OUT_OF_THE_RACE * session.compute_score(faster)


def _siblings(session: Session) -> Iterator[tuple[Trial, str, Value, Trial]]:
    """The last trial of each configuration, a knob of the step and its value there, and a trial that differs in that knob
    alone, or in what goes with its value too."""
    trials = [
        trial for trial in session.trials if trial is session.measured(trial.config) and _has_resident_rate(trial)
    ]
    knobs = [knob for knob in KNOBS if knob.stage == "compute"]
    for one, other in itertools.permutations(trials, 2):
        changed = one.config.changes_from(other.config).keys()
        for knob in knobs:
            companions = knob.companions(other.config[knob.name], session.facts).keys()
            if knob.name in changed and changed <= {knob.name, *companions}:
                yield one, knob.name, one.config[knob.name], other


def _has_resident_rate(trial: Trial) -> bool:
    measurement = trial.measurement
    return trial.failure is None and measurement is not None and measurement.resident_samples_per_second is not None


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
