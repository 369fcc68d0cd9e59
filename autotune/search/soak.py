"""The winner runs on for longer, as training does; what does not bear it gives way to the next best."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from autotune.config import TrainingConfig
from autotune.knobs.registry import compiles_in_evaluation, first_step_limit_seconds, slow_to_start
from autotune.memory_margin import leak
from autotune.quantities import format_rate
from autotune.records import LONGEST_SOAK_SHARE, OUT_OF_MEMORY, Failure, FailureKind, SoakResult, Trial, TrialAnswer
from autotune.search.pace import Pace
from autotune.search.session import Session

EVALUATION_SHARE = 0.4
"""Of a cold first step, for compiling forward and loss without gradients: 8.8 s for GPT-2 124M, whose first step takes 21
to 27 s (H200)."""
SHORTER_BATCH_SHARE = 1.4
"""Of a cold first step, for compiling it again for the shorter last batch of a pass: 1.4 for ResNet-50, where a search with
290 s ended 20 s late by a smaller share (H200); 0.7 and 0.9 for three layers of a transformer (CPU)."""
PARAMETER_BYTES_PER_SECOND = 1.3e8
"""Of the model, where it is saved and loaded with what the optimizer keeps beside it: 3.8 s for GPT-2 124M and AdamW, a
state of 1.5 GB (H200)."""
LATE_SECONDS = 5.0
"""A search ends so much after its budget, if need be, for the shortest soak of what it recommends. Where even that needs
more time, it ends without one, and says so: a budget may be what a job or a person has, while a soak left out is not lost,
since the study keeps everything and the same command goes on with it."""
FEWEST_SOAK_SECONDS = 3.0
FEWEST_SOAK_STEPS = 200
"""Enough, where a budget leaves no time for the whole soak."""
NEARLY_WHOLE = 0.9
"""A soak that ran for this share of the whole time was not cut short."""
OF_THE_PROGRAM: tuple[FailureKind, ...] = ("numerics", "user_error")
"""Failures that a program which runs on for longer may have by itself: a loss that diverges, a broken sample."""


def soak_trial_seconds(session: Session, trial: Trial, soak_seconds: float) -> float:
    """What a soak of so many seconds of a trial's configuration is likely to take: the start with a first step that was
    compiled before, the run up to the end of a pass over the data, what is compiled beside it, and saving and loading."""
    state = session.facts.workload.parameter_bytes / PARAMETER_BYTES_PER_SECOND
    run = LONGEST_SOAK_SHARE * soak_seconds
    return session.start_seconds(trial) + run + _compile_seconds(session, trial) + state


def _compile_seconds(session: Session, trial: Trial) -> float:
    """For graphs that no measurement needed: of an evaluation, and of a shorter last batch."""
    share = EVALUATION_SHARE if compiles_in_evaluation(trial.config) else 0.0
    if slow_to_start(trial.config) and _meets_a_shorter_batch(session, trial.config):
        share += SHORTER_BATCH_SHARE
    limit = first_step_limit_seconds(trial.config)
    cold = [
        one.measurement.first_step_seconds
        for one in session.trials
        if one.measurement is not None and first_step_limit_seconds(one.config) == limit
    ]
    return share * max(cold, default=0.0)


def _meets_a_shorter_batch(session: Session, config: TrainingConfig) -> bool:
    """Whether a pass over the data ends with a shorter batch, and no trial of the configuration came that far."""
    workload, space = session.facts.workload, session.space
    length = workload.dataset_length
    if length is None or workload.drop_last or workload.batch_fixed_reason is not None:
        return False
    measured = [one.measurement for one in session.trials if one.config == config and one.measurement is not None]
    most_steps = max((one.warmup_steps + sum(one.blocks.steps) for one in measured), default=0)
    return length % space.micro_batch(config) > 0 and most_steps * space.effective_batch(config) < length


def _has_time(session: Session, config: TrainingConfig, *, late_seconds: float = LATE_SECONDS) -> bool:
    """For the shortest soak of the configuration, which may end so late, unless an earlier call ran one."""
    if ("soak", config.key) in session.probes:
        return True
    trial = session.measured(config)
    assert trial is not None
    return session.budget.left() + late_seconds >= soak_trial_seconds(session, trial, FEWEST_SOAK_SECONDS)


def soak_the_answers(session: Session) -> None:
    """Runs what is about to be recommended on for longer; where that fails, the next best takes its place."""
    session.watcher.stage("soak", "the winner runs on for longer")
    while not survives(session, session.results().best().config):
        pass
    while (free := session.results().free_batch()) is not None and not survives(session, free.config):
        pass


def survives(session: Session, config: TrainingConfig) -> bool:
    """Whether nothing speaks against the configuration; where it fails in its soak, that is recorded."""
    is_baseline = config == session.baseline
    # Nothing depends on how the user's own program runs on: that is no reason to end late.
    if not _has_time(session, config, late_seconds=0.0 if is_baseline else LATE_SECONDS):
        if not is_baseline:
            whose = "the recommendation" if session.allowed(config) else "the answer with another batch"
            session.warnings.append(
                f"no time was left for a soak of {whose}: it ran for its measurements only; the same command goes on with it"
            )
        return True
    trial = session.measured(config)
    assert trial is not None
    with _soaks_that_fit(session, trial):
        answer = session.probe("soak", config)
        failure = None if is_baseline else _held_against(session, answer)
    if failure is None:
        if answer.soak is not None:
            session.warnings.extend(finding for finding in answer.soak.findings if finding not in session.warnings)
            if _was_cut_short(session, config, answer.soak):
                session.warnings.append(f"the soak was cut short for lack of time: it ran {answer.soak.steps:,} steps")
        elif is_baseline and answer.failure is not None:
            session.warnings.append(f"your own program failed when it ran on for longer: {answer.failure.message}")
        return True
    session.watcher.probe("soak", f"{failure.kind}: {failure.message}")
    longest = " at the longest batch" if failure.kind in OUT_OF_MEMORY and answer.failure is not None else ""
    session.fail(trial, failure.model_copy(update={"message": f"in the soak{longest}: {failure.message}"}))
    return False


@contextmanager
def _soaks_that_fit(session: Session, trial: Trial) -> Iterator[None]:
    """Inside, soaks are as long as the time left allows for that of the trial's configuration."""
    whole = session.pace
    left = (session.budget.left() - soak_trial_seconds(session, trial, 0.0)) / LONGEST_SOAK_SHARE
    session.pace = replace(whole, soak_seconds=min(whole.soak_seconds, max(FEWEST_SOAK_SECONDS, left)))
    try:
        yield
    finally:
        session.pace = whole


def _was_cut_short(session: Session, config: TrainingConfig, soak: SoakResult) -> bool:
    """Whether it made few steps and had less than the whole time for them, be it in an earlier call."""
    ran_seconds = soak.steps * session.space.effective_batch(config) / soak.samples_per_second
    return soak.steps < FEWEST_SOAK_STEPS and ran_seconds < NEARLY_WHOLE * Pace.soak_seconds


def _held_against(session: Session, answer: TrialAnswer) -> Failure | None:
    """What speaks against a configuration that ran on; what the user's own program does as well does not."""
    if answer.failure is not None:
        own = _own_soak(session) if answer.failure.kind in OF_THE_PROGRAM else None
        if own is None or own.failure is None or own.failure.kind != answer.failure.kind:
            return answer.failure
        session.warnings.append(f"your own program fails too when it runs on for longer: {own.failure.message}")
        return None
    soak = answer.soak
    assert soak is not None
    if soak.allocator_retries:
        thrashes = f"the allocator had to free and retry {soak.allocator_retries} times: it does not really fit"
        return Failure(kind="device_oom", phase="soak", message=thrashes)
    if (grows := leak(soak.growth_bytes_per_step)) and not _own_program_grows(session):
        kind: FailureKind = "device_oom" if session.facts.device == "cuda" else "host_oom"
        return Failure(
            kind=kind, phase="soak", message=f"{grows}, and {session.results().whose('your own settings')} show none"
        )
    return _left_out(session, soak) or _too_slow_at_the_end(session, soak)


def _own_program_grows(session: Session) -> bool:
    """Whether the user's own program holds ever more memory as well, or there is no time to see that."""
    base = session.baseline_trial()
    if base is not None and base.measurement is not None and leak(base.measurement.memory.growth_bytes_per_step):
        return True
    own = _own_soak(session)
    return own is None or (own.soak is not None and bool(leak(own.soak.growth_bytes_per_step)))


def _left_out(session: Session, soak: SoakResult) -> Failure | None:
    """The failure where parameters lose their gradients while it runs on, and keep them in the user's own program."""
    own = _own_soak(session) if soak.lost_gradients else None
    if own is None or own.soak is None:
        return None
    kept = [name for name in soak.lost_gradients if name not in own.soak.lost_gradients]
    if not kept:
        return None
    message = (
        f"{kept[0]} had a gradient at first and has none after {soak.steps:,} steps, which it keeps with "
        f"{session.results().whose('your own settings')}: a part of the model is left out"
    )
    return Failure(kind="numerics", phase="soak", message=message)


def _too_slow_at_the_end(session: Session, soak: SoakResult) -> Failure | None:
    """The failure where a rate that fell ends below that of the user's own program, which holds its own; none where memory
    is the aim, which may cost speed from the first step on."""
    if session.settings.objective == "memory":
        return None
    assert session.baseline is not None
    base_rate = session.results().answer(session.baseline).samples_per_second
    last_rate = soak.last_samples_per_second
    if last_rate is None or last_rate >= base_rate:
        return None
    own = _own_soak(session)
    if own is None or own.soak is None or (own.soak.last_samples_per_second or 0.0) <= last_rate:
        return None
    slower = (
        f"it slowed down to {format_rate(last_rate)} samples/s, below the {format_rate(base_rate)} of "
        f"{session.results().whose('your settings')}"
    )
    return Failure(kind="timeout", phase="soak", message=slower)


def _own_soak(session: Session) -> TrialAnswer | None:
    """The user's own program run on for as long, or as there is time for; None where there is none."""
    base = session.baseline_trial()
    assert base is not None
    if not _has_time(session, base.config):
        return None
    with _soaks_that_fit(session, base):
        return session.probe("soak", base.config)
