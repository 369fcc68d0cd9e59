"""Gradients and buffers held against each other: errors, cosine, the worst tensor. Tensors in, numbers out."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from autotune.measurement.sums import Products, parts, plain, products, read, read_products

Gradients = dict[str, torch.Tensor | None]
"""Parameter name to its gradient, on any device and of any type and layout; None where it has none."""

SMALL_SHARE = 1e-4
"""Tensors whose gradient is below this share of the largest are left out of the per-tensor gate: a bias before BatchNorm
has a true gradient of zero, and its rounding errors are all there is to see."""
VANISHED_SHARE = 0.1
"""A tensor shorter than this share of the reference's has lost its gradient; noise makes one longer, not shorter."""


@dataclass(frozen=True)
class Comparison:
    """How far one set of gradients is from another."""

    relative_error: float
    cosine: float
    worst_parameter: str | None
    worst_error: float
    errors: dict[str, float] = field(default_factory=dict)
    """Relative error of each tensor that counts."""
    missing: tuple[str, ...] = ()
    """Parameters with a gradient other than zero in the reference, however small, and none in the candidate."""
    vanished: tuple[str, ...] = ()
    """Parameters that count, whose gradient is there and next to nothing."""


def compare(reference: Gradients, candidate: Gradients, scale: float = 1.0) -> Comparison:
    """`candidate`, whose gradients are multiplied by `scale`, against `reference`; both with the same parameter names.

    A value that is not finite gives infinity.
    """
    values = _products(reference, candidate, scale)
    largest = max((math.sqrt(value.expected) for value in values.values()), default=0.0)
    missing = tuple(name for name, value in values.items() if value.expected > 0 and candidate.get(name) is None)
    errors: dict[str, float] = {}
    vanished: list[str] = []
    for name, value in values.items():
        norm = math.sqrt(value.expected)
        if norm > SMALL_SHARE * largest and norm > 0:
            errors[name] = math.sqrt(value.apart) / norm
            if math.sqrt(value.got) < VANISHED_SHARE * norm:
                vanished.append(name)
    total = Products(*map(sum, zip(*values.values(), strict=True))) if values else Products(0.0, 0.0, 0.0, 0.0)
    if not math.isfinite(total.apart + total.got):
        where = next((name for name, value in values.items() if not math.isfinite(value.got)), None)
        return Comparison(math.inf, 0.0, where, math.inf, errors, missing)
    worst = max(errors, key=lambda name: errors[name], default=None)
    scales = math.sqrt(total.expected * total.got)
    return Comparison(
        relative_error=math.sqrt(total.apart / total.expected) if total.expected else math.sqrt(total.apart),
        cosine=total.both / scales if scales else float(total.expected == total.got),
        worst_parameter=worst,
        worst_error=errors[worst] if worst is not None else 0.0,
        errors=errors,
        missing=missing,
        vanished=tuple(vanished),
    )


def _products(reference: Gradients, candidate: Gradients, scale: float) -> dict[str, Products]:
    """Of every parameter that has a gradient in one of the two; where the other has none, with zeros."""
    sums: dict[str, torch.Tensor] = {}
    for name in dict.fromkeys((*reference, *candidate)):
        expected, got = reference.get(name), candidate.get(name)
        if expected is not None:
            sums[name] = products(expected, torch.zeros_like(plain(expected)) if got is None else got, scale)
        elif got is not None:
            sums[name] = products(torch.zeros_like(plain(got)), got, scale)
    return read_products(sums)


def first_not_finite(gradients: Gradients) -> str | None:
    """The first parameter whose gradient holds an infinity or no number; None where all are finite."""
    # What is not a number counts as the smallest and as the largest.
    extremes = {
        name: torch.stack(torch.aminmax(plain(gradient)))
        for name, gradient in gradients.items()
        if gradient is not None and gradient.numel()
    }
    return next((name for name, values in read(extremes).items() if not all(map(math.isfinite, values))), None)


class Move(NamedTuple):
    """How far a buffer was moved in one step, on both sides from the same values."""

    expected: float
    got: float
    size: float
    """Norm of what it was moved from."""
    scale: float
    """Norm of as many ones."""


def compare_moves(
    before: dict[str, torch.Tensor], reference: dict[str, torch.Tensor], candidate: dict[str, torch.Tensor]
) -> dict[str, Move]:
    """Of each buffer of floating point numbers that kept its shape and stayed finite."""
    values = {}
    for name, start in before.items():
        states = [state[name] for state in (before, reference, candidate) if name in state]
        if len(states) == 3 and all(_can_be_moved(state) and state.shape == start.shape for state in states):
            begin, end, own_end = (state.to(states[-1].device).float() for state in states)
            norms = map(torch.linalg.vector_norm, (end - begin, own_end - begin, begin))
            values[name] = torch.stack(list(norms))
    moves = {
        name: Move(expected, got, size, math.sqrt(before[name].numel()))
        for name, (expected, got, size) in read(values).items()
    }
    return {name: move for name, move in moves.items() if all(map(math.isfinite, move))}


def _can_be_moved(buffer: torch.Tensor) -> bool:
    return buffer.is_floating_point() and buffer.layout == torch.strided and not buffer.is_nested


def compare_buffers(reference: dict[str, torch.Tensor], candidate: dict[str, torch.Tensor]) -> dict[str, float]:
    """The relative error of each buffer; of counters and other whole numbers 1 where they differ at all, and
    of what has another shape."""
    errors = {name: _buffer_error(buffer, candidate[name]) for name, buffer in reference.items()}
    return {name: error if math.isfinite(error) else math.inf for name, (error,) in read(errors).items()}


def _buffer_error(reference: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
    """One number, on the candidate's device and not yet computed there."""
    pairs = list(zip(parts(reference), parts(candidate), strict=False))
    if reference.layout != candidate.layout or any(expected.shape != got.shape for expected, got in pairs):
        return torch.ones(1, dtype=torch.float64, device=candidate.device)
    return torch.stack([_part_error(expected.to(got.device), got) for expected, got in pairs]).amax(0)


def _part_error(expected: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
    if not expected.dtype.is_floating_point:
        return (got != expected).any().view(1).double()
    expected, got = expected.float(), got.float()  # the smallest types can be converted and not much else
    # Equal infinities are no difference: a mask of an attention is full of them.
    same = (got == expected) | (got.isnan() & expected.isnan())
    difference = torch.linalg.vector_norm((got - expected).masked_fill(same, 0.0))
    size = torch.linalg.vector_norm(expected.masked_fill(~expected.isfinite(), 0.0))
    error: torch.Tensor = difference / size.clamp_min(1e-6)
    return error.view(1).double()
