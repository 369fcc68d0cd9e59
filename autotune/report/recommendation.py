"""What a recommendation says to a person: what to use, how sure, at what price, and what else was seen."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import get_args

from autotune.config import TrainingConfig, value_text
from autotune.quantities import (
    NO_UPPER_END,
    format_bytes,
    format_cosine,
    format_duration,
    format_error,
    format_rate,
    format_ratio,
)
from autotune.records import Answer, Ceiling, ParityResult, Recommendation, Stage
from autotune.report.document import (
    Block,
    Document,
    Grid,
    Lines,
    Sentence,
    Verbatim,
    counted,
    lines_if_any,
    own_values,
    shown_baseline,
    shown_settings,
)


def recommendation_document(recommendation: Recommendation, study: Path | None) -> Document:
    """All of a recommendation. `study` is the directory that holds it; None where it was not read from one."""
    blocks: list[Block] = [
        Sentence(recommendation.verdict, "plain" if recommendation.keep else "good"),
        _comparison(recommendation),
        Lines("How sure", _certainty(recommendation)),
        Lines(
            "Trains the same",
            (
                *_parity_of(recommendation),
                f"the loss: {recommendation.workload.loss_convention}",
            ),
        ),
        *lines_if_any("Why", recommendation.best.reasons),
        *lines_if_any("Price", recommendation.best.prices),
        *_free_batch(recommendation),
        *lines_if_any("Other settings", recommendation.other_settings),
        *ceilings_grid(recommendation.ceilings, own_values(recommendation)),
        *lines_if_any("Ran, and not recommended", recommendation.rejected, "warning"),
        *lines_if_any("Failed trials", _failure_counts(recommendation)),
        *lines_if_any("Warnings", recommendation.warnings, "warning"),
        Lines("Measured", _circumstances(recommendation)),
    ]
    if study is not None:
        blocks.append(_next_commands(study, recommendation.free_batch is not None))
    return tuple(blocks)


def _comparison(recommendation: Recommendation) -> Grid:
    if recommendation.keep:
        return _answer_grid("Your settings", {"yours": recommendation.baseline}, recommendation)
    beside = {} if _is_reference(recommendation) else {_whose(recommendation): recommendation.baseline}
    return _answer_grid("What to use", {**beside, "recommended": recommendation.best}, recommendation)


def _whose(recommendation: Recommendation) -> str:
    """The head of the column beside the answers: what stands there is not the user's own program where that fits at no
    batch."""
    return "reference" if recommendation.reference_settings else "yours"


def _is_reference(recommendation: Recommendation) -> bool:
    """Whether what is recommended is what all else was compared with."""
    return recommendation.best.config == recommendation.baseline.config and not recommendation.keep


def _answer_grid(title: str, answers: dict[str, Answer], recommendation: Recommendation) -> Grid:
    """One column for each answer; a row that has nothing to tell in any of them is left out."""
    samples = recommendation.settings.train_samples
    last = list(answers.values())[-1]
    changed = {*last.config.changes_from(recommendation.baseline.config), *recommendation.reference_settings}
    rows = [
        (name, *(value_text(answer.config[name]) for answer in answers.values()))
        for name in last.config
        if name in changed
    ]
    measured: list[tuple[str, Callable[[Answer], str | None]]] = [
        ("samples/s", lambda answer: format_rate(answer.samples_per_second)),
        ("  95 % interval", lambda answer: interval_text(format_rate, answer.interval)),
        ("  resting on", _basis_text),
        ("loss weight/s (tokens)", lambda answer: _optional(format_rate, answer.weight_per_second)),
        ("  95 % interval", _weight_interval_text),
        ("effective batch", lambda answer: f"{answer.effective_batch_size:,}"),
        (
            "micro-batch x accumulation",
            lambda answer: f"{answer.micro_batch_size:,} x {answer.micro_batches_per_step:,}",
        ),
        ("peak memory", lambda answer: format_bytes(answer.peak_allocated_bytes)),
        ("memory reserved", lambda answer: _optional(format_bytes, answer.reserved_bytes)),
        ("cold compile", _compile_text),
        (f"hours for {samples or 0:,} samples", lambda answer: _optional(_hours_text, answer.training_hours)),
    ]
    for label, text_of in measured:
        texts = [text_of(answer) for answer in answers.values()]
        if any(text is not None for text in texts):
            rows.append((label, *("-" if text is None else text for text in texts)))
    return Grid(title, ("", *answers), tuple(rows), numeric=frozenset(range(1, len(answers) + 1)))


def _basis_text(answer: Answer) -> str | None:
    """How much was measured for the rate; None in a result that does not say."""
    if not answer.block_count:
        return None
    processes = max(1, answer.confirmed_rounds)
    return f"{counted(answer.block_count, 'block')} in {counted(processes, 'process', 'processes')}"


def _weight_interval_text(answer: Answer) -> str | None:
    return None if answer.weight_interval is None else interval_text(format_rate, answer.weight_interval)


def _optional(format_number: Callable[[float], str], number: float | None) -> str | None:
    return None if number is None else format_number(number)


def interval_text(format_number: Callable[[float], str], interval: tuple[float, float]) -> str:
    """Both ends; an interval without a finite upper end says that the spread was not seen."""
    low, high = interval
    return "spread not seen" if high >= NO_UPPER_END else f"{format_number(low)} to {format_number(high)}"


def _speedup_text(answer: Answer, beside: str) -> str:
    interval = interval_text(format_ratio, answer.speedup.interval)
    return f"{format_ratio(answer.speedup.value)} the speed of {beside} (95 % interval: {interval})"


def _hours_text(hours: float) -> str:
    return f"{hours:.3g}" if hours < 100 else f"{hours:,.0f}"


def _compile_text(answer: Answer) -> str | None:
    if answer.compile_seconds < 0.5:
        return None
    if answer.compile_was_cached:
        return f"not seen: {format_duration(answer.compile_seconds)}, out of its cache"
    if answer.compile_pays_after_steps is None:
        return f"{format_duration(answer.compile_seconds)}, never paid"
    return f"{format_duration(answer.compile_seconds)}, paid after {answer.compile_pays_after_steps:,} steps"


def _certainty(recommendation: Recommendation) -> tuple[str, ...]:
    best = recommendation.best
    rounds = best.confirmed_rounds
    ratio = _speedup_text(best, shown_baseline(recommendation.reference_settings))
    alone = recommendation.keep or _is_reference(recommendation)
    if alone:
        whose = "your settings" if recommendation.keep else "it"
        ratio = f"{whose} ran at {format_rate(best.samples_per_second)} samples/s"
    if rounds == 0:
        return (f"{ratio}; not confirmed: there was no time to measure it again in fresh processes",)
    times = "once in a fresh process" if rounds == 1 else f"{rounds} times in fresh processes"
    beside = "" if alone else f", in turn with {shown_baseline(recommendation.reference_settings)}"
    return (f"{ratio}; measured again {times}{beside}",)


def _parity_of(recommendation: Recommendation) -> tuple[str, ...]:
    answer = recommendation.best
    if recommendation.keep:
        return ("nothing is changed",)
    if _is_reference(recommendation):
        return ("not checked: your own step does not fit, so there is nothing to hold these settings against",)
    if answer.computes_the_same:
        return ("yes: only how batches are loaded is changed, nothing that is computed",)
    if answer.parity is None:
        return ("not checked against your step in fp32",)
    return parity_lines(answer.parity)


def parity_lines(parity: ParityResult) -> tuple[str, ...]:
    """What the check of a configuration against the user's step in fp32 showed, one sentence a line."""
    checked = f"{parity.micro_batch_size} x {parity.micro_batches_per_step} samples"
    lines = [
        f"{'yes' if parity.passed else 'no'}: {parity.reason}",
        f"the gradient of one step ({checked}) differs from your fp32 eager one by "
        f"{format_error(parity.relative_error)}; allowed {format_error(parity.tolerance)}, "
        f"rounding alone gives {format_error(parity.floor)}; the cosine between them is {format_cosine(parity.cosine)}",
    ]
    if parity.worst_parameter is not None and parity.worst_parameter_error is not None:
        allowed = parity.worst_parameter_tolerance
        of_it = "" if allowed is None else f", of {format_error(allowed)} allowed for one tensor"
        lines.append(
            f"largest difference: {format_error(parity.worst_parameter_error)}, in {parity.worst_parameter}{of_it}"
        )
    if parity.worst_buffer is not None:
        lines.append(f"buffers differ by {format_error(parity.buffer_error)} at most, in {parity.worst_buffer}")
    if parity.worst_update is not None:
        lines.append(f"the updates differ by {format_error(parity.update_error)} at most, in {parity.worst_update}")
    if parity.skipped_steps:
        lines.append(f"{counted(parity.skipped_steps, 'step')} skipped, before the loss scale was small enough")
    if parity.reference_losses and parity.candidate_losses:
        lines += [
            f"loss of each step, yours in fp32: {losses_text(parity.reference_losses)}",
            f"loss of each step, with these settings: {losses_text(parity.candidate_losses)}",
        ]
    if parity.missing_gradients:
        lines.append(f"without a gradient: {', '.join(parity.missing_gradients)}")
    return (*lines, *parity.notes)


LOSSES_SHOWN = 8


def losses_text(losses: tuple[float, ...]) -> str:
    """The first few and the last, `2.303 2.251 ... 1.98`."""
    shown = [f"{loss:.4g}" for loss in losses]
    if len(shown) > LOSSES_SHOWN:
        shown[LOSSES_SHOWN - 1 : -1] = ["..."]
    return " ".join(shown)


def _free_batch(recommendation: Recommendation) -> Document:
    answer = recommendation.free_batch
    if answer is None:
        return ()
    grid = _answer_grid(
        "Second answer, with the batch free",
        {_whose(recommendation): recommendation.baseline, "batch free": answer},
        recommendation,
    )
    unchecked = (
        () if answer.parity is not None or answer.computes_the_same else ("not checked against your step in fp32",)
    )
    unconfirmed = () if answer.confirmed_rounds else ("not confirmed in fresh processes",)
    speedup = _speedup_text(answer, shown_baseline(recommendation.reference_settings))
    notes = answer.parity.notes if answer.parity is not None else ()
    return grid, Lines("Price of the second answer", (speedup, *unconfirmed, *unchecked, *answer.prices, *notes))


def ceilings_grid(ceilings: tuple[Ceiling, ...], baseline: TrainingConfig) -> Document:
    """How far the batch went in each memory class, and why no further; nothing where no class was probed."""
    if not ceilings:
        return ()
    rows = tuple(
        (
            class_text(ceiling, baseline),
            "none" if ceiling.largest_batch_size is None else f"{ceiling.largest_batch_size:,}",
            "-" if ceiling.peak_allocated_bytes is None else format_bytes(ceiling.peak_allocated_bytes),
            _limit_text(ceiling),
        )
        for ceiling in ceilings
    )
    header = ("with", "largest batch that ran", "peak memory", "smallest that did not")
    return (Grid("Memory ceilings", header, rows, numeric=frozenset({1, 2})),)


def class_text(ceiling: Ceiling, baseline: TrainingConfig) -> str:
    """The settings that make the class, those of the user left out."""
    return shown_settings({name: value for name, value in ceiling.memory_class.items() if baseline.get(name) != value})


def _limit_text(ceiling: Ceiling) -> str:
    if ceiling.smallest_failed_batch_size is None:
        return f"none: {ceiling.stopped_because}"
    why = ceiling.failure_kind or "ran, but left no margin"
    return f"{ceiling.smallest_failed_batch_size:,} ({why})"


def _failure_counts(recommendation: Recommendation) -> tuple[str, ...]:
    if not recommendation.failure_counts:
        return ()
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(recommendation.failure_counts.items()))
    return (f"of {_trials_text(recommendation)}: {counts}",)


def _trials_text(recommendation: Recommendation) -> str:
    """As many as `show` lists: those of the search and those that confirmed it."""
    confirmations, earlier = recommendation.confirmation_count, recommendation.earlier_trial_count
    parts = [f"{confirmations:,} of them to confirm"] if confirmations else []
    parts += [f"{earlier:,} {'in' if parts else 'of them in'} earlier calls"] if earlier else []
    every = counted(recommendation.trial_count + confirmations, "trial")
    return f"{every} ({', '.join(parts)})" if parts else every


def _circumstances(recommendation: Recommendation) -> tuple[str, ...]:
    machine = recommendation.machine
    conditions = recommendation.settings.conditions
    gpu = machine.gpus[0].name if machine.gpus and conditions.device == "cuda" else None
    device = gpu or f"{machine.cpu_name}, {machine.usable_cores} cores"
    limit = conditions.memory_limit_bytes
    return (
        f"on {device}, torch {machine.torch_version}"
        + ("" if limit is None else f", memory limited to {format_bytes(limit)}"),
        f"{_trials_text(recommendation)}; {'this call' if recommendation.earlier_trial_count else 'it'} took "
        f"{format_duration(recommendation.search_seconds)}, autotune {recommendation.autotune_version}",
        *_stage_times(recommendation),
        *machine.notes,
    )


def _stage_times(recommendation: Recommendation) -> tuple[str, ...]:
    """Where the time went: each stage's trial processes, and the rest."""
    stages = [
        (stage, seconds) for stage in get_args(Stage) if (seconds := recommendation.stage_seconds.get(stage, 0.0))
    ]
    if not stages:
        return ()
    rest = recommendation.search_seconds - sum(seconds for _, seconds in stages)
    parts = [f"{stage} {format_duration(seconds)}" for stage, seconds in stages]
    return (f"{', '.join(parts)}, starting and the rest {format_duration(max(0.0, rest))}",)


def _next_commands(study: Path, has_free_batch: bool) -> Verbatim:
    best = shlex.quote(str(study / "best.json"))
    second = (f"autotune export {best} --to python --free-batch",) if has_free_batch else ()
    return Verbatim(
        f"Kept in {study}; what can be done with it",
        (
            f"autotune export {best} --to python",
            *second,
            f"autotune show {shlex.quote(str(study))}",
            f"optuna-dashboard {shlex.quote(f'sqlite:///{study}/study.db')}  # extra: dashboard",
        ),
    )
