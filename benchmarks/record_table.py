"""Measures all points of a space, once each, and writes them as a table that whole searches can be replayed on.

    python benchmarks/record_table.py TARGET --name NAME [--space FILE] [--seconds S] [--out DIR] [--study DIR]
                                      [--free-batch] [--memory-limit SIZE]

FILE (by default `benchmarks/tables/` and the target's own name) names the points: each of its `[[parts]]` lists values of
knobs, all combinations of which are meant, the other knobs as the user has them. Parts, and within them points that share
a compilation, run one after the other; what this machine does not offer and what conflicts is left out. Beside the points
stands what a search asks beside them: a parity check of each way to compute a gradient, and each loader alone. Time that is
left goes into fresh processes of the baseline and the best.

The table is `DIR/NAME.jsonl.gz` (DIR defaults to `tests/data/tables`), written again after every few points, so a
recording may be killed at any moment: the same command goes on with the study that it keeps (by default
`autotune-study/table-NAME`). It ends after S seconds at the latest (420), and says what is left.

On the H200 a point that is not compiled takes 3 to 6 s, a compiled one 20 to 30 s and, where the compiler knows it, 8 s. On
a machine with several GPUs, tables can be recorded side by side, each on its own GPU and cores:

    CUDA_VISIBLE_DEVICES=0 taskset -c 0-15 python benchmarks/record_table.py examples/gpt2.py --name h200_gpt2 &
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import signal
import statistics
import sys
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from autotune import __version__
from autotune.config import TrainingConfig, Value, value_text
from autotune.errors import UserError
from autotune.interrupts import interrupts_kept
from autotune.knobs.registry import KNOBS, knob
from autotune.options import SearchOptions
from autotune.processes.replay import recorded_trials
from autotune.processes.table import Table, TableHead, write_table
from autotune.quantities import parse_size
from autotune.search.baseline import run_baseline
from autotune.search.exhaust import dear_first, exhaust
from autotune.search.pace import Pace
from autotune.search.session import Session
from autotune.search.watcher import QuietWatcher
from autotune.sessions import open_session
from autotune.space import SearchSpace
from autotune.workload import workload_from_target

HERE = Path(__file__).parent
PACE = Pace(block_seconds=0.15, minimum_blocks=4, maximum_blocks=8)
"""Short blocks: a replay puts longer ones together of them."""
REPEATED = 24
REPEATS = 2
"""So many of the best points, and the baseline, run in so many more processes where there is time."""
WRITTEN_EVERY_SECONDS = 20.0

Points = list[TrainingConfig]
Parts = Sequence[Mapping[str, tuple[Value, ...]]]


def main() -> int:
    """Records as long as there is time, and writes the table. 0 where it is complete, 3 where points are left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--name", required=True)
    parser.add_argument("--space", type=Path)
    parser.add_argument("--seconds", type=float, default=420.0)
    parser.add_argument("--out", type=Path, default=HERE.parent / "tests" / "data" / "tables")
    parser.add_argument("--study", type=Path)
    parser.add_argument("--free-batch", action="store_true")
    parser.add_argument("--memory-limit", type=parse_size)
    arguments = parser.parse_args()
    study = arguments.study or Path("autotune-study") / f"table-{arguments.name}"
    space = arguments.space or HERE / "tables" / f"{Path(arguments.target).stem}.toml"
    try:
        workload, parts = workload_from_target(arguments.target), read_parts(space)
    except UserError as error:
        parser.error(str(error))
    study.mkdir(parents=True, exist_ok=True)
    options = SearchOptions(
        budget_seconds=arguments.seconds,
        strategy="exhaustive",
        space=str(write_hull(study / "space.toml", parts)),
        free_batch=arguments.free_batch,
        memory_limit_bytes=arguments.memory_limit,
        study=study,
    )
    signal.signal(signal.SIGTERM, _interrupt)
    began = time.monotonic()
    with interrupts_kept(), open_session(workload, options, QuietWatcher()) as opened:
        opened.session.pace = PACE
        recording = Recording(
            opened.session, parts, arguments.out / f"{arguments.name}.jsonl.gz", command_of(arguments, space)
        )
        try:
            recording.run()
        except KeyboardInterrupt:
            print("interrupted; the same command goes on")
        finally:
            recording.write()
        recording.summarize(time.monotonic() - began)
        return 3 if recording.points_left() else 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def command_of(arguments: argparse.Namespace, space: Path) -> str:
    """What was measured, as it could be given again; not where its files lie."""
    words = ["python", "benchmarks/record_table.py", arguments.target, "--name", arguments.name]
    if arguments.space is not None:
        words += ["--space", str(space)]
    words += ["--seconds", f"{arguments.seconds:g}"]
    if arguments.free_batch:
        words.append("--free-batch")
    if arguments.memory_limit is not None:
        words += ["--memory-limit", str(arguments.memory_limit)]
    return " ".join(words)


# --- which points -----------------------------------------------------------------------------------------------------


def read_parts(path: Path) -> list[dict[str, tuple[Value, ...]]]:
    """The parts of a file, knob name to values. Raises `UserError` for what no knob understands."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        return [
            {name: tuple(knob(name).parse(value_text(value)) for value in values) for name, values in part.items()}
            for part in content["parts"]
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} names no points: {error}") from error


def write_hull(path: Path, parts: Parts) -> Path:
    """A space file that holds every value of the parts."""
    values: dict[str, dict[Value, None]] = defaultdict(dict)
    for name, listed in itertools.chain.from_iterable(part.items() for part in parts):
        values[name].update(dict.fromkeys(listed))
    lines = [f"{name} = {json.dumps(list(listed))}" for name, listed in values.items()]
    path.write_text("\n".join(['summary = "all parts of a table"', "", "[knobs]", *lines, ""]), encoding="utf-8")
    return path


def points_of(space: SearchSpace, parts: Parts) -> Points:
    """The points of all parts that this machine offers and that do not conflict, each once, the baseline first."""
    found = {space.baseline: None}
    for part in parts:
        names = dear_first(part)
        for values in itertools.product(*(part[name] for name in names)):
            config = space.baseline.replace(dict(zip(names, values, strict=True)))
            offered = all(config[name] in space.choices[name] for name in names)
            if offered and space.conflict(config) is None:
                found[config] = None
    return list(found)


def groups_of(space: SearchSpace, points: Points) -> Iterator[Points]:
    """Neighbours whose gradients come about in the same way, at the same batch: what one compilation serves."""
    for _, group in itertools.groupby(points, lambda one: (space.gradient_key(one), space.micro_batch(one))):
        yield list(group)


# --- recording --------------------------------------------------------------------------------------------------------


class Recording:
    """One call of the script on an open study."""

    def __init__(self, session: Session, parts: Parts, path: Path, command: str) -> None:
        self.session = session
        self.path = path
        self.command = command
        self.points = points_of(session.space, parts)
        self.written_at = -math.inf

    def run(self) -> None:
        """The baseline, all points with what belongs to them, then repeats."""
        session = self.session
        print(f"{len(self.points)} points, {self.points_left()} of them to be measured", flush=True)
        run_baseline(session)
        for group in groups_of(session.space, self.points):
            exhaust(session, group)
            self.check_parity(group)
            self.probe_loaders(group)
            if time.monotonic() - self.written_at > WRITTEN_EVERY_SECONDS:
                self.write()
                left = self.points_left()
                print(f"{len(self.points) - left:4} points, {session.budget.elapsed():4.0f} s", flush=True)
        if not self.points_left():
            self.repeat()

    def points_left(self) -> int:
        """How many points were not measured yet."""
        measured = {trial.config for trial in self.session.trials}
        return sum(config not in measured for config in self.points)

    def ran(self, configs: Sequence[TrainingConfig]) -> Points:
        """Those that were measured and fit, or were found to train otherwise."""
        measured = {trial.config for trial in self.session.trials if trial.measurement is not None}
        return [config for config in configs if config in measured]

    def check_parity(self, group: Points) -> None:
        """Once for each way to compute a gradient; a search that asks for others takes that answer."""
        session, space = self.session, self.session.space
        known = {space.gradient_key(probe.config) for probe in session.study.probes() if probe.kind == "parity"}
        own = space.numerics_key(space.baseline)
        others = [config for config in self.ran(group) if space.numerics_key(config) != own]
        if not others or space.gradient_key(others[0]) in known:
            return
        if session.budget.allows(2 * self.expected_seconds(others)):
            session.parity(others[0])

    def probe_loaders(self, group: Points) -> None:
        """The loaders by which a search predicts how many workers it needs: those with the fewest."""
        session = self.session
        for counting in (one for one in KNOBS if one.adds_up):
            counts = sorted(int(config[counting.name]) for config in self.points if int(config[counting.name]) > 0)
            for config in self.ran([one for one in group if counts and one[counting.name] == counts[0]]):
                loading = {one.name: config[one.name] for one in KNOBS if one.stage in ("loader", "batch")}
                if session.budget.allows(self.expected_seconds([config])):
                    session.probe("loader", session.space.baseline.replace(loading))

    def expected_seconds(self, configs: Points) -> float:
        """As long as the longest of their trials."""
        return max(trial.seconds for trial in self.session.trials if trial.config in configs)

    def repeat(self) -> None:
        """Fresh processes of the baseline and the best, in turn, so that a replay knows how processes differ."""
        session = self.session
        wanted = list(dict.fromkeys([session.space.baseline, *(one.config for one in session.candidates(free=True))]))
        for processes in range(2, REPEATS + 2):
            for config in wanted[: REPEATED + 1]:
                runs = sum(trial.config == config for trial in session.trials)
                if runs < processes and session.budget.allows(session.expected_seconds(config)):
                    session.measure_again(config, "explore")

    # --- writing ---

    def write(self) -> None:
        """The table as it stands."""
        write_table(
            self.path, Table(self.head(), tuple(recorded_trials(self.session.trials, self.session.study.probes())))
        )
        self.written_at = time.monotonic()

    def head(self) -> TableHead:
        """Where the table comes from."""
        session = self.session
        return TableHead(
            name=self.path.name.removesuffix(".jsonl.gz"),
            command=self.command,
            machine=session.facts.machine,
            workload=session.facts.workload,
            conditions=session.settings.conditions,
            choices={name: session.space.choices[name] for name in session.space.varied},
            planned_points=len(self.points),
            block_seconds=PACE.block_seconds,
            autotune_version=__version__,
        )

    def summarize(self, seconds: float) -> None:
        """A short table of what there is."""
        trials = self.session.trials
        first = {trial.config: trial for trial in reversed(trials)}
        failures = Counter(trial.failure.kind for trial in first.values() if trial.failure is not None)
        probes = Counter(probe.kind for probe in self.session.study.probes())
        spread = process_spread(self.session)
        lines = {
            "points": f"{len(first)} of {len(self.points)}",
            "of them failed": ", ".join(f"{count} {kind}" for kind, count in failures.items()) or "none",
            "compiled": f"{sum(_graphs(trial.measurement) > 0 for trial in first.values())}",
            "further processes": f"{len(trials) - len(first)}"
            + (f", which differ by {spread:.1%}" if spread is not None else ""),
            "parity checks": f"{probes['parity']}",
            "loaders alone": f"{probes['loader']}",
            "seconds of this call": f"{seconds:.0f}",
            "seconds of all trials": f"{sum(trial.seconds for trial in trials):.0f}",
            "file": f"{self.path} ({self.path.stat().st_size / 1024:.0f} KiB)",
        }
        for name, value in lines.items():
            print(f"{name:22} {value}")
        if left := self.points_left():
            each = sum(trial.seconds for trial in trials) / max(1, len(trials))
            print(f"{left} points are left, some {left * each / 60:.0f} min: the same command goes on with them")


def _graphs(measurement: Any) -> int:
    return measurement.compiled_graphs if measurement is not None else 0


def process_spread(session: Session) -> float | None:
    """Standard deviation of the logarithm of the rate from process to process, over all that ran more than once."""
    rates: dict[TrainingConfig, list[float]] = defaultdict(list)
    for trial in session.trials:
        if trial.measurement is not None:
            rates[trial.config].append(math.log(trial.measurement.samples_per_second))
    several = [one for one in rates.values() if len(one) > 1]
    if not several:
        return None
    degrees = sum(len(one) - 1 for one in several)
    return math.sqrt(sum(statistics.variance(one) * (len(one) - 1) for one in several) / degrees)


if __name__ == "__main__":
    sys.exit(main())
