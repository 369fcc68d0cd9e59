"""Compares a configuration with itself, as a search compares its finalists, and counts how often a difference is seen.

    python benchmarks/same_against_same.py TARGET [--comparisons N] [--processes N] [--blocks N] [--block-seconds S]
                                                  [--seconds S] [--out DIR]

Runs the user's own configuration in fresh processes, one after the other, with the blocks of a confirmation. Each
comparison draws the rounds of a confirmation from them, two processes a round, and asks after every round what a search
asks. No process is drawn twice, nor for both sides. Writes `DIR/same_against_same_NAME.json` with the raw blocks; DIR
defaults to `benchmarks/results`. `--seconds` ends the recording, whatever the number of processes.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autotune.config import TrainingConfig
from autotune.machine import read_machine_facts
from autotune.nvml import gpu_used_bytes
from autotune.processes.pool import TrialPool
from autotune.records import Conditions, MachineFacts, Measurement, TrialRequest
from autotune.search.answers import settled, surely_faster
from autotune.search.confirm import MOST_ROUNDS
from autotune.search.pace import Pace
from autotune.workload import workload_from_target

SEED = 20
FEWEST_PROCESSES = 2 * MOST_ROUNDS
"""What one comparison needs."""


def main() -> int:
    """Records, compares and writes the result file."""
    pace = Pace()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--comparisons", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=24)
    parser.add_argument("--blocks", type=int, default=pace.confirm_minimum_blocks, help="at least, in each process")
    parser.add_argument("--block-seconds", type=float, default=pace.confirm_block_seconds)
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    machine = read_machine_facts()
    measurements = recorded(arguments, machine)
    if len(measurements) < FEWEST_PROCESSES:
        print(f"only {len(measurements)} processes ran in {arguments.seconds:g} s; {FEWEST_PROCESSES} are needed")
        return 1
    content = {
        "name": f"same_against_same_{Path(arguments.target).stem}",
        "command": (
            f"python benchmarks/same_against_same.py {arguments.target} --comparisons {arguments.comparisons} "
            f"--processes {arguments.processes} --blocks {arguments.blocks} --block-seconds {arguments.block_seconds:g} "
            f"--seconds {arguments.seconds:g}"
        ),
        "machine": machine.model_dump(mode="json", exclude={"identity"}),
        "target": arguments.target,
        **counted(measurements, arguments.comparisons),
        "measurements": [one.model_dump(mode="json", exclude_defaults=True) for one in measurements],
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / f"{content['name']}.json").write_text(json.dumps(content, indent=1) + "\n")
    print(f"{content['false_differences']} false differences in {content['comparisons']} comparisons")
    return 0


def recorded(arguments: argparse.Namespace, machine: MachineFacts) -> list[Measurement]:
    """The user's configuration in one fresh process after the other, until there are enough or the time is over."""
    request = TrialRequest(
        kind="measure",
        config=TrainingConfig({}),
        conditions=Conditions(device="cuda" if machine.gpus else "cpu", global_batch_size=None),
        block_seconds=arguments.block_seconds,
        minimum_blocks=arguments.blocks,
        maximum_blocks=2 * arguments.blocks,
        measure_resident=False,
    )
    began, longest = time.monotonic(), 0.0
    measurements: list[Measurement] = []
    with tempfile.TemporaryDirectory() as scratch:
        used = gpu_used_bytes if machine.gpus else None
        workload = workload_from_target(arguments.target)
        with TrialPool(workload, Path(scratch), warm_compiler=True, gpu_used_bytes=used) as pool:
            while len(measurements) < arguments.processes:
                if time.monotonic() - began + longest > arguments.seconds:
                    break
                answer = pool.run(request)
                assert answer.measurement is not None, answer.failure
                measurements.append(answer.measurement)
                longest = max(longest, answer.seconds)
    return measurements


def counted(measurements: Sequence[Measurement], comparisons: int) -> dict[str, Any]:
    """How many of so many comparisons tell the two sides apart, at the 1 % level, either way."""
    dice = random.Random(SEED)
    drawn = [compared(rounds_drawn(measurements, dice)) for _ in range(comparisons)]
    return {
        "comparisons": comparisons,
        "false_differences": sum(differs for differs, _ in drawn),
        "rounds_needed": {str(rounds): sum(one == rounds for _, one in drawn) for rounds in range(3, MOST_ROUNDS + 1)},
    }


def rounds_drawn(measurements: Sequence[Measurement], dice: random.Random) -> list[tuple[Measurement, Measurement]]:
    """The rounds of one comparison. Processes that ran far apart meet too, so that a machine that drifts is no help."""
    drawn = dice.sample(list(measurements), 2 * MOST_ROUNDS)
    return list(zip(drawn[::2], drawn[1::2], strict=True))


def compared(rounds: Sequence[tuple[Measurement, Measurement]]) -> tuple[bool, int]:
    """Whether a difference is seen, and after how many rounds the search would have stopped to ask."""
    needed = next((n for n in range(1, len(rounds)) if settled(rounds[:n])), len(rounds))
    pairs = rounds[:needed]
    return surely_faster(pairs) or surely_faster([(b, a) for a, b in pairs]), needed


if __name__ == "__main__":
    sys.exit(main())
