"""Finds the largest batch with autotune's ceilings, Lightning's Tuner and accelerate, and runs each answer again.

    python benchmarks/batch_finders.py TARGET ... --memory-limit SIZE [--checks N] [--name NAME] [--out DIR]

Every finder has an interpreter of its own, the same program, device and memory limit (a fraction of the GPU; on CPU its
data segment), and the use that its documentation shows, with its defaults:

- autotune: the ceiling of the program as it is, as `autotune memory` finds it, every batch size allowed;
- power, binsearch: `Tuner(trainer).scale_batch_size(module, mode=...)` of a LightningModule;
- accelerate: `find_executable_batch_size`, which comes down from where it is started: from its default of 128, and from
  the largest size that autotune may try;

each for three steps a size. Then the size that was found trains with plain PyTorch in N fresh processes under the same
limit: forks of one that has imported torch and has not used the device. It runs again where all N end without running out
of memory and without a retry of the allocator.

Writes `DIR/NAME.json` after every finder, and prints a table last. Seconds are those of the whole process, imports
included, beside whatever else runs: the load is in the file. A probe counts as out of memory where it did not end. It
takes about half a minute for each finder and target, and N short trainings for each size that was found: on an H200
with 24 GiB some six minutes for GPT-2.
Lightning and accelerate are needed here alone; what is missing is left out and said.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from autotune.machine import read_machine_facts
from autotune.quantities import parse_size

FINDERS = {
    "autotune": "autotune",
    "power": "lightning",
    "binsearch": "lightning",
    "accelerate": "accelerate",
    "accelerate_from_top": "accelerate",
}
"""Name to the package that it needs."""
RIVALS = ("lightning", "accelerate")
CHILD = Path(__file__).parent / "batch_finder_child.py"
TIMEOUT_SECONDS = 300
"""For a finder, and for the checks of a size."""


def main() -> int:
    """Runs the finders in turn, each on each target, and writes the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="+", metavar="TARGET")
    parser.add_argument("--memory-limit", type=parse_size, required=True, metavar="SIZE")
    parser.add_argument("--checks", type=int, default=10)
    parser.add_argument("--name", default="batch_finders")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    machine = read_machine_facts()
    shown = ["python benchmarks/batch_finders.py", *arguments.targets, "--memory-limit", str(arguments.memory_limit)]
    content: dict[str, Any] = {
        "name": arguments.name,
        "command": " ".join([*shown, "--checks", str(arguments.checks)]),
        "machine": machine.model_dump(mode="json", exclude={"identity"}),
        "versions": {package: version(package) for package in RIVALS if importlib.util.find_spec(package)},
        "load_average": os.getloadavg(),
        "memory_limit_bytes": arguments.memory_limit,
        "checks": arguments.checks,
        "found": [],
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"{arguments.name}.json"
    for target in arguments.targets:
        checked: dict[int, dict[str, Any]] = {}
        for finder, package in FINDERS.items():
            if importlib.util.find_spec(package) is None:
                print(f"{finder}: {package} is not installed", flush=True)
                continue
            named = {"target": Path(target).name, "finder": finder}
            found: dict[str, Any] = {**named, **run_finder(finder, target, arguments), "again": None}
            content["found"].append(found)
            path.write_text(json.dumps(content, indent=1) + "\n")
            size = found["batch_size"]
            if size is not None and size not in checked:
                checked[size] = run_checks(size, target, arguments)
            found["again"] = checked.get(size)
            path.write_text(json.dumps(content, indent=1) + "\n")
            print(line(found), flush=True)
    print(f"\n{HEADING}")
    for found in content["found"]:
        print(line(found))
    return 0


def run_finder(finder: str, target: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """What a finder found and tried, in a fresh interpreter."""
    seconds, tail, lines = in_child(finder, target, arguments)
    answers = [entry for entry in lines if "found" in entry]
    tried = [entry["tried"] for entry in lines if "tried" in entry]
    ran = [entry["ran"] for entry in lines if "ran" in entry]
    return {
        "batch_size": answers[0]["found"] if answers else None,
        "probes": len(tried),
        "out_of_memory": len(tried) - len(ran),
        "seconds": round(seconds, 2),
        "tried": tried,
        "ended": "" if answers else tail,
    }


def run_checks(size: int, target: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """How often a size trains in fresh processes."""
    _, tail, lines = in_child("check", target, arguments, "--batch-size", str(size), "--checks", str(arguments.checks))
    checks = [entry for entry in lines if "outcome" in entry]
    good = [check for check in checks if check["outcome"] == "ran" and not check["allocator_retries"]]
    return {"times": len(checks), "ran": len(good), "checks": checks, "ended": "" if checks else tail}


def in_child(
    what: str, target: str, arguments: argparse.Namespace, *more: str
) -> tuple[float, str, list[dict[str, Any]]]:
    """Seconds, the last line of its output, and what it reported before it ended, however that was."""
    with tempfile.TemporaryDirectory() as scratch_directory:
        report = Path(scratch_directory) / "report.jsonl"
        report.touch()
        options = ["--memory-limit", str(arguments.memory_limit), "--report", str(report), *more]
        command = [sys.executable, str(CHILD), what, target, *options]
        # Inductor's import would else make CUDA in a fork impossible.
        environment = {**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        began = time.monotonic()
        try:
            finished = subprocess.run(
                command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, env=environment, check=False
            )
            output = finished.stderr.strip().splitlines() or [f"exit status {finished.returncode}"]
        except subprocess.TimeoutExpired:
            output = [f"ended after {TIMEOUT_SECONDS} s"]
        seconds = time.monotonic() - began
        return seconds, output[-1], [json.loads(entry) for entry in report.read_text().splitlines()]


HEADING = f"{'target':16} {'finder':20} {'batch':>6} {'runs again':>11} {'probes':>7} {'OOMs':>5} {'seconds':>8}"


def line(found: dict[str, Any]) -> str:
    """One row of the table."""
    again = found["again"]
    times = f"{again['ran']} of {again['times']}" if again else "-"
    size = found["batch_size"] if found["batch_size"] is not None else "none"
    numbers = f"{found['probes']:7} {found['out_of_memory']:5} {found['seconds']:8.1f}"
    return f"{found['target']:16} {found['finder']:20} {size:>6} {times:>11} {numbers} {found['ended'][:60]}"


if __name__ == "__main__":
    sys.exit(main())
