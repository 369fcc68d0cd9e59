from __future__ import annotations

import sys
from pathlib import Path

import pytest

from autotune.records import Conditions, Ratio
from autotune.report.document import Grid
from autotune.report.recommendation import losses_text, recommendation_document
from autotune.report.text import describe, render
from tests.report.sample_records import BASELINE, answer, ceiling, fast_answer, machine, parity, recommendation


def told(**changes: object) -> str:
    """The report on one line, so that it does not matter where lines were wrapped."""
    return " ".join(describe(recommendation(**changes)).split())


def test_the_verdict_comes_first() -> None:
    assert describe(recommendation()).startswith(
        "2.35x faster with batch_size=64, compile_mode=default, precision=bf16."
    )


def test_the_table_sets_the_users_settings_beside_the_recommended_ones() -> None:
    grid = next(block for block in recommendation_document(recommendation(), None) if isinstance(block, Grid))
    assert grid.header == ("", "yours", "recommended")
    labels = [row[0].strip() for row in grid.rows]
    weight_interval = grid.rows[1 + labels.index("loss weight/s (tokens)")]
    assert weight_interval == ("  95 % interval", "-", "526,000 to 548,000")
    rows = {row[0].strip(): row[1:] for row in grid.rows if row != weight_interval}
    assert rows == {
        "batch_size": ("32", "64"),
        "compile_mode": ("as_is", "default"),
        "precision": ("as_is", "bf16"),
        "samples/s": ("1,000", "2,346"),
        "95 % interval": ("990 to 1,010", "2,300 to 2,390"),
        "resting on": ("-", "18 blocks in 3 processes"),
        "loss weight/s (tokens)": ("229,000", "537,102"),
        "effective batch": ("32", "128"),
        "micro-batch x accumulation": ("32 x 1", "64 x 2"),
        "peak memory": ("10.0 GiB", "28.5 GiB"),
        "memory reserved": ("12.0 GiB", "31.0 GiB"),
        "cold compile": ("-", "21 s, paid after 1,900 steps"),
        "hours for 10,000,000 samples": ("7.6", "3.25"),
    }


def test_a_rate_that_rests_on_one_process_says_so() -> None:
    text = told(baseline=answer(BASELINE, block_count=1), best=fast_answer(block_count=3, confirmed_rounds=0))
    assert "resting on 1 block in 3 processes 3 blocks in 1 process" in text


def test_rows_without_anything_to_tell_are_left_out() -> None:
    bare = {
        "weight_per_second": None,
        "weight_interval": None,
        "block_count": 0,
        "reserved_bytes": None,
        "training_hours": None,
    }
    text = told(baseline=answer(BASELINE, **bare), best=fast_answer(**bare, compile_seconds=0.1))
    for label in ("tokens", "memory reserved", "hours for", "cold compile", "resting on"):
        assert label not in text


def test_a_compile_out_of_its_cache_is_not_told_as_a_cold_one() -> None:
    text = told(best=fast_answer(compile_was_cached=True, compile_seconds=0.8, compile_pays_after_steps=34))
    assert "not seen: 0.8 s, out of its cache" in text


def test_a_compile_that_never_pays_is_called_that() -> None:
    assert "21 s, never paid" in told(best=fast_answer(compile_pays_after_steps=None))


def test_how_sure_tells_the_interval_and_the_rounds() -> None:
    assert (
        "2.35x the speed of your settings (95 % interval: 2.29x to 2.41x); measured again 3 times in fresh processes, "
        "in turn with your settings" in told()
    )
    assert "measured again once" in told(best=fast_answer(confirmed_rounds=1))
    assert "not confirmed: there was no time" in told(best=fast_answer(confirmed_rounds=0))


def test_one_reading_has_no_interval_and_says_so() -> None:
    unknown = (0.0, sys.float_info.max)
    text = told(best=fast_answer(speedup=Ratio(value=2.3, interval=unknown), interval=unknown))
    assert text.count("spread not seen") == 2
    assert "e+308" not in text


def test_parity_tells_error_allowance_floor_and_where() -> None:
    text = told()
    assert "yes: within three times of what rounding alone gives" in text
    assert (
        "(16 x 2 samples) differs from your fp32 eager one by 0.21 %; allowed 0.54 %, rounding alone gives 0.18 %"
        in text
    )
    assert "largest difference: 1.3 %, in layer4.0.conv1.weight, of 9 % allowed for one tensor" in text
    old = told(best=fast_answer(parity=parity(worst_parameter_tolerance=None)))
    assert "largest difference: 1.3 %, in layer4.0.conv1.weight - buffers" in old
    assert "buffers differ by 0.04 % at most, in bn1.running_var" in text
    assert "the cosine between them is 0.99999" in text
    assert "loss of each step, yours in fp32: 2.303 2.251" in text
    assert "loss of each step, with these settings: 2.303 2.252" in text


def test_updates_and_skipped_steps_are_told_where_there_are_any() -> None:
    assert "updates differ" not in told() and "skipped" not in told()
    checked = parity(update_error=0.002, worst_update="fc.weight", skipped_steps=2)
    text = told(best=fast_answer(parity=checked))
    assert "the updates differ by 0.2 % at most, in fc.weight" in text
    assert "2 steps skipped, before the loss scale was small enough" in text


def test_long_loss_curves_are_cut_in_the_middle() -> None:
    losses = tuple(float(number) for number in range(20, 0, -1))
    assert losses_text(losses) == "20 19 18 17 16 15 14 ... 1"
    assert losses_text(losses[-8:]) == "8 7 6 5 4 3 2 1"


def test_parity_that_failed_or_was_not_checked_is_not_hidden() -> None:
    failed = parity(
        passed=False, reason="fc.weight has no gradient", missing_gradients=("fc.weight",), notes=("p is 0",)
    )
    text = told(best=fast_answer(parity=failed))
    assert "no: fc.weight has no gradient" in text
    assert "without a gradient: fc.weight - p is 0" in text
    assert "not checked against your step in fp32" in told(best=fast_answer(parity=None))


def test_keeping_the_settings_shows_one_column_and_no_speedup() -> None:
    verdict = "Keep your settings: nothing that was measured is better."
    kept = recommendation(keep=True, best=answer(BASELINE), verdict=verdict)
    grid = next(block for block in recommendation_document(kept, None) if isinstance(block, Grid))
    assert grid.header == ("", "yours")
    text = " ".join(describe(kept).split())
    assert text.startswith(verdict)
    assert "your settings ran at 1,000 samples/s; measured again 3 times in fresh processes" in text
    assert "nothing is changed" in text
    assert "the loss: loss_fn(model, batch) returns a scalar mean" in text
    assert "the speed of your settings" not in text


def test_where_the_users_program_fits_at_no_batch_nothing_is_told_of_it() -> None:
    found = recommendation(reference_settings={"precision": "bf16"})
    grid = next(block for block in recommendation_document(found, None) if isinstance(block, Grid))
    assert grid.header == ("", "reference", "recommended")
    text = " ".join(describe(found).split())
    assert "the speed of the reference" in text and "in turn with the reference" in text
    assert "yours " not in text.partition("Trains the same")[0] and "of your settings" not in text


def test_where_the_reference_itself_is_what_to_use_it_stands_alone_with_its_settings() -> None:
    lean = BASELINE.replace({"precision": "bf16"})
    found = recommendation(
        reference_settings={"precision": "bf16"}, baseline=answer(lean), best=answer(lean), ceilings=(ceiling(),)
    )
    grid = next(block for block in recommendation_document(found, None) if isinstance(block, Grid))
    assert grid.header == ("", "recommended")
    assert ("precision", "bf16") in grid.rows
    text = " ".join(describe(found).split())
    assert "it ran at 1,000 samples/s; measured again 3 times in fresh processes" in text
    assert "not checked: your own step does not fit" in text
    assert "precision=bf16 176" in text, "the class of its ceiling"


def test_reasons_prices_rejections_failures_and_warnings_are_there() -> None:
    text = told()
    assert "Why - precision=bf16: 1.80x the speed alone (trial 4)" in text
    assert "Price - the first step takes 21 s longer" in text
    assert "Ran, and not recommended - fp16 was 1.1x faster and its gradient wrong" in text
    assert "of 31 trials: 2 device_oom, 1 timeout" in text
    assert "Warnings - another process used the GPU" in text


def test_what_else_was_tried_and_what_was_not_has_a_section() -> None:
    other = ("tried, and left out: precision=fp16 (0.99x)", "not tried, for lack of time: compile_mode")
    assert f"Other settings - {other[0]} - {other[1]} Memory ceilings" in told(other_settings=other)
    assert "Other settings" not in told()


def test_empty_sections_have_no_title() -> None:
    text = told(
        best=fast_answer(reasons=(), prices=()),
        rejected=(),
        failure_counts={},
        warnings=(),
        ceilings=(),
    )
    for title in ("Why", "Price", "Faster, and", "Failed trials", "Warnings", "Memory ceilings", "Second answer"):
        assert title not in text


@pytest.mark.parametrize(
    ("changes", "row"),
    [
        ({}, ("precision=bf16", "176", "140 GiB", "184 (device_oom)")),
        ({"failure_kind": None}, ("precision=bf16", "176", "140 GiB", "184 (ran, but left no margin)")),
        ({"memory_class": {"precision": "as_is"}}, ("your settings", "176", "140 GiB", "184 (device_oom)")),
        (
            {"largest_batch_size": None, "peak_allocated_bytes": None, "smallest_failed_batch_size": 1},
            ("precision=bf16", "none", "-", "1 (device_oom)"),
        ),
        (
            {"smallest_failed_batch_size": None, "failure_kind": None, "stopped_because": "the data set ends there"},
            ("precision=bf16", "176", "140 GiB", "none: the data set ends there"),
        ),
    ],
)
def test_a_ceiling_says_what_ran_and_what_did_not(changes: dict[str, object], row: tuple[str, ...]) -> None:
    document = recommendation_document(recommendation(ceilings=(ceiling(**changes),)), None)
    grid = next(block for block in document if isinstance(block, Grid) and block.title == "Memory ceilings")
    assert grid.rows == (row,)


def test_the_second_answer_says_its_price_and_what_was_not_checked() -> None:
    free = fast_answer(
        effective_batch_size=4096, micro_batch_size=4096, parity=None, confirmed_rounds=0, prices=("another training",)
    )
    text = told(free_batch=free)
    assert "Second answer, with the batch free yours batch free" in text
    assert "effective batch 32 4,096" in text
    assert "- not confirmed in fresh processes - not checked against your step in fp32 - another training" in text


def test_where_it_was_measured_is_told() -> None:
    assert "on NVIDIA H200, torch 2.11.0 - 31 trials; it took 8 min 20 s, autotune 0.1.0" in told()


def test_where_the_time_went_is_told() -> None:
    assert "baseline 11 s, confirm 6 min 40 s, soak 36 s, starting and the rest 53 s" in told()
    assert "starting and the rest" not in told(stage_seconds={})


def test_trials_are_counted_as_show_lists_them_and_those_of_earlier_calls_named() -> None:
    assert "of 40 trials (9 of them to confirm): 2" in told(confirmation_count=9)
    text = told(confirmation_count=9, earlier_trial_count=12)
    assert "40 trials (9 of them to confirm, 12 in earlier calls); this call took 8 min 20 s" in text
    assert "31 trials (12 of them in earlier calls)" in told(earlier_trial_count=12)
    assert "1 trial; it took 8 min" in told(trial_count=1)
    settings = recommendation().settings.model_copy(
        update={"conditions": Conditions(device="cpu", global_batch_size=None, memory_limit_bytes=2**30)}
    )
    text = told(settings=settings, machine=machine(gpus=(), notes=("NVML is not there",)))
    assert "on Xeon, 16 cores, torch 2.11.0, memory limited to 1.0 GiB" in text
    assert "NVML is not there" in text


def test_a_result_that_lies_in_a_study_names_the_commands_that_go_on() -> None:
    text = render(recommendation_document(recommendation(), Path("my study")))
    assert "autotune export 'my study/best.json' --to python" in text
    assert "autotune show 'my study'" in text
    assert "optuna-dashboard 'sqlite:///my study/study.db'" in text
    assert "autotune show" not in describe(recommendation())
    assert "--free-batch" not in text
    text = render(recommendation_document(recommendation(free_batch=fast_answer()), Path("my study")))
    assert "autotune export 'my study/best.json' --to python --free-batch" in text


def test_the_report_is_no_wider_than_80_columns() -> None:
    free = fast_answer(reasons=("word " * 60,))
    text = render(recommendation_document(recommendation(free_batch=free), Path("autotune-study")))
    assert max(len(line) for line in text.splitlines()) <= 80
