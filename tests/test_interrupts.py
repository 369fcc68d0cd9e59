"""No interrupt is lost."""

from __future__ import annotations

import signal
import sys
import time
import weakref
from collections.abc import Callable

import pytest

from autotune.interrupts import interrupts_held, interrupts_kept


class Dying:
    """What an object does when it goes."""

    def __init__(self, last_will: Callable[[], None]) -> None:
        self.last_will = last_will

    def __del__(self) -> None:
        self.last_will()


class Plain:
    """May be referred to weakly."""


def interrupt(_: object = None) -> None:
    signal.raise_signal(signal.SIGINT)


def fail() -> None:
    raise ValueError("lost")


def interrupted_when_it_goes() -> None:
    Dying(interrupt)


def interrupted_when_it_is_known_to_be_gone() -> None:
    plain = Plain()
    reference = weakref.ref(plain, interrupt)
    del plain
    assert reference() is None


@pytest.mark.parametrize("seconds", [0.0, 0.02])
@pytest.mark.parametrize("drop", [interrupted_when_it_goes, interrupted_when_it_is_known_to_be_gone])
def test_an_interrupt_where_nothing_can_be_raised_comes_a_moment_later(
    drop: Callable[[], None],
    seconds: float,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At once is as where others hold the cores: this thread may be kept where nothing can be raised meanwhile."""
    monkeypatch.setattr("autotune.interrupts._LATER_SECONDS", seconds)
    came = False
    began = time.monotonic()
    with interrupts_kept():
        try:
            drop()
            time.sleep(120)
        except KeyboardInterrupt:
            came = True
    assert came
    assert time.monotonic() - began < 60, "it waited for the end of what could have been interrupted"
    assert capsys.readouterr().err == ""


def test_what_else_is_unraisable_is_told_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    before = sys.unraisablehook
    with interrupts_kept():
        Dying(fail)
    assert len(told) == 1
    assert sys.unraisablehook is before


def test_an_interrupt_waits_for_the_end_of_what_is_being_written() -> None:
    written: list[str] = []

    @interrupts_held()
    def write() -> None:
        interrupt()
        interrupt()
        written.append("all of it")

    with pytest.raises(KeyboardInterrupt):
        write()
    assert written == ["all of it"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(ValueError, match="lost"), interrupts_held():
        fail()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
