"""A window: the micro-batches of one optimizer step, drawn from a loader."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset

from autotune.surgery.batches import independent, kept, leading_size
from autotune.surgery.loaders import Counted, batch_fixed_reason, counted, dataset_length, rebuilt


class MicroBatch(NamedTuple):
    """One batch of the loader and the number of samples drawn for it."""

    samples: int
    data: Any


Window = list[MicroBatch]


def samples_in(window: Window) -> int:
    """Of all its micro-batches."""
    return sum(micro_batch.samples for micro_batch in window)


def fresh(window: Window) -> Window:
    """A copy to train on, where the same window is wanted again: the user's loss may change its batch in place."""
    return [MicroBatch(micro_batch.samples, independent(micro_batch.data)) for micro_batch in window]


class WindowLoader:
    """Iterates over a loader in windows of `micro_batches_per_step` batches.

    The last window of a pass may be shorter; where the user drops incomplete batches, an incomplete window is dropped.
    `loader` is the DataLoader itself, whose batches arrive as `Counted`.
    """

    def __init__(self, loader: DataLoader[Any], micro_batches_per_step: int) -> None:
        self.loader = loader
        self.micro_batches_per_step = micro_batches_per_step

    def __iter__(self) -> Iterator[Window]:
        window: Window = []
        for item in self.loader:
            if isinstance(item, Counted):
                window.append(MicroBatch(item.samples, kept(item.data)))
            else:  # a subclass that makes its batches itself
                data = kept(item)
                window.append(MicroBatch(leading_size(data), data))
            if len(window) == self.micro_batches_per_step:
                yield window
                window = []
        if window and not self.loader.drop_last:
            yield window

    def most_prefetched(self) -> int:
        """Windows that workers may have loaded before they were asked for, the one in the making included."""
        return self.loader.num_workers * (self.loader.prefetch_factor or 0) // self.micro_batches_per_step + 1

    def last_window(self) -> Window | None:
        """A window as short as the last of a pass; None where every window is full, or where that cannot be known.

        Its samples are those that the sampler draws first.
        """
        loader = self.loader
        if loader.drop_last or isinstance(loader.dataset, IterableDataset) or batch_fixed_reason(loader) is not None:
            return None
        length, batch_size = dataset_length(loader), loader.batch_size
        if length is None or batch_size is None or length % (batch_size * self.micro_batches_per_step) == 0:
            return None
        full, left = divmod(length % (batch_size * self.micro_batches_per_step), batch_size)
        window = next(iter(self))[:full]
        if left:
            window += next(iter(WindowLoader(counted(rebuilt(loader, {"batch_size": left})), 1)))
        return window

    def __len__(self) -> int:
        """Windows in one pass. Raises TypeError where the loader has no length."""
        batches = len(self.loader)
        if self.loader.drop_last:
            return batches // self.micro_batches_per_step
        return math.ceil(batches / self.micro_batches_per_step)

    def steps_in_pass(self) -> int | None:
        """Windows in one pass, or None where that is not known; never calls len() of an IterableDataset."""
        if isinstance(self.loader.dataset, IterableDataset):
            return None
        try:
            return len(self)
        except TypeError:  # a sampler without a length
            return None
