"""`fit` stopped from outside, as a notebook or a program with threads stops it, and followed by a function."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import autotune
from autotune.errors import SearchInterrupted
from autotune.records import Standing
from autotune.result import TuningResult
from autotune.search.study import stored_records
from autotune.search.watcher import CallbackFailed, CallingWatcher
from tests.report import sample_records
from tests.running_search import DEADLINE_SECONDS, TINY_PROGRAM
from tests.search.simulated_search import RememberingWatcher

OPTIONS = 'loss_fn=loss_fn, budget="5m", space="quick", study="here", quiet=True, on_trial=told'
IN_THE_MAIN_THREAD = f"""
import autotune
{TINY_PROGRAM}
def told(trial, speedup):
    print("told", trial.number, speedup is not None and speedup >= 1, flush=True)

try:
    autotune.fit(model_fn, data_fn, {OPTIONS})
except autotune.SearchInterrupted as stopped:
    assert isinstance(stopped, KeyboardInterrupt)
    print(stopped)
    print(stopped.result.recommendation.verdict, flush=True)
"""
IN_A_THREAD = f"""
import threading
import time
import autotune
{TINY_PROGRAM}
stopping = threading.Event()

class Stopped(Exception):
    pass

def told(trial, speedup):
    assert threading.current_thread() is not threading.main_thread()
    print("told", trial.number, flush=True)
    if stopping.is_set():
        raise Stopped("by the user") from ValueError("with a cause")

def work():
    try:
        autotune.fit(model_fn, data_fn, {OPTIONS})
    except Stopped as stopped:
        print("stopped", stopped, repr(stopped.__cause__), repr(stopped.__context__), flush=True)

worker = threading.Thread(target=work)
worker.start()
try:
    while True:
        time.sleep(0.1)  # an interrupted join() of Python 3.11 takes the thread for ended
except KeyboardInterrupt:
    print("the main thread was interrupted", flush=True)
    stopping.set()
worker.join()
"""


def stopped_after(said: str, source: str, directory: Path) -> list[str]:
    """The lines of a script that gets a Ctrl-C once it has printed this."""
    (directory / "script.py").write_text(source)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    process = subprocess.Popen(
        [sys.executable, "script.py"], cwd=directory, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    lines = []
    for line in process.stdout:
        lines.append(line.rstrip())
        if line.startswith(said):
            process.send_signal(signal.SIGINT)
            said = "nothing further"
    errors = process.stderr.read()
    assert process.wait(DEADLINE_SECONDS) == 0, errors
    assert "Traceback" not in errors
    return lines


def test_ctrl_c_in_the_main_thread_gives_the_best_so_far(tmp_path: Path) -> None:
    *told, text, verdict = stopped_after("told 1 ", IN_THE_MAIN_THREAD, tmp_path)
    assert told[:2] == ["told 0 False", "told 1 True"], "the first is the measurement that all others are compared with"
    assert text == (
        "the search was interrupted; the best so far is in `.result` of this exception, and kept: "
        'autotune.load("here/best.json"). The same call goes on where this one stopped'
    )
    assert autotune.load(tmp_path / "here" / "best.json").recommendation.verdict == verdict


def test_a_search_in_a_thread_is_stopped_by_its_callback_which_loses_nothing(tmp_path: Path) -> None:
    lines = stopped_after("told 1", IN_A_THREAD, tmp_path)
    assert "the main thread was interrupted" in lines
    assert lines[-1] == "stopped by the user ValueError('with a cause') None"
    told = [int(line.split()[1]) for line in lines if line.startswith("told")]
    assert told == list(range(len(told)))
    trials, _ = stored_records(tmp_path / "here")
    assert [trial.number for trial in trials] == told, "the trial whose callback raised is kept"
    assert autotune.load(tmp_path / "here" / "best.json").recommendation.trial_count >= 2


def test_an_interrupt_before_the_first_measurement_says_so() -> None:
    assert str(SearchInterrupted(None)) == (
        "the search was interrupted; nothing new was measured. The same call goes on where this one stopped"
    )
    assert SearchInterrupted(TuningResult(sample_records.recommendation())).result is not None


def test_the_callback_gets_the_trial_after_whoever_watches() -> None:
    seen: list[object] = []
    watching = RememberingWatcher()
    trial = sample_records.trial(3, {}, rate=10.0)
    CallingWatcher(watching, lambda *told: seen.append((told, list(watching.events)))).trial_finished(
        trial, Standing(samples_per_second=10.0, speedup=1.5), None
    )
    assert seen == [((trial, 1.5), ["trial 3"])]
    with pytest.raises(CallbackFailed) as failed:
        CallingWatcher(watching, lambda trial, speedup: 1 / 0).trial_finished(trial, None, None)
    assert isinstance(failed.value.error, ZeroDivisionError)
