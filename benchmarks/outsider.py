"""Holds autotune's rates against an outsider: the exported Python script, unchanged, with a clock around its steps.

    python benchmarks/outsider.py BEST.json [--rounds N] [--seconds S] [--out DIR]

For the user's own settings and for the recommended ones, each round is a fresh interpreter in which the exported script is
stepped through by a clock that knows nothing of autotune, and the same configuration is measured as a trial measures it;
which of them is first changes from round to round. One process has both, since processes of one program differ by up to
15 % where a CPU holds them back, which says nothing of a clock (`trial_start.py` holds forked trials against fresh ones).
A configuration is done when the 95 % interval of the ratio tells whether they agree within 2 %, or after N rounds. A round
takes twice S and what the program takes to start and to warm up, twice; a pass over the data that is not much longer than
S is timed to its end. Writes `DIR/outsider_NAME.json`, NAME from the user's file, after every round.
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
from autotune.records import Answer, Recommendation, TrialRequest
from autotune.result import load
from autotune.search.pace import Pace, pace_for
from autotune.stats import FEWEST_ROUNDS, ratio

CHILD = Path(__file__).parent / "outsider_child.py"
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
    for number in range(arguments.rounds):
        for which, one in sides.items():
            if one.verdict() != "undecided":
                continue
            one.measure(recommendation, target, arguments.seconds, script_first=number % 2 == 1)
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

    def measure(self, recommendation: Recommendation, target: Path, seconds: float, *, script_first: bool) -> None:
        """One round."""
        begin = time.perf_counter()
        found = both(recommendation, self.answer, target, seconds, script_first=script_first)
        self.own.append(found["autotune"])
        self.outside.append(found["outsider"])
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


def both(
    recommendation: Recommendation, answer: Answer, target: Path, seconds: float, *, script_first: bool
) -> dict[str, Any]:
    """What both clocks saw in one process: samples per second, and what the outsider counted."""
    length = recommendation.workload.dataset_length
    batch = answer.effective_batch_size
    assert length is not None, "the outsider counts samples by the length of the data set"
    full, rest = divmod(length, batch)
    dropped = recommendation.workload.drop_last or not rest
    with tempfile.TemporaryDirectory() as scratch:
        script = Path(scratch) / "plain.py"
        script.write_text(export(recommendation, answer.config))
        order = {
            "turns": ["outsider", "autotune"] if script_first else ["autotune", "outsider"],
            "script": str(script),
            "steps_per_epoch": full if dropped else full + 1,
            "samples_per_epoch": full * batch if dropped else length,
            "batch": batch,
            "seconds": seconds,
            "target": str(target),
            "request": request(recommendation, answer.config, seconds).model_dump(mode="json"),
        }
        finished = subprocess.run(
            [sys.executable, str(CHILD), json.dumps(order)], capture_output=True, text=True, check=False
        )
    assert finished.returncode == 0, finished.stderr
    found: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return found


def request(recommendation: Recommendation, config: TrainingConfig, seconds: float) -> TrialRequest:
    """For blocks as the confirmation of a search has them, in a short budget where there are few seconds; all of them."""
    pace = pace_for(0.0) if seconds < SHORT_SECONDS else Pace()
    return TrialRequest(
        kind="measure",
        config=config,
        conditions=recommendation.settings.conditions,
        blocks=recommendation.workload.blocks,
        block_seconds=pace.confirm_block_seconds,
        minimum_blocks=pace.confirm_maximum_blocks,
        maximum_blocks=pace.confirm_maximum_blocks,
        measure_resident=False,
    )


if __name__ == "__main__":
    sys.exit(main())
