"""What a process waits for a core, beside one that never gives its own up."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.measurement import cores
from autotune.measurement.cores import CoreWaits

BUSY = "import os\nos.sched_setaffinity(0, [{core}])\nprint(flush=True)\nwhile True: pass"


@pytest.fixture
def beside_another() -> Iterator[None]:
    """This process on one core, and another that wants the same."""
    before = os.sched_getaffinity(0)
    core = min(before)
    with subprocess.Popen([sys.executable, "-c", BUSY.format(core=core)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        os.sched_setaffinity(0, {core})
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)
            other.kill()


def worked(seconds: float) -> float:
    """Until so much time of a core was had; returns what went by."""
    began, spent = time.perf_counter(), time.process_time()
    while time.process_time() - spent < seconds:
        pass
    return time.perf_counter() - began


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel does not tell what waits for a core")
@pytest.mark.usefixtures("beside_another")
def test_what_it_waited_for_a_core_is_what_its_work_took_longer() -> None:
    waits = CoreWaits()
    went_by = worked(0.3)
    waited = waits.since_last()
    assert waited == pytest.approx(went_by - 0.3, abs=0.1)
    assert waited > 0.05
    assert waits.since_last() < waited, "told once"


def test_who_sleeps_waits_for_no_core() -> None:
    waits = CoreWaits()
    began = time.perf_counter()
    time.sleep(0.3)
    assert waits.since_last() <= time.perf_counter() - began - 0.3 + 0.02


@pytest.mark.usefixtures("beside_another")
def test_threads_that_wait_for_each_other_wait_for_no_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as nobody else uses the cores, which a busy machine cannot show."""
    monkeypatch.setattr(cores, "_used_by_all", time.process_time)
    waits = CoreWaits()
    went_by = worked(0.3)
    assert went_by > 0.3
    assert waits.since_last() < 0.05
