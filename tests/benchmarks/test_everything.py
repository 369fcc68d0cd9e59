"""What the README quotes is measured anew, part by part, and a call that may not take long waits for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import everything

PROJECT = everything.HERE.parent


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_part_that_fails_ends_nothing_else_and_runs_again(tmp_path: Path) -> None:
    parts = {"one": python("print('said')"), "two": python("raise SystemExit(3)"), "three": python("")}
    everything.run(tmp_path, parts)
    assert {name: came["exit_code"] for name, came in everything.ended(tmp_path).items()} == {
        "one": 0,
        "two": 3,
        "three": 0,
    }
    assert (tmp_path / "one.txt").read_text() == "said\n"

    marks = tmp_path / "marks"
    everything.run(tmp_path, {name: python(f"open({str(marks)!r}, 'a').write({name!r})") for name in parts})
    assert marks.read_text() == "two"
    assert everything.ended(tmp_path)["two"]["exit_code"] == 0


def test_a_call_that_waits_returns_in_time_and_the_next_one_waits_further(tmp_path: Path) -> None:
    kept = tmp_path / "everything"
    kept.mkdir()
    # A fast part of the real list: it fails at once, since no search has left it a best.json.
    command = [sys.executable, "benchmarks/everything.py", "--only", "outsider-small", "--out", str(tmp_path)]
    first = subprocess.run([*command, "--wait", "0"], cwd=PROJECT, capture_output=True, text=True, check=False)
    assert (first.returncode, first.stdout.split()) == (0, ["outsider-small", "not", "yet"])
    assert everything.is_running(kept)
    second = subprocess.run([*command, "--wait", "300"], cwd=PROJECT, capture_output=True, text=True, check=False)
    assert not everything.is_running(kept)
    assert (second.returncode, second.stdout.split()[:2]) == (1, ["outsider-small", "failed"])
    assert "best.json" in (kept / "outsider-small.txt").read_text()
    assert json.loads((kept / "ended.json").read_text())["outsider-small"]["exit_code"] != 0

    anew = subprocess.run([*command, "--wait", "0"], cwd=PROJECT, capture_output=True, text=True, check=False)
    assert (anew.returncode, anew.stdout.split()) == (0, ["outsider-small", "not", "yet"]), "it runs again"
    subprocess.run([*command, "--wait", "300"], cwd=PROJECT, capture_output=True, check=False)


def test_every_command_names_files_that_are_there(tmp_path: Path) -> None:
    for name, command in everything.parts_of(tmp_path, tmp_path).items():
        files = [word for word in command[1:] if word.startswith(("benchmarks/", "examples/", "tests/"))]
        assert files, name
        assert all((PROJECT / file).exists() for file in files), name


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["everything.py", "--only", "tests,nothing"])
    with pytest.raises(SystemExit) as ended:
        everything.main()
    assert ended.value.code == 2
    assert "there is no part nothing" in capsys.readouterr().err
