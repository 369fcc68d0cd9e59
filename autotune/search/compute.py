"""The step itself: one knob after the other from its prior, then the batch, judged without the loader."""

from __future__ import annotations

from collections.abc import Iterator

from autotune.advice.bottleneck import bottleneck, bottleneck_of_step
from autotune.config import TrainingConfig, Value
from autotune.knobs.base import Knob
from autotune.knobs.registry import KNOBS, slow_to_start
from autotune.quantities import format_share
from autotune.records import OF_STARTING, OUT_OF_MEMORY, Bottleneck, Stage, Trial
from autotune.search.answers import WORTHWHILE_GAIN, gain_of_update
from autotune.search.confirm import reserve
from autotune.search.loader import loader_share, search_loader
from autotune.search.session import Session

PASSES = 2
"""The second pass tries what the first had to leave out: a scope of compilation means something once one compiles."""
MOST_VALUES_PER_KNOB = 2
"""Of the values that a knob expects to be better than the baseline; the sampler may try the others later."""
LOADING_LASTS_LONGER = 0.5
"""End to end at less than this share of the step alone, more time goes by in loading than in the step."""
ANOTHER_STEP = 1.5
"""So many times faster, a step has another share in its update: what gained too little there to be seen may do so now."""
NOT_DISTURBED = 0.9
"""A rate below this share of what another update gave says that the machine was busy, or that the shares do not tell."""
HIDDEN = 0.85
"""A step whose device got faster waits for its host, which may take a little longer than the device did before, and whose
pace is the first that other work on the machine disturbs."""
LEAP = 16
"""Until the device is busy, a batch of so many times the size takes no longer, so that what lies between tells nothing; and
one trial of seconds is what a short budget has left beside a compilation."""


def search_compute(session: Session, start: Trial, *, quick_only: bool = False) -> Trial:
    """Coordinate descent over the knobs of the step. Returns the trial that leads in the end, `start` if none is better.

    Where a faster step is one that waits for its data, the loader is moved at once: both pay together, and what is dear,
    such as compiling, may no longer. `quick_only`: what is compiled or tuned in its first step is left for later.
    """
    _announce(session)
    incumbent = start
    tried: set[tuple[str, Value]] = set()
    for _ in range(PASSES):
        for knob in _ordered(session, incumbent):
            better = _best_value(session, knob, incumbent, tried, quick_only)
            if better is not incumbent:
                reserve(session)
            if better is not incumbent and loader_comes_first(session, better):
                better = search_loader(session, better)
                _announce(session)
            if session.compute_score(better) > ANOTHER_STEP * session.compute_score(incumbent):
                in_update = {knob.name for knob in KNOBS if knob.in_update_only}
                tried = {(name, value) for name, value in tried if name not in in_update}
            incumbent = better
    return incumbent


def _announce(session: Session) -> None:
    session.watcher.stage("compute", "precision, kernels and compilation, one knob after the other")


def bottleneck_of(session: Session, trial: Trial) -> Bottleneck | None:
    """What holds a measured configuration back."""
    assert trial.measurement is not None
    return bottleneck(trial.measurement, device=session.facts.device, limit_bytes=session.memory_limit_bytes())


def step_bottleneck_of(session: Session, trial: Trial) -> Bottleneck | None:
    """What holds its step back where batches lie ready."""
    assert trial.measurement is not None
    return bottleneck_of_step(trial.measurement, device=session.facts.device, limit_bytes=session.memory_limit_bytes())


def loader_comes_first(session: Session, trial: Trial) -> bool:
    """Whether the loader is to be moved before the step: it holds the step back, and the starting of kernels, whose cure
    gains several times, does not take longer than the loading."""
    if bottleneck_of(session, trial) != "loader":
        return False
    return step_bottleneck_of(session, trial) != "launch" or loader_share(trial) < LOADING_LASTS_LONGER


def device_waits(session: Session, trial: Trial) -> bool:
    """Whether the device waits for work in the step itself, so that nothing is gained by computing faster."""
    assert trial.measurement is not None
    seen = trial.measurement.device_lag_share is not None and session.settings.objective != "memory"
    return seen and step_bottleneck_of(session, trial) in OF_STARTING


def only_computes_faster(knob: Knob) -> bool:
    """Whether the knob belongs to the step and does nothing for a device that waits."""
    return knob.stage == "compute" and not knob.cures & OF_STARTING


def seconds_of_the_cure(session: Session, trial: Trial) -> float:
    """How long the longest trial is likely to take that the knobs of the step have against what holds it back."""
    return max(map(session.expected_seconds, _cures(session, trial)), default=0.0)


def _cures(session: Session, trial: Trial, *, against_the_cause_alone: bool = False) -> list[TrainingConfig]:
    """The trial with the first value of each knob against what holds its step back, of those that may run; or only with
    those values that a knob names for that cause."""
    cause = step_bottleneck_of(session, trial)
    candidates = [
        next(_with_companions(session, knob, value, trial))
        for knob in _ordered(session, trial)
        if cause in knob.cures
        for value in _hopeful(session, knob, trial)[:1]
        if not against_the_cause_alone or value in knob.best_against(cause, session.facts)
    ]
    return [candidate for candidate in candidates if session.obstacle(candidate) is None]


def _ordered(session: Session, incumbent: Trial) -> list[Knob]:
    """Knobs that cure what holds the step back come first; those that save memory only, where memory is the aim."""
    cause = step_bottleneck_of(session, incumbent)
    wanted = "memory" if session.settings.objective == "memory" else None
    knobs = [
        knob
        for knob in KNOBS
        if knob.stage == "compute"
        and knob.name in session.space.varied
        and (not knob.only_saves_memory or wanted == "memory")
    ]
    return sorted(knobs, key=lambda knob: not ({cause, wanted} & knob.cures))


def _best_value(
    session: Session, knob: Knob, incumbent: Trial, tried: set[tuple[str, Value]], quick_only: bool
) -> Trial:
    """The incumbent with the first of the knob's better-looking values that is worthwhile."""
    if knob.in_update_only and (share := gains_too_little(session, incumbent)) is not None:
        told = f"{knob.name}: the optimizer's update takes {format_share(share)} of a step, and no more can be gained"
        session.skipped[knob.name] = told
        return incumbent
    session.skipped.pop(knob.name, None)  # it was said for another step
    values = [value for value in _hopeful(session, knob, incumbent) if (knob.name, value) not in tried]
    if only_computes_faster(knob) and device_waits(session, incumbent):
        if any(session.obstacle(incumbent.config.replace({knob.name: value})) is None for value in values):
            session.skipped[knob.name] = (
                f"{knob.name}: the device waits for its next kernel, and nothing is gained by computing faster"
            )
        return incumbent
    for value in values:
        for candidate in _with_companions(session, knob, value, incumbent):
            if session.obstacle(candidate) is not None or (quick_only and slow_to_start(candidate)):
                continue
            if not session.affords(candidate):
                continue
            tried |= candidate.changes_from(incumbent.config).items()
            trial = session.measure(candidate, "compute", incumbent=incumbent)
            if is_worthwhile(session, knob, trial, incumbent):
                return trial
            if not quick_only and (started := _with_its_kernels_started(session, trial, incumbent)) is not None:
                return started
            if trial.failure is None:
                break  # it runs with its companions, so there is nothing to be had without them
    return incumbent


def _with_its_kernels_started(session: Session, trial: Trial, incumbent: Trial) -> Trial | None:
    """What gained nothing, with the cure of what holds it back: where the incumbent's device is busy and the trial's waits,
    the device got faster, and the starting of kernels hides by how much. None where that is not so, or no better.

    ResNet-50 in bf16: channels last ran as fast, with a device that waited for all of the step (H200). Neither that nor
    CUDA graphs beside a busy device would be found by moving one knob at a time.
    """
    if trial.failure is not None or device_waits(session, incumbent) or not device_waits(session, trial):
        return None
    if session.compute_score(trial) < HIDDEN * session.compute_score(incumbent):
        return None
    for candidate in _cures(session, trial, against_the_cause_alone=True):
        cure = candidate.changes_from(trial.config).items()
        was_tried = any(other.config.items() >= cure for other in session.trials)
        # What the incumbent does without was no better, and each time is another compilation.
        if session.measured(candidate) is None and (was_tried or not session.affords(candidate)):
            continue
        cured = session.measure(candidate, "compute", incumbent=incumbent)
        if _better(session, cured, incumbent):
            return cured
    return None


def gains_too_little(session: Session, trial: Trial) -> float | None:
    """The share of a step that the optimizer's update takes, where that is all that could be gained there and not
    worthwhile; None where it may be, or where memory is the aim."""
    assert trial.measurement is not None
    share = trial.measurement.update_share
    if share is None or session.settings.objective == "memory" or WORTHWHILE_GAIN * (1 - share) < 1:
        return None
    return share


def is_worthwhile(session: Session, knob: Knob, trial: Trial, without: Trial) -> bool:
    """Whether the trial's value of the knob is worth having, beside a trial that differs in nothing else.

    Of a knob of the update alone its share of a step tells that: rates of two processes differ by more than it can gain (4 %
    for a step of small kernels, H200), and what one search took, the next refused.
    """
    if knob.in_update_only and session.settings.objective != "memory" and trial.failure is None:
        assert trial.measurement is not None and without.measurement is not None
        gain = gain_of_update(trial.measurement, without.measurement)
        if gain is not None:
            is_no_slower = session.compute_score(trial) >= NOT_DISTURBED * session.compute_score(without)
            return gain >= WORTHWHILE_GAIN and is_no_slower
    return _better(session, trial, without)


def _with_companions(session: Session, knob: Knob, value: Value, incumbent: Trial) -> Iterator[TrainingConfig]:
    """The incumbent with this value and those of other knobs that go with it, then with this value alone."""
    alone = incumbent.config.replace({knob.name: value})
    space = session.space
    companions = {
        name: best
        for name, best in knob.companions(value, session.facts).items()
        if name in space.varied and best in space.choices[name]
    }
    if (together := alone.replace(companions)) != alone:
        yield together
    yield alone


def _hopeful(session: Session, knob: Knob, current: Trial) -> list[Value]:
    """The values that the knob expects to beat the one it has now, best first. That is an order of speed: where memory is
    the aim, it says nothing of the knobs that save some."""
    own, choices = current.config[knob.name], session.space.choices[knob.name]
    first = session.baseline_trial()
    assert first is not None
    hopeful = (
        knob.prior(session.facts)
        if session.settings.objective == "memory" and "memory" in knob.cures
        else knob.expected_to_beat(
            own,
            session.facts,
            at_first=step_bottleneck_of(session, first),
            now=step_bottleneck_of(session, current),
        )
    )
    return [value for value in hopeful if value in choices and value != own][:MOST_VALUES_PER_KNOB]


def _better(session: Session, trial: Trial, incumbent: Trial) -> bool:
    if trial.measurement is None or trial.failure is not None:
        return False
    return session.compute_score(trial) >= WORTHWHILE_GAIN * session.compute_score(incumbent)


# --- the batch --------------------------------------------------------------------------------------------------------


def search_batch(
    session: Session,
    incumbent: Trial,
    stage: Stage,
    *,
    free: bool,
    until_it_waits: bool = False,
    go_on_gain: float = WORTHWHILE_GAIN,
) -> Trial:
    """Larger micro-batches, doubled until another doubling is not worthwhile or does not fit; sixteen times as large as
    long as the device waits, for the rate is then that of the batch, and back to where the rate must have stopped growing.

    A size that does not fit ends its trial and is remembered, so no probes are spent on where exactly the end is: speed
    saturates long before, or the end is met by the doubling.

    With `free` the effective batch may grow; otherwise only up to the held one. With the memory objective the batch is
    halved instead, as long as the peak falls. `until_it_waits`: no further than where loading lasts longer than the step.
    `go_on_gain`: another doubling is tried only after one that gained as much.
    """
    space = session.space
    sizes = [size for size in space.batch_sizes if _reachable(session, size, free)]
    current = space.micro_batch(incumbent.config)
    smaller_wanted = session.settings.objective == "memory"
    path = (
        sorted((s for s in sizes if s < current), reverse=True) if smaller_wanted else [s for s in sizes if s > current]
    )
    best, last_tried = incumbent, current
    for size in path:
        times = 2 if smaller_wanted else _times_larger(session, best)
        far_enough = size <= last_tried / 2 if smaller_wanted else size >= times * last_tried
        if not far_enough and size != path[-1]:
            continue
        candidate = best.config.replace({space.batch_name: size})
        if session.obstacle(candidate) is not None:
            continue
        if not session.affords(candidate):
            break
        trial = session.measure(candidate, stage, incumbent=best)
        if trial.failure is not None and trial.failure.kind in OUT_OF_MEMORY:
            return _halfway(session, best, size, stage)
        last_tried = size
        if times == LEAP and (landed := _short_of_the_leap(session, best, trial, stage)) is not None:
            return landed
        if not _better(session, trial, best):
            break
        gain = session.compute_score(trial) / session.compute_score(best)
        best = trial
        if gain < go_on_gain and not smaller_wanted:
            break
        if until_it_waits and loader_share(best) < LOADING_LASTS_LONGER:
            break
    return best


def _times_larger(session: Session, trial: Trial) -> int:
    """How many times larger the next micro-batch is."""
    assert trial.measurement is not None
    reserved, limit = trial.measurement.memory.reserved_bytes, session.memory_limit_bytes()
    surely_fits = reserved is not None and limit is not None and LEAP * reserved < limit
    return LEAP if surely_fits and device_waits(session, trial) else 2


def _short_of_the_leap(session: Session, before: Trial, after: Trial, stage: Stage) -> Trial | None:
    """The trial of a batch between, where it is at most half as large and as good; None where it cannot be or is not.

    A batch of so many times the size gives so many times the rate at most: smaller ones than the gain are not asked.
    """
    if after.failure is not None:
        return None
    space = session.space
    gain = session.compute_score(after) / session.compute_score(before) / WORTHWHILE_GAIN
    least, most = max(2.0, gain) * space.micro_batch(before.config), space.micro_batch(after.config) / 2
    size = next((size for size in space.batch_sizes if least <= size <= most), None)
    candidate = None if size is None else before.config.replace({space.batch_name: size})
    if candidate is None or session.obstacle(candidate) is not None or not session.affords(candidate):
        return None
    trial = session.measure(candidate, stage, incumbent=before)
    as_good = _better(session, trial, before) and not _better(session, after, trial)
    return trial if as_good else None


def _halfway(session: Session, best: Trial, too_large: int, stage: Stage) -> Trial:
    """After a doubling that did not fit: the largest known size below it that may."""
    space = session.space
    current = space.micro_batch(best.config)
    between = [size for size in space.batch_sizes if current < size < too_large]
    for size in reversed(between[-2:]):
        candidate = best.config.replace({space.batch_name: size})
        if session.obstacle(candidate) is None and session.affords(candidate):
            trial = session.measure(candidate, stage, incumbent=best)
            if _better(session, trial, best):
                return trial
    return best


def _reachable(session: Session, size: int, free: bool) -> bool:
    held = session.settings.conditions.global_batch_size
    return free or held is None or size <= held
