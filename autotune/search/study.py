"""`Study`: every trial of a search in one Optuna study on disk.

It is told of a trial when it begins and when it has ended, so that `optuna.load_study` and `optuna-dashboard` show what
ran and nothing else. Further points are drawn from a second study, in memory (`proposals.py`).
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import optuna
from optuna.exceptions import StorageInternalError
from optuna.trial import TrialState
from pydantic import ValidationError
from sqlalchemy.exc import SQLAlchemyError

from autotune.config import TrainingConfig, value_text
from autotune.interrupts import interrupts_held
from autotune.options import Objective
from autotune.quantities import format_bytes
from autotune.records import OUT_OF_MEMORY, Conditions, OtherSearch, Probe, Trial, WorkloadFacts, WorkloadReference
from autotune.search.changes import differences
from autotune.search.proposals import Proposals, Sampler, distributions, objective_value, quiet_optuna
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

UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
"""What reading another text as JSON, or other JSON as a record, ends in."""

KNOBS_SHOWN = 3
"""By their names, where searches differ in the values of more."""

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
    with _opened_last(directory) as (tables, storage, name):
        study = optuna.load_study(study_name=name, storage=storage)
        return _read_trials(study, tables, name, directory), _read_probes(tables, name, directory)


def other_searches(directory: Path) -> tuple[OtherSearch, ...]:
    """What else a directory holds beside the study that was opened last, without touching it; as `stored_records`."""
    with _opened_last(directory) as (tables, storage, name):
        return _others(tables, storage, name)


@contextmanager
def _opened_last(directory: Path) -> Iterator[tuple[StudyTables, optuna.storages.RDBStorage, str]]:
    """The file, to be read, and the name of the study that was opened last."""
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
        yield tables, _open_storage(directory, resources), name


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
    measured since; they were told FAIL, and are worth running again. `others` are the searches of the same workload whose
    trials lie beside these and do not count here, the last one last: they ran in another space or under other conditions.
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
        conditions: Conditions,
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
        tables.set_state(name, "asked", _asked(space, conditions, objective))
        tables.set_state("", "last_opened", name)
        self._end_unfinished()
        self._trials = {trial.number: trial for trial in _read_trials(self._study, tables, name, directory)}
        self.interrupted = self._without_answer()
        self.others = _others(tables, self._storage, name)
        self._proposals = Proposals(space, objective, sampler, seed + len(self._trials))
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
        directory's, where the caller holds it already; it stays the caller's. Raises `StudyError` where the directory
        cannot be written, is in use, or holds something broken or a study of another workload or machine.
        """
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
                conditions=conditions,
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
            distributions=distributions(self._space, config),
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

    def reject(self, config: TrainingConfig, reason: str) -> None:
        """A point of the space, proposed or not, is not run; the sampler learns to keep away from there, unless it was
        measured already."""
        self._proposals.refuse(config, reason)

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
            self._study.tell(trial.number, objective_value(trial, self._objective))
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
    with quiet_optuna():
        return optuna.create_study(
            storage=storage,
            study_name=name,
            direction="maximize",
            load_if_exists=True,
            # Every trial is added with its values, so nothing is ever sampled here.
            sampler=optuna.samplers.RandomSampler(),
        )


# --- the searches in it ---


def _asked(space: SearchSpace, conditions: Conditions, objective: Objective) -> dict[str, dict[str, str]]:
    """What `study_name` tells searches apart by, in words."""
    options = {"objective": objective, **conditions.model_dump(exclude={"memory_limit_bytes"}, exclude_none=True)}
    if conditions.memory_limit_bytes is not None:
        options["memory_limit"] = format_bytes(conditions.memory_limit_bytes)
    return {
        "options": {name: str(value) for name, value in options.items()},
        "values": {name: ", ".join(map(value_text, values)) for name, values in space.choices.items()},
    }


def _others(tables: StudyTables, storage: optuna.storages.RDBStorage, name: str) -> tuple[OtherSearch, ...]:
    """The searches beside this one that ran a trial, the last one last."""
    found, asked = [], tables.state(name, "asked")
    for other in tables.study_names():
        if other == name:
            continue
        trials = optuna.load_study(study_name=other, storage=storage).get_trials(deepcopy=False)
        started = [trial.datetime_start.timestamp() for trial in trials if trial.datetime_start is not None]
        if started:
            told = _told_apart(tables.state(other, "asked"), asked)
            found.append(OtherSearch(last_started_at=max(started), trial_count=len(trials), differences=told))
    return tuple(sorted(found, key=lambda one: one.last_started_at))


def _told_apart(then: Any, now: Any) -> tuple[str, ...]:
    """What was asked for otherwise; nothing where one of them was made before that was kept."""
    if then is None or now is None:
        return ()
    old, new = then["values"], now["values"]
    knobs = [knob for knob in new if old.get(knob) != new[knob]]
    shown = ", ".join(knobs) if len(knobs) <= KNOBS_SHOWN else f"{len(knobs)} knobs"
    return (*((f"other values of {shown}",) if knobs else ()), *differences(then["options"], now["options"]))


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
