"""What every search must hold, whatever it was given: checked on what it asked of the machine and on what it says."""

from __future__ import annotations

from collections import Counter

import pytest

from autotune.records import OUT_OF_MEMORY, Answer
from autotune.search.obstacles import LEAN_KNOBS
from autotune.stats import OUT_OF_THE_RACE
from tests.search.simulated_search import Outcome


def hold_promises(outcome: Outcome, *, overrun: float = 1.15) -> None:
    """Asserts all of them. `overrun`: at most so many times the budget is spent."""
    no_point_is_measured_twice(outcome)
    what_did_not_fit_is_left_alone(outcome)
    recommendation = outcome.recommendation
    assert outcome.machine.now_seconds <= overrun * outcome.asked.budget_seconds
    for answer in (recommendation.best, recommendation.free_batch):
        if answer is not None and answer.config != recommendation.baseline.config:
            is_backed_by_evidence(outcome, answer)
    in_trials = outcome.machine.now_seconds - outcome.asked.started_seconds
    assert sum(recommendation.stage_seconds.values()) == pytest.approx(in_trials)
    held = outcome.asked.facts.global_batch_size
    if held is not None:
        assert recommendation.best.effective_batch_size == held
    if recommendation.free_batch is not None:
        assert recommendation.free_batch.effective_batch_size != recommendation.best.effective_batch_size
    for ceiling in recommendation.ceilings:
        sizes = {r.config["batch_size"] for r in outcome.machine.requests if r.kind in ("memory", "measure")}
        assert {ceiling.largest_batch_size, ceiling.smallest_failed_batch_size} - {None} <= sizes


def no_point_is_measured_twice(outcome: Outcome) -> None:
    """Unless to confirm it, which is measured without the resident rate, or once where it lost clearly."""
    counts = Counter(r.config for r in outcome.machine.requests if r.kind == "measure" and r.measure_resident)
    assert max(counts.values()) <= 2
    session = outcome.session
    ran = [trial for trial in session.trials if trial.round is None and trial.measurement is not None]
    most = max(map(session.compute_score, ran), default=0.0)
    for config in (config for config, count in counts.items() if count > 1):
        first = next(trial for trial in ran if trial.config == config)
        assert session.compute_score(first) < OUT_OF_THE_RACE * most, config
    probes = Counter((r.kind, r.config) for r in outcome.machine.requests if r.kind != "measure")
    assert max(probes.values(), default=1) == 1


def what_did_not_fit_is_left_alone(outcome: Outcome) -> None:
    """No micro-batch is run that is as large as one that failed before with the same memory settings."""
    space, failed = outcome.asked.space, {}
    for request, answer in zip(outcome.machine.requests, outcome.machine.answers, strict=False):
        memory_class, size = space.memory_class(request.config), space.micro_batch(request.config)
        if outcome.session.results().reference_settings:
            # Without a leaner update none fits, which says nothing of what does with one.
            memory_class = (*memory_class, *((name, request.config[name]) for name in LEAN_KNOBS))
        if request.kind in ("measure", "memory"):
            assert size < failed.get(memory_class, size + 1), f"{size} was known not to fit: {request.config}"
        if answer.failure is not None and answer.failure.kind in OUT_OF_MEMORY:
            failed[memory_class] = min(size, failed.get(memory_class, size))


def is_backed_by_evidence(outcome: Outcome, answer: Answer) -> None:
    """It ran, beside the baseline and for longer, fits, and trains the same."""
    machine, config = outcome.machine, answer.config
    trials = [trial for trial in outcome.session.trials if trial.config == config]
    assert trials and all(trial.failure is None for trial in trials)
    assert not machine.program.is_wrong(config)
    assert answer.speedup.interval[0] > 1 or outcome.asked.objective == "memory"
    if outcome.interrupted:
        return
    assert answer.confirmed_rounds == sum(trial.round is not None for trial in trials) > 0
    assert answer.computes_the_same or (answer.parity is not None and answer.parity.passed)
    assert config in machine.asked("soak") or any("no time was left" in one for one in outcome.recommendation.warnings)
