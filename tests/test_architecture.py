"""Rules of the layout that the import linter cannot see: what is loaded at run time, who prints, who ends the process."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.knobs.registry import KNOBS

PACKAGE = Path(__file__).resolve().parents[1] / "autotune"
MODULES = sorted(path for path in PACKAGE.rglob("*.py"))
IMPORTS_TORCH = ("training", "measurement", "surgery")
"""Packages that run in a trial process, or in `build`; everything else must be importable without torch."""


def place(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def loaded_after(statements: str, *names: str) -> list[str]:
    """Which of these top-level modules a fresh interpreter has loaded after it ran the statements."""
    script = f"import sys\n{statements}\nprint(*[name for name in {names!r} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()[-1].split()


def nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text(encoding="utf-8")))


def imported_names(path: Path) -> set[str]:
    found: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            found.add(node.module.split(".")[0])
    return found


def test_the_probe_sees_a_loaded_module() -> None:
    assert loaded_after("import json", "json", "torch") == ["json"]


def test_import_autotune_brings_in_nothing_heavy() -> None:
    assert loaded_after("import autotune", "torch", "optuna", "rich", "numpy", "pydantic") == []


def test_optuna_is_not_waited_for_before_a_server_begins_to_import_torch() -> None:
    assert loaded_after("import autotune.api", "optuna", "sqlalchemy") == []


def test_help_brings_in_no_torch() -> None:
    statements = "from autotune.cli import main\ntry: main(['--help'])\nexcept SystemExit as end: assert not end.code"
    assert loaded_after(statements, "torch", "optuna", "rich") == []


def test_the_orchestrator_imports_no_torch() -> None:
    """Every module outside the trial process, all in one interpreter, `fit` among them."""
    names = [module_name(path) for path in MODULES if place(path).split("/")[0] not in IMPORTS_TORCH]
    names.remove("autotune.processes.child")
    assert {"autotune.api", "autotune.cli", "autotune.result", "autotune.knobs.registry"} <= set(names)
    statements = "import importlib\n" + "\n".join(f"importlib.import_module({name!r})" for name in names)
    assert loaded_after(statements + "\nimport autotune\nautotune.fit", "torch") == []


@pytest.mark.parametrize(
    ("library", "homes"),
    [("optuna", {"search/study.py", "search/proposals.py"}), ("rich", {"report/terminal.py"})],
)
def test_a_library_is_known_at_its_home_alone(library: str, homes: set[str]) -> None:
    assert {place(path) for path in MODULES if library in imported_names(path)} == homes


def test_only_reports_and_the_command_line_print() -> None:
    printing = {
        place(path)
        for path in MODULES
        for node in nodes(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("print", "input")
    }
    assert "cli.py" in printing
    assert {name for name in printing if not name.startswith("report/")} == {"cli.py"}


def test_exit_codes_are_decided_by_the_command_line() -> None:
    """`os._exit` ends a forked child and is no exit code of ours; `raise SystemExit` and the like are."""
    ending = {place(path) for path in MODULES for node in nodes(path) if _leaves_the_process(node)}
    assert ending == {"cli.py", "__main__.py"}


def _leaves_the_process(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        called = ast.unparse(node.func)
        return called in ("sys.exit", "exit", "quit")
    if isinstance(node, ast.Raise) and node.exc is not None:
        return ast.unparse(node.exc).startswith("SystemExit")
    return False


def test_no_knob_is_named_outside_its_package() -> None:
    """Search, advice, reports and exports read what knobs declare.

    `num_workers`, `prefetch_factor` and `pin_memory` are also arguments of DataLoader and facts of the user's loader,
    and `batch_size` is all of that; as names of those they are free in the trial process and in exports.
    """
    also_of_loaders = {"batch_size", "num_workers", "prefetch_factor", "pin_memory"}
    speaks_of_loaders = ("training/", "measurement/", "surgery/", "export/")
    knob_names = {knob.name for knob in KNOBS}
    found = []
    for path in MODULES:
        if place(path).startswith("knobs/"):
            continue
        allowed = also_of_loaders if place(path).startswith(speaks_of_loaders) else set()
        found += [
            f"{place(path)}:{node.lineno}: {node.value}"
            for node in nodes(path)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in knob_names - allowed
        ]
    assert found == []


def test_subpackages_are_empty_at_the_top() -> None:
    starts = [path for path in MODULES if path.name == "__init__.py" and path.parent != PACKAGE]
    assert len(starts) >= 9
    assert [place(path) for path in starts if path.read_text()] == []


def test_no_module_is_named_for_leftovers() -> None:
    leftovers = {"utils", "util", "helpers", "helper", "common", "misc", "shared"}
    assert [place(path) for path in MODULES if leftovers & set(path.relative_to(PACKAGE).with_suffix("").parts)] == []


def test_no_exception_is_swallowed_whole() -> None:
    bare = [
        f"{place(path)}:{node.lineno}"
        for path in MODULES
        for node in nodes(path)
        if isinstance(node, ast.ExceptHandler) and node.type is None
    ]
    assert bare == []
