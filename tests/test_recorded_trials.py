"""Trials that ran on an H200, replayed: what was measured there holds here."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from autotune.config import TrainingConfig
from autotune.processes.replay import RecordedTrial, ReplayBackend, read_trials
from autotune.records import Conditions, TrialAnswer, TrialRequest
from autotune.search.answers import surely_faster
from autotune.search.ceiling import CeilingSearch
from autotune.stats import faster, rate

FILES = sorted((Path(__file__).parent / "data").glob("h200_*.jsonl"))
GPT2 = next(path for path in FILES if path.name == "h200_gpt2.jsonl")
CARD_BYTES = 150_754_820_096
"""Of that H200, as NVML tells it."""
LEAST_GAIN = {"h200_gpt2": 5.0, "h200_gpt2_16gib": 5.0, "h200_small": 2.5}
"""The recommended configurations were at least so many times faster in every round."""
CONDITIONS = Conditions(device="cuda", global_batch_size=None)


def request(trial: RecordedTrial) -> TrialRequest:
    return TrialRequest(kind=trial.kind, config=trial.config, conditions=CONDITIONS)


def confirmations(path: Path) -> dict[TrainingConfig, list[TrialAnswer]]:
    """The answers of configurations that were measured again, without the first."""
    measured: dict[TrainingConfig, list[TrialAnswer]] = defaultdict(list)
    for trial in read_trials(path):
        if trial.kind == "measure" and trial.answer.measurement is not None:
            measured[trial.config].append(trial.answer)
    return {config: answers[1:] for config, answers in measured.items() if len(answers) > 1}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_replay_answers_what_was_recorded_and_nothing_else(path: Path) -> None:
    trials = read_trials(path)
    backend = ReplayBackend(trials)
    for trial in trials:
        assert backend.run(request(trial)) in [other.answer for other in trials if other.config == trial.config]
    unknown = trials[-1].model_copy(update={"config": trials[-1].config.replace({"num_workers": 99})})
    with pytest.raises(LookupError, match="num_workers"):
        backend.run(request(unknown))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_rates_follow_from_the_raw_blocks(path: Path) -> None:
    for trial in read_trials(path):
        measurement = trial.answer.measurement
        if measurement is not None:
            value, interval = rate(measurement.blocks.samples, measurement.blocks.seconds)
            assert value == pytest.approx(measurement.samples_per_second)
            assert interval == pytest.approx(measurement.interval)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_was_recommended_is_clearly_faster_than_the_baseline(path: Path) -> None:
    """As the search judged it, which has two rounds where time was short."""
    rounds = {
        config: [answer.measurement for answer in answers if answer.measurement is not None]
        for config, answers in confirmations(path).items()
    }
    slowest = min(rounds, key=lambda config: rounds[config][0].samples_per_second)
    assert slowest["precision"] == "as_is"
    others = [config for config in rounds if config != slowest]
    assert others
    for config in others:
        pairs = list(zip(rounds[config], rounds[slowest], strict=True))
        assert surely_faster(pairs)
        assert not surely_faster([(base, own) for own, base in pairs])
        assert all(own.samples_per_second > LEAST_GAIN[path.stem] * base.samples_per_second for own, base in pairs)


def test_the_same_configuration_is_not_told_apart_from_itself() -> None:
    for answers in confirmations(GPT2).values():
        rates = [answer.measurement.samples_per_second for answer in answers if answer.measurement is not None]
        assert faster(rates, rates[1:] + rates[:1]) != "faster"


def test_allocated_bytes_are_affine_and_three_probes_find_the_ceiling() -> None:
    probes = {
        int(trial.config["batch_size"]): trial.answer.memory
        for trial in read_trials(GPT2)
        if trial.kind == "memory" and trial.answer.memory is not None
    }
    (small, middle, largest) = sorted(probes)
    peaks = {size: probe.memory.peak_allocated_bytes for size, probe in probes.items()}
    slope = (peaks[middle] - peaks[small]) / (middle - small)
    assert peaks[small] + slope * (largest - small) == pytest.approx(peaks[largest], rel=0.01)

    search = CeilingSearch(limit_bytes=int(0.99 * CARD_BYTES), cap=4096, start=small)
    asked = []
    while (size := search.next()) is not None:
        asked.append(size)
        probe = probes[size]
        search.tell(size, fits=probe.fits, peak_bytes=probe.memory.reserved_bytes, affine=True)
    assert asked == [small, middle, largest]
    assert search.result().largest_batch_size == largest
    assert search.result().smallest_failed_batch_size is None
