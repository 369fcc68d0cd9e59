"""The user's loader: what can be changed in it, and a loader like it with some arguments changed."""

from __future__ import annotations

import hashlib
import inspect
import io
import pickle
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as _worker_module

from autotune.errors import WorkloadError
from autotune.surgery.batches import kept, leading_size, tensors
from autotune.surgery.generators import seed_everything

DEFAULT_BATCH_SIZE = 32
"""For a bare data set, as many as that or as it has."""

DEFAULT_PREFETCH_FACTOR = 2
"""DataLoader's own, where it has workers."""

START = 4
"""So many samples tell whether two workers begin alike."""
SECONDS_TO_READ = 0.5
"""A stream is read to its end where that takes no longer."""
LARGEST_UNLIKE_SHARE = 0.1
"""Of a pass: workers may round their parts, or leave samples out at random."""

_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]+")
_WORKER_ONLY = ("prefetch_factor", "timeout", "multiprocessing_context", "persistent_workers")


class Counted(NamedTuple):
    """A collated batch and how many samples went into it.

    A named tuple, because the loader's own pinning passes through it.
    """

    samples: int
    data: Any


class CountingCollate:
    """The user's collate function; counts the samples that it was given.

    `sizes`: of the batches, where the data set is asked for one at a time (`__getitems__`) and may give its columns.
    """

    def __init__(self, collate: Any, batched: bool, sizes: frozenset[int]) -> None:
        self.collate = collate
        self.batched = batched
        self.sizes = sizes
        self.was_sent = False

    def __call__(self, drawn: Any) -> Counted:
        data = self.collate(drawn)
        if not self.was_sent and get_worker_info() is not None:
            _check_is_sent(data)
            self.was_sent = True
        if not self.batched:
            data = kept(data)  # or counting would read it
            return Counted(leading_size(data), data)
        return Counted(self._drawn_samples(drawn, data), data)

    def _drawn_samples(self, drawn: Any, data: Any) -> int:
        """Samples in what the collate function was given. Not the length of columns side by side."""
        is_columns = isinstance(drawn, tuple) and all(hasattr(column, "shape") for column in drawn)
        if is_columns or isinstance(drawn, Mapping):
            return leading_size(drawn)
        if not hasattr(drawn, "__len__"):
            return leading_size(data)
        if isinstance(drawn, list) and self.sizes and len(drawn) not in self.sizes:
            lengths = {_length(column) for column in drawn}
            if len(lengths) == 1 and lengths <= self.sizes:
                return lengths.pop()
        return len(drawn)


def _check_is_sent(data: Any) -> None:
    """A worker that cannot send its batches says so on its standard error alone, and is waited for without end."""
    try:
        _Sender(io.BytesIO()).dump(data)
    except Exception as error:  # whatever pickling raises for objects of the user's
        raise TypeError(
            f"a batch cannot be sent from a loader worker ({type(error).__name__}: {error}); leave out of it what cannot be "
            "pickled, or use num_workers=0"
        ) from None


class _Sender(ForkingPickler):
    """As between processes, but for the tensors, which go another way."""

    def persistent_id(self, item: Any) -> str | None:
        if not isinstance(item, torch.Tensor):
            return None
        if not item.is_leaf:
            raise ValueError("a tensor is not detached from what it was computed from")
        return ""


def _length(column: Any) -> int:
    shape = getattr(column, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else 0
    return len(column) if isinstance(column, (list, tuple)) else 0


def as_loader(data: Any) -> tuple[DataLoader[Any], bool]:
    """What `data_fn` returned as a loader, and whether the user chose its batch size.

    Raises `WorkloadError` for anything but a Dataset, an IterableDataset or a DataLoader, and for one without data.
    """
    if isinstance(data, DataLoader):
        _refuse_without_batches(data)
        return data, True
    if isinstance(data, type):
        raise WorkloadError(f"data_fn returned the class {data.__name__}; it must return an object of it: call it")
    if isinstance(data, IterableDataset):
        return DataLoader(data, batch_size=DEFAULT_BATCH_SIZE), False
    if isinstance(data, Dataset) or _holds_samples(data):
        length = len(data)
        if length == 0:
            raise WorkloadError("data_fn returned an empty data set; there is nothing to train on")
        return DataLoader(data, batch_size=min(DEFAULT_BATCH_SIZE, length), shuffle=True), False
    if inspect.isgenerator(data) or inspect.isgeneratorfunction(data):
        raise WorkloadError(
            "data_fn returned a generator, which can be read only once; return a Dataset, an IterableDataset or a "
            "DataLoader. To keep the generator, put its body into `class Data(IterableDataset)` as `def __iter__(self)` "
            "and return `DataLoader(Data(), batch_size=None)` if it yields ready batches"
        )
    what = type(data).__name__
    if _is_stream(data):
        raise WorkloadError(
            f"data_fn returned {what}, which can only be iterated; it must return a Dataset, an IterableDataset or a "
            "DataLoader. Put the iteration into `class Data(IterableDataset)` as `def __iter__(self)`, begun anew at each "
            "call, and return `DataLoader(Data(), batch_size=None)` if it yields ready batches"
        )
    if isinstance(data, (tuple, list)):
        what = f"a {what} of {len(data)} ({', '.join(type(item).__name__ for item in data[:4])})"
    which = ", the one to train on" if isinstance(data, (tuple, list, Mapping)) else ""
    raise WorkloadError(f"data_fn returned {what}; it must return a Dataset, an IterableDataset or a DataLoader{which}")


def _is_stream(data: Any) -> bool:
    """Whether something that cannot be used by index gives samples or batches in a loop: `zip` of two loaders, a loader of
    the user's own class."""
    return isinstance(data, Iterable) and not isinstance(data, (tuple, list, set, Mapping, str, bytes))


def _holds_samples(data: Any) -> bool:
    """Whether something that is no Dataset can be used as one: a list of samples, an array, a class of the user's own.

    Several loaders or data sets in a container are not meant to be batched, nor are texts.
    """
    if isinstance(data, (tuple, Mapping, str, bytes)) or not (
        hasattr(data, "__getitem__") and hasattr(data, "__len__")
    ):
        return False
    return not (isinstance(data, list) and any(isinstance(item, (DataLoader, Dataset)) for item in data))


def _refuse_without_batches(loader: DataLoader[Any]) -> None:
    if isinstance(loader.dataset, IterableDataset):
        return
    length = dataset_length(loader)
    if length == 0:
        raise WorkloadError("data_fn returned a loader over an empty data set; there is nothing to train on")
    if length is not None and loader.batch_size and loader.drop_last and length < loader.batch_size:
        raise WorkloadError(
            f"data_fn's loader gives no batch at all: {length} samples, batch {loader.batch_size}, drop_last: no batch. "
            f"Use a batch of at most {length}, or drop_last=False"
        )


def dataset_length(loader: DataLoader[Any]) -> int | None:
    """Samples in one pass, or None where that is not known; never calls len() of an IterableDataset."""
    if isinstance(loader.dataset, IterableDataset):
        return None
    try:
        if isinstance(loader.batch_sampler, BatchSampler):
            return len(loader.batch_sampler.sampler)  # type: ignore[arg-type]
        return len(loader.dataset)  # type: ignore[arg-type]
    except TypeError:
        return None


def batch_fixed_reason(loader: DataLoader[Any]) -> str | None:
    """Why the batch size cannot be changed, or None."""
    if type(loader) is not DataLoader:
        return f"data_fn returns {type(loader).__name__}, a subclass of DataLoader, which is used as it is"
    if loader.batch_size is None and loader.batch_sampler is None:
        return "the loader has batch_size=None: the data set makes the batches"
    if loader.batch_size is None:
        reason = f"the loader has a batch_sampler of its own ({type(loader.batch_sampler).__name__})"
        plain = "; give the DataLoader its sampler, batch_size and drop_last instead"
        return reason + plain if type(loader.batch_sampler) is BatchSampler else reason
    return None


def workers_fixed_reason(loader: DataLoader[Any], fresh_datasets: tuple[Any, Any] | None) -> str | None:
    """Why the number of workers cannot be changed, or None.

    `fresh_datasets`: for an IterableDataset, two fresh copies of it to look whether it shards.
    """
    if type(loader) is not DataLoader:
        return f"data_fn returns {type(loader).__name__}, a subclass of DataLoader, which is used as it is"
    if fresh_datasets is None:
        return None
    try:
        whole = _read(loader.dataset, time.monotonic() + SECONDS_TO_READ)
        first, second = _parts(fresh_datasets, loader.worker_init_fn, START if whole is None else len(whole))
    except Exception as error:  # whatever the user's data set or worker_init_fn raises in a worker, and only there
        return f"the IterableDataset does not run in a worker ({type(error).__name__}: {error})"
    if first[:START] == second[:START]:
        return (
            "workers that are seeded alike get the same samples from the IterableDataset: split it by "
            "torch.utils.data.get_worker_info(), or seed by its id, in __iter__, what is drawn at random"
        )
    together = len(first) + len(second)
    if whole is None or abs(together - len(whole)) <= max(2, LARGEST_UNLIKE_SHARE * len(whole)):
        return None
    in_both = (Counter(first) & Counter(second)).total()
    if together < len(whole) or in_both > LARGEST_UNLIKE_SHARE * len(whole):
        return (
            f"one pass over the IterableDataset is {len(whole):,} samples in one process and {together:,} in two workers: "
            "in __iter__, give each its part by the id and num_workers of torch.utils.data.get_worker_info()"
        )
    return None  # each worker draws as many as one process does, and others


def _read(dataset: Any, deadline: float) -> list[Any] | None:
    """All samples' signatures; None where reading them takes longer, has no end, or fails."""
    seed_everything(0)
    found = []
    try:
        for sample in dataset:
            found.append(signature(sample))
            if time.monotonic() > deadline:
                return None
    except Exception:  # whatever the user's data set raises at a sample that a trial is yet to come to
        return None
    return found


def _parts(datasets: tuple[Any, Any], worker_init_fn: Callable[[int], Any] | None, most: int) -> list[list[Any]]:
    """The signatures of the samples that two workers of an iterable data set give, up to so many of each.

    Sets torch's own worker information in this process, which is what `get_worker_info()` reads, however imported; what
    `worker_init_fn` does is done here too.
    """
    found = []
    saved = get_worker_info()
    try:
        for worker_id, dataset in enumerate(datasets):
            # The same seed in both, and set again after what may set another: a shuffle must not pass for sharding.
            _worker_module._worker_info = _worker_module.WorkerInfo(
                id=worker_id, num_workers=2, seed=0, dataset=dataset
            )
            seed_everything(0)
            if worker_init_fn is not None:
                worker_init_fn(worker_id)
                seed_everything(0)
            iterator = iter(dataset)
            found.append([signature(sample) for sample, _ in zip(iterator, range(most), strict=False)])
    finally:
        _worker_module._worker_info = saved
    return found


def signature(sample: Any) -> Any:
    """What tells a sample from others: the first values of its tensors or, where it has none, how it is shown.

    Text, the same for equal samples in any process: what is not a number counts as equal to itself.
    """
    found = tuple(_values(tensor.detach()) for tensor in tensors(sample))
    return found or _shown(sample)


def _values(tensor: torch.Tensor) -> str:
    plain = tensor.layout == torch.strided and not tensor.is_nested
    return repr(tensor.flatten()[:64].tolist() if plain else tensor)


def _shown(sample: Any) -> str:
    """Where that tells only where an object lies, a digest of what it holds."""
    try:
        text = repr(sample)
        return _digest(sample) if _ADDRESS.search(text) else text
    except Exception:  # whatever objects of the user's raise that can be neither shown nor pickled
        return type(sample).__name__


class _Pickler(pickle.Pickler):
    """Of tensors takes their values: as torch pickles them they tell where they lie."""

    def persistent_id(self, item: Any) -> str | None:
        return _values(item.detach()) if isinstance(item, torch.Tensor) else None


def _digest(sample: Any) -> str:
    pickled = io.BytesIO()
    _Pickler(pickled).dump(sample)
    return hashlib.sha256(pickled.getvalue()).hexdigest()


def counted(loader: DataLoader[Any]) -> DataLoader[Any]:
    """The same loader object, whose batches now arrive as `Counted`.

    Those of a subclass that iterates in a way of its own arrive as they are: it may take a batch apart.
    """
    if type(loader).__iter__ is not DataLoader.__iter__ or type(loader)._get_iterator is not DataLoader._get_iterator:
        return loader
    collate = loader.collate_fn
    own = collate.collate if isinstance(collate, CountingCollate) else collate
    batched = loader.batch_size is not None or loader.batch_sampler is not None
    loader.collate_fn = CountingCollate(own, batched, _sizes_of_batches(loader))
    return loader


def _sizes_of_batches(loader: DataLoader[Any]) -> frozenset[int]:
    if loader.batch_size is None or not hasattr(loader.dataset, "__getitems__"):
        return frozenset()
    return frozenset({loader.batch_size, (dataset_length(loader) or 0) % loader.batch_size} - {0})


def rebuilt(loader: DataLoader[Any], changes: Mapping[str, Any]) -> DataLoader[Any]:
    """A loader like the user's with some arguments changed; the user's own object where nothing differs, and where it is
    of a subclass, which cannot be made anew and may give other batches than a plain one.

    Data set, collate function, sampler, worker initialisation, generator, timeout and context stay.
    """
    fixed = batch_fixed_reason(loader) is not None
    # Such a loader shows batch_size=None; the size that the facts tell of its batches is none that could be set.
    differing = {
        name: value
        for name, value in changes.items()
        if getattr(loader, name) != value and not (fixed and name == "batch_size")
    }
    if not differing or type(loader) is not DataLoader:
        return loader
    arguments: dict[str, Any] = {
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "generator": loader.generator,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
        "in_order": loader.in_order,
    }
    if fixed:
        if loader.batch_sampler is not None:
            arguments["batch_sampler"] = loader.batch_sampler
        else:
            arguments.update(batch_size=None, sampler=_own_sampler(loader))
    else:
        arguments.update(batch_size=loader.batch_size, drop_last=loader.drop_last, sampler=_own_sampler(loader))
    arguments.update(differing)
    if arguments["num_workers"] == 0:
        for name in _WORKER_ONLY:
            arguments.pop(name)
    elif arguments["prefetch_factor"] is None:
        arguments.pop("prefetch_factor")
    return DataLoader(loader.dataset, **arguments)


def _own_sampler(loader: DataLoader[Any]) -> Any:
    return None if isinstance(loader.dataset, IterableDataset) else loader.sampler
