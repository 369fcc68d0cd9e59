"""How good searches are, by replay on recorded tables: what they recommend, held against the best of all points.

    python benchmarks/search_quality.py TABLE... [--seeds N] [--final] [--strategies NAME,NAME] [--jobs N] [--add]
                                                 [--out DIR]

Every strategy searches every table with N seeds (20) and at most 15, 30 and 60 evaluations, from the baseline to the
recommendation: trials outside the confirmation, memory probes and loader probes are counted; parity checks, confirmation
and soak are not. Then with budgets of 120, 180 and 300 s instead, as `autotune search --budget` has them: recorded seconds,
with parity checks, confirmation and soak.

What is recommended is worth the share that its rate, over all that was recorded of it, has of the best rate of a point that
fits, trains the same and keeps the batch that is held. `alike` is the share of the pairs of seeds that recommend the same,
or rates that differ by at most 1 %. The course of the longest of the runs by evaluations, over evaluations and over the
seconds that its trials took, is what would be recommended if it were stopped there.

Half of the seeds, and tables whose name contains `resnet50`, are looked at with `--final` alone, so that nothing is fitted
to them. Prints a table; writes `DIR/search_quality.json` (DIR defaults to `benchmarks/results`) after each table, and
`DIR/search_quality.svg` where matplotlib is installed (`pip install torch-autotune[benchmarks]`). `gp` needs the extra gp.
A search takes two to five seconds of one core; one by a Gaussian process minutes, where the table has many gaps: with
`--add` it can run by itself, for what the file holds of other strategies stays.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from autotune.config import TrainingConfig
from autotune.machine import read_machine_facts
from autotune.processes.table import NOT_RECORDED, Table, TableSpace, read_table, table_space
from autotune.processes.table_machine import TableHole, TableMachine
from autotune.records import Settings, Standing, Strategy, Trial, TrialRequest
from autotune.search.budget import Budget
from autotune.search.pace import pace_for
from autotune.search.proposals import sampler_of
from autotune.search.search import Search
from autotune.search.session import Session
from autotune.search.study import Study
from autotune.search.watcher import QuietWatcher

EVALUATIONS = (15, 30, 60)
LONGEST = f"{EVALUATIONS[-1]}"
BUDGETS_SECONDS = (120.0, 180.0, 300.0)
STRATEGIES: tuple[Strategy, ...] = ("staged", "tpe", "gp", "random")
KEPT_FOR_THE_END = "resnet50"
BUDGET_SECONDS = 600.0
"""What a search is told that it has where evaluations are the limit: the default of `autotune search`."""
WORKLOAD = "000000000000"
ALIKE = 0.01
MOST_GAPS = 4
"""Proposals that the table cannot answer, before one is taken at random of what it can."""


# --- one search -------------------------------------------------------------------------------------------------------


class CountingMachine(TableMachine):
    """A table that counts evaluations: what a search asks before it confirms."""

    def evaluations(self) -> int:
        """So far. What confirms is measured without the resident rate."""
        return sum(_is_evaluation(request) for request in self.requests)


def _is_evaluation(request: TrialRequest) -> bool:
    return request.kind in ("memory", "loader") or (request.kind == "measure" and request.measure_resident)


class EvaluationBudget(Budget):
    """So many evaluations, however long they take; or so many seconds, where no number is given."""

    def __init__(self, machine: CountingMachine, evaluations: int | None, seconds: float) -> None:
        super().__init__(seconds, None, clock=machine.clock if evaluations is None else lambda: 0.0)
        self._machine = machine
        self._evaluations = evaluations

    def allows(self, seconds: float, *, gains_much: bool = False) -> bool:
        """Whether one more is left."""
        enough = self._evaluations is None or self._machine.evaluations() < self._evaluations
        return enough and super().allows(seconds, gains_much=gains_much)


class TableStudy(Study):
    """A study whose sampler draws again where the table has a gap, before a search has to refuse the point: a search ends
    when too much is refused, and gaps of a table are no fault of the sampler's. It is told of those that it insists on.
    Where it comes upon gaps alone, a point of the table is taken at random, as the study itself does of the space."""

    def __init__(self, *, space: TableSpace, seed: int, **what: Any) -> None:
        super().__init__(space=space, seed=seed, **what)
        self._table_space = space
        self._random = random.Random(seed)

    def propose(self) -> TrainingConfig:
        """A point of the table."""
        before, config = None, super().propose()
        for _ in range(MOST_GAPS):
            if self._table_space.conflict(config) is None:
                return config
            if config == before:
                self.reject(config, NOT_RECORDED)
            before, config = config, super().propose()
        left = sorted((one for one in self._table_space.points if not self.knows(one)), key=lambda one: one.key)
        return self._random.choice(left) if left else config


@dataclass(frozen=True)
class Step:
    """Where a search stands after a trial: what it would recommend, as a share of the best."""

    evaluations: int
    seconds: float
    share: float


class Course(QuietWatcher):
    """Notes after each trial what the search would recommend if it were stopped there."""

    def __init__(self, machine: CountingMachine, truth: Truth) -> None:
        self.session: Session | None = None
        self.steps: list[Step] = []
        self._machine = machine
        self._truth = truth

    def trial_finished(self, trial: Trial, best: Standing | None, free_batch: Standing | None) -> None:
        """One more step of the course. Until it is known which program all others are held against, that is it."""
        session = self.session
        if session is None or trial.round is not None:
            return
        config = trial.config if session.baseline is None else session.results(unconfirmed=True).best().config
        self.steps.append(Step(self._machine.evaluations(), self._machine.now_seconds, self._truth.share(config)))


@dataclass(frozen=True)
class Truth:
    """What every point of a table is worth."""

    rates: dict[TrainingConfig, float]
    best: float

    def share(self, config: TrainingConfig) -> float:
        """0 for what does not run, does not fit or trains otherwise."""
        return self.rates.get(config, 0.0) / self.best


def truth_of(table: Table, space: TableSpace) -> Truth:
    """The rates of the points that keep the held batch, and the best of them."""
    held = table.head.conditions.global_batch_size
    rates = TableMachine(table, space, seed=0).true_rates()
    kept = {config: rate for config, rate in rates.items() if space.holds(config, held)}
    return Truth(kept, max(kept.values()))


@dataclass(frozen=True)
class Run:
    """What one search came to."""

    table: str
    strategy: Strategy
    seed: int
    limit: str
    """What it was allowed: evaluations, or seconds."""
    share: float
    speedup: float
    """Of what is recommended over the baseline, over all that was recorded of both."""
    recommended: dict[str, Any]
    evaluations: int
    seconds: float
    holes: int
    """Points that it asked for and the table does not hold; they were refused."""
    course: tuple[Step, ...]
    hole: str = ""
    """What ended the search, where it asked for what could not be refused."""


def replay(
    table: Table,
    directory: Path,
    *,
    strategy: Strategy = "staged",
    seed: int = 0,
    evaluations: int | None = None,
    seconds: float = BUDGET_SECONDS,
) -> Run:
    """A whole search on a table, in a directory that is empty or holds an empty study of it."""
    space = table_space(table)
    machine, truth = CountingMachine(table, space, seed=seed), truth_of(table, space)
    course = Course(machine, truth)
    hole = ""
    with open_study(table, space, directory, strategy, seed) as study:
        session = Session(
            backend=machine,
            study=study,
            space=space,
            settings=_settings(table, strategy, seconds),
            budget=EvaluationBudget(machine, evaluations, seconds),
            watcher=course,
            pace=pace_for(seconds),
        )
        course.session = session
        search = Search(session)
        try:
            search.begin()
            search.go_on()
        except TableHole as error:
            hole = str(error)
        best = session.results(unconfirmed=bool(hole)).best().config
    baseline = session.baseline
    assert baseline is not None
    return Run(
        table=table.head.name,
        strategy=strategy,
        seed=seed,
        limit=limit_text(evaluations, seconds),
        share=truth.share(best),
        speedup=truth.rates.get(best, 0.0) / truth.rates[baseline],
        recommended=best.changes_from(baseline),
        evaluations=machine.evaluations(),
        seconds=machine.now_seconds,
        holes=len(space.holes),
        course=tuple(course.steps),
        hole=hole,
    )


def limit_text(evaluations: int | None, seconds: float) -> str:
    """As a table says it."""
    return f"{evaluations}" if evaluations is not None else f"{seconds:.0f} s"


def open_study(table: Table, space: TableSpace, directory: Path, strategy: Strategy, seed: int) -> Study:
    """The study of a search on a table; an empty one is the same for every strategy."""
    return TableStudy.open(
        directory,
        workload=WORKLOAD,
        space=space,
        conditions=table.head.conditions,
        objective="throughput",
        sampler=sampler_of(strategy),
        machine_identity=table.head.machine.identity,
        seed=seed,
    )


def _settings(table: Table, strategy: Strategy, seconds: float) -> Settings:
    return Settings(budget_seconds=seconds, strategy=strategy, space=table.head.name, conditions=table.head.conditions)


# --- many searches ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """One search to run."""

    path: Path
    strategy: Strategy
    seed: int
    evaluations: int | None
    seconds: float = BUDGET_SECONDS


@cache
def _table(path: Path) -> Table:
    return read_table(path)


@cache
def _empty_study(path: Path) -> tempfile.TemporaryDirectory[str]:
    """A directory with an empty study of the table: to make one takes Optuna longer than many a search."""
    directory = tempfile.TemporaryDirectory()
    table = _table(path)
    open_study(table, table_space(table), Path(directory.name), "staged", 0).close()
    return directory


def searches(path: Path, strategies: Sequence[Strategy], seeds: int, *, final: bool) -> list[Asked]:
    """All that are run on a table; before the end half of the seeds, and none on the table that is kept back."""
    if KEPT_FOR_THE_END in path.name and not final:
        return []
    limits = [(evaluations, BUDGET_SECONDS) for evaluations in EVALUATIONS]
    limits += [(None, seconds) for seconds in BUDGETS_SECONDS]
    return [
        Asked(path, strategy, seed, evaluations, seconds)
        for strategy in strategies
        for seed in range(seeds if final else (seeds + 1) // 2)
        for evaluations, seconds in limits
    ]


def run(asked: Asked) -> Run:
    """Runs it, in a directory that is gone afterwards."""
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copy(Path(_empty_study(asked.path).name) / "study.db", scratch)
        return replay(
            _table(asked.path),
            Path(scratch),
            strategy=asked.strategy,
            seed=asked.seed,
            evaluations=asked.evaluations,
            seconds=asked.seconds,
        )


def main() -> int:
    """Searches, and writes the result after every table. 1 where a search met a hole that it could not go round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", type=Path)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument(
        "--final", action="store_true", help="also the other half of the seeds, and the table kept back"
    )
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--add", action="store_true", help="keep what the result file holds of other searches")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    if unknown := set(arguments.strategies.split(",")) - set(STRATEGIES):
        parser.error(f"there is no strategy {', '.join(sorted(unknown))}; there are {', '.join(STRATEGIES)}")
    if min(arguments.seeds, arguments.jobs) < 1:
        parser.error("--seeds and --jobs are at least 1")
    for path in arguments.tables:  # all, before hours go into the first
        try:
            read_table(path)
        except ValueError as error:
            parser.error(str(error))
    os.environ["OMP_NUM_THREADS"] = "1"  # a search is small, and there are as many as cores
    began = time.monotonic()
    strategies = arguments.strategies.split(",")
    result = arguments.out / "search_quality.json"
    earlier = read_result(result) if arguments.add else Result()
    runs: list[Run] = []
    with ProcessPoolExecutor(arguments.jobs) as pool:
        for path in arguments.tables:
            asked = searches(path, strategies, arguments.seeds, final=arguments.final)
            if not asked:
                print(f"{path.name} is kept for --final", flush=True)
                continue
            runs += pool.map(run, asked)
            commands = dict.fromkeys([*earlier.commands, command_of(arguments)])
            write_result(result, list(commands), all_runs(earlier.runs, runs))
            print(f"{path.name}: {len(asked)} searches, {time.monotonic() - began:.0f} s", flush=True)
    both = all_runs(earlier.runs, runs)
    print("\n".join(summary(both)))
    if importlib.util.find_spec("matplotlib") is None:
        print("no plot: it needs matplotlib (pip install torch-autotune[benchmarks])")
    else:
        draw(arguments.out / "search_quality.svg", both)
    holes = [one for one in runs if one.hole]
    for one in holes:
        print(f"{one.table}, {one.strategy}, seed {one.seed}: {one.hole}")
    return 1 if holes else 0


# --- what came of them ------------------------------------------------------------------------------------------------


def summary(runs: Sequence[Run]) -> list[str]:
    """A line for each table, strategy and limit, and one over all tables for a strategy that searched several, and all."""
    lines = [
        "table              strategy        limit   >= 95 %  >= 98 %   median    worst   alike  evaluated  seconds  "
        "refused holes"
    ]
    tables = list(dict.fromkeys(one.table for one in runs))
    for name in [*tables, *(["all"] if len(tables) > 1 else [])]:
        of_table = [one for one in runs if name in ("all", one.table)]
        for strategy in dict.fromkeys(one.strategy for one in of_table):
            of_strategy = [one for one in of_table if one.strategy == strategy]
            if name == "all" and {one.table for one in of_strategy} != set(tables):
                continue  # it would be held against others on harder tables
            for limit in dict.fromkeys(one.limit for one in of_strategy):
                group = [one for one in of_strategy if one.limit == limit]
                lines.append(f"{name:18} {strategy:9} {limit:>11}   {_figures(group)}")
    return lines


def _figures(group: Sequence[Run]) -> str:
    shares = [one.share for one in group]
    reached = [sum(share >= goal for share in shares) / len(shares) for goal in (0.95, 0.98)]
    pairs = [pair for of_table in _by_table(group) for pair in itertools.combinations(of_table, 2)]
    similar = f"{statistics.mean(alike(*pair) for pair in pairs):.0%}" if pairs else "-"
    evaluated = statistics.mean(one.evaluations for one in group)
    seconds = statistics.mean(one.seconds for one in group)
    holes = statistics.mean(one.holes for one in group)
    return (
        f"{reached[0]:7.0%} {reached[1]:8.0%} {statistics.median(shares):8.1%} {min(shares):8.1%} {similar:>7} "
        f"{evaluated:10.1f} {seconds:8.0f} {holes:14.1f}"
    )


def _by_table(runs: Iterable[Run]) -> list[list[Run]]:
    found: dict[str, list[Run]] = defaultdict(list)
    for one in runs:
        found[one.table].append(one)
    return list(found.values())


def alike(one: Run, other: Run) -> bool:
    """Whether two searches recommend the same, or what runs as fast to within 1 %."""
    return one.recommended == other.recommended or abs(one.share - other.share) <= ALIKE * max(one.share, other.share)


@dataclass(frozen=True)
class Result:
    """What a result file holds."""

    commands: tuple[str, ...] = ()
    runs: tuple[Run, ...] = ()


def read_result(path: Path) -> Result:
    """Nothing where there is no file."""
    if not path.exists():
        return Result()
    content = json.loads(path.read_text())
    runs = [Run(**{**one, "course": tuple(Step(*step) for step in one["course"])}) for one in content["runs"]]
    return Result(tuple(content["commands"]), tuple(runs))


def all_runs(earlier: Sequence[Run], runs: Sequence[Run]) -> list[Run]:
    """Both, table by table and in the order of strategies; of what both hold, the new ones."""
    new = {(one.table, one.strategy) for one in runs}
    kept = [one for one in earlier if (one.table, one.strategy) not in new]
    tables = list(dict.fromkeys(one.table for one in [*earlier, *runs]))
    return sorted([*kept, *runs], key=lambda one: (tables.index(one.table), STRATEGIES.index(one.strategy)))


def command_of(arguments: argparse.Namespace) -> str:
    """The command line, whatever jobs it had and wherever it wrote."""
    return (
        f"python benchmarks/search_quality.py {' '.join(map(str, arguments.tables))} --seeds {arguments.seeds}"
        f"{' --final' if arguments.final else ''} --strategies {arguments.strategies}{' --add' if arguments.add else ''}"
    )


def write_result(path: Path, commands: Sequence[str], runs: Sequence[Run]) -> None:
    """The result file: every run, and the courses of the longest ones."""
    content = {
        "name": "search_quality",
        "commands": commands,
        "machine": read_machine_facts().model_dump(mode="json", exclude={"identity"}),
        "summary": summary(runs),
        "runs": [described(one) for one in runs],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def described(one: Run) -> dict[str, Any]:
    """A run as JSON."""
    content = {**vars(one), "share": round(one.share, 4), "speedup": round(one.speedup, 3)}
    steps = one.course if one.limit == LONGEST else ()
    content["course"] = [[step.evaluations, round(step.seconds, 1), round(step.share, 4)] for step in steps]
    return content


# --- the plot ---------------------------------------------------------------------------------------------------------


def draw(path: Path, runs: Sequence[Run]) -> None:
    """The median share over evaluations, and over seconds: one row of panels for each table."""
    from matplotlib.figure import Figure

    tables = list(dict.fromkeys(one.table for one in runs))
    figure = Figure(figsize=(10, 3 * len(tables)), layout="constrained")
    panels = figure.subplots(len(tables), 2, squeeze=False, sharey=True)
    for row, name in zip(panels, tables, strict=True):
        longest = [one for one in runs if one.table == name and one.limit == LONGEST]
        for strategy in dict.fromkeys(one.strategy for one in longest):
            courses = [one.course for one in longest if one.strategy == strategy]
            for panel, along in zip(row, ("evaluations", "seconds"), strict=True):
                places = sorted({getattr(step, along) for course in courses for step in course})
                shares = [[share_at(course, along, place) for course in courses] for place in places]
                line = panel.step(places, [statistics.median(one) for one in shares], where="post", label=strategy)
                low, high = [min(one) for one in shares], [max(one) for one in shares]
                panel.fill_between(places, low, high, step="post", alpha=0.1, color=line[0].get_color(), linewidth=0)
        for panel, along in zip(row, ("evaluations", "seconds of trials, parity checks included"), strict=True):
            panel.axhline(0.95, color="grey", linewidth=0.5)
            panel.set(xlabel=along, title=name)
        row[0].set_ylabel("share of the best point")
        row[0].legend(loc="lower right")
    figure.savefig(path, metadata={"Date": None})


def share_at(course: Iterable[Step], along: str, place: float) -> float:
    """What was recommended there; 0 before the baseline ran."""
    reached = [step.share for step in course if getattr(step, along) <= place]
    return reached[-1] if reached else 0.0


if __name__ == "__main__":
    sys.exit(main())
