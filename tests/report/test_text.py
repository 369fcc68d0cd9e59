from __future__ import annotations

import pytest

from autotune.report.document import Grid, Lines, Sentence, Verbatim, one_line
from autotune.report.text import grid_lines, render, wrap


def test_blocks_are_set_apart_by_an_empty_line() -> None:
    document = (Sentence("Done."), Lines("Why", ("a", "b")), Verbatim("Next", ("autotune show x",)))
    assert render(document) == "Done.\n\nWhy\n  - a\n  - b\n\nNext\n  autotune show x"


def test_columns_are_aligned_and_numbers_flush_right() -> None:
    grid = Grid("", ("name", "rate"), (("a", "1,000"), ("longer", "20")), numeric=frozenset({1}))
    assert grid_lines(grid) == [
        "  name     rate",
        "  ------  -----",
        "  a       1,000",
        "  longer     20",
    ]


def test_the_widest_column_is_wrapped_and_the_narrow_ones_are_not() -> None:
    grid = Grid("", ("#", "text", "took"), (("1", "word " * 30, "12 s"),))
    lines = grid_lines(grid, width=60)
    assert max(len(line) for line in lines) <= 60
    assert lines[2].startswith("  1  word word")
    assert lines[2].endswith("12 s")
    assert " ".join(lines[2:]).count("word") == 30


SETTINGS = "activation_checkpointing=alternate, num_workers=2"
TRIALS = Grid(
    "",
    ("#", "changed", "samples/s (95 %)"),
    (("1", SETTINGS, "1,641 ± 18 %"), ("2", "blocks.10.norm.weight", "8.5 MiB")),
)


@pytest.mark.parametrize("width", range(20, 80, 3))
def test_no_name_is_cut_however_narrow_the_terminal_is(width: int) -> None:
    lines = grid_lines(TRIALS, width=width)
    pieces = {piece for line in lines for piece in line.split()}
    for name in ("activation_checkpointing=", "num_workers=", "samples/s", "norm.weight"):
        assert any(piece.endswith((name, f"{name}:")) or name in piece for piece in pieces), name
    assert all(len(line) <= max(width, len("  - activation_checkpointing=alternate,")) for line in lines)
    assert "± 18 %" in "\n".join(lines) or width < 30


def test_where_columns_have_no_room_each_row_is_a_sentence() -> None:
    assert grid_lines(TRIALS, width=30)[:2] == ["  - #: 1; changed:", "    activation_checkpointing=alternate,"]


def test_a_path_is_never_broken() -> None:
    path = "/a/very-long/" + "directory/" * 12 + "file.txt"
    assert path in "\n".join(wrap(f"it is in {path} there", width=40, bullet=True))
    assert path in render((Verbatim("", (path,)),), width=40)


def test_foreign_text_stays_on_one_line_and_cannot_steer_the_terminal() -> None:
    assert one_line("a\n  b\tc\x1b[31m\x07d") == "a b c[31md"
    assert render((Sentence("first\nsecond"),)) == "first second"
