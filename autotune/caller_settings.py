"""What a program that calls `fit` has set in torch for its whole process: a trial is another process, and needs it too."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from autotune.config import Value

WARN_ONLY = "warn_only"
"""Of deterministic algorithms."""

_READ: Mapping[str, Callable[[Any], Value]] = {
    "float32_matmul_precision": lambda torch: torch.get_float32_matmul_precision(),
    "cudnn_allow_tf32": lambda torch: bool(torch.backends.cudnn.allow_tf32),
    "cudnn_benchmark_set": lambda torch: bool(torch.backends.cudnn.benchmark),
    "deterministic_algorithms": lambda torch: _deterministic(torch),
    "torch_threads": lambda torch: torch.get_num_threads(),
    "default_dtype": lambda torch: str(torch.get_default_dtype()).removeprefix("torch."),
}


def settings_of_this_process() -> dict[str, Value]:
    """The settings in force here; none where torch is not imported, since nothing can have been set then."""
    torch = sys.modules.get("torch")
    return {} if torch is None else {name: value for name in _READ if (value := _read(torch, name)) is not None}


def put_in_force(settings: Mapping[str, Value]) -> None:
    """In this process, which has imported torch. Only what differs is set: setting even the value in force changes what the
    compiler's cache is keyed by."""
    if not settings:
        return
    import torch

    write: dict[str, Callable[[Any], None]] = {
        "float32_matmul_precision": torch.set_float32_matmul_precision,
        "cudnn_allow_tf32": lambda value: setattr(torch.backends.cudnn, "allow_tf32", value),
        "cudnn_benchmark_set": lambda value: setattr(torch.backends.cudnn, "benchmark", value),
        "deterministic_algorithms": lambda value: torch.use_deterministic_algorithms(
            bool(value), warn_only=value == WARN_ONLY
        ),
        "torch_threads": torch.set_num_threads,
        "default_dtype": lambda value: torch.set_default_dtype(getattr(torch, value)),
    }
    for name, value in settings.items():
        # While a server prepares, threads are told otherwise.
        if name == "torch_threads" or _read(torch, name) != value:
            write[name](value)


def _deterministic(torch: Any) -> Value:
    """A program that only wants to be warned may well have operations that are not deterministic."""
    enabled = bool(torch.are_deterministic_algorithms_enabled())
    return WARN_ONLY if enabled and torch.is_deterministic_algorithms_warn_only_enabled() else enabled


def _read(torch: Any, name: str) -> Value | None:
    """None where torch does not say: it refuses where the older and the newer way to set precisions are mixed."""
    try:
        return _READ[name](torch)
    except (RuntimeError, AttributeError):
        return None
