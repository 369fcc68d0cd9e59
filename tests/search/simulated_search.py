"""A whole search on a `SimulatedMachine`, as `autotune.api` wires it on a real one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from autotune.config import TrainingConfig, Value
from autotune.knobs.registry import KNOBS
from autotune.records import (
    Conditions,
    Recommendation,
    SearchFacts,
    Settings,
    Stage,
    Standing,
    Strategy,
    Trial,
    WorkloadReference,
)
from autotune.search.baseline import run_baseline
from autotune.search.budget import Budget
from autotune.search.pace import pace_for
from autotune.search.proposals import sampler_of
from autotune.search.recommend import Evidence, recommend
from autotune.search.search import Search
from autotune.search.session import Session
from autotune.search.study import Study
from autotune.search.watcher import QuietWatcher
from autotune.space import SearchSpace, build_space
from tests.search.simulated_machine import Program, SimulatedMachine

REFERENCE = WorkloadReference(form="file", location="train.py", names={}, source_hash="aaaabbbbcccc")


class RememberingWatcher(QuietWatcher):
    """Keeps what a person would have read, in its order: `note ...`, `trial N`, `stage ...`."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def note(self, text: str) -> None:
        """One line."""
        self.events.append(f"note: {text}")

    def stage(self, stage: Stage, detail: str) -> None:
        """One line."""
        self.events.append(f"stage: {stage}")

    def trial_finished(self, trial: Trial, best: Standing | None, free_batch: Standing | None) -> None:
        """One line."""
        self.events.append(f"trial {trial.number}")


@dataclass
class SimulatedSearch:
    """One call of a search; several on the same directory are an interrupted search and its resumption."""

    program: Program
    facts: SearchFacts
    directory: Path
    seed: int = 0
    budget_seconds: float = 600.0
    trials: int | None = None
    preset: str = "default"
    only: tuple[str, ...] = ()
    fixed: Mapping[str, Value] = field(default_factory=dict)
    objective: Literal["throughput", "memory"] = "throughput"
    strategy: Strategy = "staged"
    memory_limit_bytes: int | None = None
    train_samples: int | None = None
    started_seconds: float = 0.0
    """Of the budget, what goes by before the baseline: reading what the program is, and starting to fork."""

    def __post_init__(self) -> None:
        self.space: SearchSpace = build_space(self.facts, preset=self.preset, only=self.only, fixed=self.fixed)
        self.machine = SimulatedMachine(self.program, self.space, seed=self.seed)
        self.watcher = RememberingWatcher()

    def session(self) -> Session:
        """A session whose study is open; the caller closes `session.study`."""
        conditions = Conditions(
            device=self.facts.device,
            global_batch_size=self.facts.global_batch_size,
            memory_limit_bytes=self.memory_limit_bytes,
        )
        study = Study.open(
            self.directory, workload="aaaabbbbcccc", space=self.space, conditions=conditions, objective=self.objective,
            machine_identity=self.facts.machine.identity, seed=self.seed,
            sampler=sampler_of(self.strategy),
        )  # fmt: skip
        settings = Settings(
            objective=self.objective,
            budget_seconds=self.budget_seconds,
            trials=self.trials,
            space=self.preset,
            only=self.only,
            fixed={name: self.space.start[name] for name in self.fixed},
            train_samples=self.train_samples,
            strategy=self.strategy,
            conditions=conditions,
        )
        budget = Budget(self.budget_seconds, self.trials, clock=self.machine.clock)
        self.machine.now_seconds += self.started_seconds
        session = Session(
            backend=self.machine,
            study=study,
            space=self.space,
            settings=settings,
            budget=budget,
            watcher=self.watcher,
            pace=pace_for(self.budget_seconds),
        )
        session.resume()
        return session

    @contextmanager
    def begun(self) -> Iterator[Session]:
        """A session whose baseline ran."""
        session = self.session()
        try:
            run_baseline(session)
            yield session
        finally:
            session.study.close()

    def run(self) -> Outcome:
        """To its end. What an interrupt in the middle leaves is an outcome too, and says so."""
        session = self.session()
        search = Search(session)
        interrupted = False
        try:
            search.begin()
            search.go_on()
        except KeyboardInterrupt:
            interrupted = True
        finally:
            session.study.close()
        evidence = Evidence(
            results=session.results(unconfirmed=interrupted),
            ceilings=tuple(search.ceilings.values()),
            reference=REFERENCE,
            knobs=KNOBS,
            memory_limit_bytes=session.memory_limit_bytes(),
            warnings=tuple(session.warnings),
            skipped=tuple(session.skipped.values()),
            short_of=session.short_of,
            earlier_trial_count=session.earlier_trial_count,
            search_seconds=self.machine.now_seconds,
            stage_seconds=session.stage_seconds,
            autotune_version="0",
        )
        return Outcome(self, session, search, recommend(evidence), interrupted)


@dataclass
class Outcome:
    """What a search left."""

    asked: SimulatedSearch
    session: Session
    search: Search
    recommendation: Recommendation
    interrupted: bool

    @property
    def machine(self) -> SimulatedMachine:
        """With all that was asked of it."""
        return self.asked.machine

    @property
    def config(self) -> TrainingConfig:
        """What is recommended."""
        return self.recommendation.best.config

    @property
    def changes(self) -> dict[str, Value]:
        """What is recommended, without what stays as it is."""
        return self.config.changes_from(self.recommendation.baseline.config)

    def true_speedup(self, config: TrainingConfig | None = None) -> float:
        """Without noise."""
        return self.machine.true_rate(config or self.config) / self.machine.true_rate(
            self.recommendation.baseline.config
        )


def run_search(program: Program, facts: SearchFacts, directory: Path, **options: Any) -> Outcome:
    """One search from its beginning to its end."""
    return SimulatedSearch(program, facts, directory, **options).run()
