"""The finalists and the baseline, interleaved in fresh processes until it is clear which is faster."""

from __future__ import annotations

from autotune.config import TrainingConfig
from autotune.records import OUT_OF_MEMORY, Failure, Stage, Trial
from autotune.search.session import WORTHWHILE_GAIN, Session
from autotune.stats import FEWEST_ROUNDS, faster

MOST_FINALISTS = 2
"""Beside the baseline and the free-batch candidate: each costs a fresh process per round."""
MOST_ROUNDS = 6
NEAR_BEST = 0.93
"""A configuration slower than this share of the best in its first measurement is no finalist."""
ALIKE = 1.01
"""First measurements this close to the best are no better and no worse than it."""
LARGEST_RESERVE = 0.45
"""Share of the budget that the confirmation may keep for itself."""
FEWEST_SOAK_SECONDS = 5.0


def reserve_seconds(session: Session) -> float:
    """What confirmation, parity and soak are likely to take: kept free of everything before them."""
    base, best = session.baseline_trial(), session.best()
    entrants = {trial.config.key: trial for trial in (base, best) if trial is not None}
    seconds = [trial.seconds for trial in entrants.values()]
    # One more finalist than those that are known now, and a parity check that compiles.
    estimate = FEWEST_ROUNDS * (sum(seconds) + min(seconds, default=0.0)) + max(seconds, default=0.0)
    return min(estimate + 1.5 * session.pace.soak_seconds, LARGEST_RESERVE * session.budget.seconds)


def confirm(session: Session) -> None:
    """Re-measures what may be recommended, beside the baseline, and soaks the winner. All of it goes into the study.

    A finalist that trains differently, fails in a later round or does not survive its soak is recorded as failed, and the
    next one takes its place.
    """
    session.watcher.stage("confirm", "the best few and your program, in turn, in fresh processes")
    assert session.baseline is not None
    finalists = _finalists(session, free=False)
    held = session.settings.conditions.global_batch_size
    if held is not None:
        finalists += [config for config in _finalists(session, free=True)[:1] if not session.allowed(config)]
    entrants = [session.baseline, *finalists]
    for round_number in range(MOST_ROUNDS):
        if len(entrants) == 1 and round_number > 0:
            break
        expected = sum(_expected_seconds(session, config) for config in entrants)
        if round_number >= 1 and session.budget.left() - session.pace.soak_seconds < expected:
            break
        for config in list(entrants):
            trial = session.measure(config, "confirm", confirm_round=round_number)
            if trial.failure is not None and config != session.baseline:
                entrants.remove(config)
        if round_number + 1 >= FEWEST_ROUNDS and all(_settled(session, config) for config in entrants[1:]):
            break
    _soak_the_winner(session, entrants[1:])


def _expected_seconds(session: Session, config: TrainingConfig) -> float:
    rounds = [trial.seconds for trial in session.trials if trial.config == config and trial.round is not None]
    first = session.measured(config)
    return rounds[-1] if rounds else (first.seconds if first is not None else 5.0)


def _finalists(session: Session, *, free: bool) -> list[TrainingConfig]:
    """The best measured configurations that train the same, at most `MOST_FINALISTS`."""
    assert session.baseline is not None
    found: list[TrainingConfig] = []
    candidates = session.candidates(free=free)
    if not candidates:
        return found
    base = session.baseline_trial()
    for trial in _simpler_first(session, candidates):
        if len(found) == MOST_FINALISTS or (found and session.score(trial) < NEAR_BEST * session.score(candidates[0])):
            break
        if trial.config == session.baseline or (base is not None and session.score(trial) <= session.score(base)):
            break
        if _trains_the_same(session, trial):
            found.append(trial.config)
    return found


def _simpler_first(session: Session, candidates: list[Trial]) -> list[Trial]:
    """Best first, but what is as good as the best, as far as one measurement tells, ordered by how simple it is.

    Only the simplest of those is kept: the others could win by noise alone.
    """
    top = session.score(candidates[0])
    alike = [trial for trial in candidates if session.score(trial) * ALIKE >= top]
    simplest = min(alike, key=lambda t: (session.space.effective_batch(t.config), session.space.rank(t.config)))
    return [simplest, *(trial for trial in candidates if trial not in alike)]


def _trains_the_same(session: Session, trial: Trial) -> bool:
    assert session.baseline is not None
    if session.numerics_key(trial.config) == session.numerics_key(session.baseline):
        return True
    result = session.parity(trial.config)
    if isinstance(result, Failure):
        session.fail(trial, result)
        return False
    if not result.passed:
        session.fail(trial, Failure(kind="numerics", phase="parity", message=result.reason))
        return False
    return True


def _settled(session: Session, config: TrainingConfig) -> bool:
    own, base = round_rates(session, config)
    return faster(own, base, minimum_gain=WORTHWHILE_GAIN - 1) != "undecided"


def round_rates(session: Session, config: TrainingConfig) -> tuple[list[float], list[float]]:
    """Rates of a configuration and of the baseline in the rounds that both have."""
    assert session.baseline is not None
    own = _rates(session.trials, config)
    base = _rates(session.trials, session.baseline)
    shared = sorted(own.keys() & base.keys())
    return [own[number] for number in shared], [base[number] for number in shared]


def _rates(trials: list[Trial], config: TrainingConfig) -> dict[int, float]:
    return {
        trial.round: trial.measurement.samples_per_second
        for trial in trials
        if trial.config == config
        and trial.round is not None
        and trial.measurement is not None
        and trial.failure is None
    }


def _soak_the_winner(session: Session, entrants: list[TrainingConfig]) -> None:
    """Runs the best entrant on for longer; one that runs out of memory or dies gives way to the next."""
    ranked = sorted(entrants, key=lambda config: _mean(_rates(session.trials, config)), reverse=True)
    assert session.baseline is not None
    for config in [*ranked, session.baseline]:
        if session.budget.left() < FEWEST_SOAK_SECONDS and config != session.baseline:
            session.warnings.append("no time was left for the soak: the recommendation ran for its measurements only")
            return
        stage: Stage = "soak"
        session.watcher.stage(stage, "the winner runs on for longer")
        answer = session.probe("soak", config)
        if answer.failure is None:
            assert answer.soak is not None
            session.warnings.extend(answer.soak.findings)
            return
        session.watcher.probe("soak", f"{answer.failure.kind}: {answer.failure.message}")
        if config == session.baseline:
            session.warnings.append(f"your own program failed when it ran on for longer: {answer.failure.message}")
            return
        trial = session.measured(config)
        if trial is not None:
            longest = " at the longest batch" if answer.failure.kind in OUT_OF_MEMORY else ""
            session.fail(
                trial, answer.failure.model_copy(update={"message": f"in the soak{longest}: {answer.failure.message}"})
            )


def _mean(rates: dict[int, float]) -> float:
    return sum(rates.values()) / len(rates) if rates else 0.0
