"""Studies for simulated searches: made from a template and never waiting for the disk, since none is about power cuts."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.knobs.search_facts import cpu_facts
from tests.search.simulated_machine import Program
from tests.search.simulated_search import SimulatedSearch


@pytest.fixture(scope="session")
def empty_simulated_study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made once, since Optuna takes half a second for a new file."""
    made = tmp_path_factory.mktemp("empty-simulated")
    SimulatedSearch(Program(sample_seconds=1.0), cpu_facts(), made).session().study.close()
    return made / "study.db"


@pytest.fixture
def new_directory(empty_simulated_study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Path]:
    """Makes one more study directory in which nothing ran yet."""
    connect = sqlite3.connect

    def without_sync(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*arguments, **options)
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("PRAGMA journal_mode = MEMORY")
        return connection

    monkeypatch.setattr(sqlite3, "connect", without_sync)
    made = 0

    def make() -> Path:
        nonlocal made
        made += 1
        directory = tmp_path / f"study-{made}"
        directory.mkdir()
        shutil.copy(empty_simulated_study, directory / "study.db")
        return directory

    return make
