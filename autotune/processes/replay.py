"""`ReplayBackend`: answers from recorded trials, so that a whole search runs in seconds on a machine without a GPU."""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from autotune.config import TrainingConfig
from autotune.records import Failure, Phase, Probe, Record, Trial, TrialAnswer, TrialKind, TrialRequest


class RecordedTrial(Record):
    """A trial that was run once, as one line of a file."""

    kind: TrialKind
    config: TrainingConfig
    answer: TrialAnswer


class ReplayBackend:
    """A `TrialBackend` that knows only what was recorded, and never invents an answer.

    A configuration that was recorded several times gives its answers in turn, as a real machine would give another
    one each time.
    """

    def __init__(self, trials: Iterable[RecordedTrial]) -> None:
        self._answers: dict[tuple[TrialKind, TrainingConfig], deque[TrialAnswer]] = defaultdict(deque)
        for trial in trials:
            self._answers[trial.kind, trial.config].append(trial.answer)

    def run(self, request: TrialRequest, on_phase: Callable[[Phase], None] | None = None) -> TrialAnswer:
        """The recorded answer. Raises LookupError where nothing of that kind was recorded for the configuration."""
        answers = self._answers.get((request.kind, request.config))
        if not answers:
            raise LookupError(f"the replay has no record of a {request.kind} trial of {dict(request.config)}")
        if on_phase is not None:
            on_phase("finish")
        answers.rotate(-1)
        return answers[-1]

    def close(self) -> None:
        """Does nothing: there are no processes."""


def recorded_trials(trials: Iterable[Trial], probes: Iterable[Probe]) -> Iterator[RecordedTrial]:
    """Every answer of a trial process that a study holds, without what names files of this machine."""
    for trial in trials:
        failure = trial.failure if trial.measurement is None else None
        answer = TrialAnswer(measurement=trial.measurement, failure=_without_paths(failure), seconds=trial.seconds)
        yield RecordedTrial(kind="measure", config=trial.config, answer=answer)
    for probe in probes:
        changes = {"output_path": None, "failure": _without_paths(probe.answer.failure)}
        yield RecordedTrial(kind=probe.kind, config=probe.config, answer=probe.answer.model_copy(update=changes))


def _without_paths(failure: Failure | None) -> Failure | None:
    return failure.model_copy(update={"output_path": None, "detail": ""}) if failure is not None else None


def write_trials(path: Path, trials: Iterable[RecordedTrial]) -> None:
    """One JSON object a line."""
    lines = (
        json.dumps({"kind": trial.kind, "config": dict(trial.config), "answer": trial.answer.model_dump()})
        for trial in trials
    )
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def read_trials(path: Path) -> list[RecordedTrial]:
    """What `write_trials` wrote. Raises ValueError that names the line that is no recorded trial."""
    trials = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            trials.append(RecordedTrial.model_validate(json.loads(line)))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}, is no recorded trial: {error}") from error
    return trials
