"""Finds the repeated blocks of a model: those whose recomputation would lower the memory peak of a step most."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils.parametrize import ParametrizationList

from autotune.errors import WorkloadError
from autotune.surgery.batches import tensors
from autotune.surgery.out_of_memory import is_out_of_memory

ABOUT_EQUAL = 1.1
"""Estimated peaks within this factor count as equal; the outer class is then taken: fewer calls, larger graphs."""

LEAST_SHARE = 0.1
"""Blocks save at least this share of what all modules save for backward; less is a detail of the model."""

Storages = dict[int, int]
"""A storage's number to its bytes: what shares memory counts once."""


class Blocks(NamedTuple):
    """Modules of one class that are worth recomputing or compiling one by one, in the order in which they run."""

    class_name: str
    names: tuple[str, ...]


NO_BLOCKS = Blocks("", ())


def named_blocks(model: nn.Module, wanted: Sequence[str]) -> Blocks:
    """The blocks that the user names: modules by their names, or all of a class by the class's name, outermost ones.

    Raises `WorkloadError` for a name that is neither, with the classes that occur more than once.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    found: list[str] = []
    for word in wanted:
        of_class = [name for name, module in modules.items() if type(module).__name__ == word]
        if word not in modules and not of_class:
            counts = Counter(type(module).__name__ for module in modules.values())
            repeated = ", ".join(name for name, count in counts.items() if count > 1)
            raise WorkloadError(
                f"the model has no module and no class named {word!r}, which was given as a block; classes with several "
                f"instances are {repeated or 'none'}"
            )
        found += [word] if word in modules else of_class
    outermost = [name for name in found if not any(name.startswith(f"{other}.") for other in found)]
    names = tuple(dict.fromkeys(outermost))
    return Blocks("/".join(dict.fromkeys(type(modules[name]).__name__ for name in names)), names)


@dataclass
class _Record:
    """What one module saved for backward (its children included) and what it was given."""

    module: nn.Module
    saved: Storages = field(default_factory=dict)
    inputs: Storages = field(default_factory=dict)


class _Candidate(NamedTuple):
    names: tuple[str, ...]
    saved_bytes: int
    peak_bytes: int


def find_blocks(model: nn.Module, run_step: Callable[[], Any], *, keep_saved: bool = True) -> Blocks:
    """The repeated blocks of `model`, or `NO_BLOCKS`.

    `run_step` runs the forward and the loss of one batch, in training mode. Unless `keep_saved`, what that saves for a
    backward pass is let go at once, so that it needs no more memory than without gradients. Where memory runs out in the
    midst of it, what was seen until then decides, and the instances that it did not come to are taken for blocks too.

    A class qualifies that holds other modules and computes no parameter, of which at least two instances ran (the whole
    model and instances inside instances not counted) and which save at least `LEAST_SHARE` of what all modules save. Of
    these the class wins whose recomputation leaves the lowest peak: what is saved outside the blocks, the blocks' inputs,
    and the one block that is being recomputed. Parameters and buffers count for nothing, since they stay anyway.
    """
    names = {id(module): name for name, module in reversed(list(model.named_modules())) if name}
    records, whole = _watch(model, names, run_step, keep_saved)
    by_class: dict[type[nn.Module], list[str]] = defaultdict(list)
    for name, record in records.items():
        if any(True for _ in record.module.children()) and not isinstance(record.module, ParametrizationList):
            by_class[type(record.module)].append(name)
    if not whole:
        for name, module in model.named_modules():
            if names.get(id(module)) == name and name not in records and type(module) in by_class:
                by_class[type(module)].append(name)
    everything = _merged(record.saved for record in records.values())
    found = [
        _candidate(outermost, records, everything)
        for instances in by_class.values()
        if len(outermost := _outermost(instances)) >= 2
    ]
    worthwhile = [candidate for candidate in found if candidate.saved_bytes > LEAST_SHARE * sum(everything.values())]
    if not worthwhile:
        return NO_BLOCKS
    best = min(worthwhile, key=lambda candidate: candidate.peak_bytes)
    about_as_good = [candidate for candidate in worthwhile if candidate.peak_bytes <= ABOUT_EQUAL * best.peak_bytes]
    for candidate in about_as_good:
        if _encloses(candidate.names, best.names):
            best = candidate
    return Blocks(type(model.get_submodule(best.names[0])).__name__, best.names)


def _watch(
    model: nn.Module, names: dict[int, str], run_step: Callable[[], Any], keep_saved: bool
) -> tuple[dict[str, _Record], bool]:
    """Runs a step and returns what each module that ran saved, by name, in the order in which they began; and whether
    memory was enough for all of the step."""
    kept = {_address(tensor) for tensor in (*model.parameters(), *model.buffers())}
    records: dict[str, _Record] = {}
    running: list[_Record] = []
    seen: dict[int, StorageWeakRef] = {}

    def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
        record = records.setdefault(names[id(module)], _Record(module))
        for tensor in tensors((args, kwargs)):
            _add(record.inputs, tensor, kept, seen)
        running.append(record)

    def end(module: nn.Module, args: Any, output: Any) -> None:
        running.pop()

    def save(tensor: torch.Tensor) -> torch.Tensor | None:
        for record in running:
            _add(record.saved, tensor, kept, seen)
        return tensor if keep_saved else None

    # A scripted module takes no hooks; what it saves counts for those around it.
    hookable = (module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule))
    watched = [module for module in hookable if id(module) in names]
    with _hooked(watched, begin, end), torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        try:
            run_step()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return records, False
    return records, True


@contextmanager
def _hooked(modules: list[nn.Module], begin: Callable[..., None], end: Callable[..., None]) -> Iterator[None]:
    handles = [module.register_forward_pre_hook(begin, with_kwargs=True, prepend=True) for module in modules]
    # always_call: a module that raises, and whose caller goes on, must not stay on the stack.
    handles += [module.register_forward_hook(end, always_call=True) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _add(storages: Storages, tensor: torch.Tensor, kept: set[int], seen: dict[int, StorageWeakRef]) -> None:
    """Counts a tensor's storage unless it belongs to a parameter or buffer.

    `seen` keeps the number of every storage from being used twice, though not its memory.
    """
    if _address(tensor) not in kept:
        reference = StorageWeakRef(tensor.untyped_storage())
        seen.setdefault(reference.cdata, reference)
        storages[reference.cdata] = tensor.untyped_storage().nbytes()


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _merged(parts: Any) -> Storages:
    merged: Storages = {}
    for part in parts:
        merged.update(part)
    return merged


def _outermost(names: list[str]) -> list[str]:
    """Without those that lie inside another of them."""
    return [name for name in names if not any(name.startswith(f"{other}.") for other in names)]


def _encloses(outer: tuple[str, ...], inner: tuple[str, ...]) -> bool:
    return all(any(name.startswith(f"{other}.") for other in outer) for name in inner)


def _candidate(names: list[str], records: dict[str, _Record], everything: Storages) -> _Candidate:
    """What the modules save, and the bytes kept at the worst moment of the backward pass if each were recomputed."""
    blocks = [records[name] for name in names if name in records]
    covered = _merged(block.saved for block in blocks)
    inputs = _merged(block.inputs for block in blocks)
    outside = {address: size for address, size in everything.items() if address not in covered} | inputs
    largest = max(sum(size for address, size in block.saved.items() if address not in outside) for block in blocks)
    return _Candidate(tuple(names), sum(covered.values()), sum(outside.values()) + largest)
