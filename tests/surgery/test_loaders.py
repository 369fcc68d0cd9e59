from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.utils.data
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from autotune.errors import WorkloadError
from autotune.surgery.loaders import (
    Counted,
    as_loader,
    batch_fixed_reason,
    counted,
    dataset_length,
    rebuilt,
    workers_fixed_reason,
)
from autotune.training.windows import MicroBatch, WindowLoader


def numbers(length: int = 10) -> TensorDataset:
    return TensorDataset(torch.arange(length))


class Sharded(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(0 if info is None else info.id, 10, 1 if info is None else info.num_workers))

    def __len__(self) -> int:
        raise AssertionError("an iterable data set's length must not be asked")


class ShardedByModule(IterableDataset[int]):
    """Finds the worker through the module, in the iteration itself."""

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        for number in range(10):
            if info is None or number % info.num_workers == info.id:
                yield number


class Unsharded(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class UnshardedAndShuffled(IterableDataset[torch.Tensor]):
    """The same samples in every worker, in the order of torch's generator."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.randperm(1000).float())


class UnshardedAndShuffledInPython(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(1000), 1000))


class UnshardedAndShuffledByWorker(IterableDataset[int]):
    """The same samples in every worker, in an order of the worker's seed."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        seed = 0 if info is None else info.seed
        return iter(random.Random(seed).sample(range(1000), 1000))


class ShuffledWhole(IterableDataset[int]):
    """All of the data from every worker, each in an order of its own."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(random.Random(None if info is None else info.id).sample(range(1000), 1000))


class EveryFourth(IterableDataset[int]):
    """Right for four workers alone."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(1000) if info is None else range(info.id, 1000, 4))


class DrawnAnew(IterableDataset[float]):
    """As many from each worker as from one process, and no sample twice."""

    def __iter__(self) -> Iterator[float]:
        info = get_worker_info()
        generator = random.Random(None if info is None else info.id)
        return (generator.random() for _ in range(1000))


class Rounded(IterableDataset[int]):
    """Workers leave out what is not a whole part of theirs."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(1001) if info is None else range(info.id, 1000 - 1000 % info.num_workers, info.num_workers))


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return itertools.count() if info is None else itertools.count(info.id, info.num_workers)


class BrokenLater(IterableDataset[int]):
    """A sample that cannot be read is for a trial to come upon."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        yield from range(10) if info is None else range(info.id, 10, info.num_workers)
        raise ValueError("a broken file")


class ShardedFromOutside(IterableDataset[int]):
    """As in torch's documentation: `worker_init_fn` gives each worker's copy its part."""

    def __init__(self) -> None:
        self.start, self.step = 0, 1

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, 10, self.step))


def shard(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.start, info.dataset.step = worker_id, info.num_workers


def shuffle_by_worker(worker_id: int) -> None:
    random.seed(worker_id)


class MainProcessOnly(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        if get_worker_info() is not None:
            raise RuntimeError("the handle is the main process's")
        return iter(range(10))


class OwnLoader(DataLoader[Any]):
    pass


class TakesBatchesApart(DataLoader[Any]):
    def __iter__(self) -> Any:
        for inputs, targets in super().__iter__():
            yield inputs * 2, targets


class OwnSampler(BatchSampler):
    pass


# --- what data_fn returns ---


def test_a_loader_is_taken_as_it_is_and_its_batch_is_the_users_choice() -> None:
    loader = DataLoader(numbers(), batch_size=3)
    assert as_loader(loader) == (loader, True)


@pytest.mark.parametrize(("length", "batch_size"), [(10, 10), (100, 32)])
def test_a_bare_data_set_is_shuffled_in_batches_of_at_most_32(length: int, batch_size: int) -> None:
    loader, held = as_loader(numbers(length))
    assert (loader.batch_size, held) == (batch_size, False)
    assert isinstance(loader.sampler, RandomSampler)


def test_a_list_of_samples_is_a_data_set_too() -> None:
    loader, held = as_loader([(torch.zeros(2), 1)] * 5)
    assert (loader.batch_size, held) == (5, False)


def test_a_bare_iterable_data_set_comes_in_batches_of_32() -> None:
    loader, held = as_loader(Sharded())
    assert (loader.batch_size, held) == (32, False)


def generator() -> Iterator[int]:
    yield 1


class InALoop:
    """Batches in a loop, and no more."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (numbers(0), "data_fn returned an empty data set; there is nothing to train on"),
        ([], "data_fn returned an empty data set; there is nothing to train on"),
        (DataLoader(numbers(0)), "data_fn returned a loader over an empty data set; there is nothing to train on"),
        (
            DataLoader(numbers(40), batch_size=64, drop_last=True),
            "gives no batch at all: 40 samples, batch 64, drop_last: no batch. Use a batch of at most 40, or drop_last=F",
        ),
        (
            generator(),
            "data_fn returned a generator, which can be read only once; return a Dataset, an IterableDataset",
        ),
        (generator, "data_fn returned a generator, which can be read only once"),
        (None, "data_fn returned NoneType; it must return a Dataset, an IterableDataset or a DataLoader"),
        ((1, 2).__iter__(), "data_fn returned tuple_iterator, which can only be iterated; it must return a Dataset"),
        (zip([1], [2], strict=True), "data_fn returned zip, which can only be iterated; it must return a Dataset"),
        (InALoop(), "data_fn returned InALoop, which can only be iterated; it must return a Dataset"),
        (
            {"train": numbers(4)},
            "data_fn returned dict; it must return a Dataset, an IterableDataset or a DataLoader, the",
        ),
    ],
)
def test_what_gives_no_batches_is_an_error(data: Any, text: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        as_loader(data)
    assert text in str(caught.value)


def test_a_batch_of_more_than_all_samples_is_fine_without_drop_last() -> None:
    loader = DataLoader(numbers(40), batch_size=64)
    assert as_loader(loader)[0] is loader


@pytest.mark.parametrize(
    ("loader", "length"),
    [
        (DataLoader(numbers(10), batch_size=3), 10),
        (DataLoader(numbers(10), batch_size=3, sampler=WeightedRandomSampler([1.0] * 10, 7)), 7),
        (DataLoader(numbers(10), batch_size=None), 10),
        (DataLoader(numbers(10), batch_sampler=BatchSampler(SequentialSampler(range(4)), 2, True)), 4),
        (DataLoader(Sharded(), batch_size=3), None),
    ],
)
def test_the_length_is_that_of_a_pass(loader: DataLoader[Any], length: int | None) -> None:
    assert dataset_length(loader) == length


# --- what can be changed ---


def test_why_a_batch_size_is_fixed() -> None:
    assert batch_fixed_reason(DataLoader(numbers(), batch_size=3)) is None
    assert batch_fixed_reason(DataLoader(Sharded(), batch_size=3)) is None
    own = DataLoader(numbers(), batch_sampler=OwnSampler(SequentialSampler(numbers()), 2, False))
    assert batch_fixed_reason(own) == "the loader has a batch_sampler of its own (OwnSampler)"
    assert batch_fixed_reason(DataLoader(numbers(), batch_sampler=[[0, 1], [2]])) == (
        "the loader has a batch_sampler of its own (list)"
    )
    plain = DataLoader(numbers(), batch_sampler=BatchSampler(SequentialSampler(numbers()), 2, False))
    assert batch_fixed_reason(plain) == (
        "the loader has a batch_sampler of its own (BatchSampler); give the DataLoader its sampler, batch_size and "
        "drop_last instead"
    )
    assert batch_fixed_reason(DataLoader(numbers(), batch_size=None)) == (
        "the loader has batch_size=None: the data set makes the batches"
    )
    assert batch_fixed_reason(OwnLoader(numbers())) == (
        "data_fn returns OwnLoader, a subclass of DataLoader, which is used as it is"
    )


UNSHARDED = (
    "workers that are seeded alike get the same samples from the IterableDataset: split it by "
    "torch.utils.data.get_worker_info(), or seed by its id, in __iter__, what is drawn at random"
)
A_PASS = (
    "one pass over the IterableDataset is 1,000 samples in one process and {} in two workers: in __iter__, give each its "
    "part by the id and num_workers of torch.utils.data.get_worker_info()"
)


@pytest.mark.parametrize(
    ("dataset_class", "reason"),
    [
        (Sharded, None),
        (ShardedByModule, None),
        (Unsharded, UNSHARDED),
        (UnshardedAndShuffled, UNSHARDED),
        (UnshardedAndShuffledInPython, UNSHARDED),
        (UnshardedAndShuffledByWorker, UNSHARDED),
        (ShuffledWhole, A_PASS.format("2,000")),
        (EveryFourth, A_PASS.format("500")),
        (DrawnAnew, None),
        (Rounded, None),
        (Endless, None),
        (BrokenLater, None),
    ],
)
def test_workers_are_offered_only_where_sharding_was_seen(dataset_class: Any, reason: str | None) -> None:
    loader = DataLoader(dataset_class(), batch_size=2)
    assert workers_fixed_reason(loader, (dataset_class(), dataset_class())) == reason
    assert get_worker_info() is None


def test_what_worker_init_fn_does_to_the_data_set_counts() -> None:
    def reason(dataset_class: Any, worker_init_fn: Any) -> str | None:
        loader = DataLoader(dataset_class(), worker_init_fn=worker_init_fn)
        return workers_fixed_reason(loader, (dataset_class(), dataset_class()))

    assert reason(ShardedFromOutside, None) == UNSHARDED
    assert reason(ShardedFromOutside, shard) is None
    assert reason(UnshardedAndShuffledInPython, shuffle_by_worker) == UNSHARDED
    loader = rebuilt(DataLoader(ShardedFromOutside(), batch_size=2, worker_init_fn=shard), {"num_workers": 2})
    assert sorted(value for batch in loader for value in batch.tolist()) == list(range(10))


def test_a_stream_that_fails_in_a_worker_gets_none() -> None:
    reason = workers_fixed_reason(DataLoader(MainProcessOnly()), (MainProcessOnly(), MainProcessOnly()))
    assert reason == ("the IterableDataset does not run in a worker (RuntimeError: the handle is the main process's)")
    assert get_worker_info() is None


def test_workers_of_a_data_set_with_indices_can_be_changed_and_a_subclass_cannot() -> None:
    assert workers_fixed_reason(DataLoader(numbers()), None) is None
    reason = "data_fn returns OwnLoader, a subclass of DataLoader, which is used as it is"
    assert workers_fixed_reason(OwnLoader(numbers()), None) == reason


# --- rebuilding ---


def collate(rows: list[Any]) -> torch.Tensor:
    return torch.stack([row[0] for row in rows])


def start_worker(worker_id: int) -> None:
    torch.manual_seed(worker_id)


def test_where_nothing_differs_the_loader_is_the_users_own() -> None:
    loader = DataLoader(numbers(), batch_size=3)
    assert rebuilt(loader, {"batch_size": 3, "num_workers": 0}) is loader


def test_everything_but_the_change_stays() -> None:
    generator = torch.Generator().manual_seed(1)
    loader = DataLoader(
        numbers(),
        batch_size=3,
        sampler=RandomSampler(numbers(), generator=generator),
        num_workers=1,
        collate_fn=collate,
        drop_last=True,
        timeout=7,
        worker_init_fn=start_worker,
        multiprocessing_context="fork",
        generator=generator,
        prefetch_factor=5,
        persistent_workers=True,
        in_order=False,
    )
    changed = rebuilt(loader, {"batch_size": 4, "num_workers": 2})
    assert (changed.batch_size, changed.num_workers) == (4, 2)
    for attribute in (
        "dataset", "sampler", "collate_fn", "drop_last", "timeout", "worker_init_fn", "generator", "prefetch_factor",
        "persistent_workers", "pin_memory", "in_order",
    ):  # fmt: skip
        assert getattr(changed, attribute) == getattr(loader, attribute), attribute
    assert changed.multiprocessing_context.get_start_method() == "fork"


def test_without_workers_what_only_workers_have_is_left_out() -> None:
    loader = DataLoader(numbers(), batch_size=2, num_workers=2, timeout=7, prefetch_factor=5, persistent_workers=True)
    changed = rebuilt(loader, {"num_workers": 0})
    assert [batch[0].tolist() for batch in changed] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert (changed.timeout, changed.prefetch_factor, changed.persistent_workers) == (0, None, False)


def test_a_shuffled_loader_stays_shuffled_from_the_same_seed() -> None:
    def order(batch_size: int) -> list[int]:
        loader = DataLoader(numbers(), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(3))
        return [int(value) for batch in rebuilt(loader, {"batch_size": batch_size}) for value in batch[0]]

    assert order(5) == order(2) != list(range(10))


def test_an_iterable_data_set_can_have_another_batch_and_workers() -> None:
    changed = rebuilt(DataLoader(Sharded(), batch_size=2), {"batch_size": 3, "num_workers": 2})
    assert sorted(value for batch in changed for value in batch.tolist()) == list(range(10))
    assert changed.batch_size == 3


def test_where_the_batch_is_fixed_the_workers_can_change_all_the_same() -> None:
    own = DataLoader(numbers(), batch_sampler=[[0, 1, 2], [3]])
    ready = DataLoader([torch.zeros(2), torch.ones(3)], batch_size=None)
    for loader in (own, ready):
        changed = rebuilt(loader, {"batch_size": 7, "num_workers": 1})
        assert changed.num_workers == 1
        assert rebuilt(loader, {"batch_size": 7, "num_workers": 0}) is loader
    assert [batch[0].tolist() for batch in rebuilt(own, {"num_workers": 1})] == [[0, 1, 2], [3]]
    plain = DataLoader(numbers(), batch_sampler=BatchSampler(SequentialSampler(range(5)), 2, True))
    assert [batch[0].tolist() for batch in rebuilt(plain, {"batch_size": 7, "num_workers": 1})] == [[0, 1], [2, 3]]
    assert [len(batch) for batch in rebuilt(ready, {"num_workers": 1})] == [2, 3]


# --- counting ---


def test_counted_keeps_the_loader_and_wraps_its_collate_once() -> None:
    loader = DataLoader(numbers(5), batch_size=2, collate_fn=collate)
    assert counted(counted(loader)) is loader
    batches = list(loader)
    assert all(isinstance(batch, Counted) for batch in batches)
    assert [batch.samples for batch in batches] == [2, 2, 1]
    assert batches[0].data.tolist() == [0, 1]


def test_a_subclass_is_used_as_it_is_whatever_is_asked_of_it() -> None:
    """As a parity check does, which reads batches without workers."""
    loader = TakesBatchesApart(numbers(), batch_size=2, num_workers=1)
    assert rebuilt(loader, {"num_workers": 0}) is loader


def test_a_subclass_that_takes_batches_apart_finds_its_own() -> None:
    loader = TakesBatchesApart(TensorDataset(torch.ones(5, 2), torch.arange(5)), batch_size=2)
    for _ in range(2):
        batches = [MicroBatch(*micro_batch) for window in WindowLoader(counted(loader), 1) for micro_batch in window]
        assert [batch.samples for batch in batches] == [2, 2, 1]
        assert batches[0].data[0].tolist() == [[2.0, 2.0], [2.0, 2.0]]


def test_counted_after_rebuilding_counts_once() -> None:
    changed = counted(rebuilt(counted(DataLoader(numbers(5), batch_size=2)), {"batch_size": 3}))
    assert [(batch.samples, len(batch.data[0])) for batch in changed] == [(3, 3), (2, 2)]


class Ready(Dataset[Any]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.zeros(index + 3, 2)}


def test_ready_batches_are_counted_by_their_first_dimension() -> None:
    assert [batch.samples for batch in counted(DataLoader(Ready(), batch_size=None))] == [3, 4]


@pytest.mark.parametrize(
    "form",
    [
        lambda rows: rows,
        lambda rows: (rows, rows, rows),
        lambda rows: [rows, rows, rows.tolist()],
        lambda rows: {"x": rows, "y": rows, "z": rows},
        lambda rows: [(row, row) for row in rows],
        lambda rows: tuple((row, row) for row in rows),
    ],
    ids=["a tensor", "columns", "a list of columns", "named columns", "a list of samples", "a tuple of samples"],
)
def test_a_data_set_that_takes_whole_lists_of_indices_is_counted_by_what_it_gives(form: Any) -> None:
    class AtOnce(TensorDataset):
        def __getitems__(self, indices: list[int]) -> Any:
            return form(torch.tensor(indices))

    loader = DataLoader(AtOnce(torch.arange(5)), batch_size=2, collate_fn=lambda batch: batch)
    assert [batch.samples for batch in counted(loader)] == [2, 2, 1]


@pytest.mark.parametrize("what", [lambda: 1, torch.ones(1, requires_grad=True) * 2], ids=["a function", "a graph"])
def test_a_batch_that_a_worker_cannot_send_is_told_instead_of_waited_for(what: Any) -> None:
    def collate(samples: list[Any]) -> Any:
        return {"x": torch.stack([sample for (sample,) in samples]), "what": what}

    loader = DataLoader(numbers(), batch_size=2, collate_fn=collate, num_workers=1)
    with pytest.raises(
        TypeError, match=r"a batch cannot be sent from a loader worker \(.*(pickle|detached).*; leave out"
    ):
        next(iter(counted(loader)))
    assert len(list(counted(DataLoader(numbers(), batch_size=2, collate_fn=collate)))) == 5
