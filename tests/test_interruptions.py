"""A search is ended from outside, at every stage and in the middle of its writing: nothing is lost, and it goes on."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest

import autotune
from autotune.records import Trial
from autotune.search.study import stored_records
from autotune.search.tables import StudyError
from tests.simulated_cli import Ended, SimulatedCli

FINISHED = re.compile(r"trial (\d+): (?:.* samples/s|\w+: )")
STARTED = re.compile(r"trial (\d+): ")
ARGUMENTS = ("--trials", "9", "--budget", "60s")


@pytest.fixture(scope="module")
def cli() -> Iterator[SimulatedCli]:
    made = SimulatedCli()
    yield made
    made.close()


def trials_in(directory: Path) -> list[Trial]:
    """None where no study was made yet."""
    with contextlib.suppress(StudyError):
        return stored_records(directory / "here")[0]
    return []


def unfinished_in(directory: Path) -> int:
    """How many trials Optuna takes for waiting or running, after any tool opened the study."""
    storage = f"sqlite:///{directory / 'here' / 'study.db'}"
    studies = [optuna.load_study(study_name=name, storage=storage) for name in optuna.get_all_study_names(storage)]
    states = Counter(trial.state.name for study in studies for trial in study.trials)
    return states["RUNNING"] + states["WAITING"]


def numbers(pattern: re.Pattern[str], ended: Ended) -> set[int]:
    return {int(found[1]) for line in ended.errors.splitlines() if (found := pattern.match(line))}


def hold_goes_on(cli: SimulatedCli, directory: Path) -> None:
    """The next call finds its answer, repeats no trial and leaves none running."""
    before = trials_in(directory)
    ended = cli.run(directory, *ARGUMENTS)
    assert ended.exit_code == 0, ended.errors
    assert unfinished_in(directory) == 0
    trials = trials_in(directory)
    assert trials[: len(before)] == before
    searched = [trial.config for trial in trials if trial.round is None]
    assert len(searched) == len(set(searched)) == 9
    best = autotune.load(directory / "here" / "best.json").best
    assert best.confirmed_rounds >= 3
    # fused gains as much as processes differ by here: whether that shows depends on what was interrupted
    assert best.config.replace({"optimizer_impl": "as_is"}) == trials[0].config.replace({"num_workers": 2})


# --- killed -----------------------------------------------------------------------------------------------------------


def test_killed_at_any_statement_it_loses_the_trial_in_flight_at_most(cli: SimulatedCli, tmp_path: Path) -> None:
    moments = random.Random(0)
    trials: list[Trial] = []
    for _ in range(8):
        killed = cli.run(tmp_path, *ARGUMENTS, killed_at_statement=moments.randint(60, 330))
        assert killed.exit_code == -signal.SIGKILL, killed.errors
        after = trials_in(tmp_path)
        assert after[: len(trials)] == trials
        trials = after
        stored = {trial.number for trial in trials}
        assert numbers(FINISHED, killed) <= stored
        assert len(numbers(STARTED, killed) - stored) <= 1
        assert unfinished_in(tmp_path) <= 1
    hold_goes_on(cli, tmp_path)


@pytest.mark.parametrize("statement", [3, 60, 150])
def test_killed_while_the_study_is_made(cli: SimulatedCli, statement: int, tmp_path: Path) -> None:
    killed = cli.run(tmp_path, killed_at_statement=statement)
    assert killed.exit_code == -signal.SIGKILL
    ended = cli.run(tmp_path, "--trials", "1", "--budget", "60s")
    assert ended.exit_code == 0, ended.errors
    assert unfinished_in(tmp_path) == 0


def test_killed_in_each_stage_it_goes_on(cli: SimulatedCli, tmp_path: Path) -> None:
    killed_in = set()
    for at in range(1, 20, 2):  # each call gets a little further than the one before
        known = trials_in(tmp_path)
        ended = cli.run(tmp_path, *ARGUMENTS, ending=(signal.SIGKILL, at))
        assert trials_in(tmp_path)[: len(known)] == known
        if ended.exit_code != -signal.SIGKILL:
            break
        stages = [line.split()[1].rstrip(":") for line in ended.errors.splitlines() if line.startswith("stage ")]
        killed_in.add(stages[-1])
    assert ended.exit_code == 0, ended.errors
    assert killed_in >= {"baseline", "compute", "explore", "confirm"}
    hold_goes_on(cli, tmp_path)


# --- interrupted ------------------------------------------------------------------------------------------------------

EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


@pytest.mark.parametrize(("number", "at"), [(signal.SIGINT, 4), (signal.SIGTERM, 8), (signal.SIGHUP, 14)])
def test_it_ends_with_the_best_so_far(cli: SimulatedCli, number: signal.Signals, at: int, tmp_path: Path) -> None:
    ended = cli.run(tmp_path, *ARGUMENTS, ending=(number, at))
    assert ended.exit_code == EXIT_CODES[number]
    assert "autotune: interrupted; the best so far is kept, and the same command goes on" in ended.errors
    assert "Traceback" not in ended.errors
    verdict = autotune.load(tmp_path / "here" / "best.json").recommendation.verdict
    assert ended.output.startswith(verdict[:20])
    assert unfinished_in(tmp_path) == 0


@pytest.mark.parametrize("at", [1, 2])
def test_before_the_baseline_ran_there_is_nothing_to_keep(cli: SimulatedCli, at: int, tmp_path: Path) -> None:
    ended = cli.run(tmp_path, *ARGUMENTS, ending=(signal.SIGTERM, at))
    assert ended.exit_code == 143
    assert ended.output == ""
    assert ended.errors.splitlines()[-1].startswith("autotune: interrupted; nothing new was measured")
    assert not (tmp_path / "here" / "best.json").exists()


def test_interrupted_at_any_moment_it_is_orderly(cli: SimulatedCli, tmp_path: Path) -> None:
    moments = random.Random(0)
    for _ in range(6):
        pid = cli.start(tmp_path, *ARGUMENTS)
        time.sleep(moments.uniform(0.02, 0.8))
        os.kill(pid, signal.SIGINT)
        ended = cli.end(tmp_path)
        assert ended.exit_code in (130, 0), ended.errors
        assert "Traceback" not in ended.errors
        assert trials_in(tmp_path) == [] or unfinished_in(tmp_path) == 0
    hold_goes_on(cli, tmp_path)


def test_what_was_interrupted_is_run_again_in_the_end(cli: SimulatedCli, tmp_path: Path) -> None:
    cli.run(tmp_path, *ARGUMENTS, ending=(signal.SIGINT, 7))
    with sqlite3.connect(tmp_path / "here" / "study.db") as connection:
        assert connection.execute("SELECT count(*) FROM trials WHERE state = 'FAIL'").fetchone() == (1,)
    hold_goes_on(cli, tmp_path)


def test_an_answer_that_cannot_be_saved_is_told_all_the_same(cli: SimulatedCli, tmp_path: Path) -> None:
    """As on a full disk; here something else has its name."""
    (tmp_path / "here" / "best.json").mkdir(parents=True)
    ended = cli.run(tmp_path, *ARGUMENTS)
    assert ended.exit_code == 0, ended.errors
    assert "note: cannot save here/best.json: Is a directory; the trials are kept there" in ended.errors
    assert "How sure" in ended.output
    assert trials_in(tmp_path)


# --- gone on with otherwise -------------------------------------------------------------------------------------------


def test_other_settings_begin_anew_and_say_so_and_fresh_forgets(cli: SimulatedCli, tmp_path: Path) -> None:
    assert cli.run(tmp_path, *ARGUMENTS, ending=(signal.SIGINT, 5)).exit_code == 130
    count = len(trials_in(tmp_path))
    began = "note: this begins another search in here "
    for change, why in (
        (("--seed", "1"), "seed: 0 then, 1 now"),
        (("--only", "num_workers"), "seed: 1 then, 0 now"),
        (("--fix", "precision=as_is"), "other values of "),
    ):
        other = cli.run(tmp_path, "--trials", "1", "--budget", "60s", *change)
        told = [line for line in other.errors.splitlines() if line.startswith(began)]
        assert len(told) == 1 and why in told[0] and "do not count, and best.json will be of this one" in told[0]
    same = cli.run(tmp_path, "--trials", str(count), "--budget", "90s")
    assert f"note: going on with here: {count} trials of an earlier call; --fresh" in same.errors
    again = cli.run(tmp_path, "--trials", str(count), "--budget", "90s")
    confirmations = len(trials_in(tmp_path)) - count
    told = f"going on with here: {count + confirmations} trials of an earlier call, {confirmations} of them to confirm;"
    assert told in again.errors
    assert began not in same.errors
    assert sum(trial.round is None for trial in trials_in(tmp_path)) == count, "the trials of the first call count"
    assert cli.run(tmp_path, "--trials", "1", "--budget", "60s", "--fresh").exit_code == 0
    assert sum(trial.round is None for trial in trials_in(tmp_path)) == 1
