"""The files of a study's directory: a lock held while a search uses it, and our own tables beside Optuna's."""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import IO, Any

from autotune.errors import NoAnswerError, UserError

DATABASE_NAME = "study.db"
OLD_NAME = "study.db.old"
NAME_PREFIX = "autotune"
"""With which the names of our Optuna studies begin; the workload's identity follows."""
INSTEAD = "choose another --study (study=), or pass --fresh (fresh=True) to start over"
"""What to do where a directory's study cannot be used."""
BUSY_TIMEOUT_SECONDS = 30.0
"""How long a write waits for whoever else reads the file, such as a dashboard."""

_TABLES = """
CREATE TABLE IF NOT EXISTS autotune_state (study TEXT, key TEXT, json TEXT, PRIMARY KEY (study, key));
CREATE TABLE IF NOT EXISTS autotune_probes (number INTEGER PRIMARY KEY, study TEXT, json TEXT);
CREATE TABLE IF NOT EXISTS autotune_replaced (study TEXT, number INTEGER, json TEXT, PRIMARY KEY (study, number));
"""


class StudyError(UserError):
    """A study directory that cannot be used; the text says why and what to do instead."""


def is_of_disk(error: sqlite3.Error) -> bool:
    """Whether the disk would not write, or the file may not grow: nothing is wrong with the file."""
    return getattr(error, "sqlite_errorname", "").startswith(("SQLITE_FULL", "SQLITE_IOERR"))


def unwritable(directory: Path, error: sqlite3.Error) -> NoAnswerError:
    """What to tell where a study cannot be written any more; what it holds already is safe."""
    return NoAnswerError(
        f"cannot write {directory / DATABASE_NAME} ({error}): make room there and give the same command again, it goes on "
        "where this one stopped"
    )


class DirectoryLock:
    """Held from creation to `close()`, by one process at a time; the operating system frees it when the process dies.

    Makes the directory where it is missing. Raises `StudyError` where it cannot be written or another search has it.
    """

    def __init__(self, directory: Path) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._file: IO[str] = (directory / "study.lock").open("a+", encoding="utf-8")
        except OSError as error:
            raise StudyError(
                f"cannot keep a study in {directory}: {error.strerror}; choose another directory with --study"
            ) from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.seek(0)
            owner = self._file.read().strip()
            self._file.close()
            if not isinstance(error, BlockingIOError):
                raise StudyError(
                    f"cannot lock {directory}/study.lock: {error.strerror}; choose a --study on a local disk"
                ) from None
            raise StudyError(
                f"another search (process {owner}) is using {directory}; wait for it, or choose another --study"
            ) from None
        self._file.truncate(0)
        self._file.write(str(os.getpid()))
        self._file.flush()

    def close(self) -> None:
        """Lets the next search in."""
        self._file.close()


class StudyTables:
    """Values, probes and corrected records that are kept in the study's file and not told to the sampler.

    A new file gets its tables by `create`; until then nothing is written, since the file may be somebody else's. Raises
    `StudyError` where the file is not a database that can be used.
    """

    def __init__(self, directory: Path) -> None:
        self._shown = str(directory / DATABASE_NAME)
        try:
            self._connection = sqlite3.connect(self._shown, timeout=BUSY_TIMEOUT_SECONDS, isolation_level=None)
        except sqlite3.Error as error:  # it is a directory, for one
            raise self._unusable(str(error)) from None
        try:
            verdict = self._connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            tables = self._tables()
            if verdict == "ok" and tables and not {"studies", "autotune_state"} & tables:
                verdict = "it is a database of something else"
        except sqlite3.Error as error:
            verdict = str(error)
        if verdict != "ok":
            self._connection.close()
            raise self._unusable(verdict)

    def create(self) -> None:
        """Makes the tables where they are missing. Raises `StudyError` where the file cannot be written."""
        try:
            self._connection.executescript(f"BEGIN IMMEDIATE; {_TABLES} COMMIT;")
        except sqlite3.Error as error:
            raise self._unusable(str(error)) from None

    def exist(self) -> bool:
        """Whether a search has made them."""
        return "autotune_state" in self._tables()

    def _tables(self) -> set[str]:
        return {row[0] for row in self._connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}

    def _unusable(self, reason: str) -> StudyError:
        return StudyError(f"{self._shown} cannot be used as a study ({reason}); {INSTEAD}")

    def close(self) -> None:
        """Ends the connection."""
        self._connection.close()

    def study_names(self) -> list[str]:
        """Names of all Optuna studies in the file, in the order in which they were made."""
        if "studies" not in self._tables():
            return []
        return [row[0] for row in self._connection.execute("SELECT study_name FROM studies ORDER BY study_id")]

    def set_state(self, study: str, key: str, value: Any) -> None:
        """Keeps something that JSON can hold under a key, in place of what was there."""
        row = (study, key, json.dumps(value))
        self._connection.execute("INSERT OR REPLACE INTO autotune_state VALUES (?, ?, ?)", row)

    def state(self, study: str, key: str) -> Any:
        """What is kept under the key; None where nothing is."""
        found = self._connection.execute("SELECT json FROM autotune_state WHERE study = ? AND key = ?", (study, key))
        row = found.fetchone()
        return None if row is None else json.loads(row[0])

    def add_probe(self, study: str, probe: dict[str, Any]) -> None:
        """Keeps one more probe."""
        row = (study, json.dumps(probe))
        self._connection.execute("INSERT INTO autotune_probes (study, json) VALUES (?, ?)", row)

    def probes(self, study: str) -> list[dict[str, Any]]:
        """All probes, in the order in which they were made."""
        found = self._connection.execute("SELECT json FROM autotune_probes WHERE study = ? ORDER BY number", (study,))
        return [json.loads(row[0]) for row in found]

    def replace_record(self, study: str, number: int, record: dict[str, Any]) -> None:
        """Keeps what a trial's record became after Optuna was told, since Optuna's own copy is final."""
        row = (study, number, json.dumps(record))
        self._connection.execute("INSERT OR REPLACE INTO autotune_replaced VALUES (?, ?, ?)", row)

    def replaced_records(self, study: str) -> dict[int, dict[str, Any]]:
        """Trial number to the record that stands in place of Optuna's copy."""
        found = self._connection.execute("SELECT number, json FROM autotune_replaced WHERE study = ?", (study,))
        return {row[0]: json.loads(row[1]) for row in found}


def refuse_unusable(directory: Path) -> None:
    """Raises `StudyError` where a directory's study is broken or somebody else's: what can be seen before anything runs."""
    if (directory / DATABASE_NAME).exists():
        with closing(StudyTables(directory)) as tables:
            refuse_strangers(directory, tables)


def refuse_strangers(directory: Path, tables: StudyTables) -> None:
    """Raises `StudyError` where the file holds a study that is not of ours."""
    for name in tables.study_names():
        if not name.startswith(f"{NAME_PREFIX}-"):
            raise StudyError(f"{directory} holds a study of another program ({name}); {INSTEAD}")


def refuse_others(directory: Path, tables: StudyTables, workload: str, machine_identity: str) -> None:
    """Raises `StudyError` where the file holds a study of another workload or machine."""
    for name in tables.study_names():
        if not name.startswith(f"{NAME_PREFIX}-{workload}-"):
            raise StudyError(
                f"{directory} holds a study of another workload (its functions, or what they make, differ); {INSTEAD}"
            )
        if tables.state(name, "machine_identity") not in (None, machine_identity):
            raise StudyError(f"{directory} holds a study made on another machine; {INSTEAD}")


def set_aside(directory: Path) -> None:
    """Starting over: the old file stays beside the new one, so that nothing is lost at once."""
    database, journal = directory / DATABASE_NAME, directory / f"{DATABASE_NAME}-journal"
    if not database.exists():
        return
    old, old_journal = (path.with_name(path.name.replace(DATABASE_NAME, OLD_NAME)) for path in (database, journal))
    old_journal.unlink(missing_ok=True)
    database.replace(old)
    if journal.exists():  # a killed search left it: without it, what it was writing stays half written
        journal.replace(old_journal)
