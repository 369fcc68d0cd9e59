from __future__ import annotations

import pytest
import torch

from autotune.surgery.out_of_memory import is_out_of_memory


def test_a_cpu_that_has_no_memory_left_is_told_as_torch_tells_it() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


def test_the_class_for_a_devices_memory_is_known_and_other_errors_are_not_taken_for_it() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
