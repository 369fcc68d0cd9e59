"""Measures one configuration end to end in this process: build, first step, warm-up, blocks, resident blocks."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from autotune.failure import TrialFailure
from autotune.knobs.registry import slow_to_start
from autotune.measurement.clock import BlockClock, Done, endless, synchronize
from autotune.measurement.compilation import Compilations, break_reason, compile_counts
from autotune.measurement.marks import MemoryMeter, StepPeaks, watched_step
from autotune.measurement.passes import BlockPlan, block_plan
from autotune.measurement.shared_files import refuse_shared_positions
from autotune.measurement.spent import Stopwatch, process_age_seconds
from autotune.records import Blocks, Measurement, Phase, TrialRequest
from autotune.stats import is_precise, out_of_the_race, rate, warmed_up
from autotune.surgery.batches import byte_count, tensors, to_device, versions
from autotune.surgery.generators import seed_everything
from autotune.training.training import Training
from autotune.training.windows import MicroBatch, Window, fresh, samples_in
from autotune.workload import UserFunctions

MAXIMUM_WARMUP_BLOCKS = 12
RESIDENT_WINDOWS = 4
"""Different real batches that resident steps go round, so that no cache holds the only one."""
RESIDENT_BYTES = 2 * 2**30
"""At most so much of the device is taken by them."""
SHARE_REPEATS = 5
"""By so many steps the shares of a fast step are told."""
SHARE_SECONDS = 0.3
"""After which no further step is asked for its shares: those of slow steps spread little."""

PhaseReport = Callable[[Phase], None]


@dataclass
class Running:
    """A training that has done its first step."""

    training: Training
    windows: Iterator[Window]
    phase: PhaseReport
    is_slow_to_start: bool
    """Something was compiled or tuned in the first step, and is again for another size."""
    meter: MemoryMeter
    build_seconds: float
    first_step_seconds: float
    process_seconds: float
    first_loss: float
    first_window: Window
    watch: Stopwatch
    _apart_seconds: float = 0.0
    """Inside `time_to_compile`, as far as that was a phase of its own."""

    @contextmanager
    def time_to_compile(self, window: Window, phase: Phase) -> Iterator[None]:
        """For a step in this phase. Where a pass ends with a shorter window, the first one gets the time that a first step
        gets, and the phase has all of its own time after it."""
        if not self.is_slow_to_start or samples_in(window) == samples_in(self.first_window):
            yield
            return
        self.is_slow_to_start = False
        self.phase("compile")
        begin = time.perf_counter()
        yield
        self._apart_seconds += time.perf_counter() - begin
        self.phase(phase)

    def train(self, window: Window, phase: Phase) -> torch.Tensor:
        """The loss of a step in this phase."""
        with self.time_to_compile(window, phase):
            return self.training.step(window)

    def phase_seconds(self) -> float:
        """A clock that stands inside `time_to_compile` where that is a phase of its own: whoever ends in time by it ends
        within the limit of the phase."""
        return time.perf_counter() - self._apart_seconds


def started(functions: UserFunctions, request: TrialRequest, phase: PhaseReport) -> Running:
    """Builds the training and runs its first step. Raises `TrialFailure` where loader workers would read each other's
    samples, and where nothing was compiled that should be."""
    watch = Stopwatch()
    begin = time.perf_counter()
    phase("build")
    seed_everything(request.conditions.seed)
    meter = MemoryMeter(torch.device(request.conditions.device))
    timed = watch.timed(functions, meter.device)
    training = Training(timed, request.config, request.conditions, blocks=request.blocks)
    training.outlives_schedule = True
    windows = endless(training.loader)
    build_seconds = time.perf_counter() - begin
    refuse_shared_positions(training, phase)
    phase("compile")
    with watch.part("first_batch_seconds"):
        window = next(windows)
    first_window = fresh(window)
    before = compile_counts()
    begin = time.perf_counter()
    loss = training.step(window)
    synchronize(meter.device)
    first_step_seconds = time.perf_counter() - begin
    if training.parts.expects_compiled_graphs and compile_counts().graphs == before.graphs:
        message = f"torch.compile made no graph: nothing of this step was compiled{break_reason()}"
        raise TrialFailure("compile_error", message)
    return Running(
        training=training,
        windows=windows,
        phase=phase,
        is_slow_to_start=slow_to_start(request.config) or compile_counts().graphs > before.graphs,
        meter=meter,
        build_seconds=build_seconds,
        first_step_seconds=first_step_seconds,
        process_seconds=process_age_seconds(),
        first_loss=float(loss),
        first_window=first_window,
        watch=watch,
    )


def measure(functions: UserFunctions, request: TrialRequest, phase: PhaseReport) -> Measurement:
    """One configuration, measured. Raises `TrialFailure` for a loss that is not finite or an empty compile.

    Where it is seen to be out of the race, blocks are ended after the fewest, and resident ones are timed only for who
    judges by them.
    """
    running = started(functions, request, phase)
    counts_before = compile_counts()
    phase("warm-up")
    with running.watch.part("warm_up_seconds"):
        clock, warmup_steps, peaks = _warm_up(running, request)
    phase("measure")
    with running.watch.part("end_to_end_seconds"):
        losses, skipped, dropped_steps = _timed_blocks(running, request, clock, warmup_steps)
    memory = running.meter.marks(peaks)
    result_blocks = clock.blocks()
    value, interval = rate(result_blocks.samples, result_blocks.seconds)
    counts = compile_counts()
    beaten = out_of_the_race(result_blocks.samples, result_blocks.seconds, request.rate_to_beat)
    resident = None
    if request.measure_resident and not (beaten and request.resident_rate_to_beat is None):
        phase("measure")  # again: what follows has its own time
        resident = _Resident(running, request)
    training = running.training
    return Measurement(
        samples_per_second=value,
        interval=interval,
        blocks=result_blocks,
        weight_per_second=sum(result_blocks.weights) / sum(result_blocks.seconds) if result_blocks.weights else None,
        weight_interval=_weight_interval(result_blocks),
        resident_samples_per_second=resident.samples_per_second if resident else None,
        resident_interval=resident.interval if resident else None,
        resident_blocks=resident.blocks if resident else None,
        memory=memory,
        micro_batch_size=running.first_window[0].samples,
        micro_batches_per_step=training.parts.micro_batches_per_step,
        warmup_steps=warmup_steps + dropped_steps,
        build_seconds=running.build_seconds,
        first_step_seconds=running.first_step_seconds,
        process_seconds=running.process_seconds,
        compiled_graphs=counts.graphs,
        compile_was_cached=counts.cache_hits > 0,
        graph_breaks=counts.breaks,
        recompiles=max(0, counts.graphs - counts_before.graphs),
        skipped_steps=skipped,
        losses=losses,
        device_lag_share=resident.device_lag_share if resident else None,
        update_share=resident.update_share if resident else None,
        start_method="fresh" if os.environ.get("AUTOTUNE_START_METHOD") == "fresh" else "fork",
        stopped_early=beaten and (resident is None or resident.beaten),
        spent=running.watch.spent(),
    )


def _weight_interval(blocks: Blocks) -> tuple[float, float] | None:
    """Of the loss's weight per second; None where a block had none."""
    if not blocks.weights or min(blocks.weights) <= 0:
        return None
    return rate(blocks.weights, blocks.seconds)[1]


def _warm_up(running: Running, request: TrialRequest) -> tuple[BlockClock, int, StepPeaks]:
    """Runs until the pace, the compiler and the allocator have settled; returns the clock of it, the steps run and the
    phases' peaks.

    At least as many steps as the loader may have prefetched while the first step compiled: they cost no loading.
    """
    training, device = running.training, running.meter.device
    prefetched = training.loader.most_prefetched()
    clock = BlockClock(device)
    steps = 1
    begin = running.phase_seconds()
    budget_seconds = request.timeouts.measure_seconds / 2
    window = next(running.windows)
    with running.time_to_compile(window, "warm-up"):
        peaks = watched_step(training, window, running.meter)
    steps += 1
    for _ in range(MAXIMUM_WARMUP_BLOCKS):
        graphs, reserved = compile_counts(), _reserved_bytes(device)
        clock.run(lambda: end_to_end_step(running, "warm-up"), request.block_seconds / 2)
        steps += clock.steps[-1]
        settled = compile_counts() == graphs and _reserved_bytes(device) == reserved
        is_late = running.phase_seconds() - begin > budget_seconds
        if is_late or (steps > prefetched and settled and warmed_up(clock.rates())):
            break
    return clock, steps, peaks


def _reserved_bytes(device: torch.device) -> int:
    return int(torch.cuda.memory_reserved(device)) if device.type == "cuda" else 0


def end_to_end_step(running: Running, phase: Phase) -> Done:
    """A step with its loading, in this phase."""
    window = next(running.windows)
    loss = running.train(window, phase)
    return Done(samples_in(window), running.training.last_weight, loss)


def _timed_blocks(
    running: Running, request: TrialRequest, clock: BlockClock, warmup_steps: int
) -> tuple[tuple[float, ...], int, int]:
    """The blocks are left in `clock`, which goes on after the warm-up; returns losses, the steps that a scaler skipped, and
    those in blocks that were dropped, since something was compiled in them."""
    meter, training = running.meter, running.training
    plan = _plan(running, request, clock)
    clock.forget()
    losses = [running.first_loss]
    steps, skipped = warmup_steps, 0
    scale = training.scaler.get_scale() if training.scaler else 1.0
    meter.reset_peak()
    meter.note_live(steps)
    compilations = Compilations()
    begin = running.phase_seconds()
    while len(clock.seconds) < plan.maximum_blocks:
        clock.run(lambda: end_to_end_step(running, "measure"), plan.minimum_seconds, plan.multiple(len(clock.seconds)))
        steps += clock.steps[-1]
        losses.append(clock.losses[-1])
        meter.note_live(steps)
        if training.scaler:
            # The scaler halves its scale for each step that it skips; growth comes every 2000 steps only.
            now = training.scaler.get_scale()
            skipped += max(0, round(math.log2(scale / now))) if now else clock.steps[-1]
            scale = now
        if not math.isfinite(losses[-1]) and not training.scaler:
            raise TrialFailure("numerics", f"the loss was {losses[-1]} after {steps} steps")
        elapsed = running.phase_seconds() - begin
        if compilations.are_new() and elapsed < 0.4 * request.timeouts.measure_seconds:
            clock.finish()  # the next block's first step, where that is what compiled, goes too
            clock.forget()
            continue
        if len(clock.seconds) >= plan.minimum_blocks and plan.ends_round(len(clock.seconds)):
            beaten = out_of_the_race(clock.samples, clock.seconds, request.rate_to_beat)
            if beaten or is_precise(clock.samples, clock.seconds, request.relative_precision):
                break
        if elapsed > 0.8 * request.timeouts.measure_seconds:
            break
    clock.finish()
    return tuple(losses), skipped, steps - warmup_steps - sum(clock.steps)


def _plan(running: Running, request: TrialRequest, warm_up: BlockClock) -> BlockPlan:
    """By the faster of the warm-up's last two blocks: the slower may hold the end of a pass."""
    paces = [seconds / steps for seconds, steps in zip(warm_up.seconds, warm_up.steps, strict=True)]
    windows = running.training.loader
    return block_plan(
        steps_in_pass=windows.steps_in_pass(),
        starts_workers=windows.loader.num_workers > 0 and not windows.loader.persistent_workers,
        seconds_per_step=min(paces[-2:]),
        block_seconds=request.block_seconds,
        minimum_blocks=request.minimum_blocks,
        maximum_blocks=request.maximum_blocks,
    )


class _Resident:
    """Steps on real batches that already lie on the device: what the step does without its loader."""

    def __init__(self, running: Running, request: TrialRequest) -> None:
        self.running = running
        self.device = running.meter.device
        self.next_window = 0
        self.changed_in_place = True
        """Whether a step changes its batch in place, and is given a copy therefore."""
        self.clock = BlockClock(self.device)
        with running.watch.part("resident_seconds"):
            self.windows = self._collected(running)
            self._time_blocks(request)
        self.blocks = self.clock.blocks()
        self.samples_per_second, self.interval = rate(self.blocks.samples, self.blocks.seconds)
        self.beaten = out_of_the_race(self.blocks.samples, self.blocks.seconds, request.resident_rate_to_beat)
        self.update_share: float | None = None
        self.device_lag_share: float | None = None
        if not self.beaten:
            with running.watch.part("shares_seconds"):
                self.update_share, self.device_lag_share = self._shares()

    def _time_blocks(self, request: TrialRequest) -> None:
        self.clock.run(self._watched_step, request.block_seconds / 2)
        self.clock.forget()
        begin = time.perf_counter()
        for _ in range(request.minimum_blocks):
            self.clock.run(self._step, request.block_seconds)
            if time.perf_counter() - begin > 0.3 * request.timeouts.measure_seconds:
                break
        self.clock.finish()

    def _collected(self, running: Running) -> list[Window]:
        collected: list[Window] = []
        full = samples_in(running.first_window)
        taken = 0
        for window in running.windows:
            if collected and samples_in(window) < full:
                continue  # the short end of a pass: the rate is that of full steps
            resident = [MicroBatch(item.samples, to_device(item.data, self.device)) for item in window]
            if not all(tensor.is_leaf for item in resident for tensor in tensors(item.data)):
                resident = fresh(resident)  # a backward pass goes once through what a sample was computed from
            collected.append(resident)
            taken += _device_bytes(resident)
            if len(collected) == RESIDENT_WINDOWS or taken > RESIDENT_BYTES:
                break
        return collected

    def _next(self) -> Window:
        window = self.windows[self.next_window % len(self.windows)]
        self.next_window += 1
        return fresh(window) if self.changed_in_place else window

    def _watched_step(self) -> Done:
        window = self._next()
        before = [versions(item.data) for item in window]
        self.running.training.step(window)
        self.changed_in_place = [versions(item.data) for item in window] != before
        return Done(samples_in(window))

    def _step(self) -> Done:
        window = self._next()
        self.running.training.step(window)
        return Done(samples_in(window))

    def _shares(self) -> tuple[float, float | None]:
        """The optimizer's share of a step, and how far the device lags behind the CPU at its end."""
        training = self.running.training
        update_seconds, total_seconds, lag_seconds = [], [], []
        began = time.perf_counter()
        for index in range(SHARE_REPEATS):
            if index and time.perf_counter() - began > SHARE_SECONDS:
                break
            window = self._next()
            synchronize(self.device)
            begin = time.perf_counter()
            training.accumulate(window)
            synchronize(self.device)
            middle = time.perf_counter()
            training.update()
            synchronize(self.device)
            update_seconds.append((time.perf_counter() - middle) / (time.perf_counter() - begin))
            window = self._next()
            begin = time.perf_counter()
            training.step(window)
            queued = time.perf_counter()
            synchronize(self.device)
            total_seconds.append(time.perf_counter() - begin)
            lag_seconds.append(time.perf_counter() - queued)
        update = statistics.median(update_seconds)
        if self.device.type == "cpu":
            return update, None
        return update, statistics.median(lag_seconds) / statistics.median(total_seconds)


def _device_bytes(window: Window) -> int:
    return sum(byte_count(item.data) for item in window)
