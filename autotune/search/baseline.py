"""First stage: the user's own program, measured. Without it there is nothing to compare with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from autotune.config import TrainingConfig, Value, settings_text
from autotune.errors import NoAnswerError, UserError
from autotune.knobs.registry import KNOBS
from autotune.records import OUT_OF_MEMORY, Failure, Trial
from autotune.search.memory import find_ceiling
from autotune.search.pace import FEWEST_STARTS, FEWEST_TRIALS
from autotune.search.rescue import lightest_that_fits
from autotune.search.session import Session


def run_baseline(session: Session, *, expected: Mapping[str, Value] | None = None) -> Trial:
    """Measures the user's program; where it does not fit, the largest micro-batch that does, at the same global batch;
    where none does, that with the lightest settings with which one does. `expected`: these, where they are known.

    Raises `UserError` where the program cannot run at all, and `NoAnswerError` where that is not its fault: the text
    says what happened. Where starting took much of the budget, the session hurries; after that, where the trial shows that
    few others fit.
    """
    config = session.space.baseline
    session.hurry_if_short_of(FEWEST_STARTS * session.budget.elapsed())
    session.watcher.stage("baseline", "your program as it is")
    if not session.facts.workload.step_fits:
        config, trial = _leaner_reference(session, config, "no step of it fits", expected)
    else:
        trial = _measured(session, config)
        if trial.failure is not None and trial.failure.kind in OUT_OF_MEMORY:
            config, trial = _smaller_reference(session, config, trial.failure, expected)
    if trial.failure is not None:
        raise baseline_error(trial.failure)
    session.baseline = config
    session.hurry_if_short_of(FEWEST_TRIALS * session.seconds_unhurried(trial))
    session.budget.searched_seconds = max(0.0, session.budget.left())
    return trial


def _measured(session: Session, config: TrainingConfig) -> Trial:
    """What failed in an earlier call is tried again: a busy machine or a short budget may have been the reason."""
    trial = session.measured(config)
    if trial is None or (trial.failure is not None and trial.failure.kind not in OUT_OF_MEMORY):
        return session.measure_again(config, "baseline")
    return trial


def baseline_error(failure: Failure) -> UserError | NoAnswerError:
    """What to tell a person whose own program does not run."""
    kind = failure.kind if failure.signal is None else f"{failure.kind}, {failure.signal}"
    error = NoAnswerError if failure.kind == "memory_not_returned" else UserError
    return error(
        f"your own program does not run as it is ({kind}, in phase {failure.phase}): {failure.message}",
        told_beside(failure),
    )


def told_beside(failure: Failure) -> str:
    """The user's own frames, and where to read what the trial printed, if it printed anything."""
    lines = [failure.detail] if failure.detail else []
    output = Path(failure.output_path) if failure.output_path is not None else None
    if output is not None and output.is_file() and output.stat().st_size:
        lines.append(f"what it printed: {failure.output_path}")
    return "\n".join(lines)


def _smaller_reference(
    session: Session, config: TrainingConfig, failure: Failure, expected: Mapping[str, Value] | None
) -> tuple[TrainingConfig, Trial]:
    """The reference where the baseline does not fit. The user is told first."""
    size = session.space.micro_batch(config)
    session.watcher.note(f"your batch of {size} does not fit ({failure.message}); looking for the largest that does")
    ceiling = find_ceiling(session, config, keep_global_batch=True)
    if ceiling.largest_batch_size is None:
        return _leaner_reference(session, config, failure.message, expected)
    smaller = config.replace({session.space.batch_name: ceiling.largest_batch_size})
    largest = ceiling.largest_batch_size
    _warn(
        session,
        f"a batch of {size} does not fit here; the reference is a micro-batch of {largest}, with {_how(session)}",
    )
    return smaller, _measured(session, smaller)


def _leaner_reference(
    session: Session, config: TrainingConfig, why: str, expected: Mapping[str, Value] | None
) -> tuple[TrainingConfig, Trial]:
    """The reference where the user's program fits at no micro-batch. The user is told first."""
    space = session.space
    session.watcher.note(f"your program fits at no batch as it is ({why}); looking for what it takes to make it fit")
    leanest, short_of_margin = lightest_that_fits(session, why, expected or {})
    leaner, trial = _grown(session, leanest)
    settings, size = space.beside_own(leaner), space.micro_batch(leaner)
    how = f", with {_how(session)}" if size < space.micro_batch(config) else ""
    if settings:
        rounds = "" if all(knob.effect == "exact" for knob in KNOBS if knob.name in settings) else UNCHECKED
        _warn(
            session,
            f"your program fits at no batch here; the reference is your program with {settings_text(settings)}, at a "
            f"micro-batch of {size}{how}, and every speed-up is told against that{rounds}",
        )
    elif how:
        _warn(
            session,
            f"a batch of {space.micro_batch(config)} does not fit here; the reference is a micro-batch of {size}{how}",
        )
    if short_of_margin:
        _warn(session, short_of_margin)
    return leaner, trial


def _grown(session: Session, leanest: TrainingConfig) -> tuple[TrainingConfig, Trial]:
    """These settings, which fit at this micro-batch, at the largest that fits and bears being measured."""
    space = session.space
    smallest = space.micro_batch(leanest)
    own = leanest.replace({space.batch_name: space.micro_batch(space.baseline)})
    while True:
        ceiling = find_ceiling(session, own, keep_global_batch=True, start=smallest)
        size = ceiling.largest_batch_size or smallest
        config = own.replace({space.batch_name: size})
        trial = _measured(session, config)
        # A measurement holds a little more than a probe; that it failed is known to the next search for a ceiling.
        if trial.failure is None or trial.failure.kind not in OUT_OF_MEMORY or size <= smallest:
            return config, trial


UNCHECKED = "; what these settings round is not checked, since no step in fp32 fits"


def _how(session: Session) -> str:
    same_batch = session.settings.conditions.global_batch_size is not None
    return "gradients accumulated to the same batch" if same_batch else "a smaller effective batch, since none is held"


def _warn(session: Session, warning: str) -> None:
    """Told at once, and in the report."""
    session.warnings.append(warning)
    session.watcher.note(warning)
