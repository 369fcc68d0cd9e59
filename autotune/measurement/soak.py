"""Runs a configuration on for longer: over ends of the data set, an evaluation, a save and load of its state."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from autotune.failure import TrialFailure
from autotune.measurement.clock import BlockClock, Done, synchronize
from autotune.measurement.compilation import Compilations, compile_counts
from autotune.measurement.cores import CoreWaits
from autotune.measurement.measure import PhaseReport, Running, started
from autotune.measurement.samples import check_workers
from autotune.memory_margin import leak
from autotune.quantities import format_rate
from autotune.records import LONGEST_SOAK_SHARE, Phase, SoakResult, TrialRequest
from autotune.stats import rate
from autotune.surgery.generators import seed_everything
from autotune.surgery.out_of_memory import is_out_of_memory
from autotune.training.training import Training
from autotune.training.windows import Window, fresh, samples_in
from autotune.workload import UserFunctions

STEADY_SHARE = 0.85
"""The last third of the soak runs at least at this share of the first third's rate."""
LEAST_RUN_SHARE = 0.1
"""Of a block, what is taken to have run, however long some thread waited for a core."""
WAITED_SHARE = 0.5
"""The loader is behind a fall where waiting for it explains so much of the time that was lost."""
NOT_FINITE_BLOCKS = 3
"""Under a gradient scaler, losses that are not finite at the ends of so many blocks in a row are no accident."""
WINDOWS_TO_FIND_GRADIENTS = 16
"""What none of so many windows gives a gradient is left out for good: a branch may be taken rarely, or dropped by chance."""
SAME_LOSS = 0.01
"""Two losses of the same step differ by less, whatever the order in which a GPU adds."""


@dataclass
class _Course:
    """Blocks of the long run, with what stood beside them."""

    clock: BlockClock
    waited_seconds: list[float] = field(default_factory=list)
    """In each block, for the loader."""
    starved_seconds: list[float] = field(default_factory=list)
    """In each block, for a core that other work had."""
    fewest_samples: int = 0
    """In one step."""
    steps: int = 2
    """The first step, and one that showed which parameters have gradients, came before."""

    def thirds(self) -> tuple[float, float]:
        """Seconds per sample in the first and in the last third of the blocks."""
        return _thirds(self.clock.seconds, self.clock.samples)

    def unhindered_thirds(self) -> tuple[float, float]:
        """The same without what was spent waiting for a core."""
        blocks = zip(self.clock.seconds, self.starved_seconds, strict=True)
        # The thread that waited most may be another one than that which all wait for.
        ran = [max(seconds - starved, LEAST_RUN_SHARE * seconds) for seconds, starved in blocks]
        return _thirds(ran, self.clock.samples)

    def drop_last(self) -> None:
        """Drops the last block, and begins the next one anew: something was compiled in it or in the step after it, which
        is no part of how training goes on."""
        self.clock.drop_last()
        del self.waited_seconds[-1], self.starved_seconds[-1]

    def fall(self) -> str:
        """What is found of a rate that falls; empty where it holds."""
        first, last = self.thirds()
        if first >= STEADY_SHARE * last:
            return ""
        found = f"throughput fell from {format_rate(1 / first)} to {format_rate(1 / last)} samples/s while it ran"
        unhindered_first, unhindered_last = self.unhindered_thirds()
        if unhindered_first >= STEADY_SHARE * unhindered_last:
            return f"{found}: other work on this machine had its cores"
        waited_first, waited_last = _thirds(self.waited_seconds, self.clock.samples)
        if waited_last - waited_first >= WAITED_SHARE * (last - first):
            found += ": the loader did not keep up"
        return found


def _thirds(seconds: list[float], samples: list[int]) -> tuple[float, float]:
    third = max(1, (len(seconds) - 1) // 3)
    first = slice(1, 1 + third) if len(seconds) > 1 else slice(0, 1)  # what was loaded in advance is in the very first
    return sum(seconds[first]) / sum(samples[first]), sum(seconds[-third:]) / sum(samples[-third:])


def soak(functions: UserFunctions, request: TrialRequest, phase: PhaseReport) -> SoakResult:
    """Runs `maximum_blocks` blocks of `block_seconds`, and on to the end of a pass over the data set where a quarter more
    is enough for that; then the shorter last batch of a pass, an evaluation, a save and a load of the state.

    Raises `TrialFailure` for a loss that stops being finite. What the user's own program cannot do either, such as
    an evaluation, is a finding and no failure.
    """
    running = started(functions, request, phase)
    check_workers(running.training, phase)
    # What follows the run may compile: other shapes, other modes.
    after: Phase = "compile" if running.is_slow_to_start else "soak"
    phase("soak")
    counts = compile_counts()
    trained = _with_gradients(running.training, running.first_window)
    course = _run_on(running, request)
    growth, retries = running.meter.growth_bytes_per_step(), _allocator_retries(running.meter.device)
    lost = _lost_gradients(running, trained, functions, request)
    phase(after)
    _end_a_pass(running, course)
    recompiles = compile_counts().graphs - counts.graphs
    findings = [leak(growth), course.fall()]
    if lost:
        findings.append(f"{lost[0]} had a gradient at first, and has none after {course.steps:,} steps")
    if retries:
        findings.append(f"the allocator had to free and retry {retries} times: it fits, but thrashes")
    if recompiles:
        graphs = "1 graph was" if recompiles == 1 else f"{recompiles:,} graphs were"
        findings.append(f"{graphs} compiled while it ran on: the last batch of a pass is shorter, or shapes vary")
    alone = _Alone(functions, request, running.first_window)
    phase(after)
    findings.append(alone.compared("an evaluation without gradients", running.training, _evaluate))
    phase(after)
    findings.append(alone.compared("a save and load of the state", running.training, _save_and_load))
    synchronize(running.meter.device)
    value, interval = rate(course.clock.samples, course.clock.seconds)
    return SoakResult(
        steps=course.steps,
        samples_per_second=value,
        interval=interval,
        block_count=len(course.clock.seconds),
        last_samples_per_second=1 / course.unhindered_thirds()[1],
        growth_bytes_per_step=growth,
        allocator_retries=retries,
        lost_gradients=lost,
        findings=tuple(finding for finding in findings if finding),
    )


# --- the long run -----------------------------------------------------------------------------------------------------


def _run_on(running: Running, request: TrialRequest) -> _Course:
    training, meter = running.training, running.meter
    course = _Course(BlockClock(meter.device), fewest_samples=samples_in(running.first_window))
    steps_in_pass = training.loader.steps_in_pass() or 0
    goal_seconds = request.block_seconds * request.maximum_blocks
    waited = 0.0
    cores = CoreWaits()

    def step() -> Done:
        nonlocal waited
        begin = time.perf_counter()
        window = next(running.windows)
        waited += time.perf_counter() - begin
        loss = running.train(window, "soak")
        course.fewest_samples = min(course.fewest_samples, samples_in(window))
        return Done(samples_in(window), loss=loss)

    def block() -> None:
        nonlocal waited
        waited = 0.0
        course.clock.run(step, request.block_seconds)
        course.steps += course.clock.steps[-1]
        meter.note_live(course.steps)
        course.waited_seconds.append(waited)
        course.starved_seconds.append(cores.since_last())
        _check_finite(course, training)

    begin, compilations = running.phase_seconds(), Compilations()
    while True:
        block()
        if compilations.are_new():
            course.drop_last()
            continue  # it may have been the only one
        elapsed = running.phase_seconds() - begin
        if elapsed > LONGEST_SOAK_SHARE * goal_seconds or (elapsed > goal_seconds and course.steps > steps_in_pass):
            break
    course.clock.finish()
    return course


def _with_gradients(training: Training, window: Window) -> set[str]:
    """The parameters that a step on the window gives a gradient."""
    training.accumulate(fresh(window))
    found = {name for name, parameter in training.model.named_parameters() if parameter.grad is not None}
    training.update()
    return found


def _lost_gradients(
    running: Running, trained: set[str], functions: UserFunctions, request: TrialRequest
) -> tuple[str, ...]:
    """Those of these parameters that get none any more: a model may leave a part out once it has run for a while.

    Not what is frozen by then, nor what the user's program at the same weights gives none either, as experts that are
    chosen no more.
    """
    model = running.training.model
    lost = {name for name, parameter in model.named_parameters() if name in trained and parameter.requires_grad}
    windows: list[Window] = []
    while lost and len(windows) < WINDOWS_TO_FIND_GRADIENTS:
        windows.append(next(running.windows) if windows else running.first_window)
        lost -= _with_gradients(running.training, windows[-1])
    if lost:
        lost &= _own_gradients(functions, request, model, windows)
    return tuple(name for name, _ in model.named_parameters() if name in lost)


def _own_gradients(
    functions: UserFunctions, request: TrialRequest, model: nn.Module, windows: list[Window]
) -> set[str]:
    """The parameters that the user's program as it stands, at the weights of the model, gives a gradient in one of the
    windows; all where it does not run beside the model: it will be asked in a process of its own."""
    found: set[str] = set()
    try:
        plain = _users_training(functions, request)
        for window in windows:
            plain.model.load_state_dict(model.state_dict())
            found |= _with_gradients(plain, window)
    except Exception:  # whatever the user's model raises, or there is no memory for it
        return {name for name, _ in model.named_parameters()}
    return found


def _users_training(functions: UserFunctions, request: TrialRequest) -> Training:
    seed_everything(request.conditions.seed)
    return Training(functions, request.reference, request.conditions, blocks=request.blocks)


def _check_finite(course: _Course, training: Training) -> None:
    blocks = 1 if training.scaler is None else NOT_FINITE_BLOCKS
    latest = course.clock.losses[-blocks:]
    if len(latest) == blocks and not any(math.isfinite(loss) for loss in latest):
        raise TrialFailure("numerics", f"the loss was {latest[-1]} after {course.steps} steps")


def _end_a_pass(running: Running, course: _Course) -> None:
    """Trains on the shorter last window of a pass, where the run did not come that far."""
    if course.fewest_samples < samples_in(running.first_window):
        return
    window = running.training.loader.last_window()
    if window is None:
        return
    try:
        loss = float(running.training.step(window))
    except Exception as error:  # whatever the user's model raises; named for what it was asked to do
        error.add_note(f"at the last batch of a pass, of {window[-1].samples} samples; drop_last=True leaves it out")
        raise
    if not math.isfinite(loss) and running.training.scaler is None:
        raise TrialFailure("numerics", f"the loss was {loss} at the last batch, of {window[-1].samples} samples")


def _allocator_retries(device: torch.device) -> int:
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0)) if device.type == "cuda" else 0


# --- what is done beside training -------------------------------------------------------------------------------------


@dataclass
class _Alone:
    """The user's program as it stands, asked only where the configuration fails at something beside training."""

    functions: UserFunctions
    request: TrialRequest
    window: Window

    def compared(self, what: str, training: Training, attempt: Callable[[Training, Window], str]) -> str:
        """What `attempt` finds. Where it raises: the same exception, unless the user's own program raises there too."""
        try:
            return attempt(training, self.window)
        except Exception as error:  # whatever the user's model raises
            if is_out_of_memory(error):
                raise
            own = self._own_error(attempt)
            if own is None or is_out_of_memory(own):
                # Beside this one, the user's own may not fit, which says nothing of it.
                error.add_note(f"in {what}{', which your own settings get through' if own is None else ''}")
                raise
            return f"{what} fails with your own settings too ({type(own).__name__}: {own}), so that it was not tried"

    def _own_error(self, attempt: Callable[[Training, Window], str]) -> Exception | None:
        plain = _users_training(self.functions, self.request)
        try:
            plain.step(fresh(self.window))
            found = attempt(plain, self.window)
        except Exception as error:  # whatever the user's model raises
            return error
        # An evaluation that there was no room for does not show what it would have failed at.
        return MemoryError(found) if found and attempt is _evaluate else None


def _evaluate(training: Training, window: Window) -> str:
    """A forward as in an evaluation, and a step after it.

    That may need more memory than a step, where a compiled step keeps no logits or recomputes what it keeps. No fault, for
    an evaluation may take its samples in smaller batches.
    """
    found = ""
    try:
        training.evaluate(fresh(window))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        size = max(item.samples for item in window)
        found = f"an evaluation of {size:,} samples at once runs out of memory: evaluate in smaller batches"
    if found and training.parts.device.type == "cuda":
        torch.cuda.empty_cache()
    training.step(fresh(window))
    return found


def _save_and_load(training: Training, window: Window) -> str:
    """Saves the state, trains on, loads it, and trains on again: the losses must be the same."""
    with tempfile.NamedTemporaryFile(suffix=".pt") as file:
        torch.save(training.state_dict(), file.name)
        first = _losses(training, window)
        second = _losses_after_load(training, window, file.name)
        if _alike(first, second):
            return ""
        third = _losses_after_load(training, window, file.name)
    if not _alike(second, third):
        return ""  # it draws random numbers of its own, or counts its steps: nothing follows from the difference
    return (
        f"after its state was loaded, the loss of a step was {_shown(second)} where it had been {_shown(first)}: "
        "state_dict() does not hold all that training depends on"
    )


def _losses_after_load(training: Training, window: Window, path: str) -> list[float]:
    if training.parts.device.type == "cuda":
        torch.cuda.empty_cache()
    # Written by this process a moment ago. On the CPU: it must not take the device's memory a second time.
    training.load_state_dict(torch.load(path, map_location="cpu", weights_only=False))
    return _losses(training, window)


def _losses(training: Training, window: Window) -> list[float]:
    """Of two steps from the same random numbers: the first depends on the weights, the second on the optimizer too."""
    seed_everything(0)
    return [float(training.step(fresh(window))), float(training.step(fresh(window)))]


def _alike(left: list[float], right: list[float]) -> bool:
    pairs = zip(left, right, strict=True)
    return not all(map(math.isfinite, [*left, *right])) or all(
        abs(one - other) <= SAME_LOSS * max(abs(one), abs(other)) + 1e-6 for one, other in pairs
    )


def _shown(losses: list[float]) -> str:
    return " and then ".join(f"{loss:.6g}" for loss in losses)
