"""What the server finds out for all its trials saves time, and costs none where it cannot be found out."""

from __future__ import annotations

import pytest

from autotune.processes.preparation import prepare_for_compiling


def test_what_the_compiler_will_not_tell_ends_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def moved_elsewhere() -> bytes:
        asked.append("torch_key")
        raise AttributeError("torch has changed")

    monkeypatch.setattr("torch._inductor.codecache.torch_key", moved_elsewhere)
    prepare_for_compiling("cpu")
    assert asked == ["torch_key"]
