"""A directory that nobody is told of does not stay, however its process ended."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.errors import UserError
from autotune.options import SearchOptions
from autotune.scratch import MARK, scratch

HOLD = """
import os, signal
from autotune.options import SearchOptions
from autotune.scratch import scratch

with scratch(SearchOptions()) as options:
    (options.study / "study.db").write_text("half")
    print(options.study, flush=True)
    signal.pause()
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_what_a_killed_process_left_is_removed_by_the_next_one_and_not_while_it_runs(temporary: Path) -> None:
    holding = subprocess.Popen(
        [sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(temporary)}
    )
    assert holding.stdout is not None
    left = Path(holding.stdout.readline().strip())
    try:
        with scratch(SearchOptions()):
            assert (left / "study.db").is_file(), "it is in use"
    finally:
        holding.send_signal(signal.SIGKILL)
        holding.wait()
        holding.stdout.close()
    assert names(temporary) == {left.name}
    with scratch(SearchOptions()) as options:
        assert names(temporary) == {options.study.name}
    assert names(temporary) == set()


def test_what_is_not_ours_or_shall_stay_is_left_alone(temporary: Path) -> None:
    (temporary / "autotune-notes").mkdir()
    target = temporary / "elsewhere"
    target.mkdir()
    (target / MARK).touch()
    (temporary / "autotune-link").symlink_to(target)
    with scratch(SearchOptions()):
        pass
    assert names(temporary) == {"autotune-notes", "autotune-link", "elsewhere"}
    assert (target / MARK).is_file()


@pytest.mark.parametrize(("told", "stays"), [("in {}/processes/trial-0001.log", True), ("in the program", False)])
def test_a_directory_of_its_own_stays_only_where_an_error_leads_into_it(told: str, stays: bool) -> None:
    with pytest.raises(UserError) as caught, scratch(SearchOptions()) as options:
        raise UserError(f"it failed: {told.format(options.study)}")
    assert options.study.is_dir() == stays, caught
    with scratch(SearchOptions()):
        assert options.study.is_dir() == stays, "for as long as the user wants"
    shutil.rmtree(options.study, ignore_errors=True)


def test_where_no_temporary_directory_can_be_used_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_usable(prefix: str) -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr("tempfile.mkdtemp", none_usable)
    with (
        pytest.raises(UserError, match="found in .* make room in one of them, or set TMPDIR"),
        scratch(SearchOptions()),
    ):
        pass


def test_a_directory_of_somebody_else_is_left_alone_whatever_names_it_has(temporary: Path) -> None:
    for name in ("named-alike", "pipe", "directory"):
        (temporary / f"autotune-{name}").mkdir()
    (temporary / "autotune-named-alike" / MARK).write_text("by me")
    os.mkfifo(temporary / "autotune-pipe" / MARK)
    (temporary / "autotune-directory" / MARK).mkdir()
    before = names(temporary)
    with scratch(SearchOptions()):
        pass
    assert names(temporary) == before


def test_a_mark_that_cannot_be_written_leaves_nothing_behind(temporary: Path) -> None:
    limited = (
        "import resource, signal, tempfile; tempfile.gettempdir(); signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    )
    limited += "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))" + HOLD
    ended = subprocess.run(
        [sys.executable, "-c", limited],
        check=False,
        env={**os.environ, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
    )
    assert "File too large" in ended.stderr
    assert names(temporary) == set()
