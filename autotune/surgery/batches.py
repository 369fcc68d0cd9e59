"""What a batch is made of: description, size, and its way to the device, whatever its nesting."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from types import GeneratorType
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

READ_ONCE = (GeneratorType, map, filter, zip)


def kept(batch: Any) -> Any:
    """A batch that can be read only once, such as `map(torch.stack, zip(*samples))`, as a tuple of what it gives."""
    return tuple(batch) if isinstance(batch, READ_ONCE) else batch


def map_tensors(batch: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same structure with every tensor replaced by `function` of it.

    Named tuples, tuples, lists, mappings and dataclasses keep their type, and what else they carry; what holds no tensor
    is passed on as it is.
    """
    return _mapped(batch, function, None)


def to_device(batch: Any, device: torch.device, *, non_blocking: bool = False) -> Any:
    """The batch with its tensors on `device`, the very same tensors where they lie there already.

    Its containers are new ones, so that a loss function may take one apart, and the batch can be used again. An object
    with a `to` method of its own, wherever it lies in the batch, is moved by that.
    """
    if device.type == "cpu":
        return _mapped(batch, lambda tensor: tensor, None)

    def move(item: Any) -> Any:
        # Some mappings move themselves in place.
        return (_like(item, dict(item)) if isinstance(item, Mapping) else item).to(device)

    return _mapped(batch, lambda tensor: tensor.to(device, non_blocking=non_blocking), move)


def _mapped(batch: Any, function: Callable[[torch.Tensor], torch.Tensor], move: Callable[[Any], Any] | None) -> Any:
    """`move` takes what has a `to` method: a packed sequence is a named tuple too, but knows which parts stay."""
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if move is not None and hasattr(batch, "to"):
        return move(batch)
    if isinstance(batch, tuple):
        items = [_mapped(item, function, move) for item in batch]
        if all(item is before for item, before in zip(items, batch, strict=True)):
            return batch
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    if isinstance(batch, list):
        items = [_mapped(item, function, move) for item in batch]
        if type(batch) is list:
            return items
        same_class = copy.copy(batch)
        same_class[:] = items
        return same_class
    if isinstance(batch, Mapping):
        return _like(batch, {key: _mapped(item, function, move) for key, item in batch.items()})
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        # A copy, not `dataclasses.replace`: what `__post_init__` does to a sample is done once.
        changed = copy.copy(batch)
        for field in dataclasses.fields(batch):
            value = getattr(batch, field.name, None)
            if (mapped := _mapped(value, function, move)) is not value:
                object.__setattr__(changed, field.name, mapped)
        return changed
    return batch


def _like(batch: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """The items in a mapping of the batch's own class; in a plain one where that class can be neither copied nor made."""
    if type(batch) is dict:
        return items
    try:
        if isinstance(batch, MutableMapping):
            changed = copy.copy(batch)
            for key, item in items.items():
                changed[key] = item
            return changed
        return type(batch)(items)  # type: ignore[call-arg]  # a mapping class of the user's
    except TypeError:
        return items


def independent(batch: Any) -> Any:
    """A copy that shares no memory with the batch: a loss function may change in place what it is given.

    Of a view into much more no more is copied than it spans: a sample may be a row of the whole data set. It keeps its
    strides, which compiled code may be made for.
    """
    try:
        # Held until the copy is made: where a mapping makes them as they are asked for, others would get their ids.
        found = list(tensors(batch))
        copies = {id(view): _cut_out(view) for view in found if _is_small_view(view)}
        # Copied deeply, a ragged tensor has offsets of its own, and torch refuses its backward pass (2.13); and what comes
        # out of a model, in the data set, cannot be copied so.
        copies |= {id(tensor): _cut_off(tensor) for tensor in found if tensor.is_nested or not tensor.is_leaf}
        return copy.deepcopy(batch, copies)
    except Exception:  # whatever an object of the user's raises that cannot be copied: its tensors can
        return map_tensors(batch, _cut_off)


def _cut_off(tensor: torch.Tensor) -> torch.Tensor:
    """A copy without what it was computed from, which a second backward pass could not go through again."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _is_small_view(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor spans less than half of its memory."""
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.is_nested or tensor.requires_grad:
        return False
    return 2 * _span(tensor) * tensor.element_size() < tensor.untyped_storage().nbytes()


def _span(tensor: torch.Tensor) -> int:
    """Elements of its memory from its first to its last one."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _cut_out(view: torch.Tensor) -> torch.Tensor:
    memory = view.as_strided((_span(view),), (1,)).clone()
    return memory.as_strided(view.shape, view.stride())


def versions(batch: Any) -> list[int]:
    """A number for each tensor in a batch that grows where it is changed in place."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors(batch)]


def tensors(batch: Any) -> Iterator[torch.Tensor]:
    """Every tensor in a batch, depth first."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for item in batch.values():
            yield from tensors(item)
    elif isinstance(batch, (tuple, list)):
        for item in batch:
            yield from tensors(item)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for field in dataclasses.fields(batch):
            yield from tensors(getattr(batch, field.name))


def byte_count(batch: Any) -> int:
    """Bytes of all tensors in a batch."""
    return sum(_bytes(tensor) for tensor in tensors(batch))


def _bytes(tensor: torch.Tensor) -> int:
    if tensor.layout == torch.sparse_coo:
        return int(tensor._indices().nbytes + tensor._values().nbytes)
    return int(tensor.nbytes)


def leading_size(batch: Any) -> int:
    """Samples in a ready batch: the first dimension of its first tensor or array, 1 where there is none.

    Lists of samples, or of parts of samples, count by their length. Only for loaders that hand over ready batches;
    elsewhere samples are counted where they are collated.
    """
    if isinstance(batch, (tuple, list)) and not isinstance(batch, PackedSequence) and (listed := _listed(batch)):
        return listed
    for part in _sized(batch):
        return int(part)
    return len(batch) if isinstance(batch, (list, tuple, dict)) else 1


def _listed(batch: tuple[Any, ...] | list[Any]) -> int:
    """Samples in a list of alike mappings, or in several lists side by side; 0 where it is neither."""
    if isinstance(batch, list) and all(isinstance(item, Mapping) and item.keys() == batch[0].keys() for item in batch):
        return len(batch)
    lengths = {len(item) if isinstance(item, list) else 0 for item in batch}
    return lengths.pop() if len(lengths) == 1 else 0


def _sized(batch: Any) -> Iterator[int]:
    """What each tensor or array tells of the number of samples, depth first."""
    if isinstance(batch, PackedSequence):
        yield int(batch.batch_sizes[0])  # its data holds the steps of all sequences
    elif isinstance(batch, torch.Tensor):
        yield batch.size(0) if batch.dim() else 1
    elif isinstance(batch, Mapping):
        for item in batch.values():
            yield from _sized(item)
    elif isinstance(batch, (tuple, list)):
        for item in batch:
            yield from _sized(item)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for field in dataclasses.fields(batch):
            yield from _sized(getattr(batch, field.name))
    elif isinstance(shape := getattr(batch, "shape", None), tuple):  # an array of NumPy or of another library
        yield shape[0] if shape else 1


def describe(batch: Any) -> str:
    """A batch in words, such as `tuple of 2: float32 [32, 8], int64 [32]`."""
    if isinstance(batch, torch.Tensor):
        dtype = str(batch.dtype).removeprefix("torch.")
        # The ragged dimension of a nested tensor has no size, and a new name in every batch.
        return f"nested {dtype} [{batch.size(0)}, ...]" if batch.is_nested else f"{dtype} {list(batch.shape)}"
    if isinstance(batch, Mapping):
        items = ", ".join(f"{key}: {_nested(item)}" for key, item in batch.items())
        kind = "mapping" if isinstance(batch, dict) else type(batch).__name__
        return f"{kind} with {items}" if items else f"empty {kind}"
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        items = ", ".join(f"{name}: {_nested(item)}" for name, item in zip(batch._fields, batch, strict=True))
        return f"{type(batch).__name__} with {items}"
    if isinstance(batch, (tuple, list)):
        kind = type(batch).__name__
        shown = [_nested(item) for item in batch]
        if len(shown) > 3 and len(set(shown)) == 1:  # a list of the samples, as object detection collates them
            return f"{kind} of {len(batch)} {shown[0]}"
        if len(batch) > 8 or (batch and not any(True for _ in tensors(batch))):
            inner = sorted({type(item).__name__ for item in batch})
            return f"{kind} of {len(batch)} {'/'.join(inner)}"
        return f"{kind} of {len(batch)}: {', '.join(shown)}"
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        items = ", ".join(f"{f.name}: {_nested(getattr(batch, f.name))}" for f in dataclasses.fields(batch))
        return f"{type(batch).__name__} with {items}"
    return type(batch).__name__


def _nested(item: Any) -> str:
    text = describe(item)
    return f"({text})" if ("," in text and not isinstance(item, torch.Tensor)) else text
