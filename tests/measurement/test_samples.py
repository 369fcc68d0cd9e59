"""Whether two batches are the same, which tells a collate function that gives another one at every call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from autotune.measurement.samples import _are_same


@pytest.mark.parametrize("form", [torch.clone, torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_large_batches_are_the_same_where_every_value_is(form: Callable[[torch.Tensor], torch.Tensor]) -> None:
    one = torch.arange(1.0, 5001).unsqueeze(0)
    one[0, 7] = torch.nan
    other = one.clone()
    assert _are_same({"x": form(one)}, {"x": form(other)})
    other[0, 2500] = 0.5  # where what torch prints of it is left out
    assert not _are_same({"x": form(one)}, {"x": form(other)})
