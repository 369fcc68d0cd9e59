"""Measurements on a GPU say what disturbed them, and are made once more where it was heat."""

import threading

import pytest

from autotune.config import TrainingConfig
from autotune.gpu_watch import GpuWatch
from autotune.processes.watched import WatchedBackend
from autotune.records import Conditions, Failure, TrialAnswer, TrialRequest
from tests.invented_nvml import Card, Nvml
from tests.report.sample_records import measurement

HEAT = 0x40


class CountingNvml(Nvml):
    """Tells of each sample."""

    def __init__(self, card):
        super().__init__(card)
        self.samples = threading.Semaphore(0)

    def nvmlDeviceGetClockInfo(self, card, kind):  # noqa: N802
        self.samples.release()
        return card.clock


class Pool:
    """Trials in which the card does what it is told to, each thing for some samples where it is watched."""

    def __init__(self, nvml, *reasons, watched, failing=()):
        self.nvml, self.reasons, self.failing, self.watched = nvml, list(reasons), failing, watched
        (self.card,) = nvml.cards
        self.asked = 0
        self.closed = False

    def run(self, request, on_phase=None):
        self.asked += 1
        self.card.reasons = HEAT  # while it is built and compiled, which is not timed
        self.let_look()
        timed, resident = self.reasons.pop(0)
        for phase, reasons in (("measure", timed), ("measure", resident)):
            self.card.reasons = reasons
            if on_phase is not None:
                on_phase(phase)
            self.let_look()
        if self.asked in self.failing:
            return TrialAnswer(failure=Failure(kind="crash", phase="measure", message="died"), seconds=1.0)
        return TrialAnswer(measurement=measurement(samples_per_second=float(self.asked)), seconds=1.0)

    def let_look(self):
        while self.nvml.samples.acquire(blocking=False):
            """Those of what was before."""
        for _ in range(5 if self.watched else 0):
            assert self.nvml.samples.acquire(timeout=300)

    def close(self):
        self.closed = True


def ask(*reasons, kind="measure", device="cuda", failing=(), heard=None):
    nvml = CountingNvml(Card())
    pool = Pool(nvml, *reasons, watched=(kind, device) == ("measure", "cuda"), failing=failing)
    backend = WatchedBackend(pool, lambda: GpuWatch(nvml=nvml, samples_per_second=500))
    conditions = Conditions(device=device, global_batch_size=None)
    request = TrialRequest(kind=kind, config=TrainingConfig({}), conditions=conditions)
    answer = backend.run(request, None if heard is None else heard.append)
    backend.close()
    assert pool.closed
    return answer, pool


def test_a_quiet_card_leaves_no_note_and_phases_pass_through():
    heard = []
    answer, pool = ask((0, 0), heard=heard)
    assert (answer.measurement.gpu_notes, pool.asked, answer.seconds) == ((), 1, 1.0)
    assert heard == ["measure", "measure"]


def test_heat_means_a_second_measurement_which_counts_where_it_is_cooler():
    answer, pool = ask((HEAT, HEAT), (0, 0))
    assert (pool.asked, answer.seconds) == (2, 2.0)
    assert answer.measurement.samples_per_second == 2.0
    assert answer.measurement.gpu_notes == ()


def test_a_card_that_stays_hot_is_measured_twice_at_most_and_it_is_said():
    answer, pool = ask((HEAT, 0), (HEAT, HEAT))
    assert (pool.asked, answer.seconds) == (2, 2.0)
    assert answer.measurement.samples_per_second == 1.0, "the less disturbed one"
    (note,) = answer.measurement.gpu_notes
    assert "thermal slowdown by the hardware" in note


def test_a_second_measurement_that_fails_does_not_undo_the_first():
    answer, pool = ask((HEAT, HEAT), (0, 0), failing=(2,))
    assert (pool.asked, answer.seconds) == (2, 2.0)
    assert answer.measurement.samples_per_second == 1.0


def test_a_failure_is_not_tried_again():
    answer, pool = ask((HEAT, HEAT), failing=(1,))
    assert (pool.asked, answer.failure.kind) == (1, "crash")


@pytest.mark.parametrize("other", [{"kind": "memory"}, {"device": "cpu"}])
def test_what_times_nothing_on_a_gpu_is_not_watched(other):
    answer, pool = ask((HEAT, HEAT), **other)
    assert (pool.asked, answer.measurement.gpu_notes) == (1, ())
