from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from autotune.measurement.gradients import compare
from autotune.measurement.runs import Difference, ParameterChange, Step, difference
from autotune.measurement.seeds import Mean, Means
from autotune.measurement.verdict import (
    Allowance,
    accumulation_advice,
    allowance,
    fault,
    finer_fault,
    update_fault,
    update_tolerance,
    widened,
)


def step(loss: float = 1.0, mean: float = 1.0, **gradients: list[float] | None) -> Step:
    """A step with these gradients and nothing else to blame."""
    return Step(
        gradients={name: None if value is None else torch.tensor(value) for name, value in gradients.items()},
        buffers={"mean": torch.tensor([mean])},
        loss=loss,
        skipped=0,
        drew=frozenset(),
    )


REFERENCE = step(a=[10.0, 0.0], b=[1.0])
SAME = difference(REFERENCE, REFERENCE)
STRICT = allowance([], [], [])


def off(loss: float = 1.0, mean: float = 1.0, **gradients: list[float] | None) -> Difference:
    return difference(REFERENCE, step(loss, mean, **{"a": [10.0, 0.0], "b": [1.0], **gradients}))


def test_without_any_floor_a_thousandth_is_allowed_and_a_hundredth_of_a_tensor() -> None:
    assert STRICT.tolerance == 1e-3
    assert STRICT.of_gradient("b") == 1e-2
    assert STRICT.of_buffer("mean") == 1e-2
    assert STRICT.of_loss([0.5, -2.0]) == 2e-3
    assert fault([off(a=[10.005, 0.0])], STRICT, 1) == ""
    assert fault([off(a=[10.2, 0.0])], STRICT, 1) == "gradients differ by 0.02, of 0.001 allowed, most in a (0.02)"


def test_a_type_allows_some_units_of_its_rounding() -> None:
    assert allowance([], [], ["bfloat16"]).tolerance == pytest.approx(4 / 256)
    assert allowance([], [], ["tf32", "bfloat16"]).tolerance == pytest.approx(4 / 256)
    assert allowance([], [], ["bfloat16"]).of_loss([1.0]) == pytest.approx(4 / 256 + 1e-3)


def test_three_floors_are_allowed_and_no_floor_allows_a_gradient_that_is_gone() -> None:
    assert allowance([[off(a=[10.0, 1.0])]], [], []).tolerance == pytest.approx(0.3, rel=0.01)
    assert allowance([[off(a=[0.0, 9.0])]], [], []).tolerance == 0.9


def test_a_floor_is_the_largest_over_all_steps() -> None:
    assert allowance([[SAME, off(a=[10.0, 1.0])]], [], []).tolerance == pytest.approx(0.3, rel=0.01)


@pytest.mark.parametrize("gone", [off(a=[math.nan, 0.0]), off(loss=math.nan)])
def test_a_floor_that_is_not_finite_says_nothing(gone: Difference) -> None:
    assert allowance([[gone]], [], []) == STRICT


def test_runs_with_rounded_outputs_count_for_single_tensors_and_the_loss_only() -> None:
    allowed = allowance([], [[off(loss=1.1, b=[1.2])]], [])
    assert allowed.tolerance == 1e-3
    assert allowed.of_gradient("b") == pytest.approx(1.0)
    assert allowed.of_gradient("a") == 1e-2
    assert allowed.of_loss([1.0]) == pytest.approx(0.501)


def test_rounded_outputs_allow_all_gradients_some_units_of_the_type_at_most() -> None:
    assert allowance([], [[off(a=[10.0, 0.2])]], ["bfloat16"]).tolerance == pytest.approx(0.04, rel=0.01)
    assert allowance([], [[off(a=[10.0, 9.0])]], ["bfloat16"]).tolerance == pytest.approx(16 / 256)


def test_a_single_tensor_is_allowed_as_many_units() -> None:
    assert allowance([], [], ["bfloat16"]).of_gradient("a") == pytest.approx(16 / 256)
    assert allowance([], [], ["float16"]).of_gradient("a") == 1e-2


def test_buffers_are_never_allowed_what_updating_twice_does() -> None:
    assert allowance([[off(mean=5.0)]], [], []).of_buffer("mean") == 0.5


LOOSE = Allowance(0.3, {}, {}, 0.0, 0.0, 0.9)


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        (
            [replace(SAME, skipped=25)],
            "every one of 25 steps was skipped: the scaled gradients are never finite; what overflows in fp16 must be "
            "computed in fp32 or bf16",
        ),
        (
            [off(b=None)],
            "b has a gradient in the user's program and none here: a part of the model is left out, as by a branch on "
            "autocast or by reentrant checkpointing",
        ),
        ([off(b=[0.0])], "the gradient of b is next to nothing here and not in the user's program"),
        ([off(a=[math.inf, 0.0])], "the gradient of a is not finite; what overflows must be computed in fp32"),
        ([off(b=[4.0])], "the gradient of b differs by 3, of 1.5 allowed"),
        ([SAME, off(b=[4.0]), off(b=[5.0])], "the gradient of b differs by 3 in step 2, of 1.5 allowed"),
        ([SAME, SAME, off(a=[0.0, 10.0])], "gradients differ by 1.4 in step 3, of 0.9 allowed, most in a (1.4)"),
        (
            [off(a=[0.0, 10.0])],
            "gradients differ by 1.4, of 0.9 allowed, most in a (1.4)",
        ),
        (
            [off(loss=math.nan)],
            "the loss of step 1 is nan here and 1 in the user's program; what overflows must be computed in fp32",
        ),
        (
            [SAME, off(loss=math.inf)],
            "the loss of step 2 is inf here and 1 in the user's program; what overflows must be computed in fp32",
        ),
        (
            [SAME, off(loss=0.9)],
            "the loss of step 2 is 0.9 here and 1 in the user's program at the same weights, 0.1 apart, of 0.003 allowed",
        ),
        (
            [off(mean=1.9)],
            "buffer mean differs by 0.9 after step 1, of 0.5 allowed: updated twice, or not at all, or from other values",
        ),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(steps: Sequence[Difference], text: str) -> None:
    assert fault([SAME, SAME], LOOSE, 1) == ""
    assert fault(steps, LOOSE, 1) == text


def test_one_step_of_three_may_be_moved_by_a_sample_at_a_kink_but_not_wholly() -> None:
    kink = off(a=[10.0, 1.0])
    assert fault([kink], STRICT, 1) != ""
    assert fault([kink, SAME, SAME], STRICT, 1) == ""
    assert fault([SAME, off(b=[0.0]), SAME], STRICT, 1) == ""
    assert (
        fault([SAME, kink, kink], STRICT, 1) == "gradients differ by 0.1 in step 2, of 0.001 allowed, most in a (0.1)"
    )
    for allowed, limit in ((STRICT, 0.9), (replace(STRICT, is_exact=True), 0.2)):
        assert f"differ by 1 in step 2, of {limit} allowed" in fault([SAME, off(a=[10.0, 10.0]), SAME], allowed, 1)


def test_a_step_of_a_candidate_that_rounds_nothing_is_held_closer() -> None:
    half = off(a=[10.0, 4.0])
    assert "differ by 0.4 in step 2, of 0.2 allowed" in fault([SAME, half, SAME], replace(STRICT, is_exact=True), 1)
    assert fault([SAME, half, SAME], STRICT, 1) == ""


def test_the_loss_of_one_step_of_three_may_be_off_by_three_times_as_much() -> None:
    assert fault([off(loss=1.002), SAME, SAME], STRICT, 1) == ""
    assert "the loss of step 2 is 1.002 here" in fault([SAME, off(loss=1.002), off(loss=1.002)], STRICT, 1)
    assert "the loss of step 1 is 1.004 here" in fault([off(loss=1.004), SAME, SAME], STRICT, 1)


FP32 = torch.finfo(torch.float32).eps


def test_updates_from_the_same_gradients_lead_to_the_same_parameters() -> None:
    near, far = ParameterChange(1e-6, 0.1, 1.0, FP32), ParameterChange(1e-3, 0.1, 1.0, FP32)
    assert update_tolerance(near, exact=True) == pytest.approx(1e-5 + 4 * FP32)
    assert update_fault({"a": near}, (), (), 3, exact=True) == ""
    assert update_fault({"a": near, "b": far}, (), (), 3, exact=True) == (
        "from the same gradients, 3 steps of the optimizer leave b 0.001 away from where the user's program does, which "
        "moves it by 0.1; 1e-05 is allowed: the update itself is another one (weight decay, clipping, unscaling, learning "
        "rate)"
    )
    # An optimizer that multiplies matrices may do so in TF32.
    assert update_fault({"a": replace(far, off=1e-4)}, (), (), 3, exact=False) == ""
    assert update_fault({"a": replace(far, off=math.nan)}, (), (), 3, exact=False) != ""


def test_a_parameter_that_the_user_does_not_move_must_not_move() -> None:
    assert update_fault({"a": ParameterChange(0.0, 0.0, 0.0, FP32)}, (), (), 3, exact=True) == ""
    assert update_fault({"a": ParameterChange(1e-3, 0.0, 1.0, FP32)}, (), (), 3, exact=True) != ""


def test_a_coarse_type_may_round_its_update_away() -> None:
    coarse = ParameterChange(0.01, 0.01, 1.0, torch.finfo(torch.bfloat16).eps)
    assert update_fault({"a": coarse}, (), (), 3, exact=True) == ""


def test_settings_of_the_optimizer_that_differ_are_named() -> None:
    settings = ({"lr": 0.1, "betas[0]": 0.9},)
    assert update_fault({}, settings, ({"lr": 0.1 + 1e-9, "betas[0]": 0.9},), 3, exact=True) == ""
    assert update_fault({}, settings, ({"lr": 0.2, "betas[0]": 0.9},), 3, exact=True) == (
        "after 3 steps lr of the optimizer's parameter group 0 is 0.2 here and 0.1 in the user's program: the scheduler is "
        "stepped differently, or a setting is lost"
    )
    assert update_fault({}, settings, ({"lr": 0.1},), 3, exact=True) != ""
    assert "has 2 parameter groups here and 1" in update_fault({}, settings, settings * 2, 3, exact=True)


def test_the_advice_for_several_micro_batches_tells_a_sum_from_a_mean_over_tokens() -> None:
    a_sum = compare(REFERENCE.gradients, step(a=[40.0, 0.0], b=[4.0]).gradients)
    tokens = compare(REFERENCE.gradients, step(a=[10.0, 0.5], b=[1.1]).gradients)
    assert accumulation_advice(a_sum, 1) == ""
    assert "they point the same way with another length: the loss is a sum" in accumulation_advice(a_sum, 4)
    assert "a mean over tokens of ragged batches must return (loss_sum, weight)" in accumulation_advice(tokens, 4)


def test_finer_parts_are_allowed_a_hundredth_and_tell_nothing_where_buffers_move() -> None:
    assert finer_fault(off(a=[10.0, 0.09]), STRICT, 8) == ""
    reason = finer_fault(off(a=[10.0, 0.5]), STRICT, 8)
    assert reason.startswith("where the same samples are cut finer, gradients differ by 0.05, of 0.01 allowed; with 8 ")
    assert finer_fault(off(mean=1.5, a=[10.0, 0.5]), STRICT, 8) == ""
    assert "one of 8 micro-batches may have none" in finer_fault(off(loss=math.nan), STRICT, 8)


def test_a_mean_over_seeds_knows_how_far_two_of_them_lie_apart() -> None:
    generator = torch.Generator().manual_seed(0)

    def mean() -> Mean:
        result = Mean()
        for _ in range(8):
            result.add(1 + 0.5 * torch.randn(1000, generator=generator))
        return result

    one, other = mean(), mean()
    assert one.value is not None
    assert other.value is not None
    assert float((one.value - other.value).norm()) == pytest.approx(one.spread, rel=0.1)


def test_a_gradient_that_some_seeds_lack_counts_as_zero_there() -> None:
    mean = Mean()
    mean.add(torch.tensor([2.0]))
    mean.add(None)
    assert mean.value == torch.tensor([1.0])
    assert (Mean().value, Mean().spread) == (None, 0.0)


def means_of(*values: list[float]) -> Means:
    means = Means()
    for number, value in enumerate(values):
        means.gradients.setdefault("a", Mean()).add(torch.tensor(value))
        means.buffers.setdefault("mean", Mean()).add(torch.tensor([1.0]))
        means.loss.add(torch.tensor(float(number)))
    return means


def test_means_over_seeds_allow_what_they_spread() -> None:
    means = means_of([8.0, 0.0], [12.0, 0.0])
    step = means.step()
    assert step.gradients["a"] is not None
    assert (step.gradients["a"].tolist(), step.loss, step.buffers["mean"].tolist()) == ([10.0, 0.0], 0.5, [1.0])
    allowed = widened(STRICT, means)
    # Variance 8 of one seed, so 8 of the difference of two means over two; of the loss 0.5.
    assert allowed.relative_error == pytest.approx(math.sqrt(8) / 10)
    assert allowed.of_gradient("a") == pytest.approx(5 * math.sqrt(8) / 10)
    assert allowed.loss_error == pytest.approx(math.sqrt(0.5))
