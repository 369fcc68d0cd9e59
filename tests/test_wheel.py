"""What an installation gets: the presets and the type marker are inside the built wheel, tests and studies are not."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PRESETS = sorted(path.name for path in (ROOT / "search_spaces").glob("*.toml"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built with the installed hatchling, so without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = folder.glob("*.whl")
    return path


def test_presets_are_in_the_wheel(wheel: Path) -> None:
    inside = zipfile.ZipFile(wheel).namelist()
    assert {"quick.toml", "default.toml", "thorough.toml"} <= set(PRESETS)
    assert [name for name in inside if name.endswith(".toml")] == [
        f"autotune/_search_spaces/{name}" for name in PRESETS
    ]


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert tops == {"autotune", "torch_autotune-0.1.0.dist-info"}
    assert "autotune/py.typed" in zipfile.ZipFile(wheel).namelist()


def test_presets_are_found_from_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    """Unpacked elsewhere, with the package ahead of the working tree on the path, every preset is found."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import autotune.space as space; "
        "print(space.__file__); print(*sorted(space.preset_names()))"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    location, names = ran.stdout.splitlines()
    assert location.startswith(str(tmp_path))
    assert names.split() == sorted(name.removesuffix(".toml") for name in PRESETS)
