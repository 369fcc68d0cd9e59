"""Runs a whole search from the command line and writes its result file, with the machine's facts and every trial.

    python benchmarks/whole_search.py NAME TARGET [--out DIR] [--study DIR] [-- OPTIONS OF autotune search]

Beside `DIR/NAME.json` (DIR defaults to `benchmarks/results`) it leaves the study, `NAME.study.db`, and every answer of a
trial process, `NAME.jsonl`, from which `ReplayBackend` answers. The compiler's caches are emptied first, so
that compile seconds are those of a first run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pydantic

from autotune.api import open_study
from autotune.config import TrainingConfig
from autotune.processes.replay import RecordedTrial, recorded_trials, write_trials
from autotune.records import Answer, Trial, TrialAnswer


def main() -> int:
    """Returns the exit code of the search."""
    own, search_options = split_arguments(sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("target")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--study", type=Path, help="kept afterwards; a temporary directory by default")
    arguments = parser.parse_args(own)
    with tempfile.TemporaryDirectory() as scratch:
        study = arguments.study or Path(scratch) / "study"
        shutil.rmtree(study, ignore_errors=True)
        command = ["search", arguments.target, "--study", str(study), *search_options]
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(Path(scratch) / "inductor"),
            "TRITON_CACHE_DIR": str(Path(scratch) / "triton"),
        }
        began = time.monotonic()
        finished = subprocess.run([sys.executable, "-m", "autotune.cli", *command], env=environment, check=False)
        seconds = time.monotonic() - began
        if finished.returncode != 0:
            return finished.returncode
        shown = ["autotune", "search", arguments.target, *search_options]
        write_result(arguments.out / f"{arguments.name}.json", arguments.name, shown, study, seconds)
        write_trials(arguments.out / f"{arguments.name}.jsonl", recorded(study))
        copy_study(study, arguments.out / f"{arguments.name}.study.db")
    return 0


def copy_study(study: Path, path: Path) -> None:
    """The study's database, in which `STUDY`, `HERE` and `PACKAGES` stand for what only this machine has."""
    places = {str(study): "STUDY", str(Path.cwd()): "HERE", str(Path(pydantic.__file__).parents[1]): "PACKAGES"}
    with closing(sqlite3.connect(study / "study.db")) as database:
        content = "\n".join(database.iterdump())
    for place, name in places.items():
        content = content.replace(place, name)
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as database:
        database.executescript(content)


def split_arguments(arguments: list[str]) -> tuple[list[str], list[str]]:
    """What stands before `--`, and after it."""
    if "--" not in arguments:
        return arguments, []
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def write_result(path: Path, name: str, command: list[str], study: Path, seconds: float) -> None:
    """The result file of a finished search."""
    recommendation, trials, probes = open_study(study)
    assert recommendation is not None
    content = {
        "name": name,
        "command": " ".join(command),
        "machine": recommendation.machine.model_dump(mode="json", exclude={"identity"}),
        "search_seconds": round(seconds, 1),
        "verdict": recommendation.verdict,
        "baseline": described(recommendation.baseline, trials),
        "recommended": described(recommendation.best, trials),
        "free_batch": described(recommendation.free_batch, trials) if recommendation.free_batch else None,
        "ceilings": [ceiling.model_dump(mode="json") for ceiling in recommendation.ceilings],
        "warnings": list(recommendation.warnings),
        "rejected": list(recommendation.rejected),
        "trials": [trial_line(trial) for trial in trials],
        "probes": [
            {
                "kind": probe.kind,
                "config": dict(probe.config),
                "seconds": round(probe.answer.seconds, 2),
                "failure": probe.answer.failure.kind if probe.answer.failure else None,
            }
            for probe in probes
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"wrote {path}")


def recorded(study: Path) -> list[RecordedTrial]:
    """Every answer that a trial process gave in a study, the facts of the workload first."""
    recommendation, trials, probes = open_study(study)
    assert recommendation is not None
    facts = TrialAnswer(facts=recommendation.workload)
    return [
        RecordedTrial(kind="facts", config=TrainingConfig({}), answer=facts),
        *recorded_trials(trials, probes),
    ]


def described(answer: Answer, trials: list[Trial]) -> dict[str, Any]:
    """An answer with the raw blocks of its confirmation."""
    confirmations = [trial for trial in trials if trial.config == answer.config and trial.round is not None]
    return {
        "config": dict(answer.config),
        "samples_per_second": answer.samples_per_second,
        "interval": answer.interval,
        "speedup": answer.speedup.model_dump(mode="json"),
        "confirmed_rounds": answer.confirmed_rounds,
        "block_seconds": [list(trial.measurement.blocks.seconds) for trial in confirmations if trial.measurement],
        "block_samples": [list(trial.measurement.blocks.samples) for trial in confirmations if trial.measurement],
        "peak_allocated_bytes": answer.peak_allocated_bytes,
        "reserved_bytes": answer.reserved_bytes,
        "compile_seconds": answer.compile_seconds,
        "parity": answer.parity.model_dump(mode="json") if answer.parity else None,
    }


def trial_line(trial: Trial) -> dict[str, Any]:
    """One trial: what was run, and its rate or its failure."""
    measurement = trial.measurement
    return {
        "number": trial.number,
        "kind": trial.stage,
        "round": trial.round,
        "config": dict(trial.config),
        "samples_per_second": measurement.samples_per_second if measurement else None,
        "resident_samples_per_second": measurement.resident_samples_per_second if measurement else None,
        "peak_allocated_bytes": measurement.memory.peak_allocated_bytes if measurement else None,
        "reserved_bytes": measurement.memory.reserved_bytes if measurement else None,
        "first_step_seconds": measurement.first_step_seconds if measurement else None,
        "process_seconds": measurement.process_seconds if measurement else None,
        "seconds": round(trial.seconds, 2),
        "failure": trial.failure.model_dump(mode="json", exclude={"output_path", "detail"}) if trial.failure else None,
    }


if __name__ == "__main__":
    sys.exit(main())
