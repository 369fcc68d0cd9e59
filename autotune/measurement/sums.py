"""Sums over tensors of any size: in float64, on the device where they lie, and read by the CPU all at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

PIECE = 2**18
"""Elements that are held in float64 at a time: the sums need no memory to speak of, and on a CPU they stay in its cache."""


class Products(NamedTuple):
    """Scalar products of two tensors, of which the first is what is expected."""

    apart: float
    """Square of the difference."""
    expected: float
    got: float
    """Squares of the two."""
    both: float
    """The one times the other."""


def in_real_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """A complex tensor as its real and imaginary parts; any other as it is.

    In the same memory, but for one that is yet to be conjugated: what the gradient of a conjugate can be.
    """
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The dense tensors in real numbers that it is made of. A sparse one is left so: dense, it may fit nowhere."""
    tensor = tensor.detach()
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.coalesce()
        return tensor.indices(), in_real_numbers(tensor.values())
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), in_real_numbers(tensor.values())
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), in_real_numbers(tensor.values())
    return (in_real_numbers(tensor),)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Detached, dense, and in real numbers; the same memory where it was dense."""
    return in_real_numbers(tensor.detach().to_dense())


def products(expected: torch.Tensor, got: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """The `Products` of `expected` and of `got / scale`, on the device of `got` and not yet computed there.

    `expected` may lie elsewhere, and is brought over by pieces.
    """
    pieces = zip(plain(expected).flatten().split(PIECE), plain(got).flatten().split(PIECE), strict=True)
    return torch.stack([_of_pieces(piece, other, scale) for piece, other in pieces]).sum(0)


def _of_pieces(expected: torch.Tensor, got: torch.Tensor, scale: float) -> torch.Tensor:
    wanted, found = expected.to(got.device).double(), got.double()
    if scale != 1.0:
        found = found / scale
    apart = found - wanted
    pairs = (apart, apart), (wanted, wanted), (found, found), (wanted, found)
    return torch.stack([torch.dot(one, other) for one, other in pairs])


def read_products(sums: Mapping[str, torch.Tensor]) -> dict[str, Products]:
    """What `products` gave for each name, in numbers."""
    return {name: Products(*values) for name, values in read(sums).items()}


def read(tensors: Mapping[str, torch.Tensor]) -> dict[str, list[float]]:
    """The numbers in small tensors of one shape. The CPU waits once for each device, and not for every tensor."""
    values: dict[str, list[float]] = {}
    for device in {tensor.device for tensor in tensors.values()}:
        names = [name for name, tensor in tensors.items() if tensor.device == device]
        values.update(zip(names, torch.stack([tensors[name] for name in names]).double().tolist(), strict=True))
    return {name: values[name] for name in tensors}
