"""Files that a data set opened before its workers were started: these share one position in it."""

from __future__ import annotations

import fcntl
import itertools
import multiprocessing
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset

from autotune.failure import TrialFailure
from autotune.records import Phase
from autotune.surgery.loaders import batch_fixed_reason, rebuilt, signature
from autotune.training.training import Training


def refuse_shared_positions(training: Training, phase: Callable[[Phase], None]) -> None:
    """Raises `TrialFailure` where several workers would move each other's position in a file, and the user has one or none.

    A fork shares the position in a file that is open already: what one worker seeks, another one reads from, at random
    and mostly without an error. To be called before anything is drawn here: a data set may open its file with its first
    sample, and each worker then has one of its own.
    """
    loader = training.loader.loader
    context: Any = loader.multiprocessing_context or multiprocessing
    if not loader.num_workers > 1 >= training.own_num_workers or context.get_start_method() != "fork":
        return
    before = positions_of_files_read()
    if not before:
        return
    phase("loader")
    changes: dict[str, Any] = {"num_workers": 1}
    if batch_fixed_reason(loader) is None:
        changes.update(batch_size=1, drop_last=False, collate_fn=signature)
        if not isinstance(loader.dataset, IterableDataset):
            changes["sampler"] = list(itertools.islice(loader.sampler, 1))
    next(iter(rebuilt(loader, changes)), None)
    after = positions_of_files_read()
    moved = [name for name, position in before.items() if after.get(name, position) != position]
    if moved:
        raise TrialFailure(
            "numerics",
            f"several loader workers would share one position in {moved[0][1]}, which the data set opened before they "
            "were started, and read each other's samples: open it where a sample is first read, or in worker_init_fn",
        )


def stands_within_a_file() -> bool:
    """Whether this process has a regular file open that it has read a part of. One that was read to its end, or is mapped
    into memory, stands at its end or at its start."""
    return any(0 < position < size for _, _, position, size in _files_read())


def positions_of_files_read() -> dict[tuple[int, str], int]:
    """Of every regular file that this process has open for reading only, by its number and path."""
    return {(number, path): position for number, path, position, _ in _files_read()}


def _files_read() -> Iterator[tuple[int, str, int, int]]:
    """Number, path, position and size."""
    for link in Path("/proc/self/fd").iterdir():
        try:
            number, path = int(link.name), os.readlink(link)
            is_read = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
            file = os.fstat(number)
            if is_read and stat.S_ISREG(file.st_mode):
                yield number, path, os.lseek(number, 0, os.SEEK_CUR), file.st_size
        except OSError:  # closed meanwhile, as is what listed the directory
            continue
