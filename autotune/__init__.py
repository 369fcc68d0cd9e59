"""Finds, by measuring on the user's own machine, the fastest way to run their PyTorch training step.

The names below are imported when they are first used, so that `import autotune` stays fast and brings in no torch.
"""

from __future__ import annotations

# Nothing is imported here, not even `typing`: the command hears Ctrl-C only once this module is there.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from autotune.api import fit, verify
    from autotune.errors import SearchInterrupted
    from autotune.result import TuningResult, load

__version__ = "0.1.0"
__all__ = ["SearchInterrupted", "TuningResult", "__version__", "fit", "load", "verify"]

_HOMES = {
    "fit": "autotune.api",
    "verify": "autotune.api",
    "load": "autotune.result",
    "TuningResult": "autotune.result",
    "SearchInterrupted": "autotune.errors",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'autotune' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
