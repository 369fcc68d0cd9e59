"""What `autotune show` says: every trial and probe of a study, and why the failed ones failed."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from autotune.config import TrainingConfig
from autotune.options import OUTPUT_DIRECTORY
from autotune.quantities import (
    format_bytes,
    format_cosine,
    format_duration,
    format_error,
    format_rate,
    format_spread,
)
from autotune.records import Failure, OtherSearch, ParityResult, Probe, Recommendation, Trial, TrialAnswer
from autotune.report.document import (
    Document,
    Grid,
    Sentence,
    Verbatim,
    changes_text,
    counted,
    lines_if_any,
    own_values,
)
from autotune.report.recommendation import losses_text


def trials_document(
    trials: Sequence[Trial],
    probes: Sequence[Probe],
    recommendation: Recommendation | None,
    study: Path,
    others: Sequence[OtherSearch] = (),
) -> Document:
    """The whole study, in the order in which it was measured, and what other searches there are in its directory."""
    beside = lines_if_any(
        f"Other searches in {study}; the options of then, given again, go on with one",
        tuple(map(_other_text, others)),
    )
    if not trials and not probes:
        of_it = f"The last search in {study}" if others else f"{study}"
        return (Sentence(f"{of_it} holds no trials yet."), *beside)
    baseline = _baseline(trials, recommendation)
    failures = [(trial, trial.failure) for trial in trials if trial.failure is not None]
    outputs = tuple(
        f"trial {trial.number}: {failure.output_path}" for trial, failure in failures if failure.output_path is not None
    )
    details = tuple(line for trial, failure in failures for line in _detail_lines(trial, failure))
    return (
        Grid(
            f"Trials of {study}: {_count_text(trials)}",
            ("#", "stage", "changed from your settings", "samples/s (95 %)", "blocks", "peak memory", "took"),
            tuple(_trial_row(trial, baseline) for trial in trials),
            numeric=frozenset({0, 3, 4, 5, 6}),
        ),
        *lines_if_any("Stopped early", _stopped_early(trials)),
        *lines_if_any("Compiled", tuple(text for trial in trials if (text := _compiled_text(trial)) is not None)),
        *lines_if_any(
            "Failed", tuple(_failure_text(trial, failure, baseline) for trial, failure in failures), "warning"
        ),
        *((Verbatim("In the user's code", details),) if details else ()),
        *((Verbatim("What the failed trials printed", outputs),) if outputs else ()),
        Verbatim("What any trial N printed", (str(study / OUTPUT_DIRECTORY / "*-trial-N.log"),)),
        *_parity_grids(probes, baseline),
        *lines_if_any("Probes", tuple(_probe_text(probe, baseline) for probe in probes)),
        *beside,
        _verdict(trials, recommendation),
    )


def _other_text(other: OtherSearch) -> str:
    when = f"{datetime.fromtimestamp(other.last_started_at):%Y-%m-%d %H:%M}"
    how = f": {'; '.join(other.differences)}" if other.differences else ""
    return f"{when}, {counted(other.trial_count, 'trial')}{how}"


def _verdict(trials: Sequence[Trial], recommendation: Recommendation | None) -> Sentence:
    if recommendation is None:
        return Sentence("No recommendation yet: the search was not finished.", "warning")
    if recommendation.best.config not in {trial.config for trial in trials}:
        # The study that was opened last has other knobs, limits or another seed than that of `best.json`.
        told = (
            f"The recommendation is that of another search, whose trials are not among these: {recommendation.verdict}"
        )
        return Sentence(told, "warning")
    return Sentence(recommendation.verdict, "plain" if recommendation.keep else "good")


def _baseline(trials: Sequence[Trial], recommendation: Recommendation | None) -> TrainingConfig | None:
    if recommendation is not None:
        return own_values(recommendation)
    return next((trial.config for trial in trials if trial.stage == "baseline"), None)


def _trial_row(trial: Trial, baseline: TrainingConfig | None) -> tuple[str, ...]:
    rate, blocks, peak = "-", "-", "-"
    if trial.measurement is not None:
        rate = _rate_text(trial.measurement.samples_per_second, trial.measurement.interval)
        blocks = str(len(trial.measurement.blocks.seconds))
        peak = format_bytes(trial.measurement.memory.peak_allocated_bytes)
    if trial.failure is not None:
        rate = trial.failure.kind
    stage = trial.stage if trial.round is None else f"{trial.stage} {trial.round + 1}"
    return (
        str(trial.number),
        stage,
        changes_text(trial.config, baseline),
        rate,
        blocks,
        peak,
        format_duration(trial.seconds),
    )


def _count_text(trials: Sequence[Trial]) -> str:
    """As the recommendation counts them."""
    confirmations = sum(trial.round is not None for trial in trials)
    return f"{len(trials):,}" + (f", {confirmations:,} of them to confirm" if confirmations else "")


def _rate_text(value: float, interval: tuple[float, float] | None) -> str:
    return format_rate(value) if interval is None else f"{format_rate(value)} {format_spread(value, interval)}"


def _stopped_early(trials: Sequence[Trial]) -> tuple[str, ...]:
    """One sentence for all that were."""
    numbers = [str(t.number) for t in trials if t.measurement is not None and t.measurement.stopped_early]
    if not numbers:
        return ()
    which = f"trial {numbers[0]} was" if len(numbers) == 1 else f"trials {', '.join(numbers)} were"
    return (f"{which} clearly slower than the best by then, and measured no longer than it took to see that",)


def _compiled_text(trial: Trial) -> str | None:
    """What the compiler made of the step; None where nothing was compiled."""
    measured = trial.measurement
    if measured is None or measured.compiled_graphs == 0:
        return None
    return (
        f"trial {trial.number}: {counted(measured.compiled_graphs, 'graph')}, "
        f"{counted(measured.graph_breaks, 'graph break')}, "
        f"{counted(measured.recompiles, 'graph')} made after the first step; the first step took "
        f"{format_duration(measured.first_step_seconds)}"
    )


def _failure_text(trial: Trial, failure: Failure, baseline: TrainingConfig | None) -> str:
    signal = "" if failure.signal is None else f" ({failure.signal})"
    return (
        f"trial {trial.number}, {changes_text(trial.config, baseline)}: "
        f"{failure.kind}{signal} in {failure.phase}: {failure.message}"
    )


def _detail_lines(trial: Trial, failure: Failure) -> tuple[str, ...]:
    if not failure.detail:
        return ()
    return (f"trial {trial.number}:", *(f"  {line}" for line in failure.detail.splitlines()))


def _parity_grids(probes: Sequence[Probe], baseline: TrainingConfig | None) -> Document:
    """Every check against the user's step: how far the gradients are off and where, and the losses beside each other."""
    checks = [(changes_text(probe.config, baseline), probe.answer.parity) for probe in probes]
    errors = tuple(
        (
            changes,
            "yes" if parity.passed else "no",
            format_error(parity.relative_error),
            format_error(parity.tolerance),
            format_error(parity.floor),
            format_cosine(parity.cosine),
            _worst_text(parity),
        )
        for changes, parity in checks
        if parity is not None
    )
    losses = tuple(
        (
            changes,
            losses_text(parity.candidate_losses),
            losses_text(parity.reference_losses),
            "-" if parity.loss_tolerance is None else f"{parity.loss_tolerance:.2g}",
        )
        for changes, parity in checks
        if parity is not None
    )
    if not errors:
        return ()
    title = "Gradients held against your step in fp32 (floor: what rounding alone gives)"
    header = ("", "the same", "off by", "allowed", "floor", "cosine", "most, in")
    return (
        Grid(title, header, errors, numeric=frozenset({2, 3, 4, 5})),
        Grid("Losses of the same steps", ("", "with these settings", "yours in fp32", "allowed"), losses),
    )


def _worst_text(parity: ParityResult) -> str:
    if parity.worst_parameter is None or parity.worst_parameter_error is None:
        return "-"
    allowed = parity.worst_parameter_tolerance
    of_it = "" if allowed is None else f" of {format_error(allowed)}"
    return f"{format_error(parity.worst_parameter_error)}{of_it}, {parity.worst_parameter}"


def _probe_text(probe: Probe, baseline: TrainingConfig | None) -> str:
    return f"{probe.kind}, {changes_text(probe.config, baseline)}: {_answer_text(probe.answer)}"


def _answer_text(answer: TrialAnswer) -> str:
    """One line of what a probe showed, whichever payload it has."""
    if answer.failure is not None:
        return f"{answer.failure.kind} in {answer.failure.phase}: {answer.failure.message}"
    if answer.memory is not None:
        memory = answer.memory
        fits = "fits" if memory.fits else f"does not fit: {memory.reason}"
        return f"batch {memory.micro_batch_size:,} takes {format_bytes(memory.memory.peak_allocated_bytes)}, {fits}"
    if answer.loader is not None:
        loader = answer.loader
        given = _rate_text(loader.samples_per_second, loader.interval)
        gives = f"{counted(loader.num_workers, 'worker')} alone {'gives' if loader.num_workers == 1 else 'give'}"
        return f"{gives} {given} samples/s ({counted(len(loader.blocks.seconds), 'block')})"
    if answer.parity is not None:
        return f"{'trains the same' if answer.parity.passed else 'does not train the same'}: {answer.parity.reason}"
    if answer.soak is not None:
        held = "; ".join(answer.soak.findings) or "it held"
        soak = answer.soak
        blocks = f" ({counted(soak.block_count, 'block')})" if soak.block_count else ""
        return f"{soak.steps:,} steps at {_rate_text(soak.samples_per_second, soak.interval)} samples/s{blocks}: {held}"
    return f"ended after {format_duration(answer.seconds)}"
