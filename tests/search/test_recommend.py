"""A recommendation is a pure function of trials: of these, that; whatever was measured, what is not certain is not said."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import pytest

from autotune.config import Value
from autotune.knobs.registry import KNOBS
from autotune.records import (
    Blocks,
    Ceiling,
    Conditions,
    Failure,
    FailureKind,
    MemoryMarks,
    ParityResult,
    Phase,
    Recommendation,
    Settings,
    Trial,
)
from autotune.search.answers import Results
from autotune.search.recommend import Evidence, recommend
from autotune.space import SearchSpace, build_space
from tests.report.sample_records import measurement, parity, search_facts
from tests.search.simulated_search import REFERENCE

GIB = 2**30
HELD = build_space(search_facts(largest_batch_size=256), preset="default")
FREE = build_space(search_facts(largest_batch_size=256, global_batch_size=None), preset="default")
BASELINE = HELD.baseline
BF16: dict[str, Value] = {"precision": "bf16"}
COMPILED: dict[str, Value] = {"precision": "bf16", "compile_mode": "default"}


class Trials:
    """Makes trials, numbered in the order in which they ran."""

    def __init__(self) -> None:
        self.made: list[Trial] = []

    def add(
        self, changes: dict[str, Value], rate: float | None, *, round: int | None = None,
        fails: FailureKind | None = None, phase: Phase = "measure", **measured: Any,
    ) -> Trials:  # fmt: skip
        """One trial that changes so much from the baseline."""
        result = None
        if rate is not None:
            peak = measured.pop("peak_bytes", 10 * GIB)
            fields = {
                "samples_per_second": rate, "interval": (rate * 0.995, rate * 1.005),
                "blocks": Blocks(seconds=(1.0,) * 3, samples=(round_up(rate),) * 3, steps=(10,) * 3),
                "memory": MemoryMarks(peak_allocated_bytes=peak, reserved_bytes=peak),
            }  # fmt: skip
            result = measurement(**{**fields, **measured})
        failure = None if fails is None else Failure(kind=fails, phase=phase, message=f"it ended with {fails}")
        self.made.append(
            Trial(
                number=len(self.made), stage="explore" if round is None else "confirm", round=round,
                config=BASELINE.replace(changes), measurement=result, failure=failure, started_at=1.8e9, seconds=4.0,
                machine_identity="0123456789ab",
            )
        )  # fmt: skip
        return self

    def rounds(
        self, changes: dict[str, Value], rates: Sequence[float], base: Sequence[float], **measured: Any
    ) -> Trials:
        """First measured, then confirmed beside the baseline."""
        self.add(changes, rates[0], **measured)
        for number, (own, other) in enumerate(zip(rates, base, strict=True)):
            if not any(trial.round == number and trial.config == BASELINE for trial in self.made):
                self.add({}, other, round=number)
            self.add(changes, own, round=number, **measured)
        return self


def round_up(rate: float) -> int:
    return max(1, round(rate))


def recommended(
    trials: Trials, *, free: bool = False, unconfirmed: bool = False,
    checked: dict[str, ParityResult | Failure] | None = None,
    objective: Literal["throughput", "memory"] = "throughput", train_samples: int | None = None,
    ceilings: tuple[Ceiling, ...] = (), warnings: tuple[str, ...] = (),
    space: SearchSpace | None = None,
) -> Recommendation:  # fmt: skip
    space = space or (FREE if free else HELD)
    conditions = Conditions(device="cuda", global_batch_size=None if free else 32)
    settings = Settings(
        objective=objective, budget_seconds=600, space="default", train_samples=train_samples, conditions=conditions
    )
    if checked is None:
        checked = {space.numerics_key(trial.config): parity() for trial in trials.made if trial.config != BASELINE}
    results = Results(
        trials=tuple(trials.made), baseline=BASELINE, parity_results=checked, space=space, settings=settings,
        unconfirmed=unconfirmed,
    )  # fmt: skip
    return recommend(
        Evidence(
            results=results, ceilings=ceilings, reference=REFERENCE, knobs=KNOBS, memory_limit_bytes=139 * GIB,
            warnings=warnings, skipped=("num_workers: enough",), short_of="time", earlier_trial_count=3,
            search_seconds=321.0, stage_seconds={"compute": 300.0}, autotune_version="0",
        )
    )  # fmt: skip


def started() -> Trials:
    """The baseline at 1000 samples a second."""
    return Trials().add({}, 1000.0)


# --- what is certain --------------------------------------------------------------------------------------------------


def test_the_ratio_is_that_of_paired_rounds_with_its_interval() -> None:
    found = recommended(started().rounds(BF16, [1500, 1650, 1350], [1000, 1100, 900]))
    assert found.best.config == BASELINE.replace(BF16)
    assert found.best.speedup.value == pytest.approx(1.5)
    low, high = found.best.speedup.interval
    assert low == pytest.approx(1.5)
    assert high == pytest.approx(1.5), "a machine that slows down slows both"
    assert found.best.confirmed_rounds == 3
    assert found.verdict == "Use precision=bf16: 1.50 times the speed (95 % interval 1.50 to 1.50)."
    assert found.best.samples_per_second == pytest.approx(1500)


def test_where_nothing_else_was_measured_the_verdict_says_so() -> None:
    trials = started().add(BF16, None, fails="timeout").add({}, 1000.0, round=0)
    assert recommended(trials).verdict == "Keep your settings for now: no other settings were measured to the end."


def test_where_there_is_nothing_else_the_verdict_does_not_speak_of_later() -> None:
    alone = dataclasses.replace(HELD, choices={name: (BASELINE[name],) for name in HELD.choices})
    found = recommended(started(), space=alone)
    assert found.verdict == "Keep your settings: no knob that may be moved has another value here."


def test_a_gain_within_the_noise_is_no_gain() -> None:
    found = recommended(started().rounds(BF16, [1000, 1300, 950], [1000, 1000, 1000]))
    assert found.keep
    assert found.best.config == BASELINE
    assert found.verdict == "Keep your settings: nothing that was measured is at least 2 % faster for certain."


def test_what_is_likely_and_not_certain_is_told_with_the_interval_that_decides() -> None:
    """Three rounds on an H200 whose processes differed by a tenth: the 95 % interval is 1.06 to 1.37."""
    trials = started().rounds(BF16, [8381, 9023, 9221], [7133, 7742, 7219])
    found = recommended(trials)
    assert found.keep
    assert found.verdict == (
        "Keep your settings for now: precision=bf16 looks 1.20 times as fast, which is not certain yet (99 % interval 0.90 "
        "to 1.61); the same command measures again."
    )
    assert any(
        "precision=bf16: 1.20x the speed (99 % interval, which decides: 0.90x" in one for one in found.other_settings
    )


@pytest.mark.parametrize(
    ("rates", "kept_for_now"),
    [([1300], True), ([1300, 950], True), ([1300, 950, 1050], False), ([990], False)],
)
def test_what_too_few_rounds_leave_open_is_kept_for_now(rates: list[float], kept_for_now: bool) -> None:
    """Of blocks that differ by a third, as on a machine with other work."""
    trials = started()
    for number, rate in enumerate(rates):
        trials.add({}, 1000, round=number, interval=(700, 1400))
        trials.add(BF16, rate, round=number, interval=(0.7 * rate, 1.4 * rate))
    found = recommended(trials)
    assert found.keep
    assert found.verdict.startswith("Keep your settings for now: precision=bf16 looks 1.") == kept_for_now


def test_a_gain_below_two_percent_is_not_worth_a_change() -> None:
    assert recommended(started().rounds(BF16, [1015] * 6, [1000] * 6)).keep
    assert not recommended(started().rounds(BF16, [1060] * 6, [1000] * 6)).keep


@pytest.mark.parametrize(("rate", "keep"), [(1060.0, True), (1500.0, False)])
def test_one_round_is_enough_only_for_a_gain_that_no_process_could_differ_by(rate: float, keep: bool) -> None:
    found = recommended(started().rounds(BF16, [rate], [1000.0]))
    assert found.keep == keep


@pytest.mark.parametrize(
    ("first", "rates", "keep"),
    [
        ((3072.0, 5259.0), ([39906.0], [350.0]), True),
        ((17622.0, 44634.0), ([25000.0], [7686.0]), False),
        ((1000.0, 1500.0), ([1800.0], [1200.0]), False),
    ],
)
def test_one_round_that_the_search_contradicts_decides_nothing(
    first: tuple[float, float], rates: tuple[list[float], list[float]], keep: bool
) -> None:
    """Two cores that many want: "114 times the speed" of one round, where the search had seen 1.7 times."""
    trials = Trials().add({}, first[0]).add(BF16, first[1])
    for number, (own, base) in enumerate(zip(*rates, strict=True)):
        trials.add({}, base, round=number).add(BF16, own, round=number)
    found = recommended(trials)
    assert found.keep == keep
    assert found.verdict.startswith("Keep your settings for now: precision=bf16 looks 1") == keep


def test_what_was_stopped_early_contradicts_no_round() -> None:
    trials = started().add(BF16, 300.0, stopped_early=True).add({}, 1000.0, round=0).add(BF16, 1500.0, round=0)
    assert not recommended(trials).keep


def test_two_rounds_that_disagree_show_a_wide_interval() -> None:
    found = recommended(started().rounds(BF16, [2540, 1770], [1000, 1000]))
    low, high = found.best.speedup.interval
    assert low < 1.77
    assert high > 2.54
    assert not found.keep


def test_the_rate_of_two_processes_has_an_interval_that_says_something() -> None:
    """Student's t with one degree of freedom would say 400 to 9,000."""
    found = recommended(started().rounds(BF16, [2540, 1770], [1000, 1000]))
    low, high = found.best.interval
    assert 1200 < low < 1770
    assert 2540 < high < 3800


def test_nothing_measured_but_the_baseline_is_keep() -> None:
    found = recommended(started())
    assert found.keep
    assert found.free_batch is None
    assert found.best.confirmed_rounds == 0
    assert found.trial_count == 1


def test_what_was_not_confirmed_is_not_recommended() -> None:
    assert recommended(started().add(BF16, 3000)).keep


# --- which one --------------------------------------------------------------------------------------------------------


def test_of_two_within_two_percent_the_simpler_is_recommended() -> None:
    trials = started().rounds(BF16, [1500] * 3, [1000] * 3).rounds(COMPILED, [1520] * 3, [1000] * 3)
    assert recommended(trials).best.config == BASELINE.replace(BF16)
    trials = started().rounds(BF16, [1500] * 3, [1000] * 3).rounds(COMPILED, [1600] * 3, [1000] * 3)
    assert recommended(trials).best.config == BASELINE.replace(COMPILED)


def test_of_two_batches_within_two_percent_the_smaller_is_recommended() -> None:
    trials = (
        started()
        .rounds({"batch_size": 64}, [1500] * 3, [1000] * 3)
        .rounds({"batch_size": 128}, [1525] * 3, [1000] * 3)
        .rounds({"batch_size": 48}, [1400] * 3, [1000] * 3)
    )
    assert recommended(trials, free=True).best.config["batch_size"] == 64


def test_a_held_batch_is_kept_and_a_free_one_is_the_second_answer() -> None:
    trials = started().rounds(BF16, [1500] * 3, [1000] * 3)
    trials.rounds({**BF16, "batch_size": 128}, [1900] * 3, [1000] * 3)
    found = recommended(trials)
    assert found.best.effective_batch_size == 32
    assert found.free_batch is not None
    assert found.free_batch.config["batch_size"] == 128
    assert found.free_batch.effective_batch_size == 128
    assert found.free_batch.speedup.value == pytest.approx(1.9)
    assert any("128 samples instead of 32" in price for price in found.free_batch.prices)


def test_a_free_batch_that_gains_too_little_is_no_second_answer() -> None:
    trials = started().rounds(BF16, [1500] * 3, [1000] * 3)
    trials.rounds({**BF16, "batch_size": 128}, [1520] * 3, [1000] * 3)
    assert recommended(trials).free_batch is None


def test_a_free_batch_beside_keep() -> None:
    found = recommended(started().rounds({"batch_size": 128}, [1900] * 3, [1000] * 3))
    assert found.keep
    assert found.free_batch is not None


def test_the_memory_objective_recommends_less_memory_and_says_the_speed() -> None:
    trials = started().rounds({"activation_checkpointing": "all"}, [700] * 3, [1000] * 3, peak_bytes=3 * GIB)
    found = recommended(trials, objective="memory")
    assert found.verdict == (
        "Use activation_checkpointing=all: 30 % of the peak memory, at 0.70 times the speed (95 % interval 0.70 to 0.70)."
    )
    trials = started().rounds(BF16, [1500] * 3, [1000] * 3)
    kept = recommended(trials, objective="memory")
    assert kept.verdict == "Keep your settings: nothing that was measured needs at least 2 % less memory for certain."


# --- what failed ------------------------------------------------------------------------------------------------------


def test_fast_and_wrong_is_told_and_not_recommended() -> None:
    trials = started().add(BF16, 4000, fails="numerics", phase="parity")
    found = recommended(trials)
    assert found.keep
    assert found.rejected == ("precision=bf16: 4.00 times the speed (± 0.71 %), and wrong: it ended with numerics",)
    assert found.failure_counts == {"numerics": 1}


@pytest.mark.parametrize("kind", ["crash", "device_oom", "timeout"])
def test_what_failed_in_a_later_round_is_not_recommended(kind: Any) -> None:
    trials = started().rounds(COMPILED, [2000] * 3, [1000] * 3).rounds(BF16, [1500] * 3, [1000] * 3)
    trials.add(COMPILED, None, round=3, fails=kind)
    assert recommended(trials).best.config == BASELINE.replace(BF16)


def test_what_failed_in_its_soak_is_told_and_not_recommended() -> None:
    trials = started().rounds(BF16, [1500] * 3, [1000] * 3)
    failed = trials.made[1].model_copy(
        update={"failure": Failure(kind="device_oom", phase="soak", message="in the soak: no memory")}
    )
    trials.made[1] = failed
    found = recommended(trials)
    assert found.keep
    assert found.rejected == ("precision=bf16: 1.50 times the speed (± 0.5 %), and not usable: in the soak: no memory",)


def test_what_never_ran_is_counted_and_not_told_as_faster() -> None:
    found = recommended(
        started().add({"batch_size": 256}, None, fails="device_oom").add(BF16, None, fails="device_oom")
    )
    assert found.rejected == ()
    assert found.failure_counts == {"device_oom": 2}


# --- interrupted ------------------------------------------------------------------------------------------------------


def test_after_an_interrupt_what_was_measured_once_and_checked_counts_and_says_so() -> None:
    trials = started().add(BF16, 1500).add(COMPILED, 3000)
    checked = {HELD.numerics_key(BASELINE.replace(BF16)): parity()}
    found = recommended(trials, unconfirmed=True, checked=checked)
    assert found.best.config == BASELINE.replace(BF16)
    assert found.best.confirmed_rounds == 0


def test_after_an_interrupt_one_check_stands_for_the_same_way_to_compute_gradients() -> None:
    trials = started().add(BF16, 1500).add({**BF16, "optimizer_impl": "fused"}, 1800).add({"num_workers": 4}, 1100)
    trials.made[1] = trials.made[1].model_copy(update={"parity": parity()})
    found = recommended(trials, unconfirmed=True, checked={HELD.numerics_key(BASELINE.replace(BF16)): parity()})
    assert found.best.config == BASELINE.replace({**BF16, "optimizer_impl": "fused"})
    assert any("how much was not checked" in price for price in found.best.prices)


def test_after_an_interrupt_what_failed_its_check_does_not_count() -> None:
    trials = started().add(BF16, 1500)
    failed = Failure(kind="host_oom", phase="parity", message="no memory for the reference")
    wrong = parity(passed=False)
    for outcome in (failed, wrong):
        checked = {HELD.numerics_key(BASELINE.replace(BF16)): outcome}
        assert recommended(trials, unconfirmed=True, checked=checked).keep


# --- prices -----------------------------------------------------------------------------------------------------------


def test_compiling_pays_after_so_many_steps() -> None:
    trials = started()
    trials.made[0] = trials.made[0].model_copy(
        update={"measurement": measurement(samples_per_second=1000.0, first_step_seconds=0.5)}
    )
    trials.rounds(COMPILED, [2000] * 3, [1000] * 3, first_step_seconds=20.4, compiled_graphs=2)
    found = recommended(trials)
    assert found.best.compile_seconds == pytest.approx(20.0)
    # A step of 32 samples takes 16 ms less.
    assert found.best.compile_pays_after_steps == 1250


def test_nothing_compiled_costs_no_compile_seconds() -> None:
    found = recommended(started().rounds(BF16, [1500] * 3, [1000] * 3, first_step_seconds=30.0))
    assert found.best.compile_seconds == 0.0
    assert found.best.compile_pays_after_steps is None


def test_hours_before_and_after_hold_the_compilation() -> None:
    trials = started().rounds(COMPILED, [2000] * 3, [1000] * 3, first_step_seconds=360.4, compiled_graphs=1)
    found = recommended(trials, train_samples=36_000_000)
    assert found.baseline.training_hours == pytest.approx(10.0)
    assert found.best.training_hours == pytest.approx(5.1, rel=1e-3)
    assert recommended(trials).best.training_hours is None


def test_the_peak_is_the_highest_of_all_processes() -> None:
    trials = started().rounds(BF16, [1500] * 3, [1000] * 3, peak_bytes=4 * GIB)
    trials.add(BF16, 1500, round=3, peak_bytes=5 * GIB).add({}, 1000, round=3)
    assert recommended(trials).best.peak_allocated_bytes == 5 * GIB


# --- ceilings and what else was seen -----------------------------------------------------------------------------------


def test_where_no_probe_ran_the_sizes_of_trials_are_the_ceiling() -> None:
    trials = started().rounds(BF16, [1500] * 3, [1000] * 3)
    trials.add({**BF16, "batch_size": 128}, 1700).add({**BF16, "batch_size": 256}, None, fails="device_oom")
    own, best = recommended(trials).ceilings
    assert own.memory_class["precision"] == "as_is"
    assert (own.largest_batch_size, own.smallest_failed_batch_size) == (32, None)
    assert best.memory_class["precision"] == "bf16"
    assert (best.largest_batch_size, best.smallest_failed_batch_size, best.failure_kind) == (128, 256, "device_oom")
    assert best.probes == 0


def test_a_ceiling_that_was_probed_stands() -> None:
    probed = Ceiling(
        memory_class=dict(HELD.memory_class(BASELINE)), largest_batch_size=77, smallest_failed_batch_size=79,
        failure_kind="device_oom", peak_allocated_bytes=GIB, bytes_per_sample=1.0, probes=3, out_of_memory_count=1,
        stopped_because="79 did not fit",
    )  # fmt: skip
    assert recommended(started(), ceilings=(probed,)).ceilings == (probed,)


def test_optimizer_steps_that_were_left_out_are_told() -> None:
    """Of 30 steps in each of four measurements; one in 120 is what a scaler does."""
    many = recommended(started().rounds(BF16, [1500] * 3, [1000] * 3, skipped_steps=3))
    sentence = "the gradient scaler left out 12 of 120 optimizer steps: their gradients were not finite"
    assert sentence in many.warnings
    one = started().rounds(BF16, [1500] * 3, [1000] * 3)
    one.add(BF16, 1500, round=3, skipped_steps=1)
    assert not any("scaler" in warning for warning in recommended(one).warnings)


def test_what_disturbed_the_gpu_is_told_of_what_is_compared() -> None:
    trials = started().rounds(BF16, [1500] * 3, [1000] * 3)
    assert not any("disturbed" in warning for warning in recommended(trials).warnings)
    trials.rounds(BF16, [1500], [1000], gpu_notes=("GPU 0 was hot", "another process (7) held 700 MiB on GPU 0"))
    assert (
        recommended(trials)
        .warnings[0]
        .endswith(
            "measurements of your settings and the recommendation were disturbed, such as the last of them: GPU 0 was hot; "
            "another process (7) held 700 MiB on GPU 0"
        )
    )


def test_warnings_reasons_and_leaks_are_passed_on() -> None:
    trials = Trials().add(
        {}, 1000.0, memory=MemoryMarks(peak_allocated_bytes=GIB, growth_bytes_per_step=2.0 * 2**20)
    )  # fmt: skip
    found = recommended(trials, warnings=("the card was hot",))
    assert any(
        warning.startswith("your program's memory grows by 2.00 MiB with every step") for warning in found.warnings
    )
    assert found.warnings[-1] == "the card was hot"
    assert "num_workers: enough" in found.other_settings


def test_the_same_trials_give_the_same_recommendation() -> None:
    trials = started().rounds(BF16, [1500, 1510, 1490], [1000, 990, 1020])
    assert recommended(trials) == recommended(trials)


# --- what a rate rests on, and batches of unequal length ----------------------------------------------------------------


def test_a_rate_says_how_many_blocks_it_rests_on() -> None:
    found = recommended(started().rounds(BF16, [1500, 1650, 1350], [1000, 1100, 900]))
    assert (found.best.block_count, found.best.confirmed_rounds) == (9, 3)
    assert (found.baseline.block_count, found.baseline.confirmed_rounds) == (9, 3)
    assert recommended(started()).baseline.block_count == 3


def test_tokens_are_told_as_totals_with_the_interval_of_the_processes() -> None:
    def tokens(weights: float) -> dict[str, Any]:
        blocks = Blocks(seconds=(1.0,) * 3, samples=(1500,) * 3, steps=(10,) * 3, weights=(weights,) * 3)
        return {"blocks": blocks, "weight_per_second": weights, "weight_interval": (weights, weights)}

    trials = started().add(BF16, 1500, **tokens(9_000.0))
    assert recommended(trials, unconfirmed=True).best.weight_interval == (9_000.0, 9_000.0)
    for number, weights in enumerate((8_900.0, 9_000.0, 9_100.0)):
        trials.add({}, 1000, round=number).add(BF16, 1500, round=number, **tokens(weights))
    best = recommended(trials).best
    assert best.config == BASELINE.replace(BF16)
    assert best.weight_per_second == pytest.approx(9_000.0)
    assert best.weight_interval is not None
    assert 8_500 < best.weight_interval[0] < 9_000 < best.weight_interval[1] < 9_500


def test_a_recommendation_that_is_compiled_again_for_new_shapes_says_so() -> None:
    trials = started().rounds(COMPILED, [1500] * 3, [1000] * 3, compiled_graphs=4, recompiles=3)
    (warning,) = [text for text in recommended(trials).warnings if "graphs were compiled" in text]
    assert warning == ("3 graphs were compiled after the first step: shapes vary, and new ones may be compiled again")
    steady = started().rounds(COMPILED, [1500] * 3, [1000] * 3, compiled_graphs=4)
    assert not any("graphs were compiled" in text for text in recommended(steady).warnings)
