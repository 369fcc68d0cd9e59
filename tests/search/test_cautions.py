"""Few rounds and a machine that is not quiet are said beside the figures that they make doubtful."""

from __future__ import annotations

from autotune.records import Recommendation
from tests.search.test_recommend import BF16, Trials, recommended, started

ONCE = "the recommendation was measured again beside your settings only once"
NEVER = "the recommendation was not measured again: "


def warned(found: Recommendation, beginning: str) -> bool:
    return any(warning.startswith(beginning) for warning in found.warnings)


def test_an_answer_that_rests_on_one_round_says_so() -> None:
    assert warned(recommended(started().rounds(BF16, [1600], [1000])), ONCE)
    assert not warned(recommended(started().rounds(BF16, [1600, 1610], [1000, 1005])), "the recommendation was")


def test_an_answer_without_any_round_says_so() -> None:
    assert warned(recommended(started().add(BF16, 1600.0), unconfirmed=True), NEVER)


def test_keeping_the_settings_needs_no_round() -> None:
    assert not recommended(started()).warnings


def test_the_second_answer_is_held_to_the_same() -> None:
    trials = started().rounds(BF16, [1600, 1610], [1000, 1005]).rounds({**BF16, "batch_size": 128}, [2400], [1000])
    assert warned(recommended(trials), "the second answer was measured again beside your settings only once")


def test_both_answers_share_a_sentence() -> None:
    trials = started().rounds(BF16, [1600], [1000]).rounds({**BF16, "batch_size": 128}, [2400], [1000])
    found = recommended(trials)
    assert warned(found, "the recommendation and the second answer were measured again beside your settings only once")


def test_a_baseline_that_moved_is_told_with_how_far() -> None:
    found = recommended(started().rounds(BF16, [1600, 1900], [1001, 1200]))
    assert (
        "your own program ran at 1,000 samples/s in one measurement and at 1,200 in another, 20 % more, which is further "
        "apart than either spreads: other work on this machine? What differs by less than that is not certain"
    ) in found.warnings
    assert warned(found, "the recommendation ran at 1,600 samples/s in one measurement and at 1,900")


def test_what_was_not_taken_and_moved_is_told_too() -> None:
    """101 samples/s at first and 26 in the one round: "0.26x the speed" alone would be believed."""
    found = recommended(started().add(BF16, 1600.0).rounds(BF16, [300], [1000]))
    assert found.keep
    assert warned(found, "precision=bf16 ran at 300 samples/s in one measurement and at 1,600 in another")
    assert any("precision=bf16: 0.30x the speed (99 % interval from one round" in one for one in found.other_settings)


def test_what_processes_usually_differ_by_is_no_move() -> None:
    assert not recommended(started().rounds(BF16, [1600, 1650], [1000, 1060])).warnings


def test_measurements_that_spread_as_much_themselves_are_no_move() -> None:
    wide = Trials().add({}, 1000.0, interval=(800.0, 1200.0)).rounds(BF16, [1900, 1910], [1199, 1198])
    assert not warned(recommended(wide), "your own program")


def test_a_first_measurement_that_did_not_hold_explains_nothing() -> None:
    """86 samples/s while something else ran, 2,400 when it was measured again."""
    held = recommended(Trials().add({}, 1000.0, device_lag_share=0.9).rounds(BF16, [1600, 1610], [1100, 1105]))
    assert held.bottleneck == "compute"
    refuted = recommended(Trials().add({}, 1000.0, device_lag_share=0.9).rounds(BF16, [2500, 2510], [2400, 2405]))
    assert refuted.bottleneck is None
    assert warned(refuted, "the search compared with a measurement of your program that did not hold")
    assert not warned(held, "the search compared with")
