"""The step itself: one knob after the other from its prior, then the batch, judged without the loader."""

from __future__ import annotations

from collections.abc import Iterator

from autotune.advice.bottleneck import bottleneck
from autotune.config import TrainingConfig, Value
from autotune.knobs.base import Knob
from autotune.knobs.registry import KNOBS
from autotune.quantities import format_share
from autotune.records import OUT_OF_MEMORY, Bottleneck, Stage, Trial
from autotune.search.answers import WORTHWHILE_GAIN
from autotune.search.loader import search_loader
from autotune.search.session import Session

PASSES = 2
"""The second pass tries what the first had to leave out: a scope of compilation means something once one compiles."""
MOST_VALUES_PER_KNOB = 2
"""Of the values that a knob expects to be better than the baseline; the sampler may try the others later."""


def search_compute(session: Session, start: Trial) -> Trial:
    """Coordinate descent over the knobs of the step. Returns the trial that leads in the end, `start` if none is better.

    Where a faster step is one that waits for its data, the loader is moved at once: both pay together, and what is dear,
    such as compiling, may no longer.
    """
    _announce(session)
    incumbent = start
    tried: set[tuple[str, Value]] = set()
    for _ in range(PASSES):
        for knob in _ordered(session, incumbent):
            better = _best_value(session, knob, incumbent, tried)
            if better is not incumbent and bottleneck_of(session, better) == "loader":
                better = search_loader(session, better)
                _announce(session)
            incumbent = better
    return incumbent


def _announce(session: Session) -> None:
    session.watcher.stage("compute", "precision, kernels and compilation, one knob after the other")


def bottleneck_of(session: Session, trial: Trial) -> Bottleneck | None:
    """What holds a measured configuration back."""
    assert trial.measurement is not None
    return bottleneck(trial.measurement, device=session.facts.device, limit_bytes=session.memory_limit_bytes())


def _ordered(session: Session, incumbent: Trial) -> list[Knob]:
    """Knobs that cure what holds the step back come first; those that save memory only, where memory is the aim."""
    cause = bottleneck_of(session, incumbent)
    wanted = "memory" if session.settings.objective == "memory" else None
    knobs = [
        knob
        for knob in KNOBS
        if knob.stage == "compute"
        and knob.name in session.space.varied
        and (not knob.only_saves_memory or wanted == "memory")
    ]
    return sorted(knobs, key=lambda knob: not ({cause, wanted} & knob.cures))


def _best_value(session: Session, knob: Knob, incumbent: Trial, tried: set[tuple[str, Value]]) -> Trial:
    """The incumbent with the first of the knob's better-looking values that is worthwhile."""
    if knob.in_update_only and (share := gains_too_little(session, incumbent)) is not None:
        told = f"{knob.name}: the optimizer's update takes {format_share(share)} of a step, and no more can be gained"
        session.skipped[knob.name] = told
        return incumbent
    session.skipped.pop(knob.name, None)  # it was said for another step
    for value in _hopeful(session, knob, incumbent):
        if (knob.name, value) in tried:
            continue
        for candidate in _with_companions(session, knob, value, incumbent):
            if session.obstacle(candidate) is not None or not session.affords(candidate):
                continue
            tried |= candidate.changes_from(incumbent.config).items()
            trial = session.measure(candidate, "compute", incumbent=incumbent)
            if _better(session, trial, incumbent):
                return trial
            if trial.failure is None:
                break  # it runs with its companions, so there is nothing to be had without them
    return incumbent


def gains_too_little(session: Session, trial: Trial) -> float | None:
    """The share of a step that the optimizer's update takes, where that is all that could be gained there and not
    worthwhile; None where it may be, or where memory is the aim."""
    assert trial.measurement is not None
    share = trial.measurement.update_share
    if share is None or session.settings.objective == "memory" or WORTHWHILE_GAIN * (1 - share) < 1:
        return None
    return share


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
    """The values that the knob expects to beat the one it has now, best first.

    Where the step is still held back by what a value of this knob may cure, starting kernels or work of the host, the
    rest of what beats the baseline is worth a trial too. The order is one of speed: where memory is the aim, it says
    nothing of the knobs that save some.
    """
    order = [value for value in knob.prior(session.facts) if value in session.space.choices[knob.name]]
    own = current.config[knob.name]
    better_than = own
    cause = bottleneck_of(session, current)
    if cause in ("launch", "host") and cause in knob.cures:
        better_than = session.space.baseline[knob.name]
    for_memory = session.settings.objective == "memory" and "memory" in knob.cures
    hopeful = order[: order.index(better_than)] if better_than in order and not for_memory else order
    return [value for value in hopeful if value != own][:MOST_VALUES_PER_KNOB]


def _better(session: Session, trial: Trial, incumbent: Trial) -> bool:
    if trial.measurement is None or trial.failure is not None:
        return False
    return session.compute_score(trial) >= WORTHWHILE_GAIN * session.compute_score(incumbent)


# --- the batch --------------------------------------------------------------------------------------------------------


def search_batch(session: Session, incumbent: Trial, stage: Stage, *, free: bool) -> Trial:
    """Larger micro-batches, doubled until another doubling is not worthwhile or does not fit.

    A size that does not fit ends its trial and is remembered, so no probes are spent on where exactly the end is: speed
    saturates long before, or the end is met by the doubling.

    With `free` the effective batch may grow; otherwise only up to the held one. With the memory objective the batch is
    halved instead, as long as the peak falls.
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
        doubled = size <= last_tried / 2 if smaller_wanted else size >= 2 * last_tried
        if not doubled and size != path[-1]:
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
        if not _better(session, trial, best):
            break
        best = trial
    return best


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
