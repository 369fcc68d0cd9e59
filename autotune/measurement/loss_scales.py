"""Whether a user's program scales its loss by a `GradScaler` of its own, and whether it divides by that again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.amp import GradScaler

ASKED = frozenset({"scale", "get_scale"})
"""What gives the scale to a loss."""
DIVIDES = frozenset({"unscale_", "step"})
"""What takes it off the gradients."""


@contextmanager
def scaler_calls() -> Iterator[set[str]]:
    """The names of `ASKED` and `DIVIDES` that are called of scalers that are enabled, as they are."""
    calls: set[str] = set()

    def watched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(self: GradScaler, *args: Any, **kwargs: Any) -> Any:
            if self.is_enabled():
                calls.add(name)
            return original(self, *args, **kwargs)

        return call

    with _replaced({name: watched(name, getattr(GradScaler, name)) for name in ASKED | DIVIDES}):
        yield calls


@contextmanager
def scales_halved(device: torch.device) -> Iterator[None]:
    """Every scaler that is asked has half of its scale meanwhile, whether it is made before or in here. Not twice as much,
    which a scaled loss in fp16 may have no room for."""
    before: dict[int, tuple[GradScaler, float]] = {}
    scale, get_scale = GradScaler.scale, GradScaler.get_scale

    def halve(scaler: GradScaler) -> None:
        if not scaler.is_enabled() or id(scaler) in before:
            return
        scale(scaler, torch.ones((), device=device))  # it has none before the first
        before[id(scaler)] = scaler, get_scale(scaler)
        scaler.update(before[id(scaler)][1] / 2)

    def halved(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(self: GradScaler, *args: Any, **kwargs: Any) -> Any:
            halve(self)
            return original(self, *args, **kwargs)

        return call

    with _replaced({"scale": halved(scale), "get_scale": halved(get_scale)}):
        try:
            yield
        finally:
            for scaler, value in before.values():
                scaler.update(value)


@contextmanager
def _replaced(methods: dict[str, Callable[..., Any]]) -> Iterator[None]:
    originals = {name: getattr(GradScaler, name) for name in methods}
    try:
        for name, method in methods.items():
            setattr(GradScaler, name, method)
        yield
    finally:
        for name, method in originals.items():
            setattr(GradScaler, name, method)
