from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from typing import get_args

import pytest
from pydantic import ValidationError

from autotune import records
from autotune.config import TrainingConfig
from autotune.records import (
    OUT_OF_MEMORY,
    Blocks,
    Conditions,
    Failure,
    FailureKind,
    MachineFacts,
    Measurement,
    MemoryMarks,
    Record,
    Trial,
    TrialAnswer,
    TrialRequest,
)
from tests.knobs.search_facts import H200, machine, workload


def record_classes() -> Iterator[type[Record]]:
    for _, value in inspect.getmembers(records, inspect.isclass):
        if issubclass(value, Record) and value is not Record:
            yield value


MEASUREMENT = Measurement(
    samples_per_second=100.0,
    interval=(98.0, 102.0),
    blocks=Blocks(seconds=(0.1, 0.2), samples=(10, 20), steps=(1, 2), weights=(1.5, 2.5)),
    memory=MemoryMarks(peak_allocated_bytes=2**40 + 1),
    micro_batch_size=10,
    micro_batches_per_step=1,
    warmup_steps=2,
    build_seconds=0.1,
    first_step_seconds=0.1,
    process_seconds=0.1,
)
TRIAL = Trial(
    number=3,
    stage="compute",
    config=TrainingConfig({"precision": "bf16", "num_workers": 0, "pin_memory": True, "x": 0.1}),
    measurement=MEASUREMENT,
    failure=Failure(kind="numerics", phase="parity", message="fast, and wrong"),
    started_at=1.7e9 + 0.123456,
    seconds=1 / 3,
    machine_identity="0" * 12,
)
EXAMPLES: list[Record] = [
    H200,
    machine(H200, notes=("one", "two")),
    workload(),
    TRIAL,
    TrialAnswer(measurement=MEASUREMENT, seconds=1.5),
    TrialRequest(
        kind="measure", config=TRIAL.config, conditions=Conditions(device="cpu", global_batch_size=None), blocks=("a",)
    ),
]


@pytest.mark.parametrize("record", EXAMPLES, ids=lambda record: type(record).__name__)
def test_json_brings_back_the_same_record(record: Record) -> None:
    back = type(record).model_validate_json(record.model_dump_json())
    assert back == record
    assert back.model_dump_json() == record.model_dump_json()


@pytest.mark.parametrize("record", EXAMPLES, ids=lambda record: type(record).__name__)
def test_a_field_that_is_not_known_is_an_error(record: Record) -> None:
    document = json.loads(record.model_dump_json()) | {"of_a_later_version": 1}
    with pytest.raises(ValidationError, match="of_a_later_version"):
        type(record).model_validate(document)


@pytest.mark.parametrize("record_class", list(record_classes()), ids=lambda cls: cls.__name__)
def test_every_record_is_frozen_and_closed_and_says_what_it_is(record_class: type[Record]) -> None:
    assert record_class.model_config["frozen"]
    assert record_class.model_config["extra"] == "forbid"
    assert record_class.__doc__
    assert record_class.__doc__ != Record.__doc__


def test_a_record_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        TRIAL.number = 4  # type: ignore[misc]


@pytest.mark.parametrize("record_class", [MachineFacts, Trial, TrialAnswer, records.Recommendation, records.Probe])
def test_what_is_written_down_carries_its_version(record_class: type[Record]) -> None:
    assert record_class.model_fields["schema_version"].default == records.SCHEMA_VERSION


def test_kinds_of_failure_are_a_closed_set() -> None:
    assert set(get_args(FailureKind)) >= OUT_OF_MEMORY == {"device_oom", "host_oom"}
    with pytest.raises(ValidationError):
        Failure(kind="bad luck", phase="measure", message="x")  # type: ignore[arg-type]


def test_a_request_for_nothing_special_has_the_documented_defaults() -> None:
    request = TrialRequest(
        kind="measure", config=TrainingConfig({}), conditions=Conditions(device="cpu", global_batch_size=None)
    )
    assert (request.block_seconds, request.minimum_blocks, request.relative_precision) == (0.3, 3, 0.01)
    assert request.conditions.memory_margin == 0.05


def test_values_of_a_configuration_keep_their_types_in_a_trial() -> None:
    back = Trial.model_validate_json(TRIAL.model_dump_json())
    assert {name: type(value) for name, value in back.config.items()} == {
        "precision": str,
        "num_workers": int,
        "pin_memory": bool,
        "x": float,
    }
