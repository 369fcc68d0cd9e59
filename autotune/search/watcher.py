"""`SearchWatcher`: what a search tells whoever watches it, while it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from autotune.config import Value
from autotune.records import Phase, Stage, Standing, Trial


class SearchWatcher(Protocol):
    """Told of every event in the order in which it happens, from the orchestrator's main thread.

    Called between trials and from within them, so an implementation returns quickly and raises nothing, unless it shall
    end the search (`CallbackFailed`).
    """

    def stage(self, stage: Stage, detail: str) -> None:
        """The search entered a stage; `detail` says in a few words what it will do there."""

    def trial_started(self, number: int, config_changes: Mapping[str, Value], stage: Stage) -> None:
        """A trial begins. `config_changes` holds the knobs that differ from the baseline, empty for the baseline."""

    def phase(self, phase: Phase) -> None:
        """The running trial or probe entered a phase."""

    def trial_finished(self, trial: Trial, best: Standing | None, free_batch: Standing | None) -> None:
        """A trial ended, measured or failed. With it the best so far, and the best that leaves a held batch, where that is
        better still."""

    def probe(self, kind: str, text: str) -> None:
        """A probe of this kind (memory, loader, parity, soak) ended; `text` is one line of what it showed."""

    def note(self, text: str) -> None:
        """Something that the user should know now, in one sentence."""

    def time_left(self, seconds: float) -> None:
        """What is left of the budget; negative when it is overrun."""


class PassingWatcher:
    """A `SearchWatcher` that passes everything on to another: for those that change one thing on the way."""

    def __init__(self, watcher: SearchWatcher) -> None:
        self._watcher = watcher

    def stage(self, stage: Stage, detail: str) -> None:
        """Passed on."""
        self._watcher.stage(stage, detail)

    def trial_started(self, number: int, config_changes: Mapping[str, Value], stage: Stage) -> None:
        """Passed on."""
        self._watcher.trial_started(number, config_changes, stage)

    def phase(self, phase: Phase) -> None:
        """Passed on."""
        self._watcher.phase(phase)

    def trial_finished(self, trial: Trial, best: Standing | None, free_batch: Standing | None) -> None:
        """Passed on."""
        self._watcher.trial_finished(trial, best, free_batch)

    def probe(self, kind: str, text: str) -> None:
        """Passed on."""
        self._watcher.probe(kind, text)

    def note(self, text: str) -> None:
        """Passed on."""
        self._watcher.note(text)

    def time_left(self, seconds: float) -> None:
        """Passed on."""
        self._watcher.time_left(seconds)


class CallbackFailed(Exception):  # noqa: N818  # no error of ours: it carries the user's to where the study is closed
    """The user's function raised; `error` is what."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class CallingWatcher(PassingWatcher):
    """Also calls a function of the user after every trial. What that raises ends the search, as a `CallbackFailed`."""

    def __init__(self, watcher: SearchWatcher, on_trial: Callable[[Trial, float | None], object]) -> None:
        super().__init__(watcher)
        self._on_trial = on_trial

    def trial_finished(self, trial: Trial, best: Standing | None, free_batch: Standing | None) -> None:
        """Passed on, then the function is called; the trial is in the study already."""
        super().trial_finished(trial, best, free_batch)
        try:
            self._on_trial(trial, best.speedup if best is not None else None)
        except Exception as error:  # the user's function may raise anything
            raise CallbackFailed(error) from error


class QuietWatcher:
    """A `SearchWatcher` that keeps silent."""

    def stage(self, stage: Stage, detail: str) -> None:
        """Silent."""

    def trial_started(self, number: int, config_changes: Mapping[str, Value], stage: Stage) -> None:
        """Silent."""

    def phase(self, phase: Phase) -> None:
        """Silent."""

    def trial_finished(self, trial: Trial, best: Standing | None, free_batch: Standing | None) -> None:
        """Silent."""

    def probe(self, kind: str, text: str) -> None:
        """Silent."""

    def note(self, text: str) -> None:
        """Silent."""

    def time_left(self, seconds: float) -> None:
        """Silent."""
