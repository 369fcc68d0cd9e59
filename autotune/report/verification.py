"""What `autotune verify` says: whether a recommendation still holds, then and now side by side, what changed since."""

from __future__ import annotations

from autotune.options import VerifyReport
from autotune.quantities import format_bytes, format_duration, format_rate, format_ratio, format_spread
from autotune.records import Answer
from autotune.report.document import Document, Grid, Lines, Sentence, Verbatim, lines_if_any, shown_baseline
from autotune.report.recommendation import interval_text, parity_lines


def verification_document(report: VerifyReport) -> Document:
    """All of a report."""
    frames = report.failure.detail.splitlines() if report.failure is not None else []
    return (
        Sentence(report.verdict, "good" if report.holds else "warning" if report.outcome == "unclear" else "bad"),
        _then_and_now(report),
        *((Lines("Trains the same", parity_lines(report.parity)),) if report.parity is not None else ()),
        *((Verbatim("In your code", tuple(frames)),) if frames else ()),
        Lines("Changed since", report.changed or ("nothing that is known: the same machine, versions and program",)),
        *lines_if_any("Warnings", report.warnings, "warning"),
        Sentence(f"It took {format_duration(report.seconds)}."),
    )


def _then_and_now(report: VerifyReport) -> Grid:
    own = shown_baseline(report.reference_settings)
    if report.best is None and report.best_then.config in (report.baseline_then.config, report.baseline.config):
        was_kept = report.best_then.config == report.baseline_then.config
        return _of_one(own if was_kept else "recommended", report.best_then, report.baseline)
    best = report.best
    rows = [
        (
            f"{own}, samples/s",
            _rate(report.baseline_then),
            _rate(report.baseline),
        ),
        ("recommended, samples/s", _rate(report.best_then), "-" if best is None else _rate(best)),
        ("times the speed", _speedup(report.best_then), "-" if best is None else _speedup(best)),
        ("  95 % interval", _interval(report.best_then), "-" if best is None else _interval(best)),
        ("peak memory", _peak(report.best_then), "-" if best is None else _peak(best)),
        (
            "rounds in fresh processes",
            str(report.best_then.confirmed_rounds),
            str(best.confirmed_rounds if best else 0),
        ),
        ("blocks timed in them", _blocks(report.best_then), "-" if best is None else _blocks(best)),
    ]
    return _grid(rows)


def _of_one(name: str, then: Answer, now: Answer) -> Grid:
    """Where nothing was compared: a row that holds the settings against themselves would say nothing."""
    return _grid(
        [
            (f"{name}, samples/s", _rate(then), _rate(now)),
            ("peak memory", _peak(then), _peak(now)),
            ("blocks timed", _blocks(then), _blocks(now)),
        ]
    )


def _grid(rows: list[tuple[str, str, str]]) -> Grid:
    return Grid("Then and now", ("", "then", "now"), tuple(rows), numeric=frozenset({1, 2}))


def _rate(answer: Answer) -> str:
    return f"{format_rate(answer.samples_per_second)} {format_spread(answer.samples_per_second, answer.interval)}"


def _speedup(answer: Answer) -> str:
    return format_ratio(answer.speedup.value)


def _interval(answer: Answer) -> str:
    return interval_text(format_ratio, answer.speedup.interval)


def _blocks(answer: Answer) -> str:
    """A dash in a result that does not say."""
    return f"{answer.block_count:,}" if answer.block_count else "-"


def _peak(answer: Answer) -> str:
    return format_bytes(answer.peak_allocated_bytes)
