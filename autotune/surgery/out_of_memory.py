"""Tells that memory ran out, on whichever device, from what else goes wrong."""

from __future__ import annotations

import torch


def is_out_of_memory(error: Exception) -> bool:
    """torch has a class for the device's memory alone."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator" in str(error)
