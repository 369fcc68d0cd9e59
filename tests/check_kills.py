"""Kills a real search fifty times at random moments, goes on each time, and says what each kill left.

    python tests/check_kills.py [KILLS] [SEED]

Each call of the command line goes on in the same study, until one ends by itself; the next begins a fresh one. After each
SIGKILL no process of the search may be left, no finished trial may be missing, and the study must open in Optuna. The
search that ends must leave no trial that runs. Takes some ten minutes, so it is no part of the suite. Exits with 1 where
something did not hold.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import optuna

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from autotune.processes.process_tree import carrying  # noqa: E402
from autotune.records import Trial  # noqa: E402
from autotune.search.study import stored_records  # noqa: E402
from tests.running_search import TINY_PROGRAM, RunningSearch  # noqa: E402

LONGEST_LIFE_SECONDS = 15.0
"""From the first line on, which comes when torch and the program are imported."""
ALIVE_AT_START = 0.98
"""The chance to live for another half second before that."""
SECONDS_TO_BE_GONE = 20.0
MARKER = "AUTOTUNE_CHECK_KILLS"
PROGRAM = TINY_PROGRAM.replace("batch_size=16", "batch_size=16, num_workers=1")
STARTED = re.compile(r"trial (\d+): (?!.* samples/s)")


class Checker:
    """One study directory after the other, and what did not hold in them."""

    def __init__(self, directory: Path, seed: int) -> None:
        self._directory = directory
        self._study = directory / "here"
        self._random = random.Random(seed)
        self._token = secrets.token_hex(8)
        os.environ[MARKER] = self._token
        (directory / "tiny.py").write_text(PROGRAM)
        self.troubles: list[str] = []
        self.killed_in: Counter[str] = Counter()

    def kill_one(self) -> bool:
        """One call of the command line, killed at a random moment. False where it had ended by itself."""
        before = self._trials()
        search = self._search("--budget", "2m")
        while not search.lines and search.process.poll() is None and self._random.random() < ALIVE_AT_START:
            time.sleep(0.5)
        if search.lines:
            with contextlib.suppress(subprocess.TimeoutExpired):
                search.process.wait(self._random.uniform(0.0, LONGEST_LIFE_SECONDS))
        ended = search.process.poll()
        search.process.kill()
        search.end()
        if ended is not None:
            self._hold(ended == 0, f"ended with {ended}: {search.errors[-400:]}")
            self._hold_finished()
            shutil.rmtree(self._study)
            return False
        stages = [line.split()[1].rstrip(":") for line in search.lines if line.startswith("stage ")]
        self.killed_in[stages[-1] if stages else "start"] += 1
        self._hold_gone()
        after = self._trials()
        self._hold(after[: len(before)] == before, f"trials {before} became {after}")
        begun = [int(found[1]) for line in search.lines if (found := STARTED.match(line))]
        finished = {trial.number for trial in after}
        lost = [number for number in begun if number not in finished and number != begun[-1]]
        self._hold(not lost, f"finished trials {lost} are not in the study")
        self._hold_running(at_most=1)
        return True

    def finish(self) -> None:
        """Goes on without a kill, to the end."""
        search = self._search("--budget", "30s")
        self._hold(search.end() == 0, f"ended badly: {search.errors[-400:]}")
        self._hold_finished()

    def _search(self, *arguments: str) -> RunningSearch:
        words = ("search", "tiny.py", "--space", "quick", "--study", "here", *arguments)
        return RunningSearch(*words, directory=self._directory)

    def _trials(self) -> list[Trial]:
        """Of the study as it lies on the disk; none where it is not made yet."""
        if not (self._study / "study.db").is_file():
            return []
        try:
            return stored_records(self._study)[0]
        except ValueError as error:
            self._hold("holds nothing yet" in str(error), str(error))
            return []

    def _hold_gone(self) -> None:
        deadline = time.monotonic() + SECONDS_TO_BE_GONE
        while len(left := [pid for pid in carrying(MARKER, self._token) if pid != os.getpid()]) > 0:
            if time.monotonic() > deadline:
                commands = [Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in left]
                self.troubles.append(f"still there: {commands}")
                return
            time.sleep(0.05)

    def _hold_finished(self) -> None:
        self._hold((self._study / "best.json").is_file(), "there is no best.json")
        self._hold_running(at_most=0)

    def _hold_running(self, *, at_most: int) -> None:
        if not (self._study / "study.db").is_file():
            return
        storage = f"sqlite:///{self._study / 'study.db'}"
        for name in optuna.get_all_study_names(storage):
            states = Counter(trial.state.name for trial in optuna.load_study(study_name=name, storage=storage).trials)
            unfinished = states["RUNNING"] + states["WAITING"]
            self._hold(unfinished <= at_most, f"{name} has {dict(states)}")

    def _hold(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.troubles.append(otherwise)


def main(kills: int, seed: int) -> int:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    directory = Path(tempfile.mkdtemp(prefix="autotune-kills-"))
    checker = Checker(directory, seed)
    done = 0
    while done < kills:
        done += checker.kill_one()
        print(f"{done} kills, {len(checker.troubles)} troubles", flush=True)
    checker.finish()
    print("killed in", dict(checker.killed_in))
    for trouble in checker.troubles:
        print("TROUBLE:", trouble)
    shutil.rmtree(directory)
    return 1 if checker.troubles else 0


if __name__ == "__main__":
    given = [int(word) for word in sys.argv[1:]]
    sys.exit(main(*given, *(50, 0)[len(given) :]))
