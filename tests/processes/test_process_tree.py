"""Processes are found wherever they hide."""

import os
import resource
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from autotune.processes.process_tree import carrying, descendants, exhausted_files_limit

NESTED = """
import subprocess
child = subprocess.Popen(["sh", "-c", "echo begun; read line"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()  # or it might still be opening its libraries
print(child.pid, flush=True)
child.wait()
"""


@pytest.fixture
def family():
    """A child with a child of its own, in a session of their own."""
    variables = {**os.environ, "AUTOTUNE_TEST_MARK": "here"}
    child = subprocess.Popen(
        [sys.executable, "-c", NESTED], stdout=subprocess.PIPE, start_new_session=True, env=variables
    )
    grandchild = int(child.stdout.readline())
    yield child.pid, grandchild
    os.killpg(child.pid, 9)
    child.wait()
    child.stdout.close()


def test_descendants(family):
    assert set(family) <= {process.pid for process in descendants(os.getpid())}
    assert [process.pid for process in descendants(family[0])] == [family[1]]
    assert descendants(family[1]) == []


def test_descendants_of_what_is_excepted_are_left_out(family):
    child = next(process for process in descendants(os.getpid()) if process.pid == family[0])
    left = {process.pid for process in descendants(os.getpid(), except_below=frozenset({child}))}
    assert not left & set(family)


def test_marks_are_inherited(family):
    assert set(carrying("AUTOTUNE_TEST_MARK", "here")) == set(family)
    assert carrying("AUTOTUNE_TEST_MARK", "her") == []


def test_marks_are_seen_of_what_becomes_another_program_at_this_moment():
    variables = {**os.environ, "AUTOTUNE_TEST_MARK": "started"}
    for _ in range(10):
        child = subprocess.Popen(["sleep", "600"], env=variables)  # comes back as soon as it is no longer Python
        try:
            assert carrying("AUTOTUNE_TEST_MARK", "started") == [child.pid]
        finally:
            child.kill()
            child.wait()


def test_a_mark_that_comes_between_two_looks_is_seen(family, monkeypatch):
    """Its environment is read while it becomes another program, its command line when it has."""
    read, looks = Path.read_bytes, Counter()

    def at_first_empty(path):
        looks[path] += 1
        return b"" if path.name == "environ" and looks[path] == 1 else read(path)

    monkeypatch.setattr(Path, "read_bytes", at_first_empty)
    assert set(carrying("AUTOTUNE_TEST_MARK", "here")) == set(family)


def test_open_files_near_the_limit(family):
    assert exhausted_files_limit(family[1]) is None
    used = len(os.listdir(f"/proc/{family[1]}/fd"))
    hard = resource.prlimit(family[1], resource.RLIMIT_NOFILE)[1]
    resource.prlimit(family[1], resource.RLIMIT_NOFILE, (used + 2, hard))
    assert exhausted_files_limit(family[1]) == used + 2
    assert exhausted_files_limit(2**22 + 1) is None
