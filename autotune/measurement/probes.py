"""Probes: a configuration run for a few steps to see what it takes, and the loader alone."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from autotune.measurement.clock import BlockClock, Done, endless, synchronize
from autotune.measurement.marks import watched_step
from autotune.measurement.measure import PhaseReport, started
from autotune.measurement.samples import check_workers
from autotune.memory_margin import misfit
from autotune.records import LoaderProbe, MemoryProbe, TrialRequest
from autotune.stats import is_precise, rate
from autotune.surgery.batches import tensors
from autotune.surgery.generators import seed_everything
from autotune.training.training import Training
from autotune.training.windows import Window, samples_in
from autotune.workload import UserFunctions

STEPS = 3
"""Enough for the optimizer's state to exist and for the allocator to have seen a whole step twice."""
RAGGED_SECONDS = 3.0
UNIFORM_SECONDS = 0.2
"""How long the largest batch is looked for in one pass: where batches were seen to differ in size, and where not yet."""


def probe_memory(functions: UserFunctions, request: TrialRequest, phase: PhaseReport) -> MemoryProbe:
    """Runs a few steps, one of them on the largest batch seen, and reads what they took."""
    running = started(functions, request, phase)
    phase("measure")
    training, meter = running.training, running.meter
    watched_step(training, next(running.windows), meter)
    peaks = watched_step(training, _largest_window(running.windows, training.loader.steps_in_pass()), meter)
    begin = time.perf_counter()
    for _ in range(STEPS - 2):
        training.step(next(running.windows))
        synchronize(meter.device)
    step_seconds = (time.perf_counter() - begin) / (STEPS - 2)
    marks = meter.marks(peaks)
    limit = _limit_bytes(request, meter.device)
    reason = misfit(marks, limit_bytes=limit, margin=request.conditions.memory_margin)
    return MemoryProbe(
        micro_batch_size=running.first_window[0].samples,
        memory=marks,
        limit_bytes=limit,
        fits=not reason,
        reason=reason,
        step_seconds=step_seconds,
    )


def _largest_window(windows: Iterator[Window], steps_in_pass: int | None) -> Window:
    """Of the windows of one pass, the one with the most elements, as far as there is time to look."""
    begin = time.perf_counter()
    best = next(windows)
    ragged = False
    looked_at = 1
    while steps_in_pass is None or looked_at < steps_in_pass:
        if time.perf_counter() - begin > (RAGGED_SECONDS if ragged else UNIFORM_SECONDS):
            break
        window = next(windows)
        looked_at += 1
        # the short end of a pass does not make the data ragged
        ragged = ragged or (_elements(window) != _elements(best) and samples_in(window) == samples_in(best))
        if _elements(window) > _elements(best):
            best = window
    return best


def _elements(window: Window) -> int:
    return max(sum(tensor.numel() for tensor in tensors(item.data)) for item in window)


def _limit_bytes(request: TrialRequest, device: torch.device) -> int | None:
    if device.type == "cuda":
        total = int(torch.cuda.mem_get_info(device)[1])
        return min(total, request.conditions.memory_limit_bytes or total)
    return request.conditions.memory_limit_bytes


def probe_loader(functions: UserFunctions, request: TrialRequest, phase: PhaseReport) -> LoaderProbe:
    """The loader alone, as the configuration sets it up: how many samples per second it gives when nothing is trained."""
    phase("build")
    seed_everything(request.conditions.seed)
    training = Training(functions, request.config, request.conditions, blocks=request.blocks)
    loader = training.loader.loader
    phase("loader")
    check_workers(training, phase)
    windows = endless(training.loader)
    clock = BlockClock(torch.device("cpu"))

    def step() -> Done:
        return Done(samples_in(next(windows)))

    begin = time.perf_counter()
    for _ in range(training.loader.most_prefetched()):
        step()
    while len(clock.seconds) < request.maximum_blocks:
        clock.run(step, request.block_seconds)
        enough = len(clock.seconds) >= request.minimum_blocks
        if enough and is_precise(clock.samples, clock.seconds, request.relative_precision):
            break
        if time.perf_counter() - begin > 0.5 * request.timeouts.measure_seconds:
            break
    timed = clock.blocks()
    value, interval = rate(timed.samples, timed.seconds)
    return LoaderProbe(
        num_workers=loader.num_workers,
        micro_batch_size=loader.batch_size or 0,
        samples_per_second=value,
        interval=interval,
        blocks=timed,
    )
