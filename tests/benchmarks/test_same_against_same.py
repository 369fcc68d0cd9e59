"""A configuration compared with itself: what was recorded is compared again, and what differs is told apart."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from autotune.records import Blocks, Measurement, MemoryMarks
from autotune.stats import rate
from benchmarks.same_against_same import FEWEST_PROCESSES, compared, counted, rounds_drawn

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
FILES = sorted(RESULTS.glob("*/same_against_same_*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_recorded_blocks_of_one_configuration_are_seldom_told_apart(path: Path) -> None:
    content = json.loads(path.read_text())
    measurements = [Measurement.model_validate(one) for one in content["measurements"]]
    for one in measurements:
        value, interval = rate(one.blocks.samples, one.blocks.seconds)
        assert (value, interval) == (pytest.approx(one.samples_per_second), pytest.approx(one.interval))
    on_gpu = bool(content["machine"]["gpus"])
    again = counted(measurements, 1000 if on_gpu else 100)
    assert again["false_differences"] <= (20 if on_gpu else 3)


def process(true_rate: float, dice: random.Random) -> Measurement:
    """Six blocks that spread by 1 %."""
    blocks = Blocks(
        seconds=tuple(100 / true_rate * (1 + dice.gauss(0, 0.01)) for _ in range(6)),
        samples=(100,) * 6,
        steps=(10,) * 6,
    )
    value, interval = rate(blocks.samples, blocks.seconds)
    return Measurement(
        samples_per_second=value,
        interval=interval,
        blocks=blocks,
        memory=MemoryMarks(peak_allocated_bytes=0),
        micro_batch_size=10,
        micro_batches_per_step=1,
        warmup_steps=1,
        build_seconds=0.0,
        first_step_seconds=0.0,
        process_seconds=0.0,
    )


def test_what_differs_by_a_tenth_is_told_apart_either_way() -> None:
    dice = random.Random(1)
    rounds = [(process(110, dice), process(100, dice)) for _ in range(6)]
    assert compared(rounds)[0]
    assert compared([(b, a) for a, b in rounds])[0]
    assert not compared([(process(100, dice), process(100, dice)) for _ in range(6)])[0]


@pytest.mark.parametrize("spread", [0.005, 0.02, 0.13])
def test_no_machine_is_too_noisy_for_the_one_percent_level(spread: float) -> None:
    dice = random.Random(3)

    def equal() -> Measurement:
        return process(100 * math.exp(dice.gauss(0, spread)), dice)

    told_apart = sum(compared([(equal(), equal()) for _ in range(6)])[0] for _ in range(1000))
    assert told_apart <= 20


def test_no_process_is_drawn_twice() -> None:
    dice = random.Random(2)
    measurements = [process(100 + number, dice) for number in range(2 * FEWEST_PROCESSES)]
    place = {id(one): number for number, one in enumerate(measurements)}
    seen: set[int] = set()
    for _ in range(50):
        rounds = [(place[id(a)], place[id(b)]) for a, b in rounds_drawn(measurements, dice)]
        drawn = [number for one in rounds for number in one]
        assert len(set(drawn)) == len(drawn) == 12
        seen |= set(drawn)
    assert seen == set(range(2 * FEWEST_PROCESSES))
