"""Holds autotune's rates against an outsider: the exported Python script, unchanged, with a clock around its steps.

    python benchmarks/outsider.py BEST.json [--rounds N] [--seconds S] [--turns T] [--out DIR]

For the user's own settings and for the recommended ones, each round is a fresh interpreter which has both: the exported
script, stepped through by a plain clock that knows nothing of autotune, and the training of a trial, timed as a trial times
it. They take T turns of S seconds each, in changing order. Neither is timed in a process of its own, since what two
processes of one program differ by, up to 15 % where a CPU holds it back, says nothing of a clock; `trial_start.py` holds
forked trials against fresh interpreters. A configuration is done when the 95 % interval of the ratio, over turns, tells
whether they agree within 2 %, or after N rounds. A round takes 2 T S and what the program takes to start and to warm up,
twice; a pass over the data that is not much longer than S is timed to its end.
Writes `DIR/outsider_NAME.json`, NAME from the user's file, after every round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from autotune.export.python import export
from autotune.machine import read_machine_facts
from autotune.records import Answer, Recommendation, TrialRequest
from autotune.result import load
from autotune.stats import ratio

CHILD = Path(__file__).parent / "outsider_child.py"
AGREEMENT = 0.02


def main() -> int:
    """Measures in turn, writes the result file and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("best", type=Path)
    parser.add_argument("--rounds", type=int, default=6, help="at most")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn")
    parser.add_argument("--turns", type=int, default=6, help="of each clock in a round")
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
        "command": f"python benchmarks/outsider.py BEST.json --rounds {arguments.rounds} --seconds {arguments.seconds:g}"
        f" --turns {arguments.turns}",
        "machine": machine.model_dump(mode="json", exclude={"identity"}),
        "target": f"{target.parent.name}/{target.name}",
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    for number in range(arguments.rounds):
        for which, one in sides.items():
            if one.verdict() == "undecided":
                one.measure(recommendation, target, arguments.seconds, arguments.turns)
                print(f"round {number + 1}: {which:12} {one.told()}", flush=True)
        content["configurations"] = {which: one.content() for which, one in sides.items()}
        (arguments.out / f"{content['name']}.json").write_text(json.dumps(content, indent=1) + "\n")
    for which, one in sides.items():
        print(f"{which:12} {one.told()}: {one.verdict()} after {one.seconds:.0f} s")
    return 0


@dataclass
class Sides:
    """What both clocks said of one configuration in each round."""

    answer: Answer
    rounds: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    """That all of it took."""

    def measure(self, recommendation: Recommendation, target: Path, seconds: float, turns: int) -> None:
        """One round."""
        begin = time.perf_counter()
        self.rounds.append(both(recommendation, self.answer, target, seconds, turns))
        self.seconds += time.perf_counter() - begin

    def rates(self, which: Literal["autotune", "outsider"]) -> list[float]:
        """A clock's rate in each of its turns, in samples per second."""
        return [samples / seconds for one in self.rounds for samples, seconds in one[which]]

    def ratio(self) -> tuple[float, tuple[float, float]]:
        """Of autotune's rate over the outsider's, with its 95 % interval over turns."""
        return ratio(self.rates("autotune"), self.rates("outsider"))

    def verdict(self) -> Literal["within 2 %", "not within 2 %", "undecided"]:
        """Whether the clocks agree, as far as the turns tell."""
        if not self.rounds:
            return "undecided"
        _, (low, high) = self.ratio()
        if low >= 1 - AGREEMENT and high <= 1 + AGREEMENT:
            return "within 2 %"
        return "not within 2 %" if low > 1 + AGREEMENT or high < 1 - AGREEMENT else "undecided"

    def told(self) -> str:
        """Both mean rates, and their ratio with its interval."""
        value, (low, high) = self.ratio()
        own, outside = (statistics.mean(self.rates(which)) for which in ("autotune", "outsider"))
        return (
            f"autotune {own:9.1f}/s, outsider {outside:9.1f}/s, "
            f"autotune over outsider {value:.4f} ({low:.4f} to {high:.4f})"
        )

    def content(self) -> dict[str, Any]:
        """For the result file."""
        value, interval = self.ratio()
        return {
            "config": dict(self.answer.config),
            "autotune_over_outsider": value,
            "interval": interval,
            "verdict": self.verdict(),
            "rounds": self.rounds,
            "took_seconds": self.seconds,
        }


def both(recommendation: Recommendation, answer: Answer, target: Path, seconds: float, turns: int) -> dict[str, Any]:
    """What both clocks saw in one process: samples and seconds of each turn."""
    length = recommendation.workload.dataset_length
    batch = answer.effective_batch_size
    assert length is not None, "the outsider counts samples by the length of the data set"
    full, rest = divmod(length, batch)
    dropped = recommendation.workload.drop_last or not rest
    with tempfile.TemporaryDirectory() as scratch:
        script = Path(scratch) / "plain.py"
        script.write_text(export(recommendation, answer.config))
        order = {
            "turns": turns,
            "script": str(script),
            "steps_per_epoch": full if dropped else full + 1,
            "samples_per_epoch": full * batch if dropped else length,
            "batch": batch,
            "seconds": seconds,
            "target": str(target),
            "request": TrialRequest(
                kind="measure",
                config=answer.config,
                conditions=recommendation.settings.conditions,
                blocks=recommendation.workload.blocks,
            ).model_dump(mode="json"),
        }
        finished = subprocess.run(
            [sys.executable, str(CHILD), json.dumps(order)], capture_output=True, text=True, check=False
        )
    assert finished.returncode == 0, finished.stderr
    found: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    sys.exit(main())
