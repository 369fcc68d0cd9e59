from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from autotune.surgery.loaders import counted
from autotune.training.windows import WindowLoader


def windows_over(samples: int, batch_size: int, pieces: int, **options: Any) -> WindowLoader:
    loader = DataLoader(TensorDataset(torch.arange(samples)), batch_size=batch_size, **options)
    return WindowLoader(counted(loader), pieces)


@settings(max_examples=60, deadline=None)
@given(
    samples=st.integers(1, 60),
    batch_size=st.integers(1, 20),
    pieces=st.integers(1, 6),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
)
def test_windows_hold_every_sample_once_and_are_full_but_the_last(
    samples: int, batch_size: int, pieces: int, drop_last: bool, shuffle: bool
) -> None:
    loader = windows_over(samples, batch_size, pieces, drop_last=drop_last, shuffle=shuffle)
    windows = list(loader)
    drawn = [int(value) for window in windows for item in window for value in item.data[0]]
    assert len(drawn) == len(set(drawn))
    assert len(windows) == len(loader)
    for window in windows:
        assert [item.samples for item in window] == [len(item.data[0]) for item in window]
    full = [batch_size] * pieces
    assert all([item.samples for item in window] == full for window in windows[:-1])
    if drop_last:
        assert len(drawn) == samples // batch_size // pieces * batch_size * pieces
        assert all([item.samples for item in window] == full for window in windows)
    else:
        assert sorted(drawn) == list(range(samples))
        assert len(windows) == math.ceil(math.ceil(samples / batch_size) / pieces)


def test_each_pass_begins_anew() -> None:
    loader = windows_over(6, 2, 2)
    first, second = (
        [[item.data[0].tolist() for item in window] for window in passed] for passed in (list(loader), list(loader))
    )
    assert first == second == [[[0, 1], [2, 3]], [[4, 5]]]


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_change_neither_windows_nor_counts(workers: int) -> None:
    windows = list(windows_over(10, 2, 2, num_workers=workers))
    assert [[item.samples for item in window] for window in windows] == [[2, 2], [2, 2], [2]]
    assert [value for window in windows for item in window for value in item.data[0].tolist()] == list(range(10))


def test_samples_are_counted_where_they_are_collated_not_from_shapes() -> None:
    def packed(rows: list[Any]) -> torch.Tensor:
        return torch.cat([row[0].repeat(3) for row in rows])

    windows = list(windows_over(5, 2, 1, collate_fn=packed))
    assert [window[0].samples for window in windows] == [2, 2, 1]
    assert [len(window[0].data) for window in windows] == [6, 6, 3]
