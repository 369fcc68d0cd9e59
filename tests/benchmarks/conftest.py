"""Directories for replayed searches, made from a template and never waiting for the disk, as for simulated ones."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autotune.processes.table import Table, table_space
from benchmarks.search_quality import open_study
from tests.search.conftest import empty_simulated_study, new_directory

__all__ = ["EmptyStudy", "empty_simulated_study", "empty_study", "new_directory"]

EmptyStudy = Callable[[Table], Path]
"""Makes a directory in which no search of the table ran yet."""
TEMPLATES: dict[str, Path] = {}
"""By the table's space: Optuna takes half a second for a new file."""


@pytest.fixture(autouse=True, scope="module")
def _fonts_closed() -> Iterator[None]:
    """What matplotlib has drawn with, it keeps open: a later test in this process would take that for its data set's."""
    yield
    if "matplotlib.font_manager" in sys.modules:
        sys.modules["matplotlib.font_manager"]._get_font.cache_clear()


@pytest.fixture
def empty_study(
    new_directory: Callable[[], Path], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> EmptyStudy:
    """`new_directory` is asked for what it does to SQLite."""

    def make(table: Table) -> Path:
        space = table_space(table)
        if space.fingerprint not in TEMPLATES:
            TEMPLATES[space.fingerprint] = tmp_path_factory.mktemp("empty")
            open_study(table, space, TEMPLATES[space.fingerprint], "staged", 0).close()
        directory = tmp_path / f"search-{len(list(tmp_path.iterdir()))}"
        directory.mkdir()
        shutil.copy(TEMPLATES[space.fingerprint] / "study.db", directory)
        return directory

    return make
