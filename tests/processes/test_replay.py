"""Recorded trials answer as they were recorded, and nothing else does."""

import math

import pytest

from autotune.config import TrainingConfig
from autotune.processes.replay import RecordedTrial, ReplayBackend, read_trials, write_trials
from autotune.records import Conditions, Failure, SoakResult, TrialAnswer, TrialRequest

CONFIG = TrainingConfig({"batch_size": 8, "precision": "bf16"})


def soak(rate):
    result = SoakResult(
        steps=1, samples_per_second=rate, growth_bytes_per_step=math.inf, allocator_retries=0, findings=()
    )
    return TrialAnswer(soak=result)


def ask(backend, config=CONFIG, kind="soak"):
    return backend.run(
        TrialRequest(kind=kind, config=config, conditions=Conditions(device="cuda", global_batch_size=None))
    )


def test_answers_what_was_recorded_in_turn():
    backend = ReplayBackend([RecordedTrial(kind="soak", config=CONFIG, answer=soak(rate)) for rate in (1.0, 2.0)])
    reordered = TrainingConfig(dict(reversed(list(CONFIG.items()))))
    assert [ask(backend, reordered).soak.samples_per_second for _ in range(4)] == [1.0, 2.0, 1.0, 2.0]
    backend.close()


@pytest.mark.parametrize(
    ("config", "kind"), [(CONFIG.replace({"batch_size": 16}), "soak"), (CONFIG, "measure")], ids=["config", "kind"]
)
def test_a_hole_is_an_error_that_names_it(config, kind):
    backend = ReplayBackend([RecordedTrial(kind="soak", config=CONFIG, answer=soak(1.0))])
    with pytest.raises(LookupError, match=rf"no record of a {kind} trial of .*'batch_size': {config['batch_size']}"):
        ask(backend, config, kind)


def test_file_round_trip(tmp_path):
    failure = TrialAnswer(failure=Failure(kind="device_oom", phase="warm-up", message="full"))
    trials = [RecordedTrial(kind="soak", config=CONFIG, answer=answer) for answer in (soak(3.5), failure)]
    write_trials(tmp_path / "trials.jsonl", trials)
    assert read_trials(tmp_path / "trials.jsonl") == trials


@pytest.mark.parametrize("broken", ["{", '{"kind": "soak"}', "[]"])
def test_a_broken_line_is_named(tmp_path, broken):
    path = tmp_path / "trials.jsonl"
    write_trials(path, [RecordedTrial(kind="soak", config=CONFIG, answer=soak(3.5))])
    path.write_text(path.read_text() + broken + "\n")
    with pytest.raises(ValueError, match=r"trials.jsonl, line 2, is no recorded trial"):
        read_trials(path)
