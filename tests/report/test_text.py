from __future__ import annotations

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


def test_a_path_is_never_broken() -> None:
    path = "/a/very-long/" + "directory/" * 12 + "file.txt"
    assert path in "\n".join(wrap(f"it is in {path} there", width=40, bullet=True))
    assert path in render((Verbatim("", (path,)),), width=40)


def test_foreign_text_stays_on_one_line_and_cannot_steer_the_terminal() -> None:
    assert one_line("a\n  b\tc\x1b[31m\x07d") == "a b c[31md"
    assert render((Sentence("first\nsecond"),)) == "first second"
