"""What `check`, `memory`, `knobs` and `spaces` say to a person."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autotune.config import Value, settings_text, value_text
from autotune.options import CheckReport, MemoryReport, RefusedValue
from autotune.quantities import format_bytes, format_duration
from autotune.records import MachineFacts, SearchFacts
from autotune.report.document import (
    OWN_SETTINGS,
    Document,
    Grid,
    Lines,
    Sentence,
    lines_if_any,
)
from autotune.report.recommendation import ceilings_grid, class_text

EFFECT_TEXTS = {
    "exact": "the same result",
    "rounding": "rounds differently, which is checked",
    "training": "changes the training",
}


@dataclass(frozen=True)
class KnobLine:
    """A knob as `autotune knobs` lists it."""

    name: str
    summary: str
    effect: str
    cures: tuple[str, ...]


def check_document(report: CheckReport) -> Document:
    """What one step of the user's program showed, and what a search of it would try."""
    fits = report.facts.workload.step_fits
    ran = (
        "one training step of it ran"
        if fits
        else "no training step of it fits, and a search begins with what makes one fit"
    )
    return (
        Sentence(f"Your program is understood: {ran}.", "good" if fits else "warning"),
        Lines("Your program", _workload_lines(report.facts)),
        Lines("This machine", _machine_lines(report.facts.machine)),
        *_offered(report.offered),
        *lines_if_any("Not tried here", tuple(_refusal_text(refusal) for refusal in report.refused)),
        *lines_if_any("Warnings", _told_once(report), "warning"),
        Sentence(_duration_text(report.estimated_search_seconds, report.budget_seconds)),
    )


def _told_once(report: CheckReport) -> tuple[str, ...]:
    """The warnings without those that stand among the lines on the program already."""
    return tuple(warning for warning in report.warnings if warning not in report.facts.workload.notes)


def _duration_text(needed_seconds: float, budget_seconds: float) -> str:
    """How what a search is likely to want compares with what it is given."""
    needed, budget = format_duration(needed_seconds), format_duration(budget_seconds)
    if needed_seconds <= budget_seconds:
        return (
            f"A search of this takes about {needed}. Its budget of {budget} (--budget) is the most that it takes: it ends "
            "earlier where nothing new is better."
        )
    return (
        f"A search of all this takes about {needed}, and gets {budget} (--budget): it tries first what promises most, and "
        "says what it did not come to. The same command then goes on."
    )


def _offered(offered: dict[str, tuple[Value, ...]]) -> Document:
    """The values that a search chooses from; knobs that are left no choice are named apart."""
    rows = tuple(
        (name, ", ".join(value_text(value) for value in values)) for name, values in offered.items() if len(values) > 1
    )
    held = settings_text({name: values[0] for name, values in offered.items() if len(values) == 1})
    return (
        *((Grid("What a search would try", ("knob", "values"), rows),) if rows else ()),
        *lines_if_any("What it would leave alone", (held,) if held else ()),
    )


def _refusal_text(refusal: RefusedValue) -> str:
    subject = refusal.knob if refusal.value is None else f"{refusal.knob}={value_text(refusal.value)}"
    return f"{subject}: {refusal.reason}"


def _workload_lines(facts: SearchFacts) -> tuple[str, ...]:
    workload = facts.workload
    length = "no length" if workload.dataset_length is None else f"{workload.dataset_length:,} samples"
    batch = f"{workload.batch_size} samples, {workload.batch_structure}"
    if facts.global_batch_size is None:
        held = "the batch is free: how many samples an optimizer step takes may change"
    else:
        held = f"held: every optimizer step takes {facts.global_batch_size:,} samples, in one or several micro-batches"
    blocks = (
        f"{len(workload.blocks)} blocks of {workload.block_class}, {workload.blocks[0]} to {workload.blocks[-1]}"
        if workload.blocks
        else "no repeated blocks found"
    )
    settings = settings_text(workload.process_settings)
    return (
        f"model: {workload.model_class}, {workload.parameter_count:,} parameters, "
        f"{workload.trainable_parameter_count:,} trained, {format_bytes(workload.parameter_bytes)}; {blocks}",
        f"batch: {batch}, {format_bytes(workload.sample_bytes)} a sample",
        held,
        f"data: {workload.dataset_kind} data set, {length}, {workload.num_workers} workers"
        + (", pinned memory" if workload.pin_memory else "")
        + (", the last batch is dropped" if workload.drop_last else ""),
        f"optimizer: {workload.optimizer_class}" + (", with a scheduler" if workload.has_scheduler else ""),
        f"loss: {workload.loss_convention}; the first is {workload.first_loss:.4g}",
        f"one warm step takes {format_duration(workload.step_seconds)} on {facts.device}",
        *((f"settings in force: {settings}",) if settings else ()),
        *workload.notes,
    )


def _machine_lines(machine: MachineFacts) -> tuple[str, ...]:
    gpus = tuple(
        f"GPU {gpu.index}: {gpu.name}, {format_bytes(gpu.total_bytes)}, {format_bytes(gpu.used_bytes)} in use"
        for gpu in machine.gpus
    )
    return (
        *(gpus or ("no GPU seen",)),
        f"{machine.cpu_name}, {machine.usable_cores} usable cores, "
        f"{format_bytes(machine.memory_available_bytes)} of {format_bytes(machine.memory_total_bytes)} memory free, "
        f"{format_bytes(machine.shared_memory_bytes)} in /dev/shm",
        f"torch {machine.torch_version}, Python {machine.python_version}",
        *machine.notes,
    )


def memory_document(report: MemoryReport) -> Document:
    """Does it fit, and how far does the batch go."""
    slopes = tuple(
        f"{class_text(ceiling, report.baseline)}: {format_bytes(ceiling.bytes_per_sample)} more for each sample"
        for ceiling in report.ceilings
        if ceiling.bytes_per_sample is not None
    )
    return (
        _fit_verdict(report),
        *ceilings_grid(report.ceilings, report.baseline),
        *lines_if_any("What a sample takes", slopes),
        *lines_if_any("Warnings", report.warnings, "warning"),
    )


def _fit_verdict(report: MemoryReport) -> Sentence:
    """The user's own settings first; where they do not fit, what does."""
    limit = "" if report.limit_bytes is None else f" within {format_bytes(report.limit_bytes)}"
    batch = report.facts.workload.batch_size
    reached = {class_text(ceiling, report.baseline): ceiling.largest_batch_size or 0 for ceiling in report.ceilings}
    own = reached.get(OWN_SETTINGS, 0)
    if own >= batch:
        return Sentence(f"It fits{limit}: your batch is {batch:,}, and with your settings up to {own:,} ran.", "good")
    failed = f"A batch of {batch:,} does not fit{limit} with your settings"
    failed += f"; the largest that ran is {own:,}" if own else ""
    others = {name: largest for name, largest in reached.items() if largest >= batch}
    if not others:
        return Sentence(f"{failed}. No other setting that was tried makes room for it.", "bad")
    ways = "; ".join(f"{name} (up to {largest:,} ran)" for name, largest in others.items())
    return Sentence(f"{failed}. It fits with {ways}.", "warning")


def knobs_document(knobs: Sequence[KnobLine]) -> Document:
    """What can be moved, and what each costs in exactness."""
    lines = tuple(
        f"{knob.name}: {knob.summary} ({EFFECT_TEXTS[knob.effect]}; helps against {', '.join(knob.cures)})"
        for knob in knobs
    )
    return (
        Lines("Knobs", lines),
        Sentence("The values that are worth trying depend on your program: autotune check FILE.py lists them."),
    )


def spaces_document(summaries: Mapping[str, str]) -> Document:
    """The presets that --space takes, by name."""
    return (
        Lines("Search spaces", tuple(f"{name}: {summary}" for name, summary in summaries.items())),
        Sentence(
            "Use one with --space NAME; or, with --space FILE.toml, a file of your own: a table [knobs] with lines such as "
            'precision = "all" and batch_size = [16, 32]. Knobs that it leaves out stay as they are.'
        ),
    )
