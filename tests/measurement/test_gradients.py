from __future__ import annotations

import math

import pytest
import torch

from autotune.measurement.gradients import compare, compare_buffers, first_not_finite


def gradients(**values: list[float] | None) -> dict[str, torch.Tensor | None]:
    return {name: None if value is None else torch.tensor(value) for name, value in values.items()}


def test_equal_gradients_differ_by_nothing() -> None:
    found = compare(gradients(a=[1.0, 2.0], b=None), gradients(a=[1.0, 2.0], b=None))
    assert (found.relative_error, found.cosine, found.missing, found.vanished) == (0.0, pytest.approx(1.0), (), ())


def test_the_error_is_of_all_together_and_of_each() -> None:
    found = compare(gradients(a=[3.0], b=[4.0]), gradients(a=[3.0], b=[2.0]))
    assert found.relative_error == pytest.approx(2 / 5)
    assert found.errors == {"a": 0.0, "b": pytest.approx(0.5)}
    assert (found.worst_parameter, found.worst_error) == ("b", pytest.approx(0.5))


def test_another_length_has_a_cosine_of_one_and_another_sign_of_minus_one() -> None:
    assert compare(gradients(a=[1.0, 1.0]), gradients(a=[4.0, 4.0])).cosine == pytest.approx(1.0)
    assert compare(gradients(a=[1.0, 1.0]), gradients(a=[-1.0, -1.0])).cosine == pytest.approx(-1.0)


def test_a_gradient_that_is_gone_is_missing_however_small_it_was() -> None:
    reference = gradients(large=[1.0], small=[1e-9], nothing=[0.0])
    found = compare(reference, gradients(large=[1.0], small=None, nothing=None))
    assert found.missing == ("small",)
    assert "small" not in found.errors


def test_a_gradient_that_is_there_and_zero_has_vanished() -> None:
    found = compare(gradients(a=[1.0], b=[1.0], tiny=[1e-6]), gradients(a=[1.0], b=[0.05], tiny=[0.0]))
    assert found.vanished == ("b",)


def test_a_gradient_where_the_reference_has_none_counts_as_error() -> None:
    found = compare(gradients(a=[1.0], b=None), gradients(a=[1.0], b=[1.0]))
    assert found.relative_error == pytest.approx(1.0)


def test_tensors_with_next_to_no_gradient_are_left_out_of_the_single_errors() -> None:
    assert set(compare(gradients(a=[1.0], b=[1e-5]), gradients(a=[1.0], b=[1e-3])).errors) == {"a"}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_infinitely_far_and_named(value: float) -> None:
    found = compare(gradients(a=[1.0], b=[1.0]), gradients(a=[1.0], b=[value]))
    assert found.relative_error == math.inf
    assert found.worst_parameter == "b"


def test_nothing_against_nothing_is_no_difference() -> None:
    assert compare(gradients(a=None), gradients(a=None)).relative_error == 0.0
    assert compare(gradients(a=[0.0]), gradients(a=[2.0])).relative_error == pytest.approx(2.0)


def test_buffers_averages_are_relative_and_counters_all_or_nothing() -> None:
    reference = {"mean": torch.tensor([1.0, 0.0]), "count": torch.tensor(1)}
    assert compare_buffers(reference, {"mean": torch.tensor([1.5, 0.0]), "count": torch.tensor(2)}) == {
        "mean": pytest.approx(0.5),
        "count": 1.0,
    }


def test_buffers_equal_infinities_are_equal_and_others_are_not() -> None:
    reference = {"mask": torch.tensor([0.0, -math.inf, math.nan])}
    assert compare_buffers(reference, {"mask": reference["mask"].clone()}) == {"mask": 0.0}
    assert compare_buffers(reference, {"mask": torch.tensor([0.0, 0.0, math.nan])}) == {"mask": math.inf}


def test_a_tensor_of_millions_is_summed_without_loss() -> None:
    values = torch.rand(5_000_000, generator=torch.Generator().manual_seed(0)) * 1e-3
    values[:2_000_000] *= 1e3
    found = compare({"a": values}, {"a": values * 1.01})
    assert found.cosine == pytest.approx(1.0, abs=1e-6)
    assert found.relative_error == pytest.approx(0.01, rel=1e-4)


def test_gradients_are_told_apart_from_the_scale_that_they_are_multiplied_by() -> None:
    found = compare(gradients(a=[1.0, 2.0]), gradients(a=[1024.0, 3072.0]), 1024.0)
    assert found.relative_error == pytest.approx(1 / math.sqrt(5))


def test_sparse_complex_and_double_gradients_are_compared_as_what_they_stand_for() -> None:
    reference = {"a": torch.tensor([0.0, 2.0]), "b": torch.tensor([[3.0, 4.0]]), "c": torch.tensor([1.0])}
    candidate = {
        "a": torch.tensor([0.0, 2.0]).to_sparse(),
        "b": torch.tensor([3.0 + 5.0j]),
        "c": torch.tensor([1.0 + 1e-12], dtype=torch.float64),
    }
    found = compare({**reference}, {**candidate})
    assert found.errors == {"a": 0.0, "b": pytest.approx(0.2), "c": pytest.approx(1e-12, rel=0.01)}


def test_squares_beyond_what_fp32_holds_are_numbers_still() -> None:
    found = compare(gradients(a=[1e25], b=[1e-30]), gradients(a=[1e25], b=None))
    assert (found.relative_error, found.missing) == (pytest.approx(1e-55), ("b",))


def test_the_first_that_is_not_finite_is_named() -> None:
    empty = torch.zeros(0)
    for value in (math.nan, math.inf, -math.inf):
        assert first_not_finite({"e": empty, **gradients(a=[1.0], b=None, c=[1.0, value], d=[value])}) == "c"
    assert first_not_finite({"e": empty, **gradients(a=[1.0], b=None)}) is None


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_buffers_are_compared_as_they_are(layout: torch.layout) -> None:
    def diagonal(scale: float, size: int = 3) -> torch.Tensor:
        return (torch.eye(size) * scale).to_sparse(layout=layout)

    reference = {"a": diagonal(2.0)}
    assert compare_buffers(reference, {"a": diagonal(2.0)}) == {"a": 0.0}
    assert compare_buffers(reference, {"a": diagonal(3.0)}) == {"a": pytest.approx(0.5)}
    moved = diagonal(2.0).to_dense().roll(1, 0).to_sparse(layout=layout)
    assert compare_buffers(reference, {"a": moved}) == {"a": 1.0}
    assert compare_buffers(reference, {"a": diagonal(2.0, size=4)}) == {"a": 1.0}


def test_a_buffer_of_another_shape_is_another() -> None:
    assert compare_buffers({"a": torch.ones(2)}, {"a": torch.ones(8)}) == {"a": 1.0}
