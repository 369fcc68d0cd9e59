"""Run by `outsider.py` in a fresh interpreter: a clock around an exported script's steps, and autotune's measurement.

Reads from its one argument, in JSON, which comes first and what to run, and prints what both clocks saw. The script's part
knows nothing of autotune.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import sys
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

WARM_UP_STEPS = 5
WARM_UP_SECONDS = 3.0
"""After the first step so many steps, then so many seconds of them, run untimed."""


def main() -> None:
    """Runs both in the order that was asked for."""
    order = json.loads(sys.argv[1])
    ways = {"outsider": script, "autotune": measured}
    found = {}
    for which in order["turns"]:
        found[which] = ways[which](order)
        free()
    print(json.dumps(found))


def free() -> None:
    """Lets go of the training that ran, and of what the compiler has kept in this process."""
    gc.collect()
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def script(order: dict[str, Any]) -> dict[str, float]:
    """Steps through the script's `train()`."""
    steps_per_epoch, samples_per_epoch, batch = (
        order[name] for name in ("steps_per_epoch", "samples_per_epoch", "batch")
    )

    def samples_before(step: int) -> int:
        epochs, rest = divmod(step, steps_per_epoch)
        return int(epochs * samples_per_epoch + rest * batch)

    training = imported(order["script"]).train()
    assert order["turns"][0] == "autotune" or "autotune" not in sys.modules
    first = timed(training, 1)
    pace = timed(training, WARM_UP_STEPS) / WARM_UP_STEPS
    steps = max(1, round(WARM_UP_SECONDS / pace))
    done = 1 + WARM_UP_STEPS + steps
    pace = timed(training, steps) / steps
    steps = max(3, round(order["seconds"] / pace))
    if steps_per_epoch * pace <= 2 * order["seconds"]:
        # The end of a pass costs the same, however much of the pass is timed: whole passes, or the clock is wrong by chance.
        steps = max(1, round(steps / steps_per_epoch)) * steps_per_epoch
    seconds = timed(training, steps)
    samples = samples_before(done + steps) - samples_before(done)
    return {"first_step_seconds": first, "steps": steps, "samples": samples, "seconds": seconds}


def imported(path: str) -> ModuleType:
    """The exported script, as a module."""
    specification = importlib.util.spec_from_file_location("plain", path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["plain"] = module
    specification.loader.exec_module(module)
    return module


def timed(training: Iterator[Any], steps: int) -> float:
    """Seconds for so many steps, from one synchronisation to the next."""
    synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        next(training)
    synchronize()
    return time.perf_counter() - begin


def synchronize() -> None:
    """Waits for the device, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measured(order: dict[str, Any]) -> float:
    """Samples per second as a trial measures them."""
    from autotune.measurement.phases import answer
    from autotune.records import TrialRequest
    from autotune.workload import load_functions, workload_from_target

    request = TrialRequest.model_validate(order["request"])
    functions = load_functions(workload_from_target(order["target"]))
    measurement = answer(request, functions, lambda phase: None).measurement
    assert measurement is not None
    return measurement.samples_per_second


if __name__ == "__main__":
    main()
