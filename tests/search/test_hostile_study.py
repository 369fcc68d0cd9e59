"""A study file that somebody has tampered with is refused in a sentence, or shown with what would steer taken out."""

from __future__ import annotations

import io
import json
import pickle
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.report.terminal import show
from autotune.report.trials import trials_document
from autotune.search.study import other_searches, stored_records
from autotune.search.tables import StudyError
from tests.knobs.search_facts import cpu_facts
from tests.search.simulated_machine import Fault, Program
from tests.search.simulated_search import SimulatedSearch

STEERING = "\x1b[2J\x1b]0;owned\x07 [bold]red[/] \u202e\x9b31m"


class Bomb:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self.mark,)


@pytest.fixture(scope="module")
def untouched(empty_simulated_study: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three trials, of which one failed and one did not fit, and one probe."""
    directory = tmp_path_factory.mktemp("untouched")
    shutil.copy(empty_simulated_study, directory / "study.db")
    crash, no_room = ({"precision": "bf16"}, "crash"), ({"optimizer_impl": "fused"}, "host_oom")
    failing = Program(sample_seconds=0.01, faults=tuple(Fault("measure", *how) for how in (crash, no_room)))
    search = SimulatedSearch(failing, cpu_facts(), directory)
    with search.begun() as session:
        for changes, _ in (crash, no_room):
            session.measure(search.space.baseline.replace(changes), "compute")
        session.probe("soak", search.space.baseline)
    return directory


@pytest.fixture
def directory(untouched: Path, tmp_path: Path) -> Path:
    shutil.copy(untouched / "study.db", tmp_path / "study.db")
    return tmp_path


def tamper(directory: Path, statement: str, *values: object) -> None:
    with sqlite3.connect(directory / "study.db") as connection:
        assert connection.execute(statement, values).rowcount > 0
    connection.close()


def test_what_a_trial_said_does_not_steer_the_terminal(directory: Path) -> None:
    with sqlite3.connect(directory / "study.db") as connection:
        found = connection.execute("SELECT value_json FROM trial_user_attributes WHERE key = 'record'").fetchall()
    connection.close()
    (failed,) = [json.loads(row[0]) for row in found if "crash" in row[0]]
    failed["failure"].update(message=STEERING, detail=f'  File "x{STEERING}"\n\tline', output_path=f"/tmp/{STEERING}")
    tamper(
        directory, "UPDATE trial_user_attributes SET value_json = ? WHERE key = 'record' AND value_json LIKE '%crash%'",
        json.dumps(failed),
    )  # fmt: skip
    trials, probes = stored_records(directory)
    stream = io.StringIO()
    show(trials_document(trials, probes, None, Path(f"study{STEERING}")), stream)
    text = stream.getvalue()
    assert text.count("[2J]0;owned [bold]red[/] 31m") == 5, text
    assert all(letter.isprintable() or letter == "\n" for letter in text)
    assert "\n      line\n" in text.replace("\n          line\n", "\n      line\n"), "code keeps its indentation"


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE trial_user_attributes SET value_json = ? WHERE key = 'record'",
        "UPDATE trial_params SET distribution_json = ?",
        "UPDATE trial_system_attributes SET value_json = ?",
        "UPDATE autotune_state SET json = ?",
        "UPDATE autotune_probes SET json = ?",
    ],
)
def test_what_is_put_in_the_place_of_a_record_is_never_run(statement: str, directory: Path, tmp_path: Path) -> None:
    mark = tmp_path / "was-run"
    hostile = [
        pickle.dumps(Bomb(mark)),
        pickle.dumps(Bomb(mark), protocol=0).decode("latin-1"),
        '{"name": "os.system", "attributes": {"command": "touch was-run"}}',
        json.dumps({"py/object": "os.system", "!!python/object/apply:os.system": ["touch was-run"]}),
        "[" * 100_000,
        "NaN",
        "null",
        "9" * 10_000,
    ]
    for text in hostile:
        tamper(directory, statement, text)
        told = refusal(directory)
        assert "\n" not in told
        assert not told or "--fresh" in told or "--study" in told
        assert not mark.exists()


def refusal(directory: Path) -> str:
    """What is said of the file; nothing where it can be read all the same."""
    try:
        stored_records(directory)
        other_searches(directory)
    except StudyError as error:
        return str(error)
    return ""
