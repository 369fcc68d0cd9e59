from __future__ import annotations

import io
from pathlib import Path

import pytest

from autotune.records import Failure, Standing
from autotune.report.document import Grid, Lines, Sentence, Verbatim
from autotune.report.recommendation import recommendation_document
from autotune.report.terminal import LiveView, show
from autotune.report.text import render
from tests.report.sample_records import recommendation, trial

BEST, FREER = (
    Standing(samples_per_second=1800.0, speedup=1.8),
    Standing(samples_per_second=2400.0, speedup=2.4),
)


class Screen(io.StringIO):
    """A stream that passes for a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "40")


def oom(message: str) -> Failure:
    return Failure(kind="device_oom", phase="measure", message=message)


def test_a_pipe_gets_the_plain_text() -> None:
    document = recommendation_document(recommendation(), Path("autotune-study"))
    stream = io.StringIO()
    show(document, stream)
    assert stream.getvalue() == render(document) + "\n"


def test_a_terminal_gets_the_same_words_in_colour() -> None:
    screen = Screen()
    show((Sentence("2x faster", "good"), Lines("Warnings", ("hot",), "warning")), screen)
    assert "\x1b[1;32m2x faster\x1b[0m" in screen.getvalue()
    assert "\x1b[33m  - hot\x1b[0m" in screen.getvalue()


def test_square_brackets_of_the_user_are_not_markup() -> None:
    stream = io.StringIO()
    text = "shape [red]wrong[/red] [/] :smile:"
    show((Sentence(text), Lines(text, (text,)), Grid(text, (text,), ((text,),)), Verbatim(text, (text,))), stream)
    assert stream.getvalue().count(text) == 8


def test_without_a_terminal_every_event_is_one_line() -> None:
    stream = io.StringIO()
    with LiveView(stream) as view:
        view.stage("compute", "one knob at a time")
        view.trial_started(4, {"precision": "bf16"}, "compute")
        view.phase("measure")
        view.trial_finished(trial(4, {"precision": "bf16"}, rate=1800.0), BEST, None)
        view.trial_finished(trial(5, {"batch_size": 64}, failure=oom("CUDA\nout of [memory]")), BEST, FREER)
        view.trial_finished(trial(6, {"batch_size": 48}, rate=2000.0), BEST, FREER)
        view.probe("memory", "batch 64 takes\n3 GiB")
        view.note("the GPU is shared")
    assert stream.getvalue().splitlines() == [
        "stage compute: one knob at a time",
        "trial 4: precision=bf16",
        "trial 4: 1,800 samples/s ± 1 %; best so far 1,800 samples/s, 1.80x the speed of your settings",
        "trial 5: device_oom: CUDA out of [memory]",
        "trial 6: 2,000 samples/s ± 1 %; best so far 1,800 samples/s, 1.80x the speed of your settings; with the batch "
        "free 2,400 samples/s, 2.40x",
        "memory probe: batch 64 takes 3 GiB",
        "note: the GPU is shared",
    ]


def test_a_line_is_not_wrapped_where_it_is_longer_than_80() -> None:
    stream = io.StringIO()
    with LiveView(stream) as view:
        view.note("x" * 200)
    assert stream.getvalue() == f"note: {'x' * 200}\n"


def test_the_time_left_is_told_with_the_stage() -> None:
    stream = io.StringIO()
    with LiveView(stream) as view:
        view.time_left(300.4)
        view.stage("loader", "")
    assert stream.getvalue() == "stage loader (5 min left)\n"


def test_a_budget_that_is_used_up_is_not_negative() -> None:
    stream = io.StringIO()
    with LiveView(stream) as view:
        view.time_left(-3)
        view.stage("confirm", "")
    assert stream.getvalue() == "stage confirm (finishing)\n"


def test_a_terminal_is_drawn_with_stage_trial_phase_best_and_time_left() -> None:
    screen = Screen()
    with LiveView(screen) as view:
        view.time_left(200)
        view.stage("explore", "with the sampler")
        view.trial_finished(trial(4, {"precision": "bf16"}, rate=1800.0), BEST, None)
        view.trial_started(5, {"batch_size": 64}, "explore")
        view.phase("warm-up")
    drawn = screen.getvalue()
    for text in (
        "explore: with the sampler", "trial 5: batch_size=64 [warm-up]", "3 min 20 s left", "1 trial, 0 failed",
        "best so far 1,800 samples/s, 1.80x the speed of your settings",
    ):  # fmt: skip
        assert text in drawn
    assert "trial 4: 1,800" not in drawn


def test_what_confirms_is_counted_apart() -> None:
    """`--trials` limits the others."""
    screen = Screen()
    with LiveView(screen) as view:
        view.trial_finished(trial(0, {}, rate=1000.0, stage="baseline"), None, None)
        view.trial_finished(trial(1, {}, rate=1000.0, stage="confirm").model_copy(update={"round": 0}), None, None)
    assert "2 trials, 1 of them to confirm, 0 failed" in screen.getvalue()


def test_the_last_failures_are_drawn_one_line_each() -> None:
    screen = Screen()
    with LiveView(screen) as view:
        for number in range(5):
            view.trial_finished(trial(number, {}, failure=oom(f"[b]too\nlarge[/b] {'x' * 100}")), None, None)
    last = screen.getvalue().rpartition("5 trials, 5 failed")[2]
    assert last.count("device_oom: [b]too large[/b] xxx") == 3
    assert "trial 4: device_oom" in last
    assert "trial 1: device_oom" not in last


def test_a_probe_shows_its_phase_and_then_what_it_found() -> None:
    screen = Screen()
    with LiveView(screen) as view:
        view.stage("memory", "how far the batch goes")
        view.probe("memory", "batch 64 takes 3 GiB")
        view.phase("build")
    drawn = screen.getvalue()
    assert "memory probe: batch 64 takes 3 GiB" in drawn
    assert "  probe [build]" in drawn


def test_a_note_stays_on_the_terminal() -> None:
    screen = Screen()
    with LiveView(screen) as view:
        view.note("a fresh interpreter per trial")
    assert "note: a fresh interpreter per trial" in screen.getvalue()


def test_the_view_is_taken_down_when_the_search_is_interrupted() -> None:
    screen = Screen()
    with pytest.raises(KeyboardInterrupt), LiveView(screen):
        raise KeyboardInterrupt
    shown, _, after_cursor_is_back = screen.getvalue().rpartition("\x1b[?25h")
    assert "starting" in shown
    assert "starting" not in after_cursor_is_back
    assert screen.getvalue().endswith("\x1b[2K")
