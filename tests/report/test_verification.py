"""What is said about a recommendation that was measured again."""

from __future__ import annotations

from autotune.records import Failure
from autotune.report.document import Grid
from autotune.report.text import render
from autotune.report.verification import verification_document
from tests.report.sample_records import BASELINE, FASTEST, answer, fast_answer, verify_report


def told(**changes: object) -> str:
    return " ".join(render(verification_document(verify_report(**changes))).split())


def test_then_and_now_stand_side_by_side() -> None:
    document = verification_document(verify_report())
    grid = next(block for block in document if isinstance(block, Grid))
    assert grid.header == ("", "then", "now")
    assert grid.rows == (
        ("your settings, samples/s", "1,000 ± 1 %", "1,010 ± 0.99 %"),
        ("recommended, samples/s", "2,346 ± 1.9 %", "2,323 ± 1.9 %"),
        ("times the speed", "2.35x", "2.30x"),
        ("  95 % interval", "2.29x to 2.41x", "2.20x to 2.40x"),
        ("peak memory", "28.5 GiB", "28.5 GiB"),
        ("rounds in fresh processes", "3", "3"),
        ("blocks timed in them", "18", "18"),
    )


def test_the_verdict_the_check_and_what_changed_are_told() -> None:
    text = told(warnings=("the GPU is shared",))
    assert text.startswith("It holds: precision=bf16 is 2.30 times the speed of your settings.")
    assert "Trains the same - yes: within three times" in text
    assert "Changed since - torch: 2.11 then, 2.12 now Warnings - the GPU is shared It took 1 min 1 s." in text
    assert "nothing that is known: the same machine, versions and program" in told(changed=())


def test_what_did_not_run_has_no_figures_and_shows_the_users_frames() -> None:
    frames = 'File "train.py", line 3, in model_fn\n    boom()'
    failure = Failure(kind="user_error", phase="build", message="NameError: boom", detail=frames)
    text = told(outcome="no_longer_runs", best=None, parity=None, failure=failure)
    assert "recommended, samples/s 2,346 ± 1.9 % -" in text
    assert 'In your code File "train.py", line 3, in model_fn boom()' in text
    assert "Trains the same" not in text


def then_and_now(**changes: object) -> tuple[tuple[str, ...], ...]:
    document = verification_document(verify_report(best=None, **changes))
    return next(block for block in document if isinstance(block, Grid)).rows


def test_settings_that_were_kept_are_not_held_against_themselves() -> None:
    then = answer(BASELINE, block_count=8)
    now = answer(BASELINE, samples_per_second=990.0, block_count=6)
    rows = (
        ("your settings, samples/s", "1,000 ± 1 %", "990 ± 1 %"),
        ("peak memory", "10.0 GiB", "10.0 GiB"),
        ("blocks timed", "8", "6"),
    )
    assert then_and_now(baseline_then=then, best_then=then, baseline=now) == rows
    other_loader = now.model_copy(update={"config": FASTEST})
    assert then_and_now(baseline_then=then, best_then=then, baseline=other_loader) == rows


def test_a_recommendation_that_became_the_users_own_is_shown_beside_what_it_was() -> None:
    assert then_and_now(baseline=fast_answer(samples_per_second=2323.0)) == (
        ("recommended, samples/s", "2,346 ± 1.9 %", "2,323 ± 1.9 %"),
        ("peak memory", "28.5 GiB", "28.5 GiB"),
        ("blocks timed", "18", "18"),
    )
