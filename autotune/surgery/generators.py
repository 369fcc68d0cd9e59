"""The generators of random numbers that user code draws from: Python's, torch's, and NumPy's where it is loaded."""

from __future__ import annotations

import random
import sys

import torch


def seed_everything(seed: int) -> None:
    """Python's, NumPy's (where it is loaded) and torch's generators, on every device."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def random_state() -> dict[str, object]:
    """The states of all generators that a model may draw from, by library: equal before and after drawing nothing."""
    states: dict[str, object] = {"python": random.getstate(), "torch": torch.get_rng_state().numpy().tobytes()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["torch"] = (states["torch"], *(state.numpy().tobytes() for state in torch.cuda.get_rng_state_all()))
    if "numpy" in sys.modules:
        states["numpy"] = repr(sys.modules["numpy"].random.get_state())
    return states
