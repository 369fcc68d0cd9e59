"""Run by `outsider.py` in a fresh interpreter: an exported script under a plain clock and autotune's trial, in turn.

Reads from its one argument, in JSON, what to run, and prints what both clocks saw of each turn.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Protocol

import torch

WARM_UP_STEPS = 5
WARM_UP_SECONDS = 3.0
"""After the first step so many steps, then so many seconds of them, run untimed."""


class Clock(Protocol):
    """One of the two."""

    def run(self, steps: int) -> tuple[int, float]:
        """Samples and seconds of so many steps more."""


def main() -> None:
    """So many turns of each, as long as S seconds of the script: script, trial, trial, script, script and so on."""
    order = json.loads(sys.argv[1])
    script = Script(order)
    assert "autotune" not in sys.modules
    pace, first_step_seconds = warmed_up(script)
    trial = Trial(order)
    warmed_up(trial)
    steps, passes = max(3, round(order["seconds"] / pace)), order["steps_per_epoch"]
    if passes * pace <= 2 * order["seconds"]:
        # The end of a pass costs the same, however much of the pass is timed: whole passes, or it is there by chance.
        steps = max(1, round(steps / passes)) * passes
    turns: dict[str, list[tuple[int, float]]] = {"outsider": [], "autotune": []}
    both: list[tuple[str, Clock]] = [("outsider", script), ("autotune", trial)]
    for number in range(order["turns"]):
        for name, clock in both if number % 2 == 0 else both[::-1]:
            turns[name].append(clock.run(steps))
    print(json.dumps({"first_step_seconds": first_step_seconds, "steps": steps, **turns}))


def warmed_up(clock: Clock) -> tuple[float, float]:
    """Seconds per step after the warm-up, and of the first step."""
    _, first = clock.run(1)
    _, few = clock.run(WARM_UP_STEPS)
    steps = max(1, round(WARM_UP_SECONDS * WARM_UP_STEPS / few))
    _, seconds = clock.run(steps)
    return seconds / steps, first


class Script:
    """The exported script's `train()` between two readings of a clock."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.training: Iterator[Any] = imported(order["script"]).train()
        self.batch, self.steps_per_epoch, self.samples_per_epoch = (
            order[name] for name in ("batch", "steps_per_epoch", "samples_per_epoch")
        )
        self.done = 0

    def run(self, steps: int) -> tuple[int, float]:
        before = self.samples()
        synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            next(self.training)
        synchronize()
        seconds = time.perf_counter() - begin
        self.done += steps
        return self.samples() - before, seconds

    def samples(self) -> int:
        """In all steps so far, as many as the data set has."""
        epochs, rest = divmod(self.done, self.steps_per_epoch)
        return int(epochs * self.samples_per_epoch + rest * self.batch)


def imported(path: str) -> ModuleType:
    """The exported script, as a module."""
    specification = importlib.util.spec_from_file_location("plain", path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["plain"] = module
    specification.loader.exec_module(module)
    return module


def synchronize() -> None:
    """Waits for the device, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Trial:
    """What a trial process runs and times, a block for each turn."""

    def __init__(self, order: dict[str, Any]) -> None:
        from autotune.measurement.clock import BlockClock
        from autotune.measurement.measure import end_to_end_step, started
        from autotune.records import TrialRequest
        from autotune.workload import load_functions, workload_from_target

        request = TrialRequest.model_validate(order["request"])
        functions = load_functions(workload_from_target(order["target"]))
        running = started(functions, request, lambda phase: None)
        self.step = lambda: end_to_end_step(running, "measure")
        self.clock = BlockClock(running.meter.device)

    def run(self, steps: int) -> tuple[int, float]:
        self.clock.forget()
        self.clock.run(self.step, 0.0, steps)
        self.clock.finish()
        return self.clock.samples[0], self.clock.seconds[0]


if __name__ == "__main__":
    main()
