"""How far the batch goes: ceilings found by probes that run, one for each memory class that matters."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.config import TrainingConfig, settings_text
from autotune.records import OUT_OF_MEMORY, Ceiling, FailureKind, TrialAnswer
from autotune.search.ceiling import CeilingSearch
from autotune.search.session import Session

USABLE = 0.99
"""Share of the usable memory that predictions aim at: reserved bytes follow the batch to about one per cent only."""
LONGEST_PROBE_SHARE = 0.03
"""A probe whose single step takes a larger share of the budget ends the search for larger batches."""


def find_ceiling(
    session: Session, config: TrainingConfig, *, keep_global_batch: bool = False, start: int | None = None
) -> Ceiling:
    """The largest micro-batch that runs and leaves the margin, the other knobs as in `config`.

    `keep_global_batch`: only micro-batches that the global batch is a multiple of. `start`: the first to try, in place of
    the micro-batch of `config`. Every size named in the answer ran, or failed, here; the probes are kept in the study, so a
    resumed search asks for none twice.
    """
    space = session.space
    held = space.effective_batch(config)
    sizes = [size for size in space.probe_sizes(config) if not keep_global_batch or held % size == 0]
    start = min(start or space.micro_batch(config), max(sizes))
    allowed = sizes if keep_global_batch else _allowed_sizes(session, config)
    search = CeilingSearch(
        limit_bytes=_aim_bytes(session),
        cap=session.facts.largest_batch_size,
        start=start,
        margin=session.settings.conditions.memory_margin,
        allowed=allowed,
    )
    kinds: dict[int, FailureKind] = {}
    known = session.obstacles.too_large(config)
    if known is not None:
        search.tell(known.micro_batch_size, fits=False, peak_bytes=None, affine=False)
        if known.failure_kind is not None:
            kinds[known.micro_batch_size] = known.failure_kind
    peaks: dict[int, int] = {}
    stopped = ""
    while (size := search.next()) is not None:
        if not keep_global_batch and not session.budget.allows(0.0):
            stopped = "the time for memory probes was spent"
            break
        answer = _probe(session, config, size)
        if answer.failure is not None:
            kinds[size] = answer.failure.kind
        fits = answer.memory is not None and answer.memory.fits
        reserved = answer.memory.memory.reserved_bytes if answer.memory is not None else None
        search.tell(size, fits=fits, peak_bytes=reserved, affine=reserved is not None)
        if answer.memory is not None:
            peaks[size] = answer.memory.memory.peak_allocated_bytes
        _tell_watcher(session, config, size, answer)
        stopped = "" if keep_global_batch else _reason_to_stop(size, answer, any_fits=bool(peaks))
        if stopped:
            break
        if answer.memory is not None and answer.memory.step_seconds > LONGEST_PROBE_SHARE * session.budget.seconds:
            stopped = f"a step of {size} takes {answer.memory.step_seconds:.1f} s, too long for this budget"
            break
    return _ceiling(session, config, search, kinds, peaks, stopped)


def _reason_to_stop(size: int, answer: TrialAnswer, *, any_fits: bool) -> str:
    """Why no further probe is worth its time after a failure that is not of memory; empty where one may be."""
    failure = answer.failure
    if failure is None or failure.kind in OUT_OF_MEMORY:
        return ""
    if failure.kind == "timeout":
        return f"a batch of {size} hung for {answer.seconds:.0f} s, and each further probe might"
    return "" if any_fits else f"it does not run, whatever the batch: {failure.message}"


def _allowed_sizes(session: Session, config: TrainingConfig) -> Sequence[int]:
    """Below a held global batch its divisors; above it every size, since the free batch may be any."""
    held = session.settings.conditions.global_batch_size
    sizes = session.space.probe_sizes(config)
    return sizes if held is None else [size for size in sizes if size >= held or held % size == 0]


def _probe(session: Session, config: TrainingConfig, size: int) -> TrialAnswer:
    return session.probe("memory", config.replace({session.space.batch_name: size}))


def _aim_bytes(session: Session) -> int | None:
    """What the ceiling search steers by: on CUDA reserved bytes, which decide whether a size leaves its margin."""
    limit = session.memory_limit_bytes() if session.facts.device == "cuda" else None
    return None if limit is None else int(USABLE * limit)


def _slope(peaks: dict[int, int], device: str) -> float | None:
    """Allocated bytes that each further sample takes, between the two largest sizes that ran (CUDA)."""
    if device == "cpu" or len(peaks) < 2:
        return None
    small, large = sorted(peaks)[-2:]
    return (peaks[large] - peaks[small]) / (large - small)


def _tell_watcher(session: Session, config: TrainingConfig, size: int, answer: TrialAnswer) -> None:
    batch = session.space.batch_name
    others = settings_text({name: value for name, value in session.told_changes(config).items() if name != batch})
    which = f"batch {size}, {others}" if others else f"batch {size}"
    if answer.failure is not None:
        session.watcher.probe("memory", f"{which}: {answer.failure.kind}: {answer.failure.message}")
    elif answer.memory is not None:
        peak = answer.memory.memory.peak_allocated_bytes / 2**20
        verdict = "fits" if answer.memory.fits else answer.memory.reason
        session.watcher.probe("memory", f"{which}: peak {peak:.0f} MiB, {verdict}")


def _ceiling(
    session: Session,
    config: TrainingConfig,
    search: CeilingSearch,
    kinds: dict[int, FailureKind],
    peaks: dict[int, int],
    stopped: str,
) -> Ceiling:
    result = search.result()
    failed = result.smallest_failed_batch_size
    return Ceiling(
        memory_class=dict(session.space.memory_class(config)),
        largest_batch_size=result.largest_batch_size,
        smallest_failed_batch_size=failed,
        failure_kind=kinds.get(failed) if failed is not None else None,
        peak_allocated_bytes=peaks.get(result.largest_batch_size) if result.largest_batch_size is not None else None,
        bytes_per_sample=_slope(peaks, session.facts.device),
        probes=result.probes,
        out_of_memory_count=sum(kind in OUT_OF_MEMORY for kind in kinds.values()),
        stopped_because=stopped or result.stopped_because,
    )
