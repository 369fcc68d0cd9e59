"""Opens what a search, a check or a verification works with: machine, processes, facts, study and session."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

from autotune.config import TrainingConfig
from autotune.errors import UserError
from autotune.gpu_watch import occupied
from autotune.machine import read_machine_facts
from autotune.nvml import gpu_used_bytes
from autotune.options import OUTPUT_DIRECTORY, SearchOptions
from autotune.processes.pool import TrialPool
from autotune.processes.watched import WatchedBackend
from autotune.records import (
    OUT_OF_MEMORY,
    Conditions,
    Failure,
    MachineFacts,
    PhaseTimeouts,
    SearchFacts,
    Settings,
    TrialAnswer,
    TrialRequest,
)
from autotune.report.document import counted
from autotune.search.baseline import baseline_error, told_beside
from autotune.search.budget import Budget
from autotune.search.pace import FEWEST_STARTS, pace_for
from autotune.search.session import Session
from autotune.search.tables import DirectoryLock, refuse_unusable
from autotune.search.watcher import SearchWatcher
from autotune.space import SearchSpace, build_space, preset_objective, refuse_unknown
from autotune.workload import Workload

SMALL_BATCHES = (2, 1)
"""A program whose own batch does not fit is looked at with so many samples; BatchNorm wants two."""
LARGEST_BATCH = {"cuda": (256, 4096), "cpu": (32, 256)}
"""No micro-batch above so many times the user's own, or above that number if it is larger, is tried."""


@dataclass(frozen=True)
class OpenedSession:
    """A session, and what is needed to make a result of it."""

    session: Session
    workload: Workload
    directory: Path
    pool: TrialPool


@contextmanager
def open_session(workload: Workload, options: SearchOptions, watcher: SearchWatcher) -> Iterator[OpenedSession]:
    """Reads the facts, opens the study and makes the session; ends every process in the end."""
    machine = read_machine_facts()
    budget = Budget(options.budget_seconds, options.trials)
    conditions = _conditions(options, machine)
    refuse_unknown(preset=options.space, only=options.only, fixed=options.fixed)
    others = _told_of_machine(machine, conditions, watcher)
    # Locked before anything runs: a second search would write its trials over those of the first.
    with ExitStack() as resources:
        lock = resources.enter_context(closing(DirectoryLock(options.study)))
        if not options.fresh:
            refuse_unusable(options.study)
        pool = resources.enter_context(_begun_pool(workload, options, watcher, machine))
        # Optuna comes with these, and takes about half a second: beside the import of torch.
        from autotune.search.proposals import sampler_of
        from autotune.search.study import Study, workload_identity

        pool.start()
        if budget.left() < FEWEST_STARTS * budget.elapsed():
            pool.spare_the_compiler()  # the session will hurry, and has no time for a compilation
        watcher.stage("baseline", "one step of your program")
        facts = _facts(pool, machine, conditions, options)
        space = build_space(facts, preset=options.space, only=options.only, fixed=options.fixed)
        conditions = conditions.model_copy(update={"global_batch_size": facts.global_batch_size})
        settings = _settings(options, conditions, space)
        study = resources.enter_context(
            Study.open(
                options.study,
                workload=workload_identity(workload.reference(), facts.workload),
                space=space,
                conditions=conditions,
                objective=settings.objective,
                sampler=sampler_of(options.strategy),
                machine_identity=machine.identity,
                seed=options.seed,
                fresh=options.fresh,
                lock=lock,
            )
        )
        session = Session(
            backend=WatchedBackend(pool),
            study=study,
            space=space,
            settings=settings,
            budget=budget,
            watcher=watcher,
            pace=pace_for(options.budget_seconds),
        )
        session.warnings.extend(others)
        session.resume()
        if session.trials:
            confirmations = sum(trial.round is not None for trial in session.trials)
            to_confirm = f", {confirmations} of them to confirm" if confirmations else ""
            watcher.note(
                f"going on with {options.study}: {counted(len(session.trials), 'trial')} of an earlier call{to_confirm}; "
                "--fresh (fresh=True) starts over"
            )
        if study.others and not session.trials:
            count = sum(other.trial_count for other in study.others)
            why = "; ".join(study.others[-1].differences) or "space, knobs, limits or seed were others"
            watcher.note(
                f"this begins another search in {options.study} ({why}): "
                f"{counted(count, 'earlier trial does', 'earlier trials do')} not count, and best.json will be of this one"
            )
        yield OpenedSession(session, workload, options.study, pool)


def read_facts(workload: Workload, options: SearchOptions, watcher: SearchWatcher) -> SearchFacts:
    """What one step of the user's program shows. Raises `UserError` where it does not run."""
    refuse_unknown(preset=options.space, only=options.only, fixed=options.fixed)
    machine = read_machine_facts()
    conditions = _conditions(options, machine)
    _told_of_machine(machine, conditions, watcher)
    with _begun_pool(workload, options, watcher, machine, warm_compiler=False) as pool:
        pool.start()
        return _facts(pool, machine, conditions, options)


@contextmanager
def _begun_pool(
    workload: Workload,
    options: SearchOptions,
    watcher: SearchWatcher,
    machine: MachineFacts,
    *,
    warm_compiler: bool = True,
) -> Iterator[TrialPool]:
    used = gpu_used_bytes if _device(options, machine) == "cuda" else None
    directory = options.study / OUTPUT_DIRECTORY
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o700)  # what trials print and answer is nobody else's business
    pool = TrialPool(workload, directory, warm_compiler=warm_compiler, gpu_used_bytes=used, on_note=watcher.note)
    try:
        pool.begin()
        yield pool
    finally:
        pool.close()


def _device(options: SearchOptions, machine: MachineFacts) -> Literal["cuda", "cpu"]:
    if options.device is None:
        return "cuda" if machine.gpus else "cpu"
    if options.device == "cuda" and not machine.gpus:
        raise UserError("--device cuda: this machine shows no GPU; leave the option out, or use --device cpu")
    return options.device


def _told_of_machine(machine: MachineFacts, conditions: Conditions, watcher: SearchWatcher) -> list[str]:
    """Tells what could not be seen of the machine and who else uses its GPU; returns what a report should repeat."""
    others = occupied(machine.gpus[0]) if conditions.device == "cuda" else None
    for note in filter(None, [*machine.notes, others]):
        watcher.note(note)
    return [others] if others is not None else []


def _conditions(options: SearchOptions, machine: MachineFacts) -> Conditions:
    return Conditions(
        device=_device(options, machine),
        global_batch_size=options.global_batch_size,
        clip_grad_norm=options.clip_grad_norm,
        memory_limit_bytes=options.memory_limit_bytes,
        memory_margin=options.memory_margin,
        seed=options.seed,
    )


def _facts(pool: TrialPool, machine: MachineFacts, conditions: Conditions, options: SearchOptions) -> SearchFacts:
    """Asks a child for the workload's facts. Raises `UserError` where the user's program does not run."""
    seconds = max(60.0, options.budget_seconds / 3)
    timeouts = PhaseTimeouts(build_seconds=seconds, compile_seconds=seconds, measure_seconds=seconds)
    request = TrialRequest(
        kind="facts",
        config=TrainingConfig({}),
        conditions=conditions,
        blocks=options.blocks,
        timeouts=timeouts,
    )
    answer = pool.run(request)
    if answer.failure is not None and answer.failure.kind in OUT_OF_MEMORY:
        answer = _in_less_memory(pool, request, answer.failure)
    if answer.failure is not None:
        raise_failure(answer.failure)
    assert answer.facts is not None
    workload = answer.facts
    held = options.global_batch_size
    if held is not None and workload.dataset_length is not None and held > workload.dataset_length:
        raise UserError(
            f"a global batch of {held:,} is more than the {workload.dataset_length:,} samples of the data set, so no step "
            "could take it; give --global-batch-size (global_batch_size=) at most that many"
        )
    if held is None and workload.batch_held and not options.free_batch:
        held = workload.batch_size
    times, least = LARGEST_BATCH[conditions.device]
    cap = max(times * workload.batch_size, least)
    largest = min(cap, workload.dataset_length or cap)
    if workload.batch_fixed_reason is not None:  # whatever size were asked for, this one would run
        largest = workload.batch_size
    return SearchFacts(
        machine=machine,
        workload=workload,
        device=conditions.device,
        global_batch_size=held,
        largest_batch_size=max(1, largest),
    )


def _in_less_memory(pool: TrialPool, request: TrialRequest, failure: Failure) -> TrialAnswer:
    """The facts where the user's own batch does not fit: of a smaller step, or else of forward passes alone. What settings
    make it fit is for the search to find.

    Where nothing of it runs, the first failure with what was tried. What fails without gradients, or alone in its batch as
    BatchNorm does, need not be the program's fault.
    """
    if failure.phase == "build":
        told = "this is before any batch, so no smaller one helps"
        return TrialAnswer(failure=failure.model_copy(update={"message": f"{failure.message}; {told}"}))
    for forward_only in (False, True):
        for batch_size in SMALL_BATCHES:
            changes = {"facts_batch_size": batch_size, "facts_forward_only": forward_only}
            answer = pool.run(request.model_copy(update=changes))
            if answer.failure is None or (
                answer.failure.kind not in OUT_OF_MEMORY and batch_size > 1 and not forward_only
            ):
                return answer
    told = f"neither does a step of {' or '.join(map(str, SMALL_BATCHES))} samples, nor their forward pass alone"
    return TrialAnswer(failure=failure.model_copy(update={"message": f"{failure.message}; {told}"}))


def raise_failure(failure: Failure) -> NoReturn:
    """Raises what the user is told where their program failed as it stands."""
    if failure.kind in ("user_error", "numerics"):
        raise UserError(failure.message, told_beside(failure))
    raise baseline_error(failure)


def _settings(options: SearchOptions, conditions: Conditions, space: SearchSpace) -> Settings:
    return Settings(
        objective=options.objective or preset_objective(options.space),
        strategy=options.strategy,
        budget_seconds=options.budget_seconds,
        trials=options.trials,
        space=options.space,
        only=options.only,
        fixed={name: space.start[name] for name in options.fixed},
        blocks=options.blocks,
        free_batch=options.free_batch,
        train_samples=options.train_samples,
        conditions=conditions,
    )
