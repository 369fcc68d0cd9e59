"""Seconds from the start of a trial's process to the end of its first step: forked against a fresh interpreter.

    python benchmarks/trial_start.py TARGET [--repeats N] [--out DIR]

Both start methods run in turn in one call, each on the user's own configuration. Writes `DIR/trial_start.json`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from autotune.config import TrainingConfig
from autotune.machine import read_machine_facts
from autotune.nvml import gpu_used_bytes
from autotune.processes.pool import TrialPool
from autotune.records import Conditions, TrialRequest
from autotune.workload import workload_from_target


def main() -> int:
    """Measures and writes the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    machine = read_machine_facts()
    device = "cuda" if machine.gpus else "cpu"
    request = TrialRequest(
        kind="measure",
        config=TrainingConfig({}),
        conditions=Conditions(device=device, global_batch_size=None),
        block_seconds=0.05,
        measure_resident=False,
    )
    seconds: dict[str, list[float]] = {"fork": [], "fresh": []}
    with tempfile.TemporaryDirectory() as scratch:
        workload = workload_from_target(arguments.target)
        used = gpu_used_bytes if machine.gpus else None
        pools = {
            method: TrialPool(
                workload, made(Path(scratch) / method), warm_compiler=True, gpu_used_bytes=used, start_method=method
            )
            for method in ("fork", "fresh")
        }
        for pool in pools.values():
            pool.start()
        for _ in range(arguments.repeats):
            for method, pool in pools.items():
                answer = pool.run(request)
                assert answer.measurement is not None, answer.failure
                assert answer.measurement.start_method == method
                seconds[method].append(answer.measurement.process_seconds)
        for pool in pools.values():
            pool.close()
    content = {
        "name": "trial_start",
        "command": f"python benchmarks/trial_start.py {arguments.target} --repeats {arguments.repeats}",
        "machine": machine.model_dump(mode="json", exclude={"identity"}),
        "target": arguments.target,
        "seconds_to_first_step": seconds,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "trial_start.json").write_text(json.dumps(content, indent=1) + "\n")
    for method, values in seconds.items():
        print(f"{method:6} median {statistics.median(values):.2f} s of {len(values)}: {[round(v, 2) for v in values]}")
    return 0


def made(directory: Path) -> Path:
    """The directory, made."""
    directory.mkdir(parents=True)
    return directory


if __name__ == "__main__":
    sys.exit(main())
