"""`TrainingConfig`: one value for every knob, frozen, with a key that is the same in every process."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

Value = str | int | float | bool
"""What a knob can be set to: a JSON scalar."""


def value_text(value: Value) -> str:
    """A knob's value as the command line spells it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def settings_text(settings: Mapping[str, Value]) -> str:
    """Such as `batch_size=64, precision=bf16`; empty where there are none."""
    return ", ".join(f"{name}={value_text(value)}" for name, value in settings.items())


class TrainingConfig(Mapping[str, Value]):
    """A frozen mapping from knob name to value.

    Two configurations with the same values are equal, hash alike and have the same `key`, whatever the order in which
    their values were given.
    """

    __slots__ = ("_key", "_values")

    def __init__(self, values: Mapping[str, Value]) -> None:
        self._values: dict[str, Value] = {name: values[name] for name in sorted(values)}
        self._key: str | None = None

    def __getitem__(self, name: str) -> Value:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TrainingConfig) and self.key == other.key

    def __repr__(self) -> str:
        return f"TrainingConfig({self._values})"

    @property
    def key(self) -> str:
        """Twelve hexadecimal digits that identify the values; the same on every machine."""
        if self._key is None:  # made once: a search compares configurations all the time
            canonical = json.dumps(self._values, sort_keys=True, separators=(",", ":"))
            self._key = hashlib.sha256(canonical.encode()).hexdigest()[:12]
        return self._key

    def replace(self, changes: Mapping[str, Value]) -> TrainingConfig:
        """A copy with some values changed. Raises KeyError for a knob that the configuration does not have."""
        for name in changes:
            if name not in self._values:
                raise KeyError(f"the configuration has no knob {name!r}")
        return TrainingConfig({**self._values, **changes})

    def changes_from(self, other: TrainingConfig) -> dict[str, Value]:
        """The knobs whose values differ from those in `other`, with the values that they have here."""
        return {name: value for name, value in self._values.items() if name not in other or other[name] != value}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        scalars = core_schema.union_schema(
            [
                core_schema.bool_schema(strict=True),
                core_schema.int_schema(strict=True),
                core_schema.float_schema(strict=True),
                core_schema.str_schema(strict=True),
            ],
            mode="left_to_right",
        )
        from_mapping = core_schema.no_info_after_validator_function(
            cls, core_schema.dict_schema(core_schema.str_schema(), scalars)
        )
        return core_schema.json_or_python_schema(
            json_schema=from_mapping,
            python_schema=core_schema.union_schema([core_schema.is_instance_schema(cls), from_mapping]),
            serialization=core_schema.plain_serializer_function_ser_schema(lambda config: dict(config)),
        )
