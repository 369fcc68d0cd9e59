"""`Study`: every trial of a search in one Optuna study on disk, and the sampler that proposes further ones.

The study on disk is told of a trial when it begins and when it has ended, so that `optuna.load_study` and
`optuna-dashboard` show what ran and nothing else. Proposals are drawn from a second study, in memory, that holds the same
trials over the knobs that vary: a proposal that is refused teaches the sampler there, and leaves no trial behind.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import math
import random
import sqlite3
import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, Self, TypeVar

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.exceptions import StorageInternalError
from optuna.trial import TrialState
from pydantic import ValidationError
from sqlalchemy.exc import SQLAlchemyError

from autotune.config import TrainingConfig, Value
from autotune.errors import UserError
from autotune.interrupts import interrupts_held
from autotune.options import Objective
from autotune.records import OUT_OF_MEMORY, Conditions, Probe, Strategy, Trial, WorkloadFacts, WorkloadReference
from autotune.search.tables import (
    BUSY_TIMEOUT_SECONDS,
    DATABASE_NAME,
    INSTEAD,
    NAME_PREFIX,
    DirectoryLock,
    StudyError,
    StudyTables,
    is_of_disk,
    refuse_others,
    refuse_strangers,
    set_aside,
    unwritable,
)
from autotune.space import SearchSpace

SAMPLER_DRAWS = 8
"""For one proposal, before it is taken at random: a sampler that is sure of its region draws what is known by then, and each
draw takes milliseconds."""
RANDOM_DRAWS = 64
"""For one proposal, before nothing new is proposed."""
UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
"""What reading another text as JSON, or other JSON as a record, ends in."""

Sampler = Literal["tpe", "gp", "random"]
"""Which of Optuna's samplers proposes points."""

_P = ParamSpec("_P")
_T = TypeVar("_T")


def workload_identity(reference: WorkloadReference, facts: WorkloadFacts) -> str:
    """Twelve hexadecimal digits of the user's source and of what a child saw of it: another one is another workload."""
    return _digest(reference.source_hash, facts.fingerprint)


def study_name(workload: str, space: SearchSpace, conditions: Conditions, objective: Objective) -> str:
    """The name of the Optuna study: the workload, then a digest of what makes rates comparable. Never the budget."""
    return f"{NAME_PREFIX}-{workload}-{_digest(space.fingerprint, conditions.model_dump_json(), objective)}"


def stored_records(directory: Path) -> tuple[list[Trial], list[Probe]]:
    """Trials and probes of the study that was opened last in a directory, without touching it.

    Raises `StudyError` where there is none.
    """
    if not (directory / DATABASE_NAME).is_file():
        below = sorted(path.parent for path in directory.glob(f"*/{DATABASE_NAME}"))
        found = f"; there is one in {', '.join(map(str, below[:3]))}" if below else ""
        raise StudyError(
            f"there is no study in {directory}{found}; give the directory that search was given as --study"
        )
    with ExitStack() as resources, _broken_is_told(directory):
        tables = StudyTables(directory)
        resources.callback(tables.close)
        name = tables.state("", "last_opened") if tables.exist() else None
        if name is None:
            raise StudyError(f"the study in {directory} holds nothing yet; search with --study {directory} first")
        study = optuna.load_study(study_name=name, storage=_open_storage(directory, resources))
        return _read_trials(study, tables, name, directory), _read_probes(tables, name, directory)


@contextmanager
def _telling_of_a_full_disk(directory: Path) -> Iterator[None]:
    """Where the disk does not write, the search ends with a sentence, and loses nothing that was stored."""
    try:
        yield
    except (sqlite3.Error, SQLAlchemyError, StorageInternalError) as error:
        reason = _sqlite_error(error)
        if reason is None or not is_of_disk(reason):
            raise
        raise unwritable(directory, reason) from None


def _writes(method: Callable[Concatenate[Study, _P], _T]) -> Callable[Concatenate[Study, _P], _T]:
    """A method that writes to the study's file."""

    @wraps(method)
    def writing(self: Study, /, *arguments: _P.args, **named: _P.kwargs) -> _T:
        with _telling_of_a_full_disk(self._directory):
            return method(self, *arguments, **named)

    return writing


def _sqlite_error(error: BaseException | None) -> sqlite3.Error | None:
    """What SQLite itself said, under what Optuna and SQLAlchemy made of it."""
    while error is not None and not isinstance(error, sqlite3.Error):
        error = getattr(error, "orig", None) or error.__cause__ or error.__context__
    return error


class Study:
    """A study in use by this process, from `open` to `close`. Also a context manager.

    `interrupted` holds the configurations whose trials were running when an earlier search ended, and that were not
    measured since; they were told FAIL, and are worth running again. `trials_of_others` says how many trials of the same
    workload lie beside these and do not count here: they ran in another space or under other conditions.
    """

    def __init__(
        self,
        *,
        name: str,
        directory: Path,
        space: SearchSpace,
        objective: Objective,
        sampler: Sampler,
        machine_identity: str,
        seed: int,
        tables: StudyTables,
        resources: ExitStack,
    ) -> None:
        """Only `open` calls this; `resources` is what `close` gives back."""
        self.name = name
        self._directory = directory
        self._space = space
        self._objective = objective
        self._tables = tables
        self._resources = resources
        self._running: dict[int, optuna.Trial] = {}
        self._storage = _open_storage(directory, resources)
        self._study = _create_or_load(self._storage, name)
        self._study.set_user_attr("machine_identity", machine_identity)
        self._study.set_user_attr("objective", objective)
        tables.set_state(name, "machine_identity", machine_identity)
        tables.set_state("", "last_opened", name)
        self._end_unfinished()
        self._trials = {trial.number: trial for trial in _read_trials(self._study, tables, name, directory)}
        self.interrupted = self._without_answer()
        self.trials_of_others = sum(
            len(optuna.load_study(study_name=other, storage=self._storage).get_trials(deepcopy=False))
            for other in tables.study_names()
            if other != name
        )
        self._proposals = _Proposals(space, objective, sampler, seed + len(self._trials))
        self._proposals.learn(self.trials())

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        workload: str,
        space: SearchSpace,
        conditions: Conditions,
        objective: Objective,
        sampler: Sampler = "tpe",
        machine_identity: str,
        seed: int,
        fresh: bool = False,
        lock: DirectoryLock | None = None,
    ) -> Study:
        """The study of this workload and space in a directory: continued where there is one, else made.

        `workload` comes from `workload_identity`. `fresh` sets aside whatever study the directory holds. `lock` is the
        directory's, where the caller holds it already; it stays the caller's. Raises `UserError` for a sampler that needs
        what is not installed, `StudyError` where the directory cannot be written, is in use, or holds something broken or
        a study of another workload or machine.
        """
        if sampler == "gp" and importlib.util.find_spec("scipy") is None:
            raise UserError("--strategy gp needs scipy; install torch-autotune[gp]")
        with ExitStack() as resources, _broken_is_told(directory), _telling_of_a_full_disk(directory):
            if lock is None:
                resources.callback(DirectoryLock(directory).close)
            if fresh:
                set_aside(directory)
            tables = StudyTables(directory)
            resources.callback(tables.close)
            refuse_strangers(directory, tables)
            tables.create()
            refuse_others(directory, tables, workload, machine_identity)
            study = cls(
                name=study_name(workload, space, conditions, objective),
                directory=directory,
                space=space,
                objective=objective,
                sampler=sampler,
                machine_identity=machine_identity,
                seed=seed,
                tables=tables,
                resources=resources,
            )
            study._resources = resources.pop_all()
            return study

    @_writes
    @interrupts_held()
    def close(self) -> None:
        """Ends what was interrupted, and lets another search use the directory."""
        try:
            self._end_unfinished()
        finally:
            self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- trials ---

    @_writes
    @interrupts_held()
    def begin(self, config: TrainingConfig) -> int:
        """Notes that a configuration is about to run, and gives the trial's number.

        Written at once, in one transaction: should the process be killed, the next `open` finds the configuration in
        `interrupted`.
        """
        begun = optuna.trial.create_trial(
            state=TrialState.RUNNING,
            params=dict(config),
            distributions=_distributions(self._space, config),
            user_attrs={"config_key": config.key},
        )
        # As `add_trial` does it, but telling which trial it made: whoever has the study open may add others.
        trial_id = self._storage.create_new_trial(self._storage.get_study_id_from_name(self.name), template_trial=begun)
        number = self._storage.get_trial_number_from_id(trial_id)
        self._running[number] = optuna.Trial(self._study, trial_id)
        return number

    @_writes
    @interrupts_held()
    def finish(self, trial: Trial) -> None:
        """Stores a trial that `begin` gave the number of, and tells Optuna.

        Out of memory and wrong numerics are told as a violated constraint and PRUNED, other failures as FAIL.
        """
        running = self._running.pop(trial.number)
        running.set_user_attr("stage", trial.stage)
        running.set_user_attr("machine_identity", trial.machine_identity)
        constraint = _violated_constraint(trial)
        if constraint is not None:
            running.set_constraint(constraint, 1.0)
        # The record last: where a killed search left it, all that is missing is to tell.
        running.set_user_attr("record", trial.model_dump())
        self._tell(trial)
        self._trials[trial.number] = trial
        self._proposals.learn([trial])

    @_writes
    @interrupts_held()
    def replace(self, trial: Trial) -> None:
        """Stores what a finished trial turned out to be, under its number: numerics that were seen to be wrong later.

        Optuna's own copy of a finished trial is final, so the file keeps both; `trials()` gives this one.
        """
        assert trial.number in self._trials
        self._tables.replace_record(self.name, trial.number, trial.model_dump())
        self._trials[trial.number] = trial
        self._proposals.forget()
        self._proposals.learn(self.trials())

    def trials(self) -> list[Trial]:
        """All finished trials, oldest first."""
        return [self._trials[number] for number in sorted(self._trials)]

    # --- proposals ---

    def propose(self) -> TrainingConfig:
        """A point of the space from the sampler: one that was neither measured nor refused, while there is any."""
        return self._proposals.draw()

    def knows(self, config: TrainingConfig) -> bool:
        """Whether a point was measured or rejected: proposed all the same, it says that nothing else was found."""
        return self._proposals.knows(config)

    def reject(self, reason: str) -> None:
        """The last proposal is not run; the sampler learns to keep away from there, unless it was measured already."""
        self._proposals.refuse_last(reason)

    # --- beside the trials ---

    @_writes
    @interrupts_held()
    def add_probe(self, probe: Probe) -> None:
        """Stores a probe, in a table of our own."""
        self._tables.add_probe(self.name, probe.model_dump())

    def probes(self) -> list[Probe]:
        """All probes, oldest first."""
        return _read_probes(self._tables, self.name, self._directory)

    # --- inside ---

    def _tell(self, trial: Trial) -> None:
        if trial.failure is None:
            self._study.tell(trial.number, _objective_value(trial, self._objective))
        elif _violated_constraint(trial) is not None:
            self._study.tell(trial.number, state=TrialState.PRUNED)
        else:
            self._study.tell(trial.number, state=TrialState.FAIL)

    def _end_unfinished(self) -> None:
        """Ends what an interrupted or killed search left running; where the record is there, as it says.

        What waits was left by a version that noted each trial in several steps, or put there by others.
        """
        while self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
            self._study.ask()
        for frozen in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if "record" in frozen.user_attrs:
                self._tell(_parse_trial(frozen.user_attrs["record"], self._directory))
            else:
                self._study.tell(frozen.number, state=TrialState.FAIL)

    def _without_answer(self) -> list[TrainingConfig]:
        measured = {trial.config for trial in self._trials.values()}
        ended = self._study.get_trials(deepcopy=False, states=(TrialState.FAIL,))
        begun = [
            config
            for one in ended
            # Of others' trials, and of what was noted in part, there is no such key, or it is another one.
            if one.user_attrs.get("config_key") == (config := TrainingConfig(one.params)).key
            and "record" not in one.user_attrs
        ]
        return [config for config in dict.fromkeys(begun) if config not in measured]


class _Proposals:
    """The sampler's own study, in memory: the varied knobs only, refused points included."""

    def __init__(self, space: SearchSpace, objective: Objective, sampler: Sampler, seed: int) -> None:
        self._space = space
        self._objective = objective
        self._random = random.Random(seed)
        self._sampler = _made_sampler(sampler, seed)
        self._learns_pruned = sampler != "gp"
        # A Gaussian process proposes the same again until it learns something; what it draws takes a second.
        self._sampler_draws = 1 if sampler == "gp" else SAMPLER_DRAWS
        everything = _distributions(space, space.start)
        self._distributions = {name: everything[name] for name in space.varied}
        self._measured: set[str] = set()
        self._refused: dict[str, TrainingConfig] = {}
        self._last = space.start
        self.forget()

    def forget(self) -> None:
        """Drops what was measured; what was refused stays refused."""
        with _quiet_optuna():
            self._study = optuna.create_study(direction="maximize", sampler=self._sampler)
        self._measured.clear()
        for config in self._refused.values():
            self._add(config, None)

    def learn(self, trials: Sequence[Trial]) -> None:
        """Adds measured points, except outside the space (the baseline, where something else is fixed)."""
        fixed = {name: values[0] for name, values in self._space.choices.items() if len(values) == 1}
        for trial in trials:
            self._measured.add(trial.config.key)
            if all(trial.config[name] == value for name, value in fixed.items()):
                self._add(trial.config, _objective_value(trial, self._objective) if trial.failure is None else None)

    def draw(self) -> TrainingConfig:
        """A point that is neither measured nor refused; at random where the sampler finds none in many draws."""
        if not self._distributions:
            return self._last
        asked = self._study.ask()  # from here on the sampler sees what was learnt since
        trial = self._study.get_trials(deepcopy=False)[asked.number]
        for attempt in range(self._sampler_draws + RANDOM_DRAWS):
            self._last = self._sample(trial) if attempt < self._sampler_draws else self._at_random()
            if not self.knows(self._last):
                break
        # Not run as it is: what runs is added under its own values, which may be rounded to the choices.
        self._study.tell(asked, state=TrialState.FAIL)
        return self._last

    def knows(self, config: TrainingConfig) -> bool:
        """Whether the point was measured or refused."""
        return config.key in self._measured or config.key in self._refused

    def refuse_last(self, reason: str) -> None:
        """Adds the last drawn point as one that cannot run, unless it is known already."""
        if not self.knows(self._last):
            self._refused[self._last.key] = self._last
            self._add(self._last, None, reason)

    def _add(self, config: TrainingConfig, value: float | None, reason: str = "") -> None:
        """A point with its value, or one that did not or cannot run: whatever the reason, not worth another try."""
        failed = value is None
        pruned = failed and self._learns_pruned
        self._study.add_trial(
            optuna.trial.create_trial(
                params={name: config[name] for name in self._distributions},
                distributions=self._distributions,
                value=self._middling() if failed and not pruned else value,
                state=TrialState.PRUNED if pruned else TrialState.COMPLETE,
                constraints={"runs": 1.0 if failed else -1.0},
                user_attrs={"not_run": reason} if reason else {},
            )
        )

    def _middling(self) -> float:
        """What a point that did not run counts as where a sampler wants a value: the median, so that only its constraint
        speaks against it (a Gaussian process does not see pruned trials)."""
        seen = [trial.value for trial in self._study.get_trials(deepcopy=False) if trial.value is not None]
        return statistics.median(seen) if seen else 0.0

    def _sample(self, trial: optuna.trial.FrozenTrial) -> TrainingConfig:
        # As `ask` does it, but leaving no trial behind for each draw: a draw takes the longer the more there are.
        sampler, study = self._sampler, self._study
        drawn = sampler.sample_relative(study, trial, self._distributions)
        for name, distribution in self._distributions.items():
            if name not in drawn:
                drawn[name] = sampler.sample_independent(study, trial, name, distribution)
        return self._space.start.replace({name: self._choice(name, drawn[name]) for name in self._distributions})

    def _at_random(self) -> TrainingConfig:
        choices = self._space.choices
        return self._space.start.replace({name: self._random.choice(choices[name]) for name in self._distributions})

    def _choice(self, name: str, drawn: Value) -> Value:
        """The choice that was drawn, or for a number the nearest one, by ratio."""
        choices = self._space.choices[name]
        if drawn in choices:
            return drawn
        return min(choices, key=lambda value: abs(math.log1p(int(value)) - math.log1p(int(drawn))))


def sampler_of(strategy: Strategy) -> Sampler:
    """The sampler that a strategy asks for; where it names none, the one that explores after the stages."""
    return strategy if strategy in ("gp", "random") else "tpe"


def _made_sampler(name: Sampler, seed: int) -> optuna.samplers.BaseSampler:
    if name == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    if name == "gp":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return optuna.samplers.GPSampler(seed=seed, warn_independent_sampling=False)
    # Plain multivariate TPE is enough here: `group` is for trials that lack some of the parameters.
    return optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=False)


def _distributions(space: SearchSpace, config: TrainingConfig) -> dict[str, BaseDistribution]:
    """The same for every trial of a study, as Optuna demands; numbers as a range, since a ceiling is off the grid."""
    return {name: _distribution(space, name, config[name]) for name in space.choices}


def _distribution(space: SearchSpace, name: str, value: Value) -> BaseDistribution:
    values = list(dict.fromkeys([*space.choices[name], space.baseline[name]]))
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in values):
        return CategoricalDistribution(values)
    numbers = [int(one) for one in values]
    if name == space.batch_name:
        return IntDistribution(1, max(*numbers, space.facts.largest_batch_size, int(value)), log=True)
    return IntDistribution(min(0, *numbers), max(1, int(value), *numbers))


def _objective_value(trial: Trial, objective: Objective) -> float:
    """What Optuna maximises: samples per second, or minus the peak bytes."""
    assert trial.measurement is not None
    if objective == "memory":
        return -float(trial.measurement.memory.peak_allocated_bytes)
    return trial.measurement.samples_per_second


def _violated_constraint(trial: Trial) -> str | None:
    """The name of the constraint that a failed trial violates, where its region is worth learning."""
    if trial.failure is None:
        return None
    return "memory" if trial.failure.kind in OUT_OF_MEMORY else "numerics" if trial.failure.kind == "numerics" else None


# --- the file ---------------------------------------------------------------------------------------------------------


def _open_storage(directory: Path, resources: ExitStack) -> optuna.storages.RDBStorage:
    """The file as Optuna uses it; no connection stays open when `resources` is closed."""
    # Connected by hand, for a path may hold what means something in a URL.
    connect = partial(sqlite3.connect, directory / DATABASE_NAME, timeout=BUSY_TIMEOUT_SECONDS)
    try:
        storage = optuna.storages.RDBStorage("sqlite://", engine_kwargs={"creator": connect})
    except RuntimeError as error:  # the file was made by an Optuna that this one does not understand
        raise StudyError(f"{directory / DATABASE_NAME} cannot be used as a study ({error}); {INSTEAD}") from None
    resources.callback(storage.engine.dispose)
    resources.callback(storage.remove_session)
    return storage


def _create_or_load(storage: optuna.storages.RDBStorage, name: str) -> optuna.Study:
    with _quiet_optuna():
        return optuna.create_study(
            storage=storage,
            study_name=name,
            direction="maximize",
            load_if_exists=True,
            # Every trial is added with its values, so nothing is ever sampled here.
            sampler=optuna.samplers.RandomSampler(),
        )


def _read_trials(study: optuna.Study, tables: StudyTables, name: str, directory: Path) -> list[Trial]:
    replaced = tables.replaced_records(name)
    stored: list[Mapping[str, Any]] = [
        replaced.get(frozen.number, frozen.user_attrs["record"])
        for frozen in study.get_trials(deepcopy=False)
        if frozen.state.is_finished() and "record" in frozen.user_attrs
    ]
    return [_parse_trial(record, directory) for record in stored]


def _read_probes(tables: StudyTables, name: str, directory: Path) -> list[Probe]:
    try:
        return [Probe.model_validate(record) for record in tables.probes(name)]
    except ValidationError as error:
        raise _other_version(error, directory) from None


def _parse_trial(record: Mapping[str, Any], directory: Path) -> Trial:
    try:
        return Trial.model_validate(record)
    except ValidationError as error:
        raise _other_version(error, directory) from None


@contextmanager
def _broken_is_told(directory: Path) -> Iterator[None]:
    """What is in the file may have been written by anything; read as data, it can be no worse than unreadable."""
    try:
        yield
    except StudyError:
        raise
    except (*UNREADABLE, sqlite3.Error, optuna.exceptions.OptunaError) as error:
        what = type(error).__name__
        raise StudyError(
            f"{directory / DATABASE_NAME} cannot be read as a study ({what}: {str(error)[:80]!r}); {INSTEAD}"
        ) from error


def _other_version(error: ValidationError, directory: Path) -> StudyError:
    where = ".".join(str(part) for part in error.errors()[0]["loc"])
    return StudyError(f"{directory} holds a study of another version of autotune (it differs in {where}); {INSTEAD}")


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


@contextmanager
def _quiet_optuna() -> Iterator[None]:
    """Optuna's own log lines say nothing to a user of autotune; the level is put back, for the user may use it too."""
    logger = logging.getLogger("optuna")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
