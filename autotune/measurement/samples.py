"""The samples that two runs are compared on: the same for both, however a step is split into micro-batches."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset

from autotune.failure import TrialFailure
from autotune.measurement.clock import endless
from autotune.measurement.measure import PhaseReport
from autotune.measurement.shared_files import stands_within_a_file
from autotune.surgery.batches import READ_ONCE, independent, kept, tensors
from autotune.surgery.generators import random_state, seed_everything
from autotune.surgery.loaders import (
    CountingCollate,
    batch_fixed_reason,
    counted,
    dataset_length,
    rebuilt,
    signature,
)
from autotune.training.training import Training
from autotune.training.windows import MicroBatch, Window, WindowLoader, samples_in

MOST_OWN_BATCHES = 64
"""That a larger batch is held against."""
SAMPLES_TO_COMPARE = 4
SAMPLES_TO_TELL_CHANCE = 64
"""Where few samples are changed at random, fewer may be the same by chance."""
DRAWS_TO_TELL_CHANCE = 8
"""Of one sample, which a coin may have turned or not; or of few, where there was no time for more."""
FINER_PIECES = 8
"""In so many parts, and none of them the same shares of whatever a loss weights by, but by a rare chance."""
SECONDS_TO_COMPARE = 0.5
"""Where loading one takes seconds, fewer are compared."""


class Drawn(NamedTuple):
    """Windows of the training's loader, and the same samples otherwise."""

    windows: list[Window]
    whole: list[Window] | None = None
    """Each window in one piece; None where the training does not split a step, or its loader cannot."""
    own_batches: Window | None = None
    """The first window, of one piece, in batches of the user's own size, of many the first, and the rest left out where no
    batch of theirs is shorter; None where that is no smaller, or the samples cannot be had one by one."""
    collate_keeps_count: bool = False
    """Whether the collate function gives another batch at every call, which a split makes more of."""
    finer: list[Window] | None = None
    """The windows, where they are split, cut into about `FINER_PIECES` or more, as far as they hold enough samples."""


def windows_for_both(training: Training, count: int) -> Drawn:
    """The first windows that the training's loader gives.

    Read in this process, so that no worker's seed matters. Samples are drawn once and collated anew for each form: drawn
    again, from another call of `data_fn` even, they may be others.
    """
    loader, pieces = training.loader.loader, training.parts.micro_batches_per_step
    own = training.own_batch_size or math.inf
    if (pieces == 1 and (loader.batch_size or 0) <= own) or batch_fixed_reason(loader) is not None:
        return Drawn(_drawn(rebuilt(loader, {"num_workers": 0}), pieces, count))
    drawn = _drawn(rebuilt(loader, {"num_workers": 0, "collate_fn": _as_drawn}), pieces, count)
    collate = _own_collate(loader)
    items = [item for window in drawn for item in window]
    if not all(isinstance(item.data, list) and len(item.data) == item.samples for item in items):
        windows = _collated(drawn, collate)
        if pieces == 1:
            return Drawn(windows)
        # A data set that takes many indices at once gives whole batches of a form of its own.
        size, finer_size = samples_in(drawn[0]), _finer_size(drawn[0], in_equal_parts=True)
        whole, finer = (rebuilt(loader, {"num_workers": 0, "batch_size": n}) for n in (size, finer_size))
        return Drawn(windows, whole=_drawn(whole, 1, count), finer=_drawn(finer, size // finer_size, count))
    if pieces > 1:
        both = _collated_both(drawn, [_in_one_piece(window) for window in drawn], collate)
        if both.finer is not None or both.collate_keeps_count:
            return both
        return both._replace(finer=_collated([_in_batches(window, _finer_size(window)) for window in drawn], collate))
    if samples_in(drawn[0]) <= own:
        return Drawn(_collated(drawn, collate))
    has_shorter = _has_shorter_batch(loader, int(own))
    parts = [part for part in _in_batches(drawn[0], int(own)) if has_shorter or part.samples == own]
    own_batches = parts[:MOST_OWN_BATCHES]
    both = _collated_both([own_batches], drawn[:1], collate)
    windows = [*(both.whole or []), *_collated(drawn[1:], collate)]
    return Drawn(windows, own_batches=None if both.collate_keeps_count else both.windows[0])


def check_workers(training: Training, phase: PhaseReport) -> None:
    """Raises `TrialFailure` where a data set gives other samples in a loader worker than in the training's own process.

    Only where the one takes the place of the other, and where samples are the same each time that they are drawn. A data
    set may give something else where a file that it opened, or a cache, is not there in the worker. Samples themselves
    stay where they are drawn: one that cannot be sent need not be, where the user's collate function leaves that out.

    And where workers would all repeat the same random samples.
    """
    loader = training.loader.loader
    replaced = (loader.num_workers > 0) != (training.own_num_workers > 0)
    if not replaced or batch_fixed_reason(loader) is not None or isinstance(loader.dataset, IterableDataset):
        return
    phase("loader")
    indices = list(itertools.islice(loader.sampler, SAMPLES_TO_COMPARE))
    here = _drawn_alone(loader, indices, 0, 1, SECONDS_TO_COMPARE)
    indices = indices[: len(here)]
    if here != _drawn_alone(loader, indices, 0, 2):
        _refuse_repeated_samples(loader)
        return  # they are drawn at random
    there = _drawn_alone(loader, indices, 1, 1)
    for index, one, other in zip(indices, here, there, strict=True):
        # Not by chance: a worker may draw from its own seed what is fixed without workers, and a coin may fall alike.
        if one != other and _is_always(loader, index, other, 1) and _is_always(loader, index, one, 0):
            raise TrialFailure(
                "numerics",
                f"the data set gives another sample {index} in a loader worker than without workers: it may depend on a "
                "file, a cache or a variable that is not there in the worker",
            )


def _refuse_repeated_samples(loader: DataLoader[Any]) -> None:
    """Raises `TrialFailure` where samples that are others each time without workers are the same from every worker.

    A generator that the data set owns goes into each worker as it is: all workers draw the same numbers from it, in every
    pass over the data anew. torch seeds its own, Python's and NumPy's generators in each; a `worker_init_fn` is the user's.
    """
    if loader.num_workers == 0 or loader.worker_init_fn is not None or stands_within_a_file():
        return
    indices = list(itertools.islice(loader.sampler, SAMPLES_TO_TELL_CHANCE))
    first = _drawn_alone(loader, indices, 1, 1, SECONDS_TO_COMPARE)
    # Beside a worker that is running, samples from a file whose position it shares are others each time.
    if stands_within_a_file():
        return
    further = 2 if len(first) == SAMPLES_TO_TELL_CHANCE else DRAWS_TO_TELL_CHANCE
    if all(_drawn_alone(loader, indices[: len(first)], 1, 2 + number) == first for number in range(further)):
        raise TrialFailure(
            "numerics",
            "the data set gives other samples each time that they are drawn, but the same from every loader worker and in "
            "every pass: it has a generator or a count of its own, of which each worker gets a copy; seed it in "
            "worker_init_fn, or draw from torch's generator",
        )


def _is_always(loader: DataLoader[Any], index: Any, sample: Any, workers: int) -> bool:
    drawn = _drawn_alone(loader, [index] * DRAWS_TO_TELL_CHANCE, workers, 2)
    return drawn == [sample] * DRAWS_TO_TELL_CHANCE


def _drawn_alone(
    loader: DataLoader[Any], indices: list[Any], workers: int, seed: int, limit_seconds: float = math.inf
) -> list[Any]:
    """The signatures of these samples: of the first at least, and of as many as there is time for."""
    changes = {"sampler": indices, "batch_size": 1, "drop_last": False, "collate_fn": signature}
    seed_everything(seed)
    begin, found = time.monotonic(), []
    for sample in rebuilt(loader, {**changes, "num_workers": workers}):
        found.append(sample)
        if time.monotonic() - begin > limit_seconds:
            break
    return found


def _drawn(loader: DataLoader[Any], pieces: int, count: int) -> list[Window]:
    seed_everything(1)
    source = endless(WindowLoader(counted(loader), pieces))
    return [next(source) for _ in range(count)]


def _own_collate(loader: DataLoader[Any]) -> Any:
    return loader.collate_fn.collate if isinstance(loader.collate_fn, CountingCollate) else loader.collate_fn


class _Replayed:
    """In place of a generator, which can be read once: copies of this are read apart from each other."""

    def __init__(self, source: Iterator[Any], read: list[Any], position: int = 0) -> None:
        self.source, self.read, self.position = source, read, position

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.position == len(self.read):
            self.read.append(next(self.source))
        self.position += 1
        return independent(self.read[self.position - 1])

    def __deepcopy__(self, memo: dict[int, Any]) -> Iterator[Any]:
        return _Replayed(self.source, self.read, self.position)


def _as_drawn(samples: Any) -> Any:
    """In place of a collate function."""
    return [_replayable(sample) for sample in samples] if type(samples) is list else samples


def _replayable(sample: Any) -> Any:
    if isinstance(sample, READ_ONCE):
        return _Replayed(sample, [])
    if type(sample) is tuple:
        return tuple(map(_replayable, sample))
    return {key: _replayable(part) for key, part in sample.items()} if type(sample) is dict else sample


def _in_one_piece(window: Window) -> Window:
    return [MicroBatch(samples_in(window), [sample for item in window for sample in item.data])]


def _has_shorter_batch(loader: DataLoader[Any], own: int) -> bool:
    """Whether a pass of the user's own may end in a batch of fewer samples, which their model then bears."""
    length = dataset_length(loader)
    return not loader.drop_last and (length is None or length % own > 0)


def _in_batches(window: Window, size: int) -> Window:
    samples = _in_one_piece(window)[0].data
    parts = [samples[start : start + size] for start in range(0, len(samples), size)]
    return [MicroBatch(len(part), part) for part in parts]


def _finer_size(window: Window, *, in_equal_parts: bool = False) -> int:
    """Of micro-batches no larger than the window's own. None holds a single sample unless these do: a variance that a loss
    may have a little of is not a number there."""
    samples = samples_in(window)
    smallest = min(window[0].samples, max(2, samples // FINER_PIECES))
    fits = (lambda size: samples % size == 0) if in_equal_parts else (lambda size: samples % size != 1)
    return next(filter(fits, itertools.count(smallest)))


def _collated(windows: list[Window], collate: Any) -> list[Window]:
    """With the user's collate function, from the same random numbers at each call of this."""
    seed_everything(1)
    return [[MicroBatch(item.samples, kept(collate(independent(item.data)))) for item in window] for window in windows]


def _collated_both(split: list[Window], whole: list[Window], collate: Any) -> Drawn:
    """Windows of micro-batches, and the same samples in one piece.

    What a collate function draws (mixup), it draws anew for each piece, so that they would differ without any fault. Then
    the whole is put together of the pieces, each drawn alike: a share that is the batch's is the same in all of them.
    """
    windows = _collated(split, collate)
    seed_everything(1)
    seeded = random_state()
    (first,) = _collated(whole[:1], collate)
    draws = random_state() != seeded
    in_one_piece = _collated(whole, collate)
    keeps_count = not _are_same(first[0].data, in_one_piece[0][0].data)
    if draws and samples_in(split[0]) == samples_in(whole[0]):
        alike = [[_collated([[item]], collate)[0][0] for item in window] for window in split]
        try:
            joined = [[_joined(window)] for window in alike]
            return Drawn(alike, joined, finer=alike)  # a count is the same in all, too
        except _NotJoinedError:  # padded to the longest of each, for instance
            pass
    return Drawn(windows, in_one_piece, collate_keeps_count=keeps_count)


class _NotJoinedError(Exception):
    """The batches do not add up to one."""


def _joined(window: Window) -> MicroBatch:
    return MicroBatch(
        samples_in(window), _joined_data([item.data for item in window], [item.samples for item in window])
    )


def _joined_data(parts: list[Any], samples: list[int]) -> Any:
    """What has a row for each sample, row after row; what is the same in all parts, once."""
    first = parts[0]
    if any(type(part) is not type(first) for part in parts):
        raise _NotJoinedError
    if isinstance(first, torch.Tensor):
        if [part.size(0) if part.dim() else 0 for part in parts] == samples and _fit(parts):
            return torch.cat(parts)
    elif isinstance(first, (tuple, list, dict)):
        try:
            return _joined_items(parts, samples)
        except _NotJoinedError:
            if type(first) is not list or list(map(len, parts)) != samples:
                raise
            return list(itertools.chain.from_iterable(parts))
    if not all(_are_same(part, first) for part in parts):
        raise _NotJoinedError
    return first


def _joined_items(parts: list[Any], samples: list[int]) -> Any:
    first = parts[0]
    keys = list(first) if isinstance(first, dict) else list(range(len(first)))
    if any((list(part) if isinstance(part, dict) else list(range(len(part)))) != keys for part in parts):
        raise _NotJoinedError
    items = [_joined_data([part[key] for part in parts], samples) for key in keys]
    if isinstance(first, dict):
        return type(first)(zip(keys, items, strict=True))
    return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)


def _fit(parts: list[torch.Tensor]) -> bool:
    return not any(part.is_nested for part in parts) and all(part.shape[1:] == parts[0].shape[1:] for part in parts)


def _are_same(one: Any, other: Any) -> bool:
    """By the values of all tensors, or of what has none."""
    pairs = list(itertools.zip_longest(tensors(one), tensors(other)))
    if not pairs:
        return bool(signature(one) == signature(other))
    return all(a is not None and b is not None and _are_equal(a, b) for a, b in pairs)


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.is_nested or other.is_nested:
        pairs = itertools.zip_longest(one.unbind(), other.unbind())
        return all(a is not None and b is not None and _are_equal(a, b) for a, b in pairs)
    if one.layout != other.layout or one.shape != other.shape:
        return False
    if one.layout != torch.strided:  # sparse, and too wide to be written out
        one, other = one.to_sparse().coalesce(), other.to_sparse().coalesce()
        return _are_equal(one.indices(), other.indices()) and _are_equal(one.values(), other.values())
    unlike = (one != other) & ((one == one) | (other == other))  # what is not a number counts as equal
    return not bool(unlike.any())
