from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def nothing_compiled_yet() -> Iterator[None]:
    """Forgets what other tests compiled, for the compiler keeps its graphs by code, whichever object runs it."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()
