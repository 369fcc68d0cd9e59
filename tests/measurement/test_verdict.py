from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from autotune.measurement.gradients import compare
from autotune.measurement.runs import Mean, Means, Run
from autotune.measurement.verdict import Allowance, accumulation_advice, allowance, averaged, fault, widened


def run(**gradients: list[float] | None) -> Run:
    """A run with these gradients and nothing else to blame."""
    return Run(
        gradients={name: None if value is None else torch.tensor(value) for name, value in gradients.items()},
        buffers={"mean": torch.tensor([1.0])},
        losses=[1.0, 0.9, 0.8],
        moved=1.0,
        skipped_all=False,
        drew=frozenset(),
    )


REFERENCE = run(a=[10.0, 0.0], b=[1.0])
STRICT = allowance(REFERENCE, [], [], [])


def test_without_any_floor_a_thousandth_is_allowed_and_a_hundredth_of_a_tensor() -> None:
    assert STRICT.tolerance == 1e-3
    assert STRICT.of_gradient("b") == 1e-2
    assert STRICT.of_buffer("mean") == 1e-2
    assert fault(REFERENCE, run(a=[10.005, 0.0], b=[1.0]), STRICT, 1) == ""
    assert fault(REFERENCE, run(a=[10.2, 0.0], b=[1.0]), STRICT, 1) == "gradients differ by 0.02, of 0.001 allowed"


def test_a_type_allows_some_units_of_its_rounding() -> None:
    assert allowance(REFERENCE, [], [], ["bfloat16"]).tolerance == pytest.approx(4 / 256)
    assert allowance(REFERENCE, [], [], ["tf32", "bfloat16"]).tolerance == pytest.approx(4 / 256)


def test_three_floors_are_allowed_and_no_floor_allows_a_gradient_that_is_gone() -> None:
    assert allowance(REFERENCE, [run(a=[10.0, 1.0], b=[1.0])], [], []).tolerance == pytest.approx(0.3, rel=0.01)
    assert allowance(REFERENCE, [run(a=[0.0, 9.0], b=[1.0])], [], []).tolerance == 0.9


def test_a_floor_that_is_not_finite_says_nothing() -> None:
    assert allowance(REFERENCE, [run(a=[math.nan, 0.0], b=[1.0])], [], []) == STRICT


def test_runs_with_rounded_outputs_count_for_single_tensors_only() -> None:
    allowed = allowance(REFERENCE, [], [run(a=[10.0, 0.0], b=[1.2])], [])
    assert allowed.tolerance == 1e-3
    assert allowed.of_gradient("b") == pytest.approx(1.0)
    assert allowed.of_gradient("a") == 1e-2


def test_buffers_are_never_allowed_what_updating_twice_does() -> None:
    other = replace(REFERENCE, buffers={"mean": torch.tensor([5.0])})
    assert allowance(REFERENCE, [other], [], []).of_buffer("mean") == 0.5


LOOSE = Allowance(0.3, {}, {}, 0.0, 0.9)


@pytest.mark.parametrize(
    ("candidate", "text"),
    [
        (
            replace(REFERENCE, skipped_all=True),
            "every one of 25 steps was skipped: the scaled gradients are never finite",
        ),
        (
            run(a=[10.0, 0.0], b=None),
            "b has a gradient in the user's program and none here: a part of the model is left",
        ),
        (run(a=[10.0, 0.0], b=[0.0]), "the gradient of b is next to nothing here and not in the user's program"),
        (run(a=[math.inf, 0.0], b=[1.0]), "the gradient of a is not finite"),
        (run(a=[10.0, 0.0], b=[4.0]), "the gradient of b differs by 3, of 1.5 allowed"),
        (replace(REFERENCE, losses=[math.nan, 1, 1]), "the loss of step 1 is nan here and 1 in the user's program"),
        (replace(REFERENCE, losses=[1.0, math.inf, 1]), "the loss of step 2 is inf here and 0.9 in the user's program"),
        (
            replace(REFERENCE, buffers={"mean": torch.tensor([1.9])}),
            "buffer mean differs by 0.9 after one step, such as an average updated twice",
        ),
        (
            replace(REFERENCE, moved=0.0),
            "3 steps move the parameters by 0 here and by 1 in the user's program",
        ),
        (replace(REFERENCE, moved=20.0), "3 steps move the parameters by 20 here and by 1 in the user's program"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(candidate: Run, text: str) -> None:
    assert fault(REFERENCE, REFERENCE, LOOSE, 1) == ""
    assert text in fault(REFERENCE, candidate, LOOSE, 1)


def test_the_advice_for_several_micro_batches_tells_a_sum_from_a_mean_over_tokens() -> None:
    a_sum = compare(REFERENCE.gradients, run(a=[40.0, 0.0], b=[4.0]).gradients)
    tokens = compare(REFERENCE.gradients, run(a=[10.0, 0.5], b=[1.1]).gradients)
    assert accumulation_advice(a_sum, 1) == ""
    assert "they point the same way with another length: the loss is a sum" in accumulation_advice(a_sum, 4)
    assert "a mean over tokens of ragged batches must return (loss_sum, weight)" in accumulation_advice(tokens, 4)


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
    for value in values:
        means.gradients.setdefault("a", Mean()).add(torch.tensor(value))
        means.buffers.setdefault("mean", Mean()).add(torch.tensor([1.0]))
    return means


def test_means_over_seeds_take_the_place_of_one_and_allow_what_they_spread() -> None:
    means = means_of([8.0, 0.0], [12.0, 0.0])
    replaced = averaged(run(a=[8.0, 0.0]), means)
    assert replaced.gradients["a"] is not None
    assert replaced.gradients["a"].tolist() == [10.0, 0.0]
    allowed = widened(STRICT, means)
    # Variance 8 of one seed, so 8 of the difference of two means over two.
    assert allowed.relative_error == pytest.approx(math.sqrt(8) / 10)
    assert allowed.of_gradient("a") == pytest.approx(5 * math.sqrt(8) / 10)
