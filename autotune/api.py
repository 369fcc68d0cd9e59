"""`fit`, and what the command line calls: wires machine, workload, processes, space, study and search together."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from types import NoneType
from typing import Any, Literal

from autotune import __version__
from autotune.config import Value, value_text
from autotune.errors import SearchInterrupted, UserError
from autotune.interrupts import interrupts_kept
from autotune.knobs.registry import KNOBS
from autotune.machine import read_machine_facts
from autotune.options import VERIFY_BUDGET_SECONDS, CheckReport, MemoryReport, SearchOptions, VerifyReport
from autotune.quantities import parse_duration, parse_names, parse_size
from autotune.records import OtherSearch, Probe, Recommendation, Trial
from autotune.result import TuningResult, load
from autotune.scratch import scratch
from autotune.search.changes import changes_since
from autotune.search.confirm import fewest_seconds
from autotune.search.memory import find_ceiling
from autotune.search.preview import preview
from autotune.search.recommend import Evidence, recommend
from autotune.search.search import Search
from autotune.search.verify import verify as verify_recommendation
from autotune.search.watcher import CallbackFailed, CallingWatcher, QuietWatcher, SearchWatcher
from autotune.sessions import OpenedSession, open_session, read_facts
from autotune.space import build_space
from autotune.workload import ROLES, Workload, workload_from_functions

__all__ = ["check", "fit", "load", "memory", "open_study", "other_searches", "search", "verify", "verify_workload"]

RESULT_NAME = "best.json"
AMPLE = 3
"""A budget that would do holds so many times the least that a search does."""


def fit(
    model_fn: Callable[[], Any],
    data_fn: Callable[[], Any],
    *,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    optimizer_fn: Callable[[Any], Any] | None = None,
    scheduler_fn: Callable[[Any], Any] | None = None,
    clip_grad_norm: float | None = None,
    global_batch_size: int | None = None,
    free_batch: bool = False,
    space: str = "default",
    only: str | tuple[str, ...] = (),
    blocks: str | tuple[str, ...] = (),
    fix: Mapping[str, Value] | None = None,
    objective: Literal["throughput", "memory"] | None = None,
    budget: str | float = "10m",
    trials: int | None = None,
    memory_limit: str | int | None = None,
    memory_margin: float = 0.05,
    train_samples: int | None = None,
    device: Literal["cuda", "cpu"] | None = None,
    study: str | Path = "autotune-study",
    seed: int = 0,
    fresh: bool = False,
    quiet: bool = False,
    on_trial: Callable[[Trial, float | None], object] | None = None,
) -> TuningResult:
    """Finds the fastest way to run the training step of these functions that fits and trains the same.

    `model_fn()` returns a fresh `torch.nn.Module` at every call, `data_fn()` a Dataset, IterableDataset or DataLoader,
    `loss_fn(model, batch)` the scalar mean loss or `(loss_sum, weight)`. `budget` is a duration (`"10m"`, or seconds),
    `trials` at most how many trials come before the confirmation, that of the program as it is among them,
    `memory_limit` a size (`"24GiB"`, or bytes); `clip_grad_norm` is what the loop clips gradients to; `blocks` names the
    modules to recompute, or their class, where those that are found are not the right ones. Trials and `best.json` are
    kept in the directory `study`; the same call goes on where it stopped. Progress goes to stderr unless `quiet`.

    `on_trial(trial, speedup)` is called after each trial, which is stored by then, with how many times the speed of the
    user's program the best so far has (None before there is one). An exception in it ends the search: the best so far is
    saved, and the exception raised again. So can a search be stopped that runs in another thread, where no Ctrl-C arrives.

    Raises `UserError` (a ValueError) for what the user can change, with a sentence that says so, `NoAnswerError` where
    there is no answer for another reason, `SearchInterrupted` (a KeyboardInterrupt) after Ctrl-C, with the best so far.
    """
    _refuse_in_a_child("fit")
    _refuse_other("space", space, str, "the name of a space or the path of its file")
    _refuse_other("fix", fix, (Mapping, NoneType), 'names with values, such as {"batch_size": 32}')
    _refuse_other("study", study, (str, os.PathLike), "the path of a directory")
    _refuse_other("on_trial", on_trial, (Callable, NoneType), "a function of (trial, speedup)")
    options = SearchOptions(
        budget_seconds=_seconds(budget),
        trials=trials,
        space=space,
        only=_names("only", only),
        blocks=_names("blocks", blocks),
        fixed={name: value_text(value) for name, value in (fix or {}).items()},
        global_batch_size=global_batch_size,
        free_batch=free_batch,
        objective=objective,
        memory_limit_bytes=parse_size(memory_limit) if isinstance(memory_limit, str) else memory_limit,
        memory_margin=memory_margin,
        train_samples=train_samples,
        device=device,
        study=Path(study),
        seed=seed,
        fresh=fresh,
        clip_grad_norm=clip_grad_norm,
    )
    workload = _workload(model_fn, data_fn, loss_fn, optimizer_fn, scheduler_fn)
    with _watcher(quiet) as watcher:
        return search(workload, options, watcher if on_trial is None else CallingWatcher(watcher, on_trial))


def _refuse_other(name: str, given: object, kind: Any, words: str) -> None:
    """One sentence for an argument of another kind, before anything is started."""
    if not isinstance(given, kind):
        raise UserError(f"{name} must be {words}, not {given!r}")


def _names(name: str, given: str | tuple[str, ...]) -> tuple[str, ...]:
    if isinstance(given, str):
        return parse_names(given)
    _refuse_other(name, given, (tuple, list), "names, in a tuple or in one text with commas between them")
    return tuple(given)


def _refuse_in_a_child(called: str) -> None:
    if os.environ.get("AUTOTUNE_CHILD"):
        raise UserError(
            f"{called} was reached again inside a trial process: importing the script runs it. Put the call under "
            '`if __name__ == "__main__":`'
        )


def _workload(*functions: Callable[..., Any] | None) -> Workload:
    """Of the functions in the order of their roles; those that are None were not given."""
    given = dict(zip(ROLES, functions, strict=True))
    return workload_from_functions({role: function for role, function in given.items() if function is not None})


def _seconds(budget: str | float) -> float:
    if isinstance(budget, str):
        return parse_duration(budget)
    _refuse_other("budget", budget, Real, 'a time such as "10m", or a number of seconds')
    return float(budget)


@contextmanager
def _watcher(quiet: bool) -> Iterator[SearchWatcher]:
    """Shows progress on stderr, or nothing."""
    if quiet:
        yield QuietWatcher()
        return
    from autotune.report.terminal import LiveView

    with LiveView(sys.stderr) as watcher:
        yield watcher


def search(workload: Workload, options: SearchOptions, watcher: SearchWatcher) -> TuningResult:
    """The whole search. Saves the recommendation as `best.json` in the study's directory and returns it.

    Raises as `fit` does.
    """
    began = time.monotonic()
    was_opened = False
    try:
        with interrupts_kept(), open_session(workload, options, watcher) as opened:
            was_opened = True
            return _searched(opened, began)
    except CallbackFailed as failed:
        callback_error = failed.error
    except KeyboardInterrupt:
        if was_opened:
            raise
        raise SearchInterrupted(None) from None
    raise callback_error  # here, where nothing is added to what it says


def _searched(opened: OpenedSession, began: float) -> TuningResult:
    """The search in an open study. Whatever ends it early leaves the best so far in `best.json`."""
    started = Search(opened.session)
    try:
        _run(started, began)
        return _result(opened, started, began)
    except (KeyboardInterrupt, CallbackFailed) as ended:
        measured = opened.session.baseline is not None
        result = _result(opened, started, began, unconfirmed=True) if measured else None
        if isinstance(ended, CallbackFailed):
            raise
        raise SearchInterrupted(result, opened.directory / RESULT_NAME) from None


def _run(started: Search, began: float) -> None:
    started.begin()
    session = started.session
    # Where the user's program fits at no batch, what makes it fit is an answer, however little time is left.
    is_answer = bool(session.results().reference_settings)
    fewest = fewest_seconds(session)
    if session.budget.left() < fewest and fewest and not is_answer:
        took = time.monotonic() - began
        known = session.trials[: session.earlier_trial_count]
        what = "starting" if session.baseline_trial() in known else "measuring your own program"
        needed = took + AMPLE * fewest
        raise UserError(
            f"a budget of {session.budget.seconds:.0f} s is too small: {what} took "
            f"{took:.0f} s. Give at least --budget {needed:.0f}s (budget={needed:.0f}); what was measured is kept"
        )
    started.go_on()


def check(workload: Workload, options: SearchOptions, watcher: SearchWatcher) -> CheckReport:
    """One step of the user's program, and what a search would do with it. Writes no study."""
    with scratch(options) as options:
        facts = read_facts(workload, options, watcher)
    space = build_space(facts, preset=options.space, only=options.only, fixed=options.fixed)
    return preview(space, options)


def memory(workload: Workload, options: SearchOptions, watcher: SearchWatcher) -> MemoryReport:
    """Does it fit, and how far: the ceiling of the user's program and of each way to save memory."""
    with scratch(options) as options, open_session(workload, options, watcher) as opened:
        session = opened.session
        session.baseline = session.space.baseline
        watcher.stage("memory", "how far the batch goes")
        ceilings = tuple(
            find_ceiling(session, config) for config in Search(session).memory_candidates(session.baseline)
        )
        return MemoryReport(
            facts=session.facts,
            baseline=session.baseline,
            ceilings=ceilings,
            limit_bytes=session.memory_limit_bytes(),
            warnings=tuple(session.warnings),
        )


def verify(
    result: TuningResult,
    model_fn: Callable[[], Any],
    data_fn: Callable[[], Any],
    *,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    optimizer_fn: Callable[[Any], Any] | None = None,
    scheduler_fn: Callable[[Any], Any] | None = None,
    budget: str | float = VERIFY_BUDGET_SECONDS,
    quiet: bool = False,
) -> VerifyReport:
    """Whether a result still holds: on another driver, torch or GPU, or after a change of the model.

    Measures the user's program and what was recommended in turn, in fresh processes, checks that both still train the
    same, and says what changed since. `report.holds` is the answer, `report.verdict` a sentence. The options of the
    search (device, batch, memory limit, clipping) are those that the result holds. Leaves no files.

    Raises as `fit` does, and a plain KeyboardInterrupt after Ctrl-C.
    """
    _refuse_in_a_child("verify")
    workload = _workload(model_fn, data_fn, loss_fn, optimizer_fn, scheduler_fn)
    budget_seconds = _seconds(budget)
    with _watcher(quiet) as watcher:
        return verify_workload(result.recommendation, workload, budget_seconds, watcher)


def verify_workload(
    claimed: Recommendation, workload: Workload, budget_seconds: float, watcher: SearchWatcher
) -> VerifyReport:
    """What `verify` does, for a workload of either origin."""
    if claimed.settings.conditions.device == "cuda" and not read_machine_facts().gpus:
        raise UserError("the result was measured on a GPU (device cuda), and this machine shows none")
    options = _options_of(claimed, budget_seconds)
    with scratch(options) as options, open_session(workload, options, watcher) as opened:
        changed = changes_since(claimed, opened.session.facts, workload.reference(), __version__)
        for change in changed:
            watcher.note(f"changed since the search: {change}")
        return verify_recommendation(opened.session, claimed, changed)


def _options_of(claimed: Recommendation, budget_seconds: float) -> SearchOptions:
    """What the search was asked for, as far as it decides what is measured."""
    settings, conditions, workload = claimed.settings, claimed.settings.conditions, claimed.workload
    held = conditions.global_batch_size
    # The batch of the user's own DataLoader was held because it was that, and today's is held again.
    of_the_loader = workload.batch_held and held == workload.batch_size
    return SearchOptions(
        budget_seconds=budget_seconds,
        space="thorough",  # every value that may have been recommended
        blocks=settings.blocks,
        global_batch_size=None if of_the_loader else held,
        free_batch=held is None,
        objective=settings.objective,
        memory_limit_bytes=conditions.memory_limit_bytes,
        memory_margin=conditions.memory_margin,
        device=conditions.device,
        seed=conditions.seed,
        clip_grad_norm=conditions.clip_grad_norm,
    )


def other_searches(directory: Path) -> tuple[OtherSearch, ...]:
    """The searches in a study's directory beside the one that `open_study` tells of. Raises as that does."""
    from autotune.search import study

    return study.other_searches(directory)


def open_study(directory: Path) -> tuple[Recommendation | None, list[Trial], list[Probe]]:
    """What a study's directory holds: the recommendation if there is one, all trials, all probes.

    Raises `UserError` where it holds no study.
    """
    from autotune.search.study import stored_records  # and Optuna with it, which a search imports later

    trials, probes = stored_records(directory)
    saved = directory / RESULT_NAME
    return (load(saved).recommendation if saved.is_file() else None), trials, probes


def _result(opened: OpenedSession, started: Search, began: float, *, unconfirmed: bool = False) -> TuningResult:
    session = opened.session
    evidence = Evidence(
        results=session.results(unconfirmed=unconfirmed),
        ceilings=tuple(started.ceilings.values()),
        reference=opened.workload.reference(),
        knobs=KNOBS,
        memory_limit_bytes=session.memory_limit_bytes(),
        warnings=tuple(dict.fromkeys([*opened.pool.notes, *session.warnings])),
        skipped=tuple(session.skipped.values()),
        short_of=session.short_of,
        earlier_trial_count=session.earlier_trial_count,
        search_seconds=time.monotonic() - began,
        stage_seconds=session.stage_seconds,
        autotune_version=__version__,
    )
    result = TuningResult(recommend(evidence))
    try:
        result.save(opened.directory / RESULT_NAME)
    except OSError as error:  # a full disk: the answer is here all the same
        session.watcher.note(
            f"cannot save {opened.directory / RESULT_NAME}: {error.strerror}; the trials are kept there"
        )
    return result
