"""The README says what the result files say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def check(readme: Path) -> int:
    command = [sys.executable, str(ROOT / "benchmarks" / "figures.py"), "--check", str(readme)]
    return subprocess.run(command, check=False).returncode


def test_every_figure_of_the_readme_comes_from_a_result_file() -> None:
    assert check(ROOT / "README.md") == 0


def test_a_figure_that_is_not_in_the_files_is_noticed(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    changed = tmp_path / "README.md"
    changed.write_text(text.replace("tokens/s, micro-batch 32", "tokens/s, micro-batch 33"))
    assert changed.read_text() != text
    assert check(changed) == 1
