"""Runs a configuration on for longer: over ends of the data set, an evaluation, a save and load of its state."""

from __future__ import annotations

import time

import torch

from autotune.measurement.clock import BlockClock, synchronize
from autotune.measurement.measure import PhaseReport, started
from autotune.memory_margin import leak
from autotune.quantities import format_rate
from autotune.records import SoakResult, TrialRequest
from autotune.stats import rate
from autotune.surgery.batches import to_device
from autotune.training.training import Training
from autotune.training.windows import Window
from autotune.workload import UserFunctions

STEADY_SHARE = 0.85
"""The last third of the soak runs at least at this share of the first third's rate."""


def soak(functions: UserFunctions, request: TrialRequest, phase: PhaseReport) -> SoakResult:
    """Runs `maximum_blocks` blocks of `block_seconds`, but at least one pass over the data set where that is not longer
    than twice as much, then an evaluation forward, a save and a load of the state, and one more step."""
    running = started(functions, request, phase)
    phase("soak")
    training, meter = running.training, running.meter
    clock = BlockClock(meter.device)
    steps_in_pass = training.loader.steps_in_pass() or 0
    steps = 1
    begin = time.perf_counter()
    goal_seconds = request.block_seconds * request.maximum_blocks

    def step() -> tuple[int, None]:
        window = next(running.windows)
        training.step(window)
        return sum(item.samples for item in window), None

    clock.run(step, request.block_seconds)
    clock.forget()
    meter.note_live(steps)
    while True:
        clock.run(step, request.block_seconds)
        steps += clock.steps[-1]
        meter.note_live(steps)
        elapsed = time.perf_counter() - begin
        if elapsed > 2 * goal_seconds or (elapsed > goal_seconds and steps > steps_in_pass):
            break
    findings = []
    growth = meter.growth_bytes_per_step()
    if found := leak(growth):
        findings.append(found)
    rates = clock.rates()
    third = max(1, len(rates) // 3)
    first, last = sum(rates[:third]) / third, sum(rates[-third:]) / third
    if last < STEADY_SHARE * first:
        findings.append(f"throughput fell from {format_rate(first)} to {format_rate(last)} samples/s while it ran")
    _evaluate_and_reload(running.training, running.first_window)
    training.step(next(running.windows))
    synchronize(meter.device)
    retries = (
        int(torch.cuda.memory_stats(meter.device).get("num_alloc_retries", 0)) if meter.device.type == "cuda" else 0
    )
    if retries:
        findings.append(f"the allocator had to free and retry {retries} times: it fits, but thrashes")
    return SoakResult(
        steps=steps,
        samples_per_second=rate(clock.samples, clock.seconds)[0],
        growth_bytes_per_step=growth,
        allocator_retries=retries,
        findings=tuple(findings),
    )


def _evaluate_and_reload(training: Training, window: Window) -> None:
    batch = to_device(window[0].data, training.parts.device)
    was_training = training.model.training
    training.model.eval()
    with torch.no_grad():
        training.parts.compute_loss(training.model, batch)
    training.model.train(was_training)
    training.load_state_dict(training.state_dict())
