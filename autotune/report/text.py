"""Reports as plain text: what `print(best)` shows, and the wrapping that the terminal shares."""

from __future__ import annotations

import textwrap

from autotune.records import Recommendation
from autotune.report.document import Document, Grid, Lines, Sentence, Verbatim, one_line
from autotune.report.recommendation import recommendation_document

WIDTH = 80
COLUMN_GAP = "  "


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
                blocks.append("\n".join([title, *wrapped]))
            case Verbatim(title, lines):
                blocks.append("\n".join([title, *(f"  {line}" for line in lines)]))
            case Grid():
                blocks.append("\n".join([*([block.title] if block.title else []), *grid_lines(block, width=width)]))
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
    """The rows of a grid in aligned columns. The widest column is wrapped where the whole is wider than `width`."""
    cells = [grid.header, *grid.rows]
    column_widths = [max(len(row[index]) for row in cells) for index in range(len(grid.header))]
    excess = 2 + sum(column_widths) + len(COLUMN_GAP) * (len(column_widths) - 1) - width
    if excess > 0:
        widest = column_widths.index(max(column_widths))
        column_widths[widest] = max(column_widths[widest] - excess, 12)
    lines: list[str] = []
    for number, row in enumerate(cells):
        lines.extend(_row_lines(row, column_widths, grid.numeric))
        if number == 0:
            lines.append("  " + COLUMN_GAP.join("-" * column_width for column_width in column_widths))
    return lines


def _row_lines(row: tuple[str, ...], column_widths: list[int], numeric: frozenset[int]) -> list[str]:
    columns = [textwrap.wrap(cell, width) or [""] for cell, width in zip(row, column_widths, strict=True)]
    lines: list[str] = []
    for depth in range(max(len(column) for column in columns)):
        pieces = [column[depth] if depth < len(column) else "" for column in columns]
        aligned = [
            piece.rjust(width) if index in numeric else piece.ljust(width)
            for index, (piece, width) in enumerate(zip(pieces, column_widths, strict=True))
        ]
        lines.append(("  " + COLUMN_GAP.join(aligned)).rstrip())
    return lines
