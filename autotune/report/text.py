"""Reports as plain text: what `print(best)` shows, and the wrapping that the terminal shares."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable

from autotune.records import Recommendation
from autotune.report.document import Document, Grid, Lines, Sentence, Verbatim, one_line, unwrapped
from autotune.report.recommendation import recommendation_document

WIDTH = 80
MARGIN = "  "
COLUMN_GAP = "  "
NARROWEST = 9
"""Cells that are no wider than this are never wrapped."""


def describe(recommendation: Recommendation) -> str:
    """A recommendation in words and figures, at most 80 columns wide except for paths."""
    return render(recommendation_document(recommendation, None))


def render(document: Document, *, width: int = WIDTH) -> str:
    """A document as plain text, blocks set apart by an empty line."""
    blocks: list[str] = []
    for block in document:
        match block:
            case Sentence(text):
                blocks.append("\n".join(wrap(text, width=width)))
            case Lines(title, lines):
                wrapped = [row for line in lines for row in wrap(line, width=width, bullet=True)]
                blocks.append("\n".join([one_line(title), *wrapped]))
            case Verbatim(title, lines):
                blocks.append("\n".join([one_line(title), *(f"  {unwrapped(line)}" for line in lines)]))
            case Grid():
                title = one_line(block.title)
                blocks.append("\n".join([*([title] if title else []), *grid_lines(block, width=width)]))
    return "\n\n".join(blocks)


def wrap(text: str, *, width: int, bullet: bool = False) -> list[str]:
    """Foreign text wrapped between words; a path longer than the width stays whole."""
    return textwrap.wrap(
        one_line(text),
        width,
        initial_indent="  - " if bullet else "",
        subsequent_indent="    " if bullet else "",
        break_long_words=False,
        break_on_hyphens=False,
    )


def grid_lines(grid: Grid, *, width: int = WIDTH) -> list[str]:
    """The rows of a grid in aligned columns, the header and a rule first; wide columns are wrapped to fit `width`.

    No name is cut: where columns would have to be narrower than the names in them, each row becomes a sentence instead.
    """
    header, *rows = [tuple(map(_cell, row)) for row in (grid.header, *grid.rows)]
    widths = _column_widths(header, rows, width)
    if widths is None:
        return [line for row in rows for line in _listed(header, row, width)]
    rule = MARGIN + COLUMN_GAP.join("-" * column_width for column_width in widths)
    title, *lines = (_row_lines(row, widths, grid.numeric) for row in (header, *rows))
    return [*title, rule, *(line for row in lines for line in row)]


def _cell(text: str) -> str:
    """On one line; keeps the blanks in front, which say that a row belongs to the one above."""
    return text[: len(text) - len(text.lstrip(" "))] + one_line(text)


def _column_widths(header: tuple[str, ...], rows: list[tuple[str, ...]], width: int) -> list[int] | None:
    """The natural widths, the widest lowered one by one until the row fits. Whole words stay whole as long as that is
    possible, then names and values may stand on two lines; None where not even that is enough."""
    available = width - len(MARGIN) - len(COLUMN_GAP) * (len(header) - 1)
    columns = list(zip(header, *rows, strict=True))
    for pieces_of in (_words, _pieces):
        narrowest = [max(_narrowest(cell, pieces_of, is_title=not number) for number, cell in enumerate(column))
                     for column in columns]  # fmt: skip
        widths = [max(len(cell) for cell in column) for column in columns]
        while sum(widths) > available and widths != narrowest:
            room = [one if one > least else 0 for one, least in zip(widths, narrowest, strict=True)]
            widths[room.index(max(room))] -= 1
        if sum(widths) <= available:
            return widths
    return None


def _narrowest(cell: str, pieces_of: Callable[[str], list[str]], *, is_title: bool) -> int:
    """How narrow a column may be for this cell: short ones stay on one line."""
    if len(cell) <= NARROWEST and not is_title:
        return len(cell)
    indent = len(cell) - len(cell.lstrip())
    return indent + max((len(piece) for piece in pieces_of(cell.strip())), default=0)


def _listed(header: tuple[str, ...], row: tuple[str, ...], width: int) -> list[str]:
    """A row as a sentence, each cell after its title."""
    told = [f"{title}: {cell.strip()}" if title else cell.strip() for title, cell in zip(header, row, strict=True)]
    return wrap("; ".join(told), width=width, bullet=True)


def _row_lines(row: tuple[str, ...], column_widths: list[int], numeric: frozenset[int]) -> list[str]:
    columns = [_wrap_cell(cell, width) for cell, width in zip(row, column_widths, strict=True)]
    lines: list[str] = []
    for depth in range(max(len(column) for column in columns)):
        pieces = [column[depth] if depth < len(column) else "" for column in columns]
        aligned = [
            piece.rjust(width) if index in numeric else piece.ljust(width)
            for index, (piece, width) in enumerate(zip(pieces, column_widths, strict=True))
        ]
        lines.append((MARGIN + COLUMN_GAP.join(aligned)).rstrip())
    return lines


def _wrap_cell(cell: str, width: int) -> list[str]:
    """Rows of at most `width`, broken between words; a word that is longer is broken where it consists of several."""
    indent = cell[: len(cell) - len(cell.lstrip())]
    room = width - len(indent)
    rows = [""]
    for word in _words(cell.strip()):
        for number, piece in enumerate([word] if len(word) <= room else _pieces(word)):
            longer = f"{rows[-1]} {piece}" if rows[-1] and not number else rows[-1] + piece
            if rows[-1] and len(longer) > room:
                rows.append(piece)
            else:
                rows[-1] = longer
    return [indent + row for row in rows]


def _words(text: str) -> list[str]:
    """At blanks, save for those within `± 1.2 %` and between a number and its unit."""
    return re.findall(r"(?:± )?\S+(?: (?:%|[KMGT]iB|min|ms|s|h)(?!\w)\S*)*", text)


def _pieces(text: str) -> list[str]:
    """The parts of a text that may stand on lines of their own: words, a setting's name and its value, the parts of a
    dotted name."""
    return [
        piece
        for word in _words(text)
        for piece in (re.findall(r"[^=./]*[=./]|[^=./]+", word) if word[0].isalpha() else [word])
    ]
