"""The JSON export is what `autotune.load` reads back."""

from __future__ import annotations

from pathlib import Path

from autotune.export.json import export
from autotune.result import load
from tests.test_result import recommendation


def test_it_round_trips_through_load(tmp_path: Path) -> None:
    path = tmp_path / "exported.json"
    path.write_text(export(recommendation()))
    assert load(path).recommendation == recommendation()
    assert export(load(path).recommendation) == path.read_text()
