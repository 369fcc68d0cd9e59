"""What a report consists of, before it is decided how it looks: sentences, grids, lines and commands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from autotune.config import TrainingConfig, Value, settings_text
from autotune.records import Recommendation

OWN_SETTINGS = "your settings"
Tone = Literal["plain", "good", "warning", "bad"]


@dataclass(frozen=True)
class Sentence:
    """One statement that stands by itself."""

    text: str
    tone: Tone = "plain"


@dataclass(frozen=True)
class Grid:
    """A table. Every row has as many cells as the header; columns in `numeric` are set flush right."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Lines:
    """A titled list of sentences, each wrapped to the width."""

    title: str
    lines: tuple[str, ...]
    tone: Tone = "plain"


@dataclass(frozen=True)
class Verbatim:
    """A titled list of paths or commands, never wrapped, so that they can be copied."""

    title: str
    lines: tuple[str, ...]


Block = Sentence | Grid | Lines | Verbatim
Document = tuple[Block, ...]


def lines_if_any(title: str, lines: tuple[str, ...], tone: Tone = "plain") -> Document:
    """The lines under their title, or nothing at all where there are none."""
    return (Lines(title, lines, tone),) if lines else ()


def one_line(text: str) -> str:
    """Foreign text on one line: runs of blanks and line ends become one blank, control characters vanish."""
    return "".join(character for character in " ".join(text.split()) if character.isprintable())


def unwrapped(text: str) -> str:
    """Foreign text that is never wrapped, a path or a line of code: blanks stay, whatever steers a terminal vanishes."""
    return "".join(character for character in text.expandtabs(4) if character.isprintable())


def several_lines(text: str) -> str:
    """Foreign text whose lines stay as they are, each as `unwrapped` leaves it."""
    return "\n".join(map(unwrapped, text.splitlines()))


def shown_settings(settings: Mapping[str, Value]) -> str:
    """Settings that differ from the user's; says so where none do."""
    return settings_text(settings) or OWN_SETTINGS


def shown_baseline(reference_settings: Mapping[str, Value]) -> str:
    """What the baseline is called: it is not quite the user's own program where that fits at no batch."""
    return "the reference" if reference_settings else OWN_SETTINGS


def own_values(recommendation: Recommendation) -> TrainingConfig:
    """What of the baseline are the user's own settings: all, unless their program fits at no batch with all of them."""
    baseline, others = recommendation.baseline.config, recommendation.reference_settings
    return TrainingConfig({name: value for name, value in baseline.items() if name not in others})


def changes_text(config: TrainingConfig, baseline: TrainingConfig | None) -> str:
    """What a configuration changes from the baseline; all of it where the baseline is not known."""
    return shown_settings(config if baseline is None else config.changes_from(baseline))


def counted(count: int, one: str, several: str = "") -> str:
    """Such as `1 block`, `18 blocks`; `several` where that is not the word with an s."""
    return f"1 {one}" if count == 1 else f"{count:,} {several or one + 's'}"
