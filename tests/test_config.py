from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from autotune.config import TrainingConfig

VALUES = st.dictionaries(
    st.text(max_size=8),
    st.one_of(st.text(max_size=8), st.integers(), st.booleans(), st.floats(allow_nan=False, allow_infinity=False)),
)


class Holder(BaseModel):
    config: TrainingConfig


@given(VALUES)
def test_the_order_of_values_does_not_matter(values: dict[str, object]) -> None:
    one, other = TrainingConfig(values), TrainingConfig(dict(reversed(values.items())))
    assert one == other
    assert hash(one) == hash(other)
    assert one.key == other.key
    assert dict(one) == values


@given(VALUES)
def test_json_brings_back_the_same_configuration(values: dict[str, object]) -> None:
    config = TrainingConfig(values)
    back = Holder.model_validate_json(Holder(config=config).model_dump_json()).config
    assert back == config
    assert {name: type(value) for name, value in back.items()} == {name: type(value) for name, value in values.items()}


def test_the_key_is_the_same_in_every_process() -> None:
    code = "from autotune.config import TrainingConfig as C; print(C({'b': True, 'a': 'x', 'c': 1.5}).key)"
    keys = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert keys == {TrainingConfig({"a": "x", "b": True, "c": 1.5}).key}
    assert len(keys.pop()) == 12


def test_values_of_other_types_are_other_configurations() -> None:
    configs = {TrainingConfig({"a": value}) for value in (1, True, "1", 1.0)}
    assert len(configs) == 4
    assert TrainingConfig({"a": 1}) != {"a": 1}


def test_a_replacement_leaves_the_original_alone() -> None:
    config = TrainingConfig({"a": 1, "b": "x"})
    changed = config.replace({"b": "y"})
    assert dict(changed) == {"a": 1, "b": "y"}
    assert dict(config) == {"a": 1, "b": "x"}
    with pytest.raises(KeyError, match="the configuration has no knob 'c'"):
        config.replace({"c": 1})


def test_changes_are_those_values_that_the_other_does_not_have() -> None:
    config = TrainingConfig({"a": 1, "b": "x", "c": True})
    assert config.changes_from(TrainingConfig({"a": 1, "b": "y"})) == {"b": "x", "c": True}
    assert config.changes_from(config) == {}


def test_it_cannot_be_changed() -> None:
    config = TrainingConfig({"a": 1})
    with pytest.raises(TypeError):
        config["a"] = 2  # type: ignore[index]
    with pytest.raises(AttributeError):
        config.other = 2  # type: ignore[attr-defined]
    values = {"a": 1}
    config = TrainingConfig(values)
    values["a"] = 2
    assert config["a"] == 1


@pytest.mark.parametrize("value", [None, [1], {"a": 1}])
def test_only_scalars_are_values(value: object) -> None:
    with pytest.raises(ValidationError):
        Holder.model_validate({"config": {"a": value}})


def test_it_shows_its_values() -> None:
    assert repr(TrainingConfig({"b": 1, "a": "x"})) == "TrainingConfig({'a': 'x', 'b': 1})"
    assert len(TrainingConfig({"b": 1, "a": "x"})) == 2
