"""`Stopwatch`: what the parts of a trial take, the user's own functions told apart."""

from __future__ import annotations

import dataclasses
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from autotune.measurement.clock import synchronize
from autotune.records import SpentSeconds
from autotune.workload import UserFunctions


class Stopwatch:
    """Adds up seconds by the names of `SpentSeconds`. Make it when the trial begins to build."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._seconds["start_seconds"] = process_age_seconds()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What runs within belongs to this part, also where it raises."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - begin

    def timed(self, functions: UserFunctions, device: torch.device) -> UserFunctions:
        """The functions, with their calls timed. The device is first used right after `model_fn`, as without a watch."""

        def model_fn() -> Any:
            with self.part("model_seconds"):
                model = functions.model_fn()
            with self.part("device_seconds"):
                synchronize(device)
            return model

        return dataclasses.replace(
            functions,
            model_fn=model_fn,
            data_fn=self._timed("data_seconds", functions.data_fn),
            optimizer_fn=functions.optimizer_fn and self._timed("optimizer_seconds", functions.optimizer_fn),
            scheduler_fn=functions.scheduler_fn and self._timed("optimizer_seconds", functions.scheduler_fn),
        )

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            with self.part(name):
                return function(*arguments)

        return timed

    def spent(self) -> SpentSeconds:
        """Everything so far."""
        fields = SpentSeconds.model_fields
        known = {name: self._seconds[name] for name in fields}
        return SpentSeconds(**{**known, "process_seconds": process_age_seconds()})


def process_age_seconds() -> float:
    """Since the start of this trial's process; 0 where it was not started for a trial."""
    started_at = os.environ.get("AUTOTUNE_STARTED_AT")
    return 0.0 if started_at is None else time.monotonic() - float(started_at)
