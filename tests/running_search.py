"""A search as a process of its own, watched line by line: for tests that interrupt or kill it where they want."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

DEADLINE_SECONDS = 400.0

TINY_PROGRAM = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)


def model_fn():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def data_fn():
    x = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x[:, :1]), batch_size=16)


def loss_fn(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])
"""
"""As small as a program can be that trains something."""


class RunningSearch:
    """`autotune` with arguments, in a session of its own, as a terminal would start it."""

    def __init__(self, *arguments: str, directory: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "autotune.cli", *arguments],
            cwd=directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self.output = ""
        self._progressed = threading.Condition()
        self._readers = [threading.Thread(target=self._read_lines), threading.Thread(target=self._read_output)]
        for reader in self._readers:
            reader.start()

    def _read_lines(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._progressed:
                self.lines.append(line.rstrip("\n"))
                self._progressed.notify_all()

    def _read_output(self) -> None:
        assert self.process.stdout is not None
        self.output = self.process.stdout.read()

    def wait_for(self, beginning: str) -> None:
        """Until stderr shows a line that begins so."""
        with self._progressed:
            seen = self._progressed.wait_for(
                lambda: any(line.startswith(beginning) for line in self.lines), timeout=DEADLINE_SECONDS
            )
        assert seen, f"no line {beginning!r} in:\n{self.errors}"

    def interrupt(self) -> None:
        """Ctrl-C in its terminal."""
        os.killpg(self.process.pid, signal.SIGINT)

    def kill(self) -> list[psutil.Process]:
        """SIGKILL to the orchestrator alone, while a trial runs. Returns the processes that it had started."""
        started = self.descendants(at_least=2)
        self.process.kill()
        self.end()
        return started

    def descendants(self, *, at_least: int) -> list[psutil.Process]:
        """Its processes, once there are so many: the server is one, a trial the next."""
        orchestrator = psutil.Process(self.process.pid)
        deadline = time.monotonic() + DEADLINE_SECONDS
        while len(started := orchestrator.children(recursive=True)) < at_least:
            assert time.monotonic() < deadline, f"only {started} in:\n{self.errors}"
            time.sleep(0.01)
        return started

    def end(self) -> int:
        """Waits for its end and returns the exit code."""
        exit_code = self.process.wait(DEADLINE_SECONDS)
        for reader in self._readers:
            reader.join(DEADLINE_SECONDS)
        return exit_code

    @property
    def errors(self) -> str:
        """All of stderr so far."""
        return "\n".join(self.lines)


def gone(processes: Iterable[psutil.Process], within_seconds: float = 30.0) -> bool:
    """Whether all of them end in time."""
    deadline = time.monotonic() + within_seconds
    while any(runs(process) for process in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def runs(process: psutil.Process) -> bool:
    """Whether it has not ended; a zombie has."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.is_running()
    except psutil.NoSuchProcess:  # it ended while it was looked at
        return False
