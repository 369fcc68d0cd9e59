"""Messages between the orchestrator and its server: whole ones, and waits of any length."""

from __future__ import annotations

import socket

import pytest

from autotune.processes.wire import Channel


def test_a_wait_may_be_as_long_as_any_budget() -> None:
    ours, theirs = socket.socketpair()
    sender, receiver = Channel(ours), Channel(theirs)
    sender.send({"rate": 12.5})
    assert receiver.receive(timeout_seconds=1e30) == {"rate": 12.5}
    with pytest.raises(TimeoutError):
        receiver.receive(timeout_seconds=0.0)
    sender.close()
    with pytest.raises(EOFError):
        receiver.receive(timeout_seconds=1e30)
    receiver.close()
