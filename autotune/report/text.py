"""Reports as plain text: what `print(best)` shows, and the wrapping that the terminal shares."""

from __future__ import annotations

import textwrap

from autotune.records import Recommendation
from autotune.report.document import Document, Grid, Lines, Sentence, Verbatim, one_line, unwrapped
from autotune.report.recommendation import recommendation_document

WIDTH = 80
MARGIN = "  "
COLUMN_GAP = "  "
NARROWEST = 12
"""Columns that are no wider than this are never wrapped, and a grid of many of them overflows instead."""


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
    """The rows of a grid in aligned columns, the header and a rule first; wide columns are wrapped to fit `width`."""
    table = [tuple(map(_cell, row)) for row in (grid.header, *grid.rows)]
    widths = _column_widths([max(len(row[index]) for row in table) for index in range(len(grid.header))], width)
    rule = MARGIN + COLUMN_GAP.join("-" * column_width for column_width in widths)
    header, *rows = (_row_lines(row, widths, grid.numeric) for row in table)
    return [*header, rule, *(line for row in rows for line in row)]


def _cell(text: str) -> str:
    """On one line; keeps the blanks in front, which say that a row belongs to the one above."""
    return text[: len(text) - len(text.lstrip(" "))] + one_line(text)


def _column_widths(natural: list[int], width: int) -> list[int]:
    """The natural widths, the widest lowered one by one until the row fits, none of them below `NARROWEST`."""
    widths = list(natural)
    available = width - len(MARGIN) - len(COLUMN_GAP) * (len(widths) - 1)
    while sum(widths) > available and max(widths) > NARROWEST:
        widths[widths.index(max(widths))] -= 1
    return widths


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
    indent = cell[: len(cell) - len(cell.lstrip())]
    rows = textwrap.wrap(cell.lstrip(), width - len(indent), break_on_hyphens=False)
    return [indent + row for row in rows] or [""]
