"""A search from the command line with real processes: killed, interrupted, gone on with, finished, asked about."""

from __future__ import annotations

import ast
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import optuna
import psutil
import pytest

import autotune
from autotune.records import Recommendation, Trial
from autotune.search.study import stored_records
from tests.running_search import TINY_PROGRAM, RunningSearch, gone

SEARCH = ("search", "tiny.py", "--space", "quick", "--study", "here")


@dataclass
class Story:
    """One study, used by one call after the other."""

    directory: Path
    killed: RunningSearch
    left_by_the_killed: list[psutil.Process]
    trials_after_kill: list[Trial]
    second_beside: RunningSearch
    interrupted: RunningSearch
    interrupted_result: Recommendation
    trials_after_interrupt: list[Trial]
    finished: RunningSearch


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    directory = tmp_path_factory.mktemp("story")
    (directory / "tiny.py").write_text(TINY_PROGRAM)
    began = time.monotonic()
    killed = RunningSearch(*SEARCH, "--budget", "10m", directory=directory)
    killed.wait_for("trial 2: ")
    seconds = time.monotonic() - began
    left = killed.kill()
    after_kill, _ = stored_records(directory / "here")
    interrupted = RunningSearch(*SEARCH, "--budget", "10m", directory=directory)
    interrupted.wait_for("trial ")
    beside = RunningSearch(*SEARCH, directory=directory)
    beside.end()
    interrupted.interrupt()
    interrupted.end()
    result = autotune.load(directory / "here" / "best.json").recommendation
    after_interrupt, _ = stored_records(directory / "here")
    budget = f"{min(230, max(20, round(1.5 * seconds)))}s"  # by what its first trials took on so busy a machine
    finished = RunningSearch(*SEARCH, "--budget", budget, "--train-samples", "1000000", directory=directory)
    finished.end()
    return Story(
        directory, killed, left, after_kill, beside, interrupted, result, after_interrupt, finished,
    )  # fmt: skip


def run(story: Story, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "autotune.cli", *arguments]
    return subprocess.run(command, cwd=story.directory, capture_output=True, text=True, timeout=400, check=False)


# --- killed -----------------------------------------------------------------------------------------------------------


def test_nothing_outlives_a_killed_search(story: Story) -> None:
    assert gone(story.left_by_the_killed)


def test_a_kill_loses_the_trial_in_flight_at_most(story: Story) -> None:
    stored = {trial.number for trial in story.trials_after_kill}
    told = [line for line in story.killed.lines if line.startswith("trial ")]
    begun, ended = ({int(line.split()[1][:-1]) for line in told if "samples/s" in line or not done} for done in (0, 1))
    assert ended <= stored <= begun and len(begun - stored) <= 1
    assert {0, 1} <= stored


# --- interrupted ------------------------------------------------------------------------------------------------------


def test_ctrl_c_ends_with_the_best_so_far(story: Story) -> None:
    interrupted = story.interrupted
    assert interrupted.process.returncode == 130
    assert "autotune: interrupted; the best so far is kept" in interrupted.errors
    assert "Traceback" not in interrupted.errors
    assert interrupted.output.startswith(story.interrupted_result.verdict[:20])
    # While the second search was refused, this one may have come as far as its first round.
    rounds = story.interrupted_result.best.confirmed_rounds
    assert ("not confirmed" if rounds == 0 else "measured again") in interrupted.output


def test_a_second_search_in_the_directory_is_refused_and_harms_nothing(story: Story) -> None:
    assert story.second_beside.process.returncode == 2
    assert story.second_beside.lines[-1].startswith("autotune: error: another search (process ")
    assert "trial" not in story.second_beside.errors


# --- finished ---------------------------------------------------------------------------------------------------------


def test_the_search_goes_on_where_it_stopped_and_repeats_nothing(story: Story) -> None:
    assert story.finished.process.returncode == 0, story.finished.errors
    trials, _ = stored_records(story.directory / "here")
    assert trials[: len(story.trials_after_interrupt)] == story.trials_after_interrupt
    assert story.trials_after_interrupt[: len(story.trials_after_kill)] == story.trials_after_kill
    counts = Counter(trial.config for trial in trials if trial.round is None)
    assert max(counts.values()) == 1


def test_no_trial_is_left_running(story: Story) -> None:
    storage = f"sqlite:///{story.directory / 'here' / 'study.db'}"
    (name,) = optuna.get_all_study_names(storage)
    study = optuna.load_study(study_name=name, storage=storage)
    states = Counter(trial.state.name for trial in study.trials)
    assert states["RUNNING"] == states["WAITING"] == 0
    assert states["COMPLETE"] >= 3
    assert study.best_value > 0


def test_the_answer_is_measured_confirmed_and_kept(story: Story) -> None:
    result = autotune.load(story.directory / "here" / "best.json")
    assert story.finished.output.startswith(str(result).split("\n", maxsplit=1)[0][:20])
    assert result.best.confirmed_rounds >= 1
    assert result.best.training_hours is not None
    trials, _ = stored_records(story.directory / "here")
    assert any(trial.config == result.config and trial.round is not None for trial in trials)


def test_a_study_of_another_program_is_refused(story: Story) -> None:
    (story.directory / "tiny.py").write_text(TINY_PROGRAM.replace("nn.Linear(8, 16)", "nn.Linear(8, 16, bias=False)"))
    try:
        refused = run(story, *SEARCH, "--budget", "20s")
    finally:
        (story.directory / "tiny.py").write_text(TINY_PROGRAM)
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1] == (
        "autotune: error: here holds a study of another workload (its functions, or what they make, differ); choose another "
        "--study (study=), or pass --fresh (fresh=True) to start over"
    )


def test_nobody_else_may_look_at_what_trials_print(story: Story) -> None:
    assert (story.directory / "here" / "processes").stat().st_mode & 0o777 == 0o700


def test_show_lists_every_trial(story: Story) -> None:
    shown = run(story, "show", "here")
    assert shown.returncode == 0
    trials, _ = stored_records(story.directory / "here")
    for trial in trials:
        assert f"\n  {trial.number:>{len(str(trials[-1].number))}}  {trial.stage}" in shown.stdout
    assert "What any trial N printed\n  here/processes/*-trial-N.log\n" in shown.stdout
    for trial in trials:
        assert list(story.directory.glob(f"here/processes/*-trial-{trial.number}.log"))
    missing = run(story, "show", "nowhere")
    told = "autotune: error: there is no study in nowhere; give the directory that search was given as --study\n"
    assert (missing.returncode, missing.stderr) == (2, told)


def test_the_result_is_exported(story: Story) -> None:
    exported = run(story, "export", "here/best.json", "--to", "json")
    assert Recommendation.model_validate(json.loads(exported.stdout)) == (
        autotune.load(story.directory / "here" / "best.json").recommendation
    )
    script = run(story, "export", "here/best.json", "--to", "python")
    assert script.returncode == 0
    assert not any("autotune" in ast.unparse(node) for node in ast.parse(script.stdout).body if _imports(node))


def _imports(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


# --- interrupted twice ------------------------------------------------------------------------------------------------


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(TINY_PROGRAM)
    search = RunningSearch(*SEARCH, "--budget", "10m", directory=tmp_path)
    search.wait_for("trial 0: ")
    started = search.descendants(at_least=2)
    search.interrupt()
    search.wait_for("autotune: interrupted")
    search.interrupt()
    # The second may come so late that the interpreter is on its way out, and ends by the signal itself.
    assert search.end() in (130, -signal.SIGINT)
    assert "Traceback" not in search.errors
    assert gone(started)
