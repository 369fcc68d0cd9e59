"""The parts of a trial add up to the whole, whichever way its process was started."""

from __future__ import annotations

from typing import Literal

import pytest

from autotune.records import Blocks, Measurement, MemoryMarks, SpentSeconds, TrialAnswer
from benchmarks.trial_cost import beyond, parts, table

SPENT = SpentSeconds(
    start_seconds=0.02,
    device_seconds=0.3,
    model_seconds=2.0,
    optimizer_seconds=0.1,
    data_seconds=0.5,
    first_batch_seconds=0.05,
    warm_up_seconds=1.0,
    end_to_end_seconds=2.0,
    resident_seconds=1.5,
    shares_seconds=0.25,
    process_seconds=9.0,
)


def answered(start_method: Literal["fork", "fresh"]) -> TrialAnswer:
    measurement = Measurement(
        samples_per_second=1.0,
        interval=(1.0, 1.0),
        blocks=Blocks(seconds=(1.0,), samples=(1,), steps=(1,)),
        memory=MemoryMarks(peak_allocated_bytes=0),
        micro_batch_size=1,
        micro_batches_per_step=1,
        warmup_steps=1,
        build_seconds=3.0,
        first_step_seconds=1.0,
        process_seconds=4.0,
        start_method=start_method,
        spent=SPENT,
    )
    return TrialAnswer(measurement=measurement, seconds=10.0)


@pytest.mark.parametrize("start_method", ["fork", "fresh"])
def test_the_parts_add_up(start_method: Literal["fork", "fresh"]) -> None:
    found = parts(answered(start_method), before=0.04, memory_back=0.1, total=10.0)
    assert sum(found.values()) - found["total"] == pytest.approx(10.0)
    told_apart = 2.0 + 0.1 + 0.5 + 0.05 + 1.0 + 1.0 + 2.0 + 1.5 + 0.25
    assert beyond(found) == pytest.approx(10.0 - told_apart)
    assert "beyond" in table({"fork-eager": [found], "fresh-eager": []})
