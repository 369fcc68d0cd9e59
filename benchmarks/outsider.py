"""Holds autotune's rates against an outsider: the exported Python script, unchanged, with a clock around its steps.

    python benchmarks/outsider.py BEST.json [--rounds N] [--seconds S] [--out DIR]

For the user's own settings and for the recommended ones, in turn: a trial process of autotune's, then a fresh
interpreter that imports the exported script, which knows nothing of autotune, and steps through its `train()`.
Writes `DIR/outsider_NAME.json`, NAME from the user's file.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from autotune.config import TrainingConfig
from autotune.export.python import export
from autotune.machine import read_machine_facts
from autotune.nvml import gpu_used_bytes
from autotune.processes.pool import TrialPool
from autotune.records import Answer, Recommendation, TrialRequest
from autotune.result import load
from autotune.search.pace import Pace
from autotune.stats import ratio
from autotune.workload import workload_from_target

CLOCK = """
import importlib.util, json, sys, time
import torch

path = sys.argv[1]
steps_per_epoch, samples_per_epoch, batch = map(int, sys.argv[2:5])
seconds = float(sys.argv[5])

def synchronize():
    if torch.cuda.is_available():
        torch.cuda.synchronize()

def timed(steps):
    synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        next(training)
    synchronize()
    return time.perf_counter() - begin

def samples_before(step):
    epochs, rest = divmod(step, steps_per_epoch)
    return epochs * samples_per_epoch + rest * batch

specification = importlib.util.spec_from_file_location("plain", path)
module = importlib.util.module_from_spec(specification)
sys.modules["plain"] = module
specification.loader.exec_module(module)
assert "autotune" not in sys.modules
training = module.train()
done = 1
first = timed(1)
pace = timed(5) / 5
done += 5
steps = max(1, round(3 / pace))
pace = timed(steps) / steps
done += steps
steps = max(3, round(seconds / pace))
taken = timed(steps)
print(json.dumps({
    "first_step_seconds": first,
    "steps": steps,
    "samples": samples_before(done + steps) - samples_before(done),
    "seconds": taken,
}))
"""
"""Run by `python -c`. After the first step 5 steps, then 3 s of them, run untimed."""


def main() -> int:
    """Measures in turn, writes the result file and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("best", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0, help="that the outsider times, after its warm-up")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    recommendation = load(arguments.best).recommendation
    target = recommendation.reference.location
    answers = {"yours": recommendation.baseline, "recommended": recommendation.best}
    own: dict[str, list[float]] = {which: [] for which in answers}
    outside: dict[str, list[dict[str, float]]] = {which: [] for which in answers}
    machine = read_machine_facts()
    with tempfile.TemporaryDirectory() as scratch:
        used = gpu_used_bytes if machine.gpus else None
        workload = workload_from_target(target)
        with TrialPool(workload, Path(scratch), warm_compiler=True, gpu_used_bytes=used) as pool:
            for _ in range(arguments.rounds):
                for which, answer in answers.items():
                    own[which].append(measured(pool, recommendation, answer.config))
                    outside[which].append(timed_outside(Path(scratch), recommendation, answer, arguments.seconds))
    content: dict[str, Any] = {
        "name": f"outsider_{Path(target).stem}",
        "command": f"python benchmarks/outsider.py BEST.json --rounds {arguments.rounds} --seconds {arguments.seconds:g}",
        "machine": machine.model_dump(mode="json", exclude={"identity"}),
        "target": f"{Path(target).parent.name}/{Path(target).name}",
        "configurations": {
            which: {"config": dict(answer.config), "autotune": own[which], "outsider": outside[which]}
            for which, answer in answers.items()
        },
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / f"{content['name']}.json").write_text(json.dumps(content, indent=1) + "\n")
    for which in answers:
        rates = [one["samples"] / one["seconds"] for one in outside[which]]
        value, (low, high) = ratio(own[which], rates)
        print(
            f"{which:12} autotune {sum(own[which]) / len(rates):9.1f}/s, outsider {sum(rates) / len(rates):9.1f}/s, "
            f"autotune over outsider {value:.4f}" + (f" ({low:.4f} to {high:.4f})" if len(rates) > 1 else "")
        )
    return 0


def measured(pool: TrialPool, recommendation: Recommendation, config: TrainingConfig) -> float:
    """Samples per second as the confirmation of a search measures them."""
    pace = Pace()
    answer = pool.run(
        TrialRequest(
            kind="measure",
            config=config,
            conditions=recommendation.settings.conditions,
            blocks=recommendation.workload.blocks,
            block_seconds=pace.confirm_block_seconds,
            minimum_blocks=pace.confirm_minimum_blocks,
            maximum_blocks=pace.confirm_maximum_blocks,
            measure_resident=False,
        )
    )
    assert answer.measurement is not None, answer.failure
    return answer.measurement.samples_per_second


def timed_outside(scratch: Path, recommendation: Recommendation, answer: Answer, seconds: float) -> dict[str, float]:
    """What the clock saw around the exported script."""
    script = scratch / "plain.py"
    script.write_text(export(recommendation, answer.config))
    length = recommendation.workload.dataset_length
    batch = answer.effective_batch_size
    assert length is not None, "the outsider counts samples by the length of the data set"
    full, rest = divmod(length, batch)
    dropped = recommendation.workload.drop_last or not rest
    per_epoch = (full, full * batch) if dropped else (full + 1, length)
    finished = subprocess.run(
        [sys.executable, "-c", CLOCK, str(script), *map(str, per_epoch), str(batch), str(seconds)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    found: dict[str, float] = json.loads(finished.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    sys.exit(main())
