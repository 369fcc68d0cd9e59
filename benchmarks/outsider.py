"""Holds autotune's rates against an outsider: the exported Python script, unchanged, with a clock around its steps.

    python benchmarks/outsider.py BEST.json [--rounds N] [--seconds S] [--out DIR]

For the user's own settings and for the recommended ones: a trial process of autotune's and a fresh interpreter that
imports the exported script, which knows nothing of autotune, and steps through its `train()`; which of them is first
changes from round to round. A configuration is done when the 95 % interval of the ratio tells whether they agree within
2 %, or after N rounds. A round of one takes twice S and twice what the program takes to start and to warm up, and some
6 s; a pass over the data that is not much longer than S is timed to its end.
Writes `DIR/outsider_NAME.json`, NAME from the user's file, after every round.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from autotune.config import TrainingConfig
from autotune.export.python import export
from autotune.machine import read_machine_facts
from autotune.nvml import gpu_used_bytes
from autotune.processes.pool import TrialPool
from autotune.records import Answer, Recommendation, TrialRequest
from autotune.result import load
from autotune.search.pace import Pace, pace_for
from autotune.stats import FEWEST_ROUNDS, ratio
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
if steps_per_epoch * pace <= 2 * seconds:
    # The end of a pass costs the same, however much of the pass is timed: whole passes, or the clock is wrong by chance.
    steps = max(1, round(steps / steps_per_epoch)) * steps_per_epoch
taken = timed(steps)
print(json.dumps({
    "first_step_seconds": first,
    "steps": steps,
    "samples": samples_before(done + steps) - samples_before(done),
    "seconds": taken,
}))
"""
"""Run by `python -c`. After the first step 5 steps, then 3 s of them, run untimed."""

AGREEMENT = 0.02
SHORT_SECONDS = 6.0
"""Where the outsider is given less, autotune measures as in a short budget."""


def main() -> int:
    """Measures in turn, writes the result file and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("best", type=Path)
    parser.add_argument("--rounds", type=int, default=12, help="at most")
    parser.add_argument("--seconds", type=float, default=8.0, help="that the outsider times, after its warm-up")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    recommendation = load(arguments.best).recommendation
    target = Path(recommendation.reference.location)
    sides = {
        which: Sides(answer)
        for which, answer in {"yours": recommendation.baseline, "recommended": recommendation.best}.items()
    }
    machine = read_machine_facts()
    content: dict[str, Any] = {
        "name": f"outsider_{target.stem}",
        "command": f"python benchmarks/outsider.py BEST.json --rounds {arguments.rounds} --seconds {arguments.seconds:g}",
        "machine": machine.model_dump(mode="json", exclude={"identity"}),
        "target": f"{target.parent.name}/{target.name}",
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        used = gpu_used_bytes if machine.gpus else None
        workload = workload_from_target(str(target))
        with TrialPool(workload, Path(scratch), warm_compiler=True, gpu_used_bytes=used) as pool:
            for number in range(arguments.rounds):
                for which, one in sides.items():
                    if one.verdict() != "undecided":
                        continue
                    one.measure(pool, recommendation, arguments.seconds, outsider_first=number % 2 == 1)
                    print(f"round {number + 1}: {which:12} {one.told()}", flush=True)
                content["configurations"] = {which: one.content() for which, one in sides.items()}
                (arguments.out / f"{content['name']}.json").write_text(json.dumps(content, indent=1) + "\n")
    for which, one in sides.items():
        print(f"{which:12} {one.told()}: {one.verdict()} after {one.seconds:.0f} s")
    return 0


@dataclass
class Sides:
    """What both clocks said of one configuration, a reading of each per round."""

    answer: Answer
    own: list[float] = field(default_factory=list)
    outside: list[dict[str, float]] = field(default_factory=list)
    seconds: float = 0.0
    """That all of it took."""

    def measure(self, pool: TrialPool, recommendation: Recommendation, seconds: float, *, outsider_first: bool) -> None:
        """One round."""
        begin = time.perf_counter()
        if outsider_first:
            self.outside.append(timed_outside(recommendation, self.answer, seconds))
        self.own.append(measured(pool, recommendation, self.answer.config, seconds))
        if not outsider_first:
            self.outside.append(timed_outside(recommendation, self.answer, seconds))
        self.seconds += time.perf_counter() - begin

    def rates(self) -> list[float]:
        """The outsider's, in samples per second."""
        return [one["samples"] / one["seconds"] for one in self.outside]

    def verdict(self) -> Literal["within 2 %", "not within 2 %", "undecided"]:
        """Whether the clocks agree, as far as the rounds tell."""
        if len(self.own) < FEWEST_ROUNDS:
            return "undecided"
        _, (low, high) = ratio(self.own, self.rates())
        if low >= 1 - AGREEMENT and high <= 1 + AGREEMENT:
            return "within 2 %"
        return "not within 2 %" if low > 1 + AGREEMENT or high < 1 - AGREEMENT else "undecided"

    def told(self) -> str:
        """Both mean rates, and their ratio with its interval."""
        rates, rounds = self.rates(), len(self.own)
        value, (low, high) = ratio(self.own, rates)
        return (
            f"autotune {sum(self.own) / rounds:9.1f}/s, outsider {sum(rates) / rounds:9.1f}/s, "
            f"autotune over outsider {value:.4f}" + (f" ({low:.4f} to {high:.4f})" if rounds > 1 else "")
        )

    def content(self) -> dict[str, Any]:
        """For the result file."""
        return {
            "config": dict(self.answer.config),
            "autotune": self.own,
            "outsider": self.outside,
            "took_seconds": self.seconds,
        }


def measured(pool: TrialPool, recommendation: Recommendation, config: TrainingConfig, seconds: float) -> float:
    """Samples per second as the confirmation of a search measures them; of one in a short budget for few seconds."""
    pace = pace_for(0.0) if seconds < SHORT_SECONDS else Pace()
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


def timed_outside(recommendation: Recommendation, answer: Answer, seconds: float) -> dict[str, float]:
    """What the clock saw around the exported script."""
    length = recommendation.workload.dataset_length
    batch = answer.effective_batch_size
    assert length is not None, "the outsider counts samples by the length of the data set"
    full, rest = divmod(length, batch)
    dropped = recommendation.workload.drop_last or not rest
    per_epoch = (full, full * batch) if dropped else (full + 1, length)
    with tempfile.TemporaryDirectory() as scratch:
        script = Path(scratch) / "plain.py"
        script.write_text(export(recommendation, answer.config))
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
