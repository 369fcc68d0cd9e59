"""The finalists and the baseline, interleaved in fresh processes until it is clear which is faster."""

from __future__ import annotations

import math

from autotune.config import TrainingConfig, settings_text
from autotune.knobs.registry import slow_to_start
from autotune.records import Failure, Trial
from autotune.search.answers import PROCESS_SPREAD, settled
from autotune.search.session import Session, parity_failure
from autotune.search.soak import FEWEST_SOAK_SECONDS, LATE_SECONDS, soak_the_answers, soak_trial_seconds
from autotune.stats import FEWEST_ROUNDS

MOST_FINALISTS = 2
"""Beside the baseline and the free-batch candidate: each costs a fresh process per round."""
MOST_ROUNDS = 6
NEAR_BEST = 0.93
"""A configuration slower than this share of the best in its first measurement is no finalist."""
ALIKE = 1.01
"""First measurements this close to the best are no better and no worse than it."""
LARGEST_HALF_WIDTH = 0.03
"""A measurement that spreads by more says too little to be preferred to a better one for being simpler."""
LARGEST_HALF_WIDTH_OF_A_PART = 0.1
"""Where the simpler one is a part of the better one, the rest of that has to show itself above more noise."""
LARGEST_RESERVE = 0.45
"""Of what the baseline leaves of the budget, the share that the confirmation may keep for itself."""
PLAIN_GAIN = 1.5
"""What is so much faster is certain at the 1 % level after two rounds, where processes differ by no more than expected."""


def reserve(session: Session, *, frees_the_batch: bool = False) -> None:
    """Keeps free of everything else what the confirmation is likely to take by now; as `reserve_seconds`."""
    session.budget.reserved_seconds = reserve_seconds(session, frees_the_batch=frees_the_batch)
    session.budget.least_reserved_seconds = min(session.budget.reserved_seconds, _least_reserve_seconds(session))


def _least_reserve_seconds(session: Session) -> float:
    """For one round beside the baseline, and the shortest soak."""
    base, best = session.baseline_trial(), session.best()
    if base is None or best is None:
        return 0.0
    rounds = _round_seconds(session, base) + _round_seconds(session, best)
    return rounds + _parity_seconds(session, best) + soak_trial_seconds(session, best, FEWEST_SOAK_SECONDS)


def reserve_seconds(session: Session, *, frees_the_batch: bool = False) -> float:
    """What confirmation, parity and soak are likely to take: kept free of everything before them.

    For one finalist beside the baseline, and one with the batch free where such a one leads or is looked for: a second one
    is measured where there is time, but is checked before that is known. What is plainly faster gets its last rounds where
    there is time.
    """
    base, best = session.baseline_trial(), session.best()
    if base is None:
        return 0.0
    finalist = best or base
    leaders = session.candidates(free=True)[:1]
    finalists = 1 + (frees_the_batch or any(not session.allowed(leader.config) for leader in leaders))
    is_plain = session.score(finalist) >= PLAIN_GAIN * session.score(base)
    rounds = session.pace.rounds_of_a_plain_gain if is_plain else FEWEST_ROUNDS
    measuring = rounds * (_round_seconds(session, base) + finalists * _round_seconds(session, finalist))
    soak = soak_trial_seconds(session, finalist, session.pace.soak_seconds)
    return min(measuring + _parity_seconds(session, finalist) + soak, LARGEST_RESERVE * session.budget.searched_seconds)


def fewest_seconds(session: Session) -> float:
    """What the least that a search does after its baseline is likely to take: one other trial, and a round of both; that
    round alone, where an earlier call ran others, and nothing where it came to a round."""
    base = session.baseline_trial()
    assert base is not None
    if session.results().measurements(base.config, rounds=True):
        return 0.0
    if all(trial.config == base.config or trial.measurement is None for trial in session.trials):
        return session.seconds_at_pace(base) + 2 * _round_seconds(session, base)
    best = session.best() or base
    if best.config == base.config:
        return _round_seconds(session, base)
    parity = 0.0 if session.is_checked(best.config) else session.seconds_at_pace(best)
    return parity + _round_seconds(session, base) + _round_seconds(session, best)


def _parity_seconds(session: Session, trial: Trial) -> float:
    """What the parity check of a trial's configuration is likely to take, where it is still to be made."""
    return 0.0 if session.is_checked(trial.config) else trial.seconds


def _round_seconds(session: Session, trial: Trial) -> float:
    """What measuring the configuration of a trial again for the confirmation is likely to take."""
    pace = session.pace
    blocks = (pace.confirm_minimum_blocks + pace.confirm_maximum_blocks) / 2
    if _half_width(trial) > LARGEST_HALF_WIDTH:  # on a busy machine no blocks end a measurement early
        blocks = pace.confirm_maximum_blocks
    return session.start_seconds(trial) + blocks * pace.confirm_block_seconds


def confirm(session: Session) -> None:
    """Re-measures what may be recommended, beside the baseline, and soaks the winner. All of it goes into the study.

    A finalist that trains differently, fails in a later round or does not survive its soak is recorded as failed, and
    the next one takes its place. Rounds of an earlier call count, and are gone on with.
    """
    session.watcher.stage("confirm", "the best few and your program, in turn, in fresh processes")
    assert session.baseline is not None
    finalists = _affordable(session, _finalists(session))
    first = 1 + max((trial.round for trial in session.trials if trial.round is not None), default=-1)
    for number in range(first, first + MOST_ROUNDS):
        is_needed = number - first < session.pace.rounds_of_a_plain_gain
        has_rounds = bool(finalists) and all(session.results().round_pairs(config) for config in finalists)
        if _decided(session, finalists) or (
            (number > first or has_rounds)
            and not _has_time(session, finalists, 1, short_soak=is_needed)
            and not _may_still_win(session, finalists)
        ):
            break
        failed = False
        for config in [session.baseline, *finalists]:
            trial = session.measure_again(config, "confirm", confirm_round=number)
            failed |= trial.failure is not None
        if failed:
            finalists = _finalists(session)
    soak_the_answers(session)


def _may_still_win(session: Session, finalists: list[TrainingConfig]) -> bool:
    """Whether the user's own settings would be kept, with time for a round that may show otherwise. A soak after that ends
    late, if need be, as any other; one of the user's own program is no use of that time."""
    is_kept = session.results().best().config == session.baseline
    return is_kept and _has_time(session, finalists, 1, short_soak=True, late_seconds=LATE_SECONDS)


def _affordable(session: Session, finalists: list[TrainingConfig]) -> list[TrainingConfig]:
    """The finalists without those that there is no time for: a certain answer is worth more than a second candidate."""
    kept = list(finalists)
    answer = _unsettled_answer(session)
    # What is the answer by now stays, or it would be with the few rounds that an earlier call left it.
    first = [answer] if answer in kept and session.allowed(answer) else [c for c in kept if session.allowed(c)][:1]
    second = [config for config in finalists if session.allowed(config) and config not in first]
    if second and not _has_time(session, kept, FEWEST_ROUNDS):
        kept = [config for config in kept if config not in second]
    while len(kept) > 1 and not _has_time(session, kept, 1):
        kept.pop()
    for config in finalists:
        if config not in kept and not settled(session.results().round_pairs(config)):
            _leave_out(session, config)
    return kept


def _unsettled_answer(session: Session) -> TrainingConfig | None:
    """What would be recommended by now, where its rounds do not say enough."""
    best = session.results().best().config
    return None if best == session.baseline or settled(session.results().round_pairs(best)) else best


def _leave_out(session: Session, config: TrainingConfig) -> None:
    shown = settings_text(session.told_changes(config))
    session.skipped[shown] = f"{shown}: close to the best, and not confirmed, for lack of time"


def _decided(session: Session, finalists: list[TrainingConfig]) -> bool:
    """Whether another round can change nothing."""
    assert session.baseline is not None
    if not finalists:
        return bool(session.results().measurements(session.baseline, rounds=True))
    return all(settled(session.results().round_pairs(config)) for config in finalists)


def _has_time(
    session: Session,
    finalists: list[TrainingConfig],
    rounds: int,
    *,
    checks_seconds: float = 0.0,
    short_soak: bool = False,
    late_seconds: float = 0.0,
) -> bool:
    """For so many rounds of the finalists and the baseline, after checks that take so long, and the soak of one after them,
    which may end so late.

    That of the user's own program is none of these: it decides nothing, and comes where there is time.
    """
    assert session.baseline is not None
    expected = checks_seconds + rounds * sum(
        _expected_seconds(session, config) for config in [session.baseline, *finalists]
    )
    trials = filter(None, map(session.measured, finalists))
    soak_seconds = FEWEST_SOAK_SECONDS if short_soak else session.pace.soak_seconds
    soak = max((soak_trial_seconds(session, trial, soak_seconds) for trial in trials), default=0.0)
    return session.budget.left() - max(0.0, soak - late_seconds) >= expected


def _expected_seconds(session: Session, config: TrainingConfig) -> float:
    """As long as its last round took; before the first, what its measurement lets expect."""
    rounds = [trial.seconds for trial in session.trials if trial.config == config and trial.round is not None]
    trial = session.measured(config)
    assert trial is not None
    return rounds[-1] if rounds else _round_seconds(session, trial)


# --- who takes part ---------------------------------------------------------------------------------------------------


def _finalists(session: Session) -> list[TrainingConfig]:
    """The best measured configurations; what was stopped early is measured to the end where it turns out to be ahead."""
    found = _ahead(session)
    while _reopened(session):
        found = _ahead(session)
    return found


def _reopened(session: Session) -> bool:
    """Measures the best trial that was stopped early to its end, where what it raced against has failed since."""
    failed = {trial.config for trial in session.trials if trial.failure is not None}
    stopped = [
        trial
        for trial in session.trials
        if trial.measurement is not None
        and trial.measurement.stopped_early
        and trial is session.measured(trial.config)
        and trial.config not in failed
        and session.allowed(trial.config)
    ]
    ahead, best = max(stopped, key=session.score, default=None), session.best()
    if ahead is None or best is None or session.score(ahead) <= session.score(best):
        return False
    if session.budget.left() < session.expected_seconds(ahead.config):
        return False
    session.measure_again(ahead.config, "confirm")
    return True


def _ahead(session: Session) -> list[TrainingConfig]:
    """The best few, and one that leaves the held batch where that is faster still."""
    finalists = _best_few(session, session.candidates(), MOST_FINALISTS, [])
    free = [trial for trial in session.candidates(free=True) if not session.allowed(trial.config)]
    best = session.best()
    if free and (best is None or session.score(free[0]) > session.score(best)):
        finalists += _best_few(session, free, 1, finalists)
    # What an earlier call found best takes part where there is time, so that it is compared in the same rounds.
    earlier = session.results().best().config
    return finalists if earlier in (session.baseline, *finalists) else [*finalists, earlier]


def _best_few(
    session: Session, candidates: list[Trial], count: int, beside: list[TrainingConfig]
) -> list[TrainingConfig]:
    """Of the candidates, best first: the best that beat the baseline and train the same, at most so many, where there is
    time to check them and for rounds of all, those `beside` them included.

    Of those that are as good as each other, as far as one measurement tells, the simplest comes first. Those within a
    hair of it take no part, for they could win by noise; of the others their rounds tell.
    """
    base = session.baseline_trial()
    assert base is not None and base.measurement is not None
    at_least = session.score(base)
    found: list[TrainingConfig] = []
    while candidates and len(found) < count and session.score(candidates[0]) > at_least:
        top = candidates[0]
        alike = [trial for trial in candidates if _is_alike(session, trial, top)]
        simplest = min(alike, key=lambda t: (session.space.effective_batch(t.config), session.space.rank(t.config)))
        if simplest.config == session.baseline:
            break
        others = [*beside, *found]
        if others and not _has_time_to_check(session, others, simplest.config):
            _leave_out(session, simplest.config)
            break
        if _trains_the_same(session, simplest):
            found.append(simplest.config)
            at_least = max(at_least, NEAR_BEST * session.score(simplest))
            own = session.score(simplest)
            candidates = [t for t in candidates if not own / ALIKE <= session.score(t) <= own * ALIKE]
        else:
            candidates = [trial for trial in candidates if trial is not simplest]
    return found


def _is_alike(session: Session, trial: Trial, best: Trial) -> bool:
    """Whether one measurement each does not tell them apart; where the better one has to be compiled and the other has
    not, or has changes beside those of the other, also by their own intervals and what processes differ by: a compilation
    wants to be worth its minutes, and a change to be worth itself."""
    if session.score(trial) * ALIKE >= session.score(best):
        return True
    saves_a_compilation = slow_to_start(best.config) and not slow_to_start(trial.config)
    has_less = session.results().is_part_of(trial.config, best.config)
    if not (saves_a_compilation or has_less) or session.settings.objective == "memory":
        return False
    most = LARGEST_HALF_WIDTH_OF_A_PART if has_less else LARGEST_HALF_WIDTH
    own = [min(most, _half_width(one)) for one in (trial, best)]
    return session.score(trial) * (1 + math.hypot(*own, PROCESS_SPREAD, PROCESS_SPREAD)) >= session.score(best)


def _half_width(trial: Trial) -> float:
    """Of the trial's 95 % interval, as a share of its rate."""
    measurement = trial.measurement
    assert measurement is not None
    return measurement.interval[1] / measurement.samples_per_second - 1


def _has_time_to_check(session: Session, others: list[TrainingConfig], config: TrainingConfig) -> bool:
    """Whether a further finalist could be measured beside the others, once it was checked."""
    if session.is_checked(config):
        return True
    checks = [answer.seconds for (kind, _), answer in session.probes.items() if kind == "parity"]
    seconds = max(checks, default=0.0)
    if session.allowed(config):
        return _has_time(session, [*others, config], FEWEST_ROUNDS, checks_seconds=seconds)
    # What leaves the held batch is a second answer: told after a single round too, and before a second finalist.
    rounds = session.pace.rounds_of_a_plain_gain
    return _has_time(session, others[:1], rounds, checks_seconds=seconds + _expected_seconds(session, config))


def _trains_the_same(session: Session, trial: Trial) -> bool:
    assert session.baseline is not None
    if session.space.numerics_key(trial.config) == session.space.numerics_key(session.baseline):
        return True
    result = session.parity(trial.config)
    failure = result if isinstance(result, Failure) else parity_failure(result)
    if failure is not None:
        session.fail(trial, failure)
    return failure is None
