"""Reports in colour and the live view of a running search: the only module that knows rich."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, TextIO, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from autotune.config import Value
from autotune.quantities import format_duration, format_rate, format_ratio, format_spread
from autotune.records import Phase, Stage, Standing, Trial
from autotune.report.document import (
    Document,
    Grid,
    Lines,
    Sentence,
    Tone,
    Verbatim,
    counted,
    one_line,
    shown_settings,
    unwrapped,
)
from autotune.report.text import grid_lines, wrap

FAILURES_SHOWN = 3
REDRAWS_PER_SECOND = 4
WIDEST = 120
"""Columns beyond which lines are hard to read, however wide the terminal is."""
TONE_STYLES: dict[Tone, str] = {"plain": "", "good": "bold green", "warning": "yellow", "bad": "bold red"}


def show(document: Document, stream: TextIO) -> None:
    """Prints a document: in colour on a terminal, plain where the output is a file or a pipe."""
    console = Console(file=stream, highlight=False, markup=False, emoji=False)
    width = min(console.width, WIDEST)
    for number, block in enumerate(document):
        if number:
            console.print()
        match block:
            case Sentence(text, tone):
                _print_rows(console, wrap(text, width=width), TONE_STYLES[tone])
            case Lines(title, lines, tone):
                _print_rows(console, [one_line(title)], "bold")
                _print_rows(
                    console, [row for line in lines for row in wrap(line, width=width, bullet=True)], TONE_STYLES[tone]
                )
            case Verbatim(title, lines):
                _print_rows(console, [one_line(title)], "bold")
                _print_rows(console, [f"  {unwrapped(line)}" for line in lines], "cyan")
            case Grid():
                header, *rows = grid_lines(block, width=width)
                title = one_line(block.title)
                _print_rows(console, [*([title] if title else []), header], "bold")
                _print_rows(console, rows, "")


def _print_rows(console: Console, rows: list[str], style: str) -> None:
    for row in rows:
        console.print(Text(row, style=style), soft_wrap=True)


class _Lasting:
    """A stream whose reader may go away, be it a closed terminal or the other end of a pipe: a search outlives that."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes it, or from the first failure on, nothing."""
        try:
            return self._stream.write(text)
        except OSError:
            self._write_nowhere()
            return len(text)

    def flush(self) -> None:
        """Likewise."""
        try:
            self._stream.flush()
        except OSError:
            self._write_nowhere()

    def _write_nowhere(self) -> None:
        # what is buffered would fail again at the end of the program, and change its exit code
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


def _best_text(best: Standing | None, free_batch: Standing | None) -> str:
    """How good the best so far is, and what another batch would give beside it."""
    told = "" if best is None else f"best so far {_standing_text(best)} the speed of {best.beside}"
    return told if free_batch is None else f"{told}; with the batch free {_standing_text(free_batch)}"


def _standing_text(standing: Standing) -> str:
    return f"{format_rate(standing.samples_per_second)} samples/s, {format_ratio(standing.speedup)}"


class LiveView:
    """A `SearchWatcher` that draws where the search is on a terminal, and prints a line per event anywhere else.

    To be used as a context manager. What the user's code says is shown as it is, on one line, never read as markup.
    """

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=cast("TextIO", _Lasting(stream)), highlight=False, markup=False, emoji=False)
        self._spinner = Spinner("dots")
        self._stage = "starting"
        self._running = ""
        self._phase: Phase | None = None
        self._probe = ""
        self._best = ""
        self._finished_count = 0
        self._confirmation_count = 0
        self._failed_count = 0
        self._failures: tuple[str, ...] = ()  # replaced, never changed in place: the thread that redraws reads it
        self._ends_at_seconds: float | None = None
        self._live = Live(
            get_renderable=self._picture,
            console=self._console,
            refresh_per_second=REDRAWS_PER_SECOND,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def __enter__(self) -> LiveView:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.stop()

    def stage(self, stage: Stage, detail: str) -> None:
        """A new stage: shown until the next one begins."""
        self._stage = one_line(f"{stage}: {detail}" if detail else stage)
        self._running, self._phase, self._probe = "", None, ""
        left = "" if self._ends_at_seconds is None else f" ({self._left_text()})"
        self._event(f"stage {self._stage}{left}")

    def trial_started(self, number: int, config_changes: Mapping[str, Value], stage: Stage) -> None:
        """The trial that runs now."""
        self._running, self._phase = one_line(f"trial {number}: {shown_settings(config_changes)}"), None
        self._event(self._running)

    def phase(self, phase: Phase) -> None:
        """Shown beside the running trial; not worth a line of its own where lines are printed."""
        self._phase = phase

    def trial_finished(self, trial: Trial, best: Standing | None, free_batch: Standing | None) -> None:
        """Counts the trial as the report does, remembers its failure and the best so far."""
        self._finished_count += 1
        self._confirmation_count += trial.round is not None
        self._running, self._phase = "", None
        self._best = _best_text(best, free_batch)
        if trial.failure is not None:
            self._failed_count += 1
            failure = one_line(f"trial {trial.number}: {trial.failure.kind}: {trial.failure.message}")
            self._failures = (*self._failures, failure)[-FAILURES_SHOWN:]
            self._event(failure)
        elif trial.measurement is not None:
            measured = trial.measurement
            rate = format_rate(measured.samples_per_second)
            spread = format_spread(measured.samples_per_second, measured.interval)
            stopped = ", stopped early" if measured.stopped_early else ""
            told = f"trial {trial.number}: {rate} samples/s {spread}{stopped}"
            self._event("; ".join(filter(None, [told, self._best])))

    def probe(self, kind: str, text: str) -> None:
        """What a probe showed; the last one of a stage stays in view."""
        self._probe, self._phase = one_line(f"{kind} probe: {text}"), None
        self._event(self._probe)

    def note(self, text: str) -> None:
        """Stays on the screen, above what is redrawn."""
        self._print_line(f"note: {one_line(text)}")

    def time_left(self, seconds: float) -> None:
        """Counted down from here until the search says again."""
        self._ends_at_seconds = time.monotonic() + seconds

    def _event(self, line: str) -> None:
        """Printed where nothing is redrawn."""
        if not self._console.is_terminal:
            self._print_line(line)

    def _print_line(self, line: str) -> None:
        with contextlib.suppress(OSError):  # a full disk behind stderr ends no search
            self._console.print(Text(line), soft_wrap=True)

    def _left_text(self) -> str:
        assert self._ends_at_seconds is not None
        left_seconds = self._ends_at_seconds - time.monotonic()
        return f"{format_duration(round(left_seconds))} left" if left_seconds > 0 else "finishing"

    def _picture(self) -> RenderableType:
        head = Table.grid(padding=(0, 1), expand=True)
        head.add_column(width=1)
        head.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        head.add_column(justify="right", no_wrap=True)
        left = "" if self._ends_at_seconds is None else self._left_text()
        head.add_row(self._spinner, Text(self._stage, "bold"), Text(left, "cyan"))
        phase = "" if self._phase is None else f" [{self._phase}]"
        running = self._running or ("probe" if phase else "")
        confirmations = f", {self._confirmation_count} of them to confirm" if self._confirmation_count else ""
        counts = f"{counted(self._finished_count, 'trial')}{confirmations}, {self._failed_count} failed"
        rows = [Text(f"  {running}{phase}")] if running else []
        rows += [Text(f"  {self._probe}", "dim")] if self._probe else []
        rows += [Text(f"  {self._best}", "green")] if self._best else []
        rows += [Text(f"  {counts}", "dim"), *(Text(f"  {failure}", "yellow") for failure in self._failures)]
        for row in rows:
            row.no_wrap, row.overflow = True, "ellipsis"
        return Group(head, *rows)
