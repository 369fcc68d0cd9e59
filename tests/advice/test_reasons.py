from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autotune.advice.reasons import prices, reasons
from autotune.config import TrainingConfig
from autotune.knobs.base import Knob
from autotune.knobs.registry import KNOBS, knob
from autotune.records import Trial
from tests.report.sample_records import BASELINE, FASTEST, GIB, answer, fast_answer, parity, trial, workload

START = trial(0, {}, rate=1000.0, stage="baseline")
BEST = trial(9, {"batch_size": 64, "compile_mode": "default", "precision": "bf16"}, rate=2400.0)


def evidence(name: str, trials: Sequence[Trial]) -> str:
    """What is said of one knob of FASTEST, after its summary."""
    sentence = next(line for line in reasons(FASTEST, BASELINE, trials, KNOBS) if line.startswith(f"{name}="))
    summary = next(knob.summary for knob in KNOBS if knob.name == name)
    assert f" ({summary}): " in sentence
    return sentence.split(f"({summary}): ")[1]


def test_each_changed_knob_gets_a_sentence_and_no_other() -> None:
    lines = reasons(FASTEST, BASELINE, [START, BEST], KNOBS)
    assert [line.split(" ")[0] for line in lines] == ["batch_size=64", "compile_mode=default", "precision=bf16"]
    assert reasons(BASELINE, BASELINE, [START], KNOBS) == ()


def test_a_trial_of_the_change_alone_is_the_evidence() -> None:
    alone = trial(4, {"precision": "bf16"}, rate=1800.0)
    assert evidence("precision", [START, alone]) == "1.80x (± 1.4 %) the speed alone (trial 4)"


def test_a_trial_without_the_change_shows_what_it_adds_to_the_others() -> None:
    without = trial(7, {"batch_size": 64, "compile_mode": "default"}, rate=1500.0)
    assert (
        evidence("precision", [START, without, BEST])
        == "1.60x (± 1.4 %) beside the other changes (trial 7 is without it)"
    )
    alone = trial(4, {"precision": "bf16"}, rate=1800.0)
    assert evidence("precision", [START, alone, without, BEST]) == (
        "1.80x (± 1.4 %) the speed alone (trial 4) and 1.60x (± 1.4 %) beside the other changes (trial 7 is without it)"
    )


def test_of_an_update_it_is_told_what_it_takes_of_a_step() -> None:
    """The first two trials that differ in it alone are those that it was judged by; their rates say another thing."""
    own = BASELINE.replace({"precision": "bf16"})
    trials = [with_update(4, own, "as_is", 1800.0, 0.22), with_update(5, own, "fused", 1790.0, 0.1)]
    baseline = TrainingConfig({**BASELINE, "optimizer_impl": "as_is"})
    told = reasons(trials[1].config, baseline, trials, KNOBS)[0]
    assert told.endswith(
        "): 0.99x (± 1.4 %) beside the other changes (trial 4 is without it) and the update takes 10 % of a step "
        "instead of 22 % (trials 5 and 4)"
    )
    compiled = trials[1].config.replace({"compile_mode": "default"})
    told = next(line for line in reasons(compiled, baseline, trials, KNOBS) if line.startswith("optimizer_impl"))
    assert told.endswith("): the update takes 10 % of a step instead of 22 % (trials 5 and 4)")


def with_update(number: int, config: TrainingConfig, value: str, rate: float, share: float) -> Trial:
    one = trial(number, {}, rate=rate)
    assert one.measurement is not None
    return one.model_copy(
        update={
            "config": TrainingConfig({**config, "optimizer_impl": value}),
            "measurement": one.measurement.model_copy(update={"update_share": share}),
        }
    )


def test_a_single_change_has_no_other_figure_than_the_recommendation() -> None:
    alone = trial(4, {"precision": "bf16"}, rate=1800.0)
    config = BASELINE.replace({"precision": "bf16"})
    assert reasons(config, BASELINE, [START, alone], KNOBS)[0].endswith("): the only change")


def test_a_slower_change_is_told_as_it_is() -> None:
    assert (
        evidence("batch_size", [START, trial(4, {"batch_size": 64}, rate=900.0)])
        == "0.90x (± 1.4 %) the speed alone (trial 4)"
    )


def test_failed_trials_are_no_evidence() -> None:
    assert (
        evidence("precision", [START, trial(4, {"precision": "bf16"}), BEST])
        == "tried only together with other changes"
    )


def test_measurements_that_ran_next_to_each_other_are_compared() -> None:
    """Between them the machine may have become another: here it is half as fast in the end."""
    first, last = trial(4, {"precision": "bf16"}, rate=3600.0), trial(12, {"precision": "bf16"}, rate=900.0)
    trials = [trial(0, {}, rate=2000.0), first, trial(11, {}, rate=500.0), last]
    assert evidence("precision", trials) == "1.80x (± 1.4 %) the speed alone (trial 12)"


def priced(
    config: TrainingConfig = FASTEST, knobs: Sequence[Knob] = KNOBS, batch_norm: bool = False, **changes: Any
) -> str:
    free = {
        "compile_seconds": 0.0,
        "peak_allocated_bytes": 10 * GIB,
        "effective_batch_size": 32,
        "micro_batch_size": 32,
    }
    best = fast_answer().model_copy(update={**free, "config": config, **changes})
    return "; ".join(prices(best, answer(BASELINE), workload(has_batch_norm=batch_norm), knobs))


def test_what_changes_nothing_of_note_is_free() -> None:
    exact = BASELINE.replace({"pin_memory": True})
    assert priced(exact, peak_allocated_bytes=int(10.2 * GIB), compile_seconds=0.3) == ""


def test_another_effective_batch_is_another_training() -> None:
    text = priced(BASELINE, effective_batch_size=4096)
    assert "an optimizer step takes 4,096 samples instead of 32: that is another training, whose learning rate" in text


def test_batch_norm_sees_the_micro_batch() -> None:
    assert "BatchNorm sees 8 samples at a time instead of 32" in priced(BASELINE, batch_norm=True, micro_batch_size=8)
    assert "BatchNorm" not in priced(BASELINE, batch_norm=False, micro_batch_size=8)
    assert "BatchNorm" not in priced(BASELINE, batch_norm=True)


def test_statistics_of_instance_norm_are_moved_by_the_micro_batch() -> None:
    def told(micro_batch_size: int, batch_norm: bool = False) -> tuple[str, ...]:
        facts = workload(has_batch_norm=batch_norm, has_tracking_instance_norm=True)
        changes = {"micro_batch_size": micro_batch_size, "effective_batch_size": 32}
        return prices(fast_answer().model_copy(update=changes), answer(BASELINE), facts, KNOBS)

    text = "InstanceNorm's running statistics are moved by 8 samples at a time instead of 32"
    assert text in told(8)
    assert text not in told(32)
    assert text not in told(8, batch_norm=True)


def test_rounding_is_told_with_what_parity_measured() -> None:
    text = priced(parity=parity(relative_error=0.21, floor=0.16))
    assert text == (
        "precision and compile_mode round differently: the gradient is 21 % off your step in fp32, "
        "where rounding alone gives 16 %"
    )
    assert priced(BASELINE.replace({"precision": "bf16"}), parity=None) == (
        "precision rounds differently, and how much was not checked"
    )


def test_a_knob_that_changes_training_is_named_with_what_it_does() -> None:
    class EightBitStates(type(knob("pin_memory"))):  # type: ignore[misc]
        effect = "training"
        summary = "optimizer states in 8 bits"

    changed = BASELINE.replace({"pin_memory": True})
    assert priced(changed, knobs=(EightBitStates(),)) == (
        "pin_memory=true changes what is trained: optimizer states in 8 bits"
    )


def test_a_cold_compile_is_told_with_the_steps_that_pay_it_back() -> None:
    assert "the first step takes 21 s longer where nothing is cached, paid back after 1,900 steps" in priced(
        compile_seconds=21.3, compile_pays_after_steps=1900
    )
    assert "21 s longer where nothing is cached, which no number of steps pays back" in priced(
        compile_seconds=21.3, compile_pays_after_steps=None
    )
    assert (
        "the first step takes at least 21 s longer where nothing is cached, which no number of steps pays back"
        in priced(compile_was_cached=True, compile_seconds=21.3, compile_pays_after_steps=None)
    )


def test_more_memory_is_told() -> None:
    assert "the peak memory is 28.5 GiB instead of 10.0 GiB" in priced(peak_allocated_bytes=int(28.5 * GIB))
    assert "peak memory" not in priced(peak_allocated_bytes=5 * GIB)
