from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from autotune.records import (
    Blocks,
    Failure,
    LoaderProbe,
    MemoryMarks,
    MemoryProbe,
    OtherSearch,
    Probe,
    SoakResult,
    TrialAnswer,
)
from autotune.report.document import Grid
from autotune.report.text import render
from autotune.report.trials import trials_document
from tests.report.sample_records import BASELINE, GIB, parity, recommendation, trial

STUDY = Path("study")
CRASH = Failure(
    kind="crash", phase="build", message="the process died; look at what it printed", signal="SIGSEGV",
    output_path="/tmp/with a/very/long/name/that/is/longer/than/eighty/columns/study/trials/2/output.txt",
    detail='  File "train.py", line 3, in model_fn\n    boom()',
)  # fmt: skip
TRIALS = [
    trial(0, {}, rate=1000.0, stage="baseline"),
    trial(1, {"precision": "bf16"}, rate=1800.0),
    trial(2, {"batch_size": 96, "pin_memory": True}, failure=CRASH, stage="explore"),
]


def probe(kind: Any, **answer: Any) -> Probe:
    config = BASELINE.replace({"precision": "bf16"})
    return Probe(
        kind=kind, config=config, answer=TrialAnswer(**answer), started_at=1.8e9, machine_identity="0123456789ab"
    )


def test_every_trial_is_a_row_that_says_what_it_changed() -> None:
    grid = next(block for block in trials_document(TRIALS, [], None, STUDY) if isinstance(block, Grid))
    assert grid.rows == (
        ("0", "baseline", "your settings", "1,000 ± 1 %", "2", "10.0 GiB", "12 s"),
        ("1", "compute", "precision=bf16", "1,800 ± 1 %", "2", "10.0 GiB", "12 s"),
        ("2", "explore", "batch_size=96, pin_memory=true", "crash", "-", "-", "12 s"),
    )


def test_other_searches_in_the_directory_are_named() -> None:
    known = OtherSearch(
        last_started_at=1.8e9, trial_count=5, differences=("other values of precision", "seed: 1 then, 0 now")
    )
    unknown = OtherSearch(last_started_at=1.8e9, trial_count=1, differences=())
    when = datetime.fromtimestamp(1.8e9).strftime("%Y-%m-%d %H:%M")
    for trials, told in ((TRIALS, "Trials of study: 3"), ([], "The last search in study holds no trials yet.")):
        text = render(trials_document(trials, [], None, STUDY, [unknown, known]))
        assert told in text
        assert "Other searches in study; the options of then, given again, go on with one" in text
        assert f"- {when}, 1 trial\n" in text
        assert f"- {when}, 5 trials: other values of precision; seed: 1 then, 0 now" in " ".join(text.split())
    assert "Other searches" not in render(trials_document(TRIALS, [], None, STUDY))


def test_what_the_compiler_made_of_a_step_is_told() -> None:
    compiled = trial(1, {"compile_mode": "default"}, rate=1800.0)
    seen = {"compiled_graphs": 5, "graph_breaks": 2, "recompiles": 3, "first_step_seconds": 21.0}
    compiled = compiled.model_copy(
        update={"measurement": compiled.measurement and compiled.measurement.model_copy(update=seen)}
    )
    text = " ".join(render(trials_document([TRIALS[0], compiled], [], None, STUDY)).split())
    sentence = "trial 1: 5 graphs, 2 graph breaks, 3 graphs made after the first step; the first step took 21 s"
    assert sentence in text
    assert text.count("graph breaks") == 1


def test_a_trial_that_was_stopped_early_is_called_that() -> None:
    beaten = [trial(number, {"batch_size": 8 * number}, rate=500.0) for number in (2, 3)]
    stopped = [
        one.model_copy(
            update={"measurement": one.measurement and one.measurement.model_copy(update={"stopped_early": True})}
        )
        for one in beaten
    ]
    text = " ".join(render(trials_document([*TRIALS[:2], *stopped], [], None, STUDY)).split())
    assert "Stopped early - trials 2, 3 were clearly slower than the best by then" in text
    assert "Stopped early - trial 2 was clearly" in " ".join(
        render(trials_document([*TRIALS[:2], stopped[0]], [], None, STUDY)).split()
    )
    assert "Stopped early" not in render(trials_document(TRIALS, [], None, STUDY))


def test_a_confirmation_says_its_round() -> None:
    confirmed = trial(3, {}, rate=1000.0, stage="confirm").model_copy(update={"round": 1})
    grid = next(block for block in trials_document([confirmed], [], recommendation(), STUDY) if isinstance(block, Grid))
    assert grid.rows[0][1] == "confirm 2"
    assert grid.rows[0][2] == "your settings"


def test_a_failure_comes_with_reason_frames_and_the_whole_path_of_its_output() -> None:
    text = render(trials_document(TRIALS, [], None, STUDY))
    flat = " ".join(text.split())
    assert (
        "trial 2, batch_size=96, pin_memory=true: crash (SIGSEGV) in build: the process died; look at what it printed"
        in flat
    )
    assert f"trial 2: {CRASH.output_path}" in text
    assert '      File "train.py", line 3, in model_fn\n        boom()' in text


def test_the_output_of_any_trial_can_be_found_by_its_number() -> None:
    assert "What any trial N printed\n  study/processes/*-trial-N.log" in render(
        trials_document(TRIALS[:1], [], None, STUDY)
    )


def test_the_verdict_ends_it() -> None:
    best = trial(3, dict(recommendation().best.config.changes_from(BASELINE)), rate=1900.0)
    text = render(trials_document([*TRIALS, best], [], recommendation(), STUDY))
    assert text.endswith(f"\n{recommendation().verdict}")
    assert render(trials_document(TRIALS, [], None, STUDY)).endswith(
        "No recommendation yet: the search was not finished."
    )


def test_a_verdict_on_other_trials_than_these_is_called_that() -> None:
    """As after a search with other knobs that did not come to its end."""
    text = " ".join(render(trials_document(TRIALS[:1], [], recommendation(), STUDY)).split())
    assert "The recommendation is that of another search, whose trials are not among these: " in text


def test_an_empty_study_says_so() -> None:
    assert render(trials_document([], [], None, STUDY)) == "study holds no trials yet."


@pytest.mark.parametrize(
    ("shown", "line"),
    [
        (
            probe("memory", memory=MemoryProbe(
                micro_batch_size=64, memory=MemoryMarks(peak_allocated_bytes=3 * GIB), limit_bytes=None, fits=True,
                step_seconds=0.1,
            )),
            "memory, precision=bf16: batch 64 takes 3.0 GiB, fits",
        ),
        (
            probe("memory", memory=MemoryProbe(
                micro_batch_size=64, memory=MemoryMarks(peak_allocated_bytes=3 * GIB), limit_bytes=None, fits=False,
                reason="the allocator retried", step_seconds=0.1,
            )),
            "does not fit: the allocator retried",
        ),
        (
            probe("loader", loader=LoaderProbe(
                num_workers=4, micro_batch_size=64, samples_per_second=4168.0, interval=(4084.64, 4251.36),
                blocks=Blocks(seconds=(0.3,), samples=(1250,), steps=(10,)),
            )),
            "loader, precision=bf16: 4 workers alone give 4,168 ± 2 % samples/s (1 block)",
        ),
        (probe("parity", parity=parity()), "trains the same: within three times"),
        (probe("parity", parity=parity(passed=False, reason="no gradient")), "does not train the same: no gradient"),
        (
            probe("soak", soak=SoakResult(
                steps=1200, samples_per_second=1800.0, interval=(1782.0, 1818.0), block_count=60,
                growth_bytes_per_step=0, allocator_retries=0,
                findings=("a leak",),
            )),
            "1,200 steps at 1,800 ± 1 % samples/s (60 blocks): a leak",
        ),
        (
            probe("memory", failure=Failure(kind="device_oom", phase="warm-up", message="too large")),
            "device_oom in warm-up: too large",
        ),
    ],
)  # fmt: skip
def test_a_probe_is_one_line(shown: Probe, line: str) -> None:
    assert line in " ".join(render(trials_document(TRIALS, [shown], None, STUDY)).split())


def test_every_check_shows_errors_floor_cosine_place_and_losses() -> None:
    probes = [
        probe("parity", parity=parity()),
        probe(
            "parity", parity=parity(passed=False, worst_parameter=None, worst_parameter_error=None, loss_tolerance=0.04)
        ),
        probe("parity", failure=Failure(kind="host_oom", phase="parity", message="no memory")),
    ]
    document = trials_document(TRIALS, probes, None, STUDY)
    errors, losses = (block for block in document if isinstance(block, Grid) and not block.title.startswith("Trials"))
    assert errors.header == ("", "the same", "off by", "allowed", "floor", "cosine", "most, in")
    assert errors.rows == (
        ("precision=bf16", "yes", "0.21 %", "0.54 %", "0.18 %", "0.99999", "1.3 % of 9 %, layer4.0.conv1.weight"),
        ("precision=bf16", "no", "0.21 %", "0.54 %", "0.18 %", "0.99999", "-"),
    )
    assert losses.header == ("", "with these settings", "yours in fp32", "allowed")
    assert losses.rows == tuple(("precision=bf16", "2.303 2.252", "2.303 2.251", allowed) for allowed in ("-", "0.04"))
    assert max(len(line) for line in render((errors, losses)).splitlines()) <= 80
    assert not [block for block in trials_document(TRIALS, [], None, STUDY) if "fp32" in str(block)]
