"""Runs a directory of user programs, each with the right outcome written down, and says which outcomes were right.

    python benchmarks/cases.py DIRECTORY [--only NAME ...] [--budget 60s] [--out FILE] [-- OPTIONS OF autotune search]

DIRECTORY holds NAME.py files and a `cases.toml` with a table for each: what it needs, how to run it, the right exit
codes, the kinds of failed trials, what must not be recommended, what the output must match. Programs run from a copy, so
that whatever is written beside them is seen. Cases that need more GPUs than the machine has are left out. With `--out`,
FILE gets everything as JSON, and FILE with the suffix `.txt` the table.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import autotune
from autotune.api import open_study
from autotune.config import Value
from autotune.errors import UserError
from autotune.machine import read_machine_facts
from autotune.processes.process_tree import carrying
from autotune.quantities import parse_duration
from autotune.records import Answer, Probe, Recommendation, Trial

GPUS_NEEDED = {"cpu": 0, "cuda": 1, "cuda2": 2}
VALUE_NAMES = {"off": "as_is", "fp32": "as_is", "default": "as_is"}
"""What the table calls a value, and what the knob calls it."""
MARKER_VARIABLE = "AUTOTUNE_CASE"
SCRIPT_BUDGET_SECONDS = 600.0
"""A program that calls `fit` itself has the default budget."""
GRACE_SECONDS = 45.0
"""A search may end so much after its budget: the facts are read before it, the last trial ends after it."""
OWN_FRAME = re.compile(rf'File "{re.escape(str(Path(autotune.__file__).parent))}/')

Config = Mapping[str, Value]


@dataclass
class CaseRun:
    """One run of a case and what is to be said of it."""

    name: str
    kind: str
    variant: str
    command: list[str]
    exit_code: int | None = None
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)
    verdict: str = ""
    """Of the search: the answer, or the message."""
    failures: dict[str, int] = field(default_factory=dict)
    ceilings: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    rejected: list[str] = field(default_factory=list)
    trials: list[str] = field(default_factory=list)
    output: str = ""


def main() -> int:
    """Returns 0 where every outcome was right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--budget", default="60s")
    parser.add_argument("--out", type=Path)
    own, options = split_arguments(sys.argv[1:])
    arguments = parser.parse_args(own)
    cases = tomllib.loads((arguments.directory / "cases.toml").read_text())
    unknown = set(arguments.only) - cases.keys()
    if unknown:
        parser.error(f"no case is named {', '.join(sorted(unknown))}")
    gpu_count = len(read_machine_facts().gpus)
    runs: list[CaseRun] = []
    for name, case in cases.items():
        if (arguments.only and name not in arguments.only) or GPUS_NEEDED[case["needs"]] > gpu_count:
            continue
        for variant in variants(case, options):
            run = run_case(arguments.directory, name, case, variant, arguments.budget)
            runs.append(run)
            print(line_of(run), flush=True)
            write(arguments.out, runs)
    right = sum(not run.wrong for run in runs)
    print(f"{right} of {len(runs)} outcomes are right")
    return 0 if right == len(runs) else 1


def split_arguments(arguments: list[str]) -> tuple[list[str], list[str]]:
    """What stands before `--`, and after it."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:at], arguments[at + 1 :]


@dataclass(frozen=True)
class Variant:
    """How a case is run beyond the defaults."""

    options: tuple[str, ...] = ()
    open_files: int | None = None

    def __str__(self) -> str:
        return " ".join([*self.options, *([f"ulimit -n {self.open_files}"] if self.open_files else [])])


def variants(case: Mapping[str, Any], options: list[str]) -> list[Variant]:
    """The runs that a case's `settings` ask for, each with these options beside them."""
    settings = case.get("settings", "")
    if found := re.search(r"ulimit -n (\d+)", settings):
        return [Variant(tuple(options)), Variant(tuple(options), int(found[1]))]
    options = list(options)
    if found := re.search(r"memory limit ([\d.]+) GiB", settings):
        options += ["--memory-limit", f"{found[1]}GiB"]
    if found := re.search(r"global batch (\d+) held", settings):
        options += ["--global-batch-size", found[1]]
    return [Variant(tuple(options))]


# --- running ----------------------------------------------------------------------------------------------------------


def run_case(directory: Path, name: str, case: Mapping[str, Any], variant: Variant, budget: str) -> CaseRun:
    """Runs the case in a directory of its own, and judges it."""
    with tempfile.TemporaryDirectory(prefix="autotune-case-") as scratch:
        programs, stand = Path(scratch) / "programs", Path(scratch) / "stand"
        shutil.copytree(directory, programs, copy_function=shutil.copyfile)
        for path in (programs, *programs.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        stand.mkdir()
        script = case.get("run", "search") == "script"
        budget_seconds = SCRIPT_BUDGET_SECONDS if script else parse_duration(budget)
        target = str(programs / f"{name}.py")
        search = ["-m", "autotune.cli", "search", target, "--budget", budget, *variant.options]
        run = CaseRun(name, case["kind"], str(variant), [sys.executable, *([target] if script else search)])
        before = listing(programs)
        execute(run, stand, variant, 2 * (budget_seconds + GRACE_SECONDS))
        study = stand / "autotune-study"
        judge_process(run, case, budget_seconds)
        written = sorted(listing(programs) ^ before)
        run.wrong += [f"written beside the program: {written[0]}"] if written else []
        judge_study(run, case, study)
        run.output = run.output.replace(str(programs), str(directory))
        run.command = [part.replace(str(programs), str(directory)) for part in run.command[1:]]
    return run


def listing(directory: Path) -> set[str]:
    """Every file and directory below, with its size."""
    return {f"{path.relative_to(directory)} {path.stat().st_size}" for path in directory.rglob("*") if path.is_file()}


def execute(run: CaseRun, stand: Path, variant: Variant, limit_seconds: float) -> None:
    """Starts the command, waits for its end, and looks for what it left behind."""
    marker = secrets.token_hex(8)
    command = run.command
    if variant.open_files is not None:
        command = ["bash", "-c", f'ulimit -n {variant.open_files}; exec "$@"', "bash", *command]
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    output = stand / "output.txt"
    began = time.monotonic()
    with output.open("wb") as stream:
        process = subprocess.Popen(
            command,
            cwd=stand,
            env={**environment, MARKER_VARIABLE: marker},
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            run.exit_code = process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            run.wrong.append(f"did not end within {limit_seconds:.0f} s")
            process.kill()
            process.wait()
    run.seconds = time.monotonic() - began
    run.output = output.read_text(errors="replace")
    left = carrying(MARKER_VARIABLE, marker)
    if left:
        commands = {Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:60] for pid in left}
        run.wrong.append(f"{len(left)} processes were left behind: {'; '.join(sorted(commands))}")
        for pid in left:
            os.kill(pid, signal.SIGKILL)


# --- judging ----------------------------------------------------------------------------------------------------------


def judge_process(run: CaseRun, case: Mapping[str, Any], budget_seconds: float) -> None:
    """Exit code, time and output."""
    if run.exit_code not in case["exit_codes"]:
        run.wrong.append(f"exit code {run.exit_code}, of {case['exit_codes']}")
    if run.seconds > budget_seconds + GRACE_SECONDS:
        run.wrong.append(f"took {run.seconds:.0f} s with a budget of {budget_seconds:.0f} s")
    wanted = case.get("output_matches")
    if wanted is not None and not re.search(wanted, run.output):
        run.wrong.append(f"the output does not match {wanted}")
    if OWN_FRAME.search(run.output):
        run.wrong.append("a traceback shows frames of autotune")
    errors = [line for line in run.output.splitlines() if line.startswith("autotune: error:")]
    run.verdict = errors[-1] if errors else ""


def judge_study(run: CaseRun, case: Mapping[str, Any], study: Path) -> None:
    """What was tried, how it failed, and what was recommended."""
    try:
        recommendation, trials, probes = open_study(study)
    except UserError:
        recommendation, trials, probes = None, [], []
    if recommendation is not None:
        describe(run, recommendation)
    elif run.exit_code == 0:
        run.wrong.append("exit code 0 without a recommendation")
    run.trials = [trial_line(trial) for trial in trials] + [probe_line(probe) for probe in probes]
    kinds = [trial.failure.kind for trial in trials if trial.failure is not None]
    kinds += [probe.answer.failure.kind for probe in probes if probe.answer.failure is not None]
    run.failures = {kind: kinds.count(kind) for kind in sorted(set(kinds))}
    forbidden = [predicate(clause) for clause in case.get("never_recommended", "").split(", ") if clause]
    free_too = "global batch held" not in case.get("never_recommended", "")
    if recommendation is not None:
        for answer in answers(recommendation, free_too):
            if any(matches(answer.config) for matches in forbidden):
                run.wrong.append(f"recommended: {dict(answer.config)}")
    run.wrong += wrong_kinds(set(case.get("failure_kinds", [])), forbidden, trials, probes)


def answers(recommendation: Recommendation, free_too: bool) -> list[Answer]:
    """What is recommended."""
    found = [recommendation.best]
    return [*found, recommendation.free_batch] if free_too and recommendation.free_batch is not None else found


def wrong_kinds(
    expected: set[str], forbidden: list[Callable[[Config], bool]], trials: Iterable[Trial], probes: Iterable[Probe]
) -> list[str]:
    """Failures that have another name than the table says.

    Where it says what must not be recommended, only such configurations are meant; otherwise every failed one.
    """
    if not expected:
        return []
    failed = [(trial.config, trial.failure) for trial in trials]
    failed += [(probe.config, probe.answer.failure) for probe in probes]
    others = {
        f"{failure.kind} in phase {failure.phase} ({failure.message[:160]})"
        for config, failure in failed
        if failure is not None and failure.kind not in expected and (not forbidden or any(f(config) for f in forbidden))
    }
    return [f"failed as {other}" for other in sorted(others)]


def predicate(clause: str) -> Callable[[Config], bool]:
    """Whether a configuration is what a clause such as `batch_size above 16` or `precision=bf16` describes."""
    if found := re.fullmatch(r"(\w+)=(\S+)", clause):
        name, value = found[1], VALUE_NAMES.get(found[2], found[2])
        return lambda config: str(config.get(name)) == value
    if found := re.fullmatch(r"(\w+) other than (\S+)", clause):
        name, value = found[1], VALUE_NAMES.get(found[2], found[2])
        return lambda config: name in config and str(config[name]) != value
    if found := re.fullmatch(r"(\w+) (above|below) (\d+)( with the global batch held)?", clause):
        name, sign, limit = found[1], 1 if found[2] == "above" else -1, int(found[3])
        return lambda config: name in config and sign * (int(config[name]) - limit) > 0
    raise ValueError(f"cases.toml says never_recommended = {clause!r}, which is not understood")


# --- telling ----------------------------------------------------------------------------------------------------------


def describe(run: CaseRun, recommendation: Recommendation) -> None:
    """What a person reads beside the table to judge what the table cannot say."""
    run.verdict = recommendation.verdict
    if recommendation.free_batch is not None:
        freer = recommendation.free_batch
        changes = dict(freer.config.changes_from(recommendation.baseline.config))
        run.verdict += f" Batch free: {changes}, {freer.speedup.value:.2f} times."
    for ceiling in recommendation.ceilings:
        settings = ", ".join(f"{name}={value}" for name, value in ceiling.memory_class.items() if value != "as_is")
        run.ceilings.append(
            f"{settings or 'as is'}: {ceiling.largest_batch_size} fits, {ceiling.smallest_failed_batch_size} fails "
            f"({ceiling.failure_kind}), {ceiling.probes} probes; {ceiling.stopped_because}"
        )
    run.warnings = [*recommendation.warnings, *(f"bottleneck: {recommendation.bottleneck}",)]
    run.warnings += list(recommendation.best.reasons)
    run.rejected = list(recommendation.rejected)


def trial_line(trial: Trial) -> str:
    """One trial."""
    what = f"{trial.failure.kind} ({trial.failure.phase}): {trial.failure.message}" if trial.failure else ""
    rate = f"{trial.measurement.samples_per_second:.1f}/s" if trial.measurement else ""
    return f"{trial.stage} {shown(trial.config)} {rate} {trial.seconds:.1f} s {what}"


def probe_line(probe: Probe) -> str:
    """One probe."""
    failure = probe.answer.failure
    what = f"{failure.kind} ({failure.phase}): {failure.message}" if failure else "ok"
    if probe.answer.parity is not None:
        what = f"{'passed' if probe.answer.parity.passed else 'refused'}: {probe.answer.parity.reason}"
    return f"probe {probe.kind} {shown(probe.config)} {probe.answer.seconds:.1f} s {what}"


def shown(config: Config) -> str:
    """A configuration without what is left as it is."""
    return " ".join(f"{name}={value}" for name, value in config.items() if value != "as_is")


def line_of(run: CaseRun) -> str:
    """A row of the table."""
    name = f"{run.name} ({run.variant})" if run.variant else run.name
    verdict = "right" if not run.wrong else f"WRONG: {'; '.join(run.wrong)}"
    return f"{name:44} {run.kind:15} exit {run.exit_code!s:>4} {run.seconds:6.1f} s  {verdict}"


def write(path: Path | None, runs: list[CaseRun]) -> None:
    """The results so far, as JSON and as a table."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(run) for run in runs], indent=1) + "\n")
    path.with_suffix(".txt").write_text("".join(f"{line_of(run)}\n" for run in runs))


if __name__ == "__main__":
    sys.exit(main())
