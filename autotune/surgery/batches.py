"""What a batch is made of: description, size, and its way to the device, whatever its nesting."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def map_tensors(batch: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same structure with every tensor replaced by `function` of it.

    Named tuples, tuples, lists, mappings and dataclasses keep their type; what holds no tensor is passed on as it is.
    """
    return _mapped(batch, function, None)


def to_device(batch: Any, device: torch.device, *, non_blocking: bool = False) -> Any:
    """The batch with its tensors on `device`; the very same object where there is nothing to move.

    An object with a `to` method of its own, wherever it lies in the batch, is moved by that.
    """
    if device.type == "cpu":
        return batch
    return _mapped(batch, lambda tensor: tensor.to(device, non_blocking=non_blocking), lambda item: item.to(device))


def _mapped(batch: Any, function: Callable[[torch.Tensor], torch.Tensor], move: Callable[[Any], Any] | None) -> Any:
    """`move` takes what has a `to` method: a packed sequence is a named tuple too, but knows which parts stay."""
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if move is not None and hasattr(batch, "to"):
        return move(batch)
    if isinstance(batch, tuple):
        items = [_mapped(item, function, move) for item in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    if isinstance(batch, list):
        return [_mapped(item, function, move) for item in batch]
    if isinstance(batch, Mapping):
        mapped = {key: _mapped(item, function, move) for key, item in batch.items()}
        if type(batch) is dict:
            return mapped
        try:
            return type(batch)(mapped)  # type: ignore[call-arg]  # a mapping class of the user's
        except TypeError:
            return mapped
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        changes = {
            field.name: _mapped(getattr(batch, field.name), function, move)
            for field in dataclasses.fields(batch)
            if field.init
        }
        return dataclasses.replace(batch, **changes)
    return batch


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
    return sum(tensor.nbytes for tensor in tensors(batch))


def leading_size(batch: Any) -> int:
    """Samples in a ready batch: the first dimension of its first tensor, 1 where there is none.

    Only for loaders that hand over ready batches; elsewhere samples are counted where they are collated.
    """
    for tensor in tensors(batch):
        return int(tensor.shape[0]) if tensor.dim() else 1
    return len(batch) if isinstance(batch, (list, tuple, dict)) else 1


def describe(batch: Any) -> str:
    """A batch in words, such as `tuple of 2: float32 [32, 8], int64 [32]`."""
    if isinstance(batch, torch.Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')} {list(batch.shape)}"
    if isinstance(batch, Mapping):
        items = ", ".join(f"{key}: {_nested(item)}" for key, item in batch.items())
        kind = "mapping" if isinstance(batch, dict) else type(batch).__name__
        return f"{kind} with {items}" if items else f"empty {kind}"
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        items = ", ".join(f"{name}: {_nested(item)}" for name, item in zip(batch._fields, batch, strict=True))
        return f"{type(batch).__name__} with {items}"
    if isinstance(batch, (tuple, list)):
        kind = type(batch).__name__
        if len(batch) > 8 or (batch and not any(True for _ in tensors(batch))):
            inner = sorted({type(item).__name__ for item in batch})
            return f"{kind} of {len(batch)} {'/'.join(inner)}"
        return f"{kind} of {len(batch)}: {', '.join(_nested(item) for item in batch)}"
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        items = ", ".join(f"{f.name}: {_nested(getattr(batch, f.name))}" for f in dataclasses.fields(batch))
        return f"{type(batch).__name__} with {items}"
    return type(batch).__name__


def _nested(item: Any) -> str:
    text = describe(item)
    return f"({text})" if ("," in text and not isinstance(item, torch.Tensor)) else text
