from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler

from autotune.surgery.loaders import counted, rebuilt
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


class Stream(IterableDataset[torch.Tensor]):
    """Numbers, split over the workers."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return iter(torch.arange(first, 20, step))


class ReadyStream(Stream):
    """Batches of two numbers."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.stack([number, number + 100]) for number in super().__iter__())


class Pairs(DataLoader[Any]):
    def __iter__(self) -> Iterator[Any]:
        for (numbers,) in super().__iter__():
            yield numbers, numbers


NUMBERS = TensorDataset(torch.arange(20))


def replica() -> DataLoader[Any]:
    return DataLoader(NUMBERS, batch_size=3, sampler=DistributedSampler(NUMBERS, num_replicas=2, rank=1, shuffle=False))


LOADERS: dict[str, tuple[Callable[[], DataLoader[Any]], list[int]]] = {
    "shuffled": (lambda: DataLoader(NUMBERS, batch_size=3, shuffle=True), list(range(20))),
    "weighted": (
        lambda: DataLoader(
            NUMBERS, batch_size=3, sampler=WeightedRandomSampler([0.0] * 10 + [1.0] * 10, 10, replacement=False)
        ),
        list(range(10, 20)),
    ),
    "distributed": (replica, list(range(1, 20, 2))),
    "subset": (lambda: DataLoader(NUMBERS, batch_size=3, sampler=SubsetRandomSampler(range(7))), list(range(7))),
    "batch sampler": (lambda: DataLoader(NUMBERS, batch_sampler=[[0, 1, 2], [7]]), [0, 1, 2, 7]),
    "plain batch sampler": (
        lambda: DataLoader(NUMBERS, batch_sampler=BatchSampler(SubsetRandomSampler(range(6)), 4, False)),
        list(range(6)),
    ),
    "ready": (lambda: DataLoader(NUMBERS.tensors[0].view(5, 4), batch_size=None), list(range(20))),
    "stream": (lambda: DataLoader(Stream(), batch_size=3), list(range(20))),
    "ready stream": (lambda: DataLoader(ReadyStream(), batch_size=None), [*range(20), *range(100, 120)]),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", LOADERS)
def test_each_sample_comes_once_and_is_counted_once(name: str, workers: int) -> None:
    make, expected = LOADERS[name]
    windows = WindowLoader(counted(rebuilt(make(), {"batch_size": 3, "num_workers": workers})), 2)
    assert windows.loader.num_workers == workers
    for _ in range(1 if workers else 2):
        micro_batches = [micro_batch for window in windows for micro_batch in window]
        drawn = [_numbers(micro_batch.data) for micro_batch in micro_batches]
        assert [micro_batch.samples for micro_batch in micro_batches] == [len(numbers) for numbers in drawn]
        assert sorted(number for numbers in drawn for number in numbers) == expected


def _numbers(data: Any) -> list[int]:
    found: list[int] = (data if isinstance(data, torch.Tensor) else data[0]).tolist()
    return found


def test_a_batch_that_can_be_read_once_can_be_read_again() -> None:
    data = TensorDataset(torch.arange(4), torch.arange(4) + 10)
    loader = DataLoader(data, batch_size=2, collate_fn=lambda samples: map(torch.stack, zip(*samples, strict=True)))
    windows = list(WindowLoader(counted(loader), 1))
    for _ in range(2):
        assert [[part.tolist() for part in item.data] for (item,) in windows] == [
            [[0, 1], [10, 11]],
            [[2, 3], [12, 13]],
        ]
    assert [item.samples for (item,) in windows] == [2, 2]


class ReadOnce(IterableDataset[Any]):
    """Ready batches of three samples."""

    def __iter__(self) -> Iterator[Any]:
        return (map(torch.clone, (torch.ones(3, 2), torch.ones(3))) for _ in range(2))


class HandsOver(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter(self.dataset)


@pytest.mark.parametrize("loader_class", [DataLoader, HandsOver])
def test_a_ready_batch_that_can_be_read_once_is_counted_by_what_it_gives(loader_class: Any) -> None:
    windows = list(WindowLoader(counted(loader_class(ReadOnce(), batch_size=None)), 1))
    assert [item.samples for (item,) in windows] == [3, 3]
    assert windows[0][0].data[0].shape == (3, 2)


def test_a_subclass_with_a_way_of_its_own_is_counted_by_what_it_gives() -> None:
    windows = WindowLoader(counted(Pairs(NUMBERS, batch_size=8)), 1)
    assert [micro_batch.samples for window in windows for micro_batch in window] == [8, 8, 4]


def test_an_epoch_that_is_told_to_the_users_sampler_reaches_the_rebuilt_loader() -> None:
    sampler = DistributedSampler(NUMBERS, num_replicas=2, rank=0, seed=3)
    windows = WindowLoader(counted(rebuilt(DataLoader(NUMBERS, batch_size=2, sampler=sampler), {"batch_size": 5})), 1)
    orders = []
    for epoch in (0, 1):
        sampler.set_epoch(epoch)
        orders.append([number for window in windows for number in _numbers(window[0].data)])
    assert orders[0] != orders[1]
    assert windows.loader.sampler is sampler
